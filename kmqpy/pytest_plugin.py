"""The contract suite as a pytest plugin: `pytest --kmq-storage=URL`, wherever kmqpy is installed.

The plugin runs the suite against the storage that the url names. The suite makes queues of its own, and
deletes them. If the command line names paths of tests, pytest runs those tests instead.

pytest loads this module in every test run where kmqpy is installed, so the module imports nothing of kmqpy.
In such a run pytest also rewrites the asserts of modules of kmqpy, so that a failed assert shows its values.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# Needed where -p loads this plugin; otherwise pytest rewrites these asserts by itself.
pytest.register_assert_rewrite("kmqpy.testing.contract")

_SUITE = Path(__file__).parent / "testing" / "contract" / "test_contract.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kmq-storage`."""
    parser.getgroup("kmqpy").addoption(
        "--kmq-storage",
        metavar="URL",
        help="hold the storage of this url (without queue=) against the contract of kmqpy",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let pytest run the suite if `--kmq-storage` is given and the command line names no tests."""
    if config.getoption("--kmq-storage") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(_SUITE)]
