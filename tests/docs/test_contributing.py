"""CONTRIBUTING.md names commands that there are, and continuous integration runs what a developer runs."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import rooms

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = [shlex.split(one, comments=True) for one in re.findall(r"`?((?:\.venv/bin/|make )[^`\n]*)", TEXT)]


def test_the_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [one for command in COMMANDS if command[0] == "make" for one in command[1:] if "=" not in one]
    assert {"test-quick", "test-room", "lint", "test", "chaos"} <= {*named} <= {*targets}
    in_room = [
        one.removeprefix("ROOM=") for command in COMMANDS for one in command if one.startswith("ROOM=")
    ]
    assert len(in_room) == 1
    assert rooms.tests_of(in_room[0])
    assert (ROOT / "tests/simulation/__main__.py").exists()


def test_the_folders_exist() -> None:
    folders = re.findall(r"`((?:kmqpy|tracker)[a-z/]*)`", TEXT)
    assert len(folders) > 5
    assert [one for one in folders if not (ROOT / one).is_dir()] == []


def test_the_workflow_runs_what_the_file_for_ci_does() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    file = (ROOT / ".ci/run").read_text()
    lint, test, _ = workflow["jobs"].values()
    (linting,) = [step["run"] for step in lint["steps"] if "run" in step]
    (testing,) = [step["run"] for step in test["steps"] if "run" in step]
    assert linting in file
    assert testing.replace(' ARGS="$FOLDERS"', "") in file
    assert {*re.findall(r"export (\w+)=", file)} <= {*workflow["env"]}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(("code", "is_kept"), [(1, True), (2, False), (3, False), (5, False)])
def test_what_failed_is_tried_again_only_if_all_tests_were_run(tmp_path, code, is_kept) -> None:
    kept = tmp_path / ".pytest_cache/v/cache/lastfailed"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (tmp_path / "python").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "python").chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", "-o", ".venv/.compiled", "test", f"BIN={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert made.returncode == 2
    assert kept.exists() == is_kept


def test_the_parts_of_the_workflow_are_all_tests() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"][
        "matrix"
    ]
    (others,) = matrix["include"]
    parts = {f"tests/{part}" for part in matrix["part"] if part != others["part"]} | {
        *others["folders"].split()
    }
    there = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
    assert parts == {f"tests/{folder}" for folder in there}


def test_the_workflow_has_the_oldest_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    lint, test, newer = workflow["jobs"].values()
    (version,) = {
        step["with"]["python-version"]
        for job in (lint, test)
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={version}"
    assert version not in newer["strategy"]["matrix"]["python"]
