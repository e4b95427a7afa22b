"""Dedup ids in SQL within transactions of the application, and whom their locks hold up."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from sql_support import Place, taken
from sqlalchemy import text

from kmqpy.errors import ConfigError
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, storage_for
from kmqpy.storages.sql import engine


def test_a_sender_knows_how_often_a_unique_job_is_tried_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LOOKS_EACH_S", 0)
    with storage_for(place.url) as storage, storage_for(place.url) as others:
        storage.create("q", dedup_until="acknowledged", max_redeliveries=0)
        sender = storage.open("q")
        job = sender.send("job", dedup_id="a")
        others.alter("q", max_redeliveries=5)
        assert taken(others.open("q")) == ["job"]
        place.execute(f"UPDATE {place.names.tables['messages']} SET until_ms = 1")  # its lease ends
        assert sender.send("job", dedup_id="a") == job


def test_a_dedup_id_is_free_after_a_rollback(place: Place, queue: Queue) -> None:
    with place.application.connect() as connection:
        queue.send("1", dedup_id="d", transaction=connection)
        connection.rollback()
        first = queue.send("2", dedup_id="d")
        assert queue.send("3", dedup_id="d", transaction=connection) == first
        connection.commit()
    assert [one.body for one in queue.receive()] == [b"2"]


@pytest.mark.parametrize("size", [1, 10])
def test_sends_remove_as_many_old_dedup_ids_as_they_store(
    place: Place, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(random, "random", random.Random(1).random)
    sends = 200
    with place.queue(dedup_window_ms=1) as queue:
        for send in range(sends):
            queue.send_many([OutgoingMessage("x", dedup_id=f"{send} {number}") for number in range(size)])
    ((kept,),) = place.execute(f"SELECT count(*) FROM {place.names.tables['dedup']}")
    assert kept < sends * size / 2


def test_a_transaction_sends_an_id_once_as_well(place: Place, queue: Queue) -> None:
    with place.application.connect() as connection:
        first = queue.send("1", dedup_id="d", transaction=connection)
        assert queue.send("2", dedup_id="d", transaction=connection) == first
        ids = queue.send_many(
            [OutgoingMessage(one, dedup_id=one) for one in ("z", "d", "a", "a", "b")], transaction=connection
        )
        connection.commit()
    assert [ids[1], ids[3]] == [first, ids[2]]
    messages = queue.receive(9)
    assert [one.body for one in messages] == [b"1", b"z", b"a", b"b"]  # in the order of the sends
    assert [one.id for one in messages] == [first, ids[0], ids[2], ids[4]]


@pytest.fixture
def until_acknowledged(place: Place) -> Iterator[Queue]:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    with place.queue(dedup_until="acknowledged") as queue:
        yield queue


@pytest.mark.parametrize("names", ["d", "zda"])
def test_who_waits_for_a_dedup_id_sees_its_message(
    place: Place, until_acknowledged: Queue, names: str
) -> None:
    batch = [OutgoingMessage(one, dedup_id=one) for one in names]
    with ThreadPoolExecutor(1) as thread, place.application.connect() as connection:
        first = until_acknowledged.send("1", dedup_id="d", transaction=connection)
        second = thread.submit(until_acknowledged.send_many, batch)
        wait([second], timeout=0.3)
        connection.commit()
        assert second.result()[names.index("d")] == first
    assert taken(until_acknowledged, 9) == ["1", *names.replace("d", "")]


def test_a_snapshot_hides_no_message_with_a_dedup_id(place: Place, until_acknowledged: Queue) -> None:
    strict = place.application.execution_options(isolation_level="REPEATABLE READ")
    with strict.connect() as connection:
        connection.execute(text(f"SELECT count(*) FROM {place.names.tables['messages']}")).all()
        first = until_acknowledged.send("1", dedup_id="d")
        if place.name == "postgresql":
            with pytest.raises(ConfigError, match="read committed"):
                until_acknowledged.send("2", dedup_id="d", transaction=connection)
        else:
            assert until_acknowledged.send("2", dedup_id="d", transaction=connection) == first
            connection.commit()
    assert taken(until_acknowledged, 9) == ["1"]


def test_a_snapshot_shows_no_message_that_has_ended(place: Place, until_acknowledged: Queue) -> None:
    first = until_acknowledged.send("1", dedup_id="d")
    strict = place.application.execution_options(isolation_level="REPEATABLE READ")
    with strict.connect() as connection:
        connection.execute(text(f"SELECT count(*) FROM {place.names.tables['messages']}")).all()
        until_acknowledged.ack(until_acknowledged.receive(1))
        if place.name == "postgresql":
            with pytest.raises(ConfigError, match="read committed"):
                until_acknowledged.send("2", dedup_id="d", transaction=connection)
        else:
            assert until_acknowledged.send("2", dedup_id="d", transaction=connection) != first
            connection.commit()
            assert taken(until_acknowledged) == ["2"]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"max_in_flight_per_group": 1}])
def test_a_snapshot_hides_nobody_who_waits_and_holds_up_no_sends(
    place: Place, settings: dict[str, Any]
) -> None:
    if place.name not in ("mariadb", "mysql"):
        pytest.skip("PostgreSQL refuses it, SQLite has one transaction at a time")
    strict = place.application.execution_options(isolation_level="REPEATABLE READ")
    with place.queue(**settings) as queue, strict.connect() as connection:
        connection.execute(text(f"SELECT count(*) FROM {place.names.tables['messages']}")).all()
        queue.send("first", group="a")
        (first,) = queue.receive(1, lease=60)
        queue.send("second", group="a")
        assert taken(queue) == []
        queue.ack(first, transaction=connection)
        names = [f"other {number}" for number in range(9)]
        for name in names:  # it locks no gap between groups
            queue.send(name, group=name)
        connection.commit()
        assert sorted(taken(queue, 20)) == [*names, "second"]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_batch_stores_a_dedup_id_once(queue: Queue) -> None:
    first, second = queue.send_many([OutgoingMessage(body, dedup_id="x") for body in ("a", "b")])
    assert first == second
    assert taken(queue, 9) == ["a"]


def test_a_batch_with_dedup_ids_keeps_its_order(queue: Queue) -> None:
    bodies = [str(number) for number in range(9)]
    ids = queue.send_many([OutgoingMessage(body, dedup_id=body) for body in bodies])
    assert queue.send_many([OutgoingMessage(body, dedup_id=body) for body in bodies]) == ids
    assert taken(queue, 20) == bodies


def test_a_transaction_that_removes_old_dedup_ids_holds_nobody_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)  # each send removes some
    with place.queue() as queue, ThreadPoolExecutor(1) as thread:
        queue.send_many([OutgoingMessage("x", dedup_id=f"{number}") for number in range(9)])
        place.execute(f"UPDATE {place.names.tables['dedup']} SET until_ms = 1")
        with place.application.connect() as connection:
            queue.send("y", dedup_id="other", transaction=connection)
            if place.name != "sqlite":  # there the transaction is the only writer
                thread.submit(queue.send, "z", dedup_id="5").result(30)
            connection.commit()
        left = place.execute(f"SELECT count(*) FROM {place.names.tables['dedup']} WHERE until_ms = 1")
    assert left == [(0,)]


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_old_dedup_ids_that_can_t_be_removed_at_once_hold_up_no_transaction(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)  # each send removes some
    dedup, denies = place.names.tables["dedup"], f"{place.prefix}denies"
    with storage_for(f"{place.url}&pool_size=2&timeout_ms=100s") as storage, ThreadPoolExecutor(1) as thread:
        storage.create("w")
        queue = storage.open("w")
        queue.send("x", dedup_id="old")
        place.execute(
            f"UPDATE {dedup} SET until_ms = 1",
            f"CREATE FUNCTION {denies}() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN RAISE insufficient_privilege; END'",
            f"CREATE TRIGGER denies BEFORE DELETE ON {dedup} EXECUTE FUNCTION {denies}()",
        )
        with place.application.connect() as connection:
            queue.send("denied", dedup_id="1", transaction=connection)
            pool = storage._engine._connections.pool  # type: ignore[attr-defined]
            with pool.connect(), pool.connect():
                thread.submit(queue.send, "busy", dedup_id="2", transaction=connection).result(30)
            connection.commit()
        assert taken(queue, 9) == ["x", "denied", "busy"]
    place.execute(f"DROP FUNCTION {denies} CASCADE")
