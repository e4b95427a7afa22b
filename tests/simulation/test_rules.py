"""docs/rules.md names tests, files and controls that exist, and leaves out no rule and no case."""

import re
from pathlib import Path

from .controls import CONTROLS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rules.md").read_text()


def test_every_test_that_is_named_exists():
    missing = []
    path = None
    for file, name in re.findall(
        r"`((?:tests|kmqpy/testing)/[\w/]+\.py)?(?:::)?((?:test_|Test|Against)\w+)?`", PAGE
    ):
        path = file or path
        if not name:
            continue
        assert path is not None, name
        if not re.search(rf"\b(?:def|class) {name}\b", (ROOT / path).read_text()):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_file_of_tests_that_is_named_exists():
    named = set(re.findall(r"`((?:tests|kmqpy/testing)/[\w/]+\.py)", PAGE))
    assert {file for file in named if not (ROOT / file).is_file()} == set()


def test_rules_and_cases_with_tests_of_their_own_say_so():
    there: set[str] = set()
    for folder in ("tests", "kmqpy/testing"):
        for file in (ROOT / folder).rglob("*.py"):
            for names in re.findall(r"def test_((?:[rf]\d+_)+)", file.read_text()):
                there.update(names.rstrip("_").split("_"))
    assert set(re.findall(r"`test_([rf]\d+)_\*`", PAGE)) == there


def test_every_control_that_is_named_exists_and_all_are_named():
    page = " ".join(PAGE.split())
    named = set(re.findall(r'"([^"]+)"', page)) - {"group", "noise"}
    assert named == set(CONTROLS)


def test_every_rule_and_case_is_there():
    rules = [*range(1, 29), 30, 32, 33, *range(36, 49)]
    assert re.findall(r"^### (R\d+) \w", PAGE, re.MULTILINE) == [f"R{n}" for n in rules]
    assert re.findall(r"^\| (F\d+) \|", PAGE, re.MULTILINE) == [f"F{n}" for n in range(1, 17)]


def test_no_row_of_a_table_is_too_long_to_read():
    assert [row for row in PAGE.splitlines() if row.startswith("|") and len(row) > 400] == []
