"""The references of the API and of the commands name everything that users import or type."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kmqpy.cli.plugins import plugins
from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ON_THE_PAGE = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
PACKAGES = (
    "kmqpy",
    "kmqpy.dev",
    "kmqpy.queue",
    "kmqpy.spark",
    "kmqpy.testing",
    "kmqpy.zookeeper.curator",
    "kmqpy.zookeeper.queue",
)
"""Those whose `__all__` is a promise to users."""


def object_of(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def documented(thing: object) -> bool:
    errors = importlib.import_module("kmqpy.errors")  # documented as a module
    return any(thing is object_of(name) for name in ON_THE_PAGE) or thing in vars(errors).values()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_is_on_the_page(package: str) -> None:
    names = importlib.import_module(package).__all__
    assert [name for name in names if not documented(object_of(f"{package}.{name}"))] == []


def imported() -> Iterator[tuple[str, str]]:
    """Where docs and examples import something of ours, and its name."""
    sources = [(path.name, path.read_text()) for path in (ROOT / "examples").glob("*.py")]
    for page in PAGES:
        found = [one.code for one in blocks(page.read_text()) if one.language == "python"]
        sources += [(page.name, code) for code in found]
    for place, code in sources:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kmqpy", "tracker")):
                yield from ((place, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_name_that_docs_and_examples_import_is_on_the_page() -> None:
    names = [one for one in imported() if not one[1].endswith(".*")]
    assert [one for one in names if not documented(object_of(one[1]))] == []


def test_every_name_on_the_page_says_what_it_is_for() -> None:
    assert [name for name in ON_THE_PAGE if not (object_of(name).__doc__ or "").strip()] == []


def test_no_name_is_on_the_page_twice() -> None:
    assert len(ON_THE_PAGE) == len(set(ON_THE_PAGE))


def test_the_commands_of_other_packages_are_on_the_page() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    blocks = re.findall(r":module: (\S+)\n +:command: (\S+)\n +:prog_name: (.+)", page)
    ours = {(point.module, point.attr, f"kmq {name}") for name, point in plugins().items()}
    assert set(blocks) == {*ours, ("kmqpy.cli.app", "kmq", "kmq")}
