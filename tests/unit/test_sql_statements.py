"""The plans by which SQLite executes the statements, and what the engine of SQL does with what it finds."""

import json
import re
import sqlite3

import pytest
import sqlalchemy

from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.dialect import Picked
from kmqpy.storages.sql.postgresql import PostgreSql
from kmqpy.storages.sql.statements import Names, schema, statements

NAMES = Names()
STATEMENTS = statements("sqlite", NAMES)
LISTS = {"ids": json.dumps([1]), "refs": json.dumps([[1, 1]])}


@pytest.fixture(scope="module")
def database():
    with sqlite3.connect(":memory:") as database:
        for text in schema("sqlite", NAMES):
            database.execute(text)
        yield database
    database.close()


@pytest.mark.parametrize("name", [name for name, text in STATEMENTS.items() if "kmq_messages" in text])
def test_sqlite_finds_messages_by_an_index(database, name):
    text = STATEMENTS[name]
    parameters = {one: LISTS.get(one, 1) for one in re.findall(r"(?<!:):([a-z_]+)", text)}
    plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]
    steps = [step for step in plan if "kmq_messages" in step]
    assert all("USING" in step for step in steps), plan
    assert not any("state>?" in step for step in steps), plan
    assert name != "remove_twins" or any("_digest" in step for step in steps), plan


def test_a_queue_that_is_not_to_be_created_makes_no_file(tmp_path):
    file = tmp_path / "x.db"
    for more in ("", "&create=false"):
        with pytest.raises(QueueNotFound, match="there is no file"):
            queue_for(f"sqlite:///{file}?queue=q{more}")
    assert not file.exists()
    queue_for(f"sqlite:///{file}?queue=q&create=true").close()
    queue_for(f"sqlite:///{file}?queue=q").close()
    with pytest.raises(Unavailable, match="check that its folder is there"):
        queue_for(f"sqlite:///{tmp_path}/none/x.db?queue=q&create=true")


def test_a_path_without_its_slash_is_not_cut_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="write it like sqlite:"):
        queue_for("sqlite:jobs.db?queue=q&create=true")
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_process_is_just_making_is_waited_for(tmp_path, monkeypatch):
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    real, busy = Connections.inspect, [locked]

    def inspect(connections, work):
        def look(found):
            if busy:
                raise busy.pop()
            return work(found)

        return real(connections, look)

    monkeypatch.setattr(Connections, "inspect", inspect)
    storage_for(f"sqlite:///{tmp_path}/x.db").close()
    assert not busy


def test_messages_that_others_have_just_made_ready_are_taken(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("timeout_s", "expected_ms"), [(10, 10_000), (30 * 86_400, 2**31 - 1)])
def test_libpq_takes_the_time_out_of_a_connection_to_postgresql(monkeypatch, timeout_s, expected_ms):
    given, create = {}, sqlalchemy.create_engine

    def create_engine(url, *, connect_args, **pool):
        given.update(connect_args)
        return create(url, connect_args=connect_args, **pool)

    monkeypatch.setattr(sqlalchemy, "create_engine", create_engine)
    url = sqlalchemy.make_url("postgresql://localhost/db")
    PostgreSql(url, NAMES, pool_timeout=timeout_s).engine().dispose()
    assert given["tcp_user_timeout"] == expected_ms
