"""The references of the API and of the commands name everything that users import or type."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kmqpy.cli.app import kmq
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


def typed(page: str, program: str) -> Iterator[list[str]]:
    """The command lines of a page that begin with this program, as words, also of blocks that are not run."""
    code = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in code for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        for command in re.split(r"[|;&)]|\$\(|\bdo\b", line.partition(" #")[0]):
            words = command.split()
            if words and words[0] == program:
                yield words[1:]


def unknown(words: list[str]) -> list[str]:
    """Which of these words of a command line of `kmq` are neither commands nor their options."""
    command: click.Command = kmq
    options = {name for param in kmq.params for name in param.opts} | {"--help", "--version", "-h"}
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            if found is not None:
                command = found
                options |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    if command is kmq and not all(word.startswith("-") for word in words):
        return words
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_option_that_a_page_names_is_there(page: Path) -> None:
    assert [(words, wrong) for words in typed(page.read_text(), "kmq") if (wrong := unknown(words))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_target_of_make_that_a_page_names_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in typed(page.read_text(), "make") for word in words[:1]}
    assert named - targets == set()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("kmq queue create jobs --partition 4", ["--partition"]),
        ("kmq tracker --worker 3", ["--worker"]),
        ("kmq make jobs", ["make", "jobs"]),
        ("kmq --queue-url sqlite:///jobs.db queue delete jobs --yes", []),
    ],
)
def test_what_is_not_there_is_found(line: str, wrong: list[str]) -> None:
    assert [unknown(words) for words in typed(f"```sh\n{line}\n```\n", "kmq")] == [wrong]
