"""CONTRIBUTING.md names commands that there are, and continuous integration runs what a developer runs."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = [shlex.split(one, comments=True) for one in re.findall(r"`?((?:\.venv/bin/|make )[^`\n]*)", TEXT)]


def test_the_targets_and_test_files_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [one for command in COMMANDS if command[0] == "make" for one in command[1:] if "=" not in one]
    assert {"test-quick", "lint", "test", "chaos"} <= {*named} <= {*targets}
    files = [one for command in COMMANDS for one in command if one.startswith("tests/")]
    assert len(files) > 5
    assert [one for one in files if not (ROOT / one).exists()] == []
    assert (ROOT / "tests/simulation/__main__.py").exists()


def test_the_folders_exist() -> None:
    folders = re.findall(r"`((?:kmqpy|tracker)[a-z/]*)`", TEXT)
    assert len(folders) > 6
    assert [one for one in folders if not (ROOT / one).is_dir()] == []


def test_the_workflow_runs_the_file_for_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    uses = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
    assert uses == ["actions/checkout", "actions/setup-python"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == ".ci/run"
    assert os.access(ROOT / command, os.X_OK)
    assert {*workflow[True]} == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}


def test_the_workflow_has_the_oldest_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (version,) = [
        step["with"]["python-version"]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={version}"
