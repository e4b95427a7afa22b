"""The contract of all storages, on SQLite with a clock that the tests move."""

from pathlib import Path

import pytest
import sqlalchemy

from kmqpy.core.clock import Clock
from kmqpy.storages.sql.engine import SqlEngine
from kmqpy.storages.sql.sqlite import Sqlite
from kmqpy.storages.sql.statements import Names
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing import ManualClock
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target


@pytest.fixture
def kmq_target(tmp_path: Path) -> Target:
    """The clock of the storage stands still; a storage opened with another clock is another machine's."""
    clock = ManualClock()
    url = sqlalchemy.URL.create("sqlite", database=str(tmp_path / "queues.db"))

    def opened(of_the_machine: Clock) -> StoredStorage:
        engine = SqlEngine(Sqlite(url, Names(), clock, pool_size=10), Names(), patience=0.02)
        return StoredStorage(engine, clock=of_the_machine)

    return Target(
        open=lambda: opened(clock), pass_time=clock.advance, real_time=False, open_with_clock=opened
    )
