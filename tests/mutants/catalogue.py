"""The mutants of mutants.toml, and the place of each in the source."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("mutants.toml")
SIMULATION = "tests.simulation "
SOURCE = ("kmqpy", "tracker")


class Stale(Exception):
    """A mutant no longer fits the source or the tests."""


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    name       area and name, `worker.leases-run-out`
    text       part of a line
    becomes    what the mutant has in its place
    caught_by  the pytest node id, or the arguments of `python -m`, of the test that must fail
    felt       what a user would notice
    where      file or folder in which `text` stands exactly once; empty: in all of the source
    """

    name: str
    text: str
    becomes: str
    caught_by: str
    felt: str
    where: str = ""

    @property
    def simulated(self) -> bool:
        """True when the simulation catches it, not a test of pytest."""
        return self.caught_by.startswith(SIMULATION)

    @property
    def needs_cluster(self) -> bool:
        """True when its test uses the servers that tests share."""
        return self.caught_by.startswith(("tests/integration/", "tests/spark/"))

    def file_in(self, tree: Path) -> Path:
        """The file to change. Raises Stale unless the text stands exactly once in `where`."""
        places = [tree / self.where] if self.where else [tree / folder for folder in SOURCE]
        texts = [item for place in places for item in _texts(place).items()]
        found = {file: count for file, text in texts if (count := text.count(self.text))}
        if sum(found.values()) != 1:
            shown = ", ".join(f"{file.relative_to(tree)} ({count}x)" for file, count in found.items())
            raise Stale(f"the text to replace stands not exactly once in the source: {shown or 'nowhere'}")
        return next(iter(found))

    def check_catcher(self, tree: Path) -> None:
        """Raise Stale unless there is a test of this name that `make test` runs."""
        if self.simulated:
            return
        file, *names = self.caught_by.split("::")
        found: ast.AST | None = _parsed(tree / file)
        marks: list[str] = []
        for name in names:
            inside = getattr(found, "body", [])
            marks += [ast.unparse(node) for node in inside if isinstance(node, ast.Assign)]
            found = next((node for node in inside if getattr(node, "name", None) == name), None)
            marks += map(ast.unparse, getattr(found, "decorator_list", []))
        if found is None or not names:
            raise Stale(f"{self.caught_by}: there is no such test")
        if any(re.match(r"(pytestmark = \[?.*)?pytest\.mark\.breadth", mark) for mark in marks):
            raise Stale(f"{self.caught_by}: make test does not run it (breadth)")

    def mutated(self, source: str) -> str:
        """The source of its file with the change."""
        return source.replace(self.text, self.becomes)


def load(file: Path = FILE) -> list[Mutant]:
    """All mutants, in the order of the file."""
    areas = tomllib.loads(file.read_text())
    return [
        Mutant(f"{area}.{name}", **fields)
        for area, mutants in areas.items()
        for name, fields in mutants.items()
    ]


def named(mutants: Iterable[Mutant], names: Iterable[str]) -> list[Mutant]:
    """Those with these names or in these areas; all without names. Raises ValueError for an unknown name."""
    mutants, names = list(mutants), list(names)
    for name in names:
        if not any(name in _names(mutant) for mutant in mutants):
            raise ValueError(f"{name}: no mutant and no area has this name; --list shows them")
    return [mutant for mutant in mutants if not names or _names(mutant) & set(names)]


def _names(mutant: Mutant) -> set[str]:
    return {mutant.name, mutant.name.partition(".")[0]}


@functools.cache
def _texts(place: Path) -> dict[Path, str]:
    """The files of a folder, or one file; read once, since who applies a mutant takes it back."""
    if place.is_dir():
        return {file: file.read_text() for file in sorted(place.rglob("*.py"))}
    return {place: place.read_text()} if place.is_file() else {}


@functools.cache
def _parsed(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text()) if file.is_file() else None
