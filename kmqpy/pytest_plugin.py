"""The contract suite as a pytest plugin: `pytest --kmq-storage=URL`, wherever kmqpy is installed.

It runs the suite against the storage of the url, in queues of its own that it deletes, unless paths of other
tests are given. pytest loads this module in every test run where kmqpy is installed, so it imports nothing of
kmqpy; and pytest rewrites the asserts of the modules of kmqpy that such a run imports.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# pytest rewrites these asserts without being asked, unless this plugin is loaded by -p.
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
    """Run the suite where no tests were named."""
    if config.getoption("--kmq-storage") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(_SUITE)]
