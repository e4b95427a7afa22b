"""docs/rules.md names tests and controls that exist, and leaves out no rule and no case."""

import re
from pathlib import Path

from .controls import CONTROLS

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "rules.md").read_text()


def test_every_test_that_is_named_exists():
    missing = []
    for line in TABLE.splitlines():
        path = None
        for file, name in re.findall(
            r"`((?:tests|kmqpy/testing)/[\w/]+\.py::)?((?:test_|Test|Against)\w+)`", line
        ):
            path = file.removesuffix("::") or path
            assert path is not None, line
            source = (ROOT / path).read_text()
            if not re.search(rf"\b(?:def|class) {name}\b", source):
                missing.append(f"{path}::{name}")
    assert missing == []


def test_every_control_that_is_named_exists_and_all_are_named():
    rows = "\n".join(line for line in TABLE.splitlines() if line.startswith("| "))
    named = set(re.findall(r'"([^"]+)"', rows)) - {"gone"}
    assert named == set(CONTROLS)


def test_every_rule_and_case_has_its_row():
    assert re.findall(r"^\| ([RF]\d+) \|", TABLE, re.MULTILINE) == [
        *(f"R{n}" for n in (*range(1, 29), 30, 32, 33, *range(36, 49))),
        *(f"F{n}" for n in range(1, 17)),
    ]
