"""The contract suite as a pytest plugin: `pytest -p kmqpy.testing.plugin --kmq-storage=URL`.

It runs the suite against the storage of the url, in queues of its own that it deletes, unless paths of other
tests are given. It is no pytest11 entry point: pytest would then load kmqpy, and rewrite the asserts of all
its modules, in every test run of everybody who has it installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("kmqpy.testing.contract")

_SUITE = Path(__file__).parent / "contract" / "test_contract.py"


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
