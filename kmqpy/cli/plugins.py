"""Finds the commands of other packages: those of the trackers, which kmqpy must not import, and any other."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec
from pathlib import Path

import click

import kmqpy

GROUP = "kmqpy.commands"
"""The entry-point group by which other packages add commands."""

_BESIDE = "tracker"
"""A package that is installed beside kmqpy. Its name is a common one."""


def plugins() -> dict[str, EntryPoint]:
    """The commands of other packages, by name; none of them is loaded."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load(point: EntryPoint) -> click.Command:
    """Import a command; raises ImportError or AttributeError if that fails.

    Our trackers are imported from beside kmqpy, though a `tracker.py` of the user comes first on sys.path.
    """
    if point.module.partition(".")[0] == _BESIDE:
        _import_from_beside(_BESIDE)
    command: click.Command = point.load()
    return command


def _import_from_beside(name: str) -> None:
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
