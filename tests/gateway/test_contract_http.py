"""The contract of all storages through a gateway, over memory and SQLite; the tests move their clock."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from gateway_support import running, threads_of_clients

from kmqpy.queue import storage_for
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.sql.engine import SqlEngine
from kmqpy.storages.sql.sqlite import Sqlite
from kmqpy.storages.sql.statements import Names
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing import ManualClock
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target, administration


@pytest.fixture(scope="module", params=["memory", pytest.param("sqlite", marks=pytest.mark.breadth)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A gateway whose storage has a clock that stands still."""
    clock = ManualClock()
    if request.param == "memory":
        engine = MemoryEngine(clock, patience=0.02)
    else:
        file: Path = tmp_path_factory.mktemp("http") / "queues.db"
        url = sqlalchemy.URL.create("sqlite", database=str(file))
        engine = SqlEngine(Sqlite(url, Names(), clock, pool_size=10), Names(), patience=0.02)
    with running(StoredStorage(engine, clock=clock)) as served:
        yield Target(
            open=lambda: storage_for(served.gateway.url),
            pass_time=clock.advance,
            real_time=False,
            threads=threads_of_clients,
        )


@pytest.fixture
def kmq_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(administration, "_QUEUES", 50)  # each costs requests
    return target
