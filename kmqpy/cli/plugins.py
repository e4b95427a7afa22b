"""Finds and imports commands of other packages, by their entry points.

The commands of our own package `tracker` are found in this way, too: kmqpy must not import `tracker`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

import kmqpy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kmqpy.commands"
"""The entry-point group by which other packages add commands."""

_TRACKER = "tracker"
"""The package of the trackers, installed beside kmqpy. A user may have another module of this name."""


def plugins() -> dict[str, EntryPoint]:
    """Return the entry points of other packages' commands, by name, without importing the commands."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def load(point: EntryPoint) -> click.Command:
    """Import a command; raises ImportError or AttributeError if that fails.

    Imports our trackers from the folder of kmqpy, even if a `tracker.py` of the user is first on sys.path.
    """
    if point.module.partition(".")[0] == _TRACKER:
        spec = PathFinder.find_spec(_TRACKER, [str(Path(kmqpy.__file__).parents[1])])
        imported = getattr(sys.modules.get(_TRACKER), "__file__", None)
        if spec is not None and spec.loader is not None and imported != spec.origin:
            module = sys.modules[_TRACKER] = module_from_spec(spec)
            spec.loader.exec_module(module)
    command: click.Command = point.load()
    return command
