"""A pytest plugin that writes the outcome of each test, as it ends, as a line of JSON to a file."""

import json
import os
from pathlib import Path

import pytest

FILE_VARIABLE = "MUTANTS_REPORTS"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    record = {"test": report.nodeid, "outcome": report.outcome, "why": crash.message if crash else ""}
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(record) + "\n")
