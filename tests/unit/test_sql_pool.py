"""The pool of connections, on SQLite, and what the engine of SQL does with what it finds."""

import sqlite3
import threading
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

import sqlalchemy

from kmqpy.queue import storage_for
from kmqpy.storages.sql.dialect import Picked
from kmqpy.storages.sql.pool import NoneFree, Pool


@pytest.fixture
def engine(tmp_path: Path) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(f"sqlite:///{tmp_path}/x.db", poolclass=sqlalchemy.NullPool)


def works(connection: object) -> bool:
    try:
        return connection.driver.execute("SELECT 1").fetchall() == [(1,)]
    except Exception:
        return False


def test_the_connection_that_was_used_last_is_lent_first(engine: sqlalchemy.Engine) -> None:
    pool = Pool(engine, 3, 0.01)
    first, second = pool.lend(), pool.lend()
    pool.give_back(first)
    pool.give_back(second)
    assert pool.lend() is second
    assert pool.lend() is first
    pool.close()


def test_when_all_are_in_use_one_is_awaited_and_then_an_error_says_so(engine: sqlalchemy.Engine) -> None:
    pool = Pool(engine, 1, 0.01)
    one = pool.lend()
    with pytest.raises(
        NoneFree, match=r"each of the 1 connections was in use for 0.01 s; a larger pool_size"
    ):
        pool.lend()
    patient = Pool(engine, 1, 60)
    other = patient.lend()
    threading.Timer(0.01, patient.give_back, [other]).start()
    assert patient.lend() is other
    pool.give_back(one)
    assert pool.lend() is one


def test_connections_that_cannot_be_made_use_nothing_up(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    engine = sqlalchemy.create_engine(f"sqlite:///{missing}/x.db", poolclass=sqlalchemy.NullPool)
    pool = Pool(engine, 2, 0.01)
    for _ in range(5):
        with pytest.raises(sqlite3.OperationalError):
            pool.lend()
    missing.mkdir()
    assert works(pool.lend())
    assert works(pool.lend())


def test_with_one_that_broke_those_of_its_time_are_closed(engine: sqlalchemy.Engine) -> None:
    pool = Pool(engine, 4, 0.01)
    idle, broken, in_use, also_broken = (pool.lend() for _ in range(4))
    pool.give_back(idle)
    pool.give_back(broken, broken=True)
    assert not works(idle)
    assert not works(broken)
    assert works(in_use)
    newer = pool.lend()
    pool.give_back(newer)
    pool.give_back(also_broken, broken=True)
    assert works(newer)  # it was made after they broke
    pool.give_back(in_use)
    assert not works(in_use)
    assert all(works(one) for one in [pool.lend() for _ in range(4)])
    with pytest.raises(NoneFree):
        pool.lend()


def test_close_closes_those_in_use_when_they_are_given_back(engine: sqlalchemy.Engine) -> None:
    pool = Pool(engine, 2, 0.01)
    idle, in_use = pool.lend(), pool.lend()
    pool.give_back(idle)
    pool.close()
    assert not works(idle)
    assert works(in_use)
    pool.give_back(in_use)
    assert not works(in_use)


def test_messages_that_others_have_just_made_ready_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take leaves a queue alone whose leases have ended; when it asks why, others have seen to them."""
    with storage_for(f"sqlite:///{tmp_path}/x.db") as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send("x")
        dialect = queue._engine._dialect
        real, found = dialect.take, [Picked([], 0, None, has_ready=True)]
        monkeypatch.setattr(
            dialect, "take", lambda *args, **how: found.pop() if found else real(*args, **how)
        )
        assert [one.body for one in queue.receive(wait=0)] == [b"x"]
