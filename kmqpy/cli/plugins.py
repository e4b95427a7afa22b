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
        _import_from_our_folder(_TRACKER)
    command: click.Command = point.load()
    return command


def _import_from_our_folder(name: str) -> None:
    """Import a package from the folder that holds kmqpy, unless it was imported from there already."""
    folder = Path(kmqpy.__file__).parents[1]
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is None or spec.loader is None:
        return
    imported = sys.modules.get(name)
    if imported is not None and imported.__file__ == spec.origin:
        return
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
