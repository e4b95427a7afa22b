"""Queues in SQL within transactions of the application, and their locks."""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sql_support import Place

from kmqpy.errors import ConfigError, QueueNotFound, ReceiptError, Unavailable
from kmqpy.queue import Queue, queue_for, storage_for

of_several_writers = pytest.mark.parametrize(
    "place", ["postgresql", "mariadb", pytest.param("mysql", marks=pytest.mark.breadth)], indirect=True
)
WAITS_FOR_LOCK_S = 20
"""After this, a call is taken for one that waits for a lock; the lock is released when the test fails."""


@pytest.mark.parametrize("raw", [False, True])
def test_a_message_is_sent_and_acknowledged_with_the_transaction(
    place: Place, queue: Queue, raw: bool
) -> None:
    queue.send_many(["a", "b"])
    messages = queue.receive(2, lease=60)
    with place.application.connect() as connection:
        given = connection.connection.driver_connection if raw else connection
        for end in ("rollback", "commit"):
            queue.ack(messages, transaction=given)
            sent = queue.send_many(["new", "too"], key="k", headers={"h": "1"}, transaction=given)
            if place.name != "sqlite":  # its readers are not to be kept waiting, but see the same
                assert (queue.size(), queue.in_flight()) == (0, 2)
            given.rollback() if end == "rollback" else given.commit()
            if end == "rollback":
                assert (queue.size(), queue.in_flight()) == (0, 2)
    assert (queue.size(), queue.in_flight()) == (2, 0)
    assert [(one.id, one.body, one.key) for one in queue.receive()] == [
        (sent[0], b"new", b"k"),
        (sent[1], b"too", b"k"),
    ]


def test_a_late_acknowledgement_rolls_the_transaction_back(place: Place, queue: Queue) -> None:
    queue.send("x")
    (late,) = queue.receive(lease=60)
    queue.nack(late)
    queue.receive(lease=60)
    with place.application.connect() as connection:
        queue.send("result", transaction=connection)
        with pytest.raises(ReceiptError, match="roll"):
            queue.ack(late, transaction=connection)
        connection.rollback()
    assert (queue.size(), queue.in_flight()) == (0, 1)


def test_a_connection_to_elsewhere_sends_nothing(place: Place, queue: Queue, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type object is not a connection to"):
        queue.send("x", transaction=object())
    elsewhere = Place("sqlite", f"sqlite:///{tmp_path}/elsewhere.db")
    with closing(sqlite3.connect(tmp_path / "elsewhere.db")) as connection:
        if place.name == "sqlite":
            with pytest.raises(Unavailable, match=r"^transaction: .* no such table"):
                queue.send("x", transaction=connection)
            with storage_for(elsewhere.url.replace(elsewhere.prefix, place.prefix)) as other:
                other.create("q")
                with pytest.raises(QueueNotFound):
                    queue.send("x", transaction=connection)
                connection.rollback()
    assert queue.size() == 0


def test_a_connection_that_is_closed_or_failed_is_told(place: Place, queue: Queue) -> None:
    queue.send("x")
    received = queue.receive(lease=60)
    connection = place.application.connect()
    driver = connection.connection.driver_connection
    connection.detach()
    connection.close()
    with pytest.raises(ConfigError, match=r"^transaction: .* closed"):
        queue.send("y", transaction=connection)
    with pytest.raises(Unavailable):
        queue.ack(*received, transaction=driver)
    assert (queue.size(), queue.in_flight()) == (0, 1)
    with place.application.connect() as failed:
        failed.begin()
        failed.invalidate()
        with pytest.raises(ConfigError, match=r"^transaction: .*[Rr]oll"):
            queue.send("y", transaction=failed)
    assert (queue.size(), queue.in_flight()) == (0, 1)


def test_a_connection_of_another_thread_is_told(tmp_path: Path) -> None:
    with (
        queue_for(f"sqlite:///{tmp_path}/queues.db?queue=q&create=true") as queue,
        closing(sqlite3.connect(tmp_path / "queues.db")) as connection,
        ThreadPoolExecutor(1) as thread,
        pytest.raises(Unavailable, match="same thread"),
    ):
        thread.submit(queue.send, "x", transaction=connection).result()


def test_large_headers_are_sent_in_several_statements(place: Place, queue: Queue) -> None:
    headers = {"large": b"h" * 2_000_000}
    ids = queue.send_many([b"x"] * 10, headers=headers)
    found = queue.receive(lease=60)
    assert [one.id for one in found] == ids
    assert all(one.headers == (("large", headers["large"]),) for one in found)


@of_several_writers
def test_an_acknowledgement_that_is_not_committed_keeps_nobody_waiting(place: Place, queue: Queue) -> None:
    queue.send_many(["a", "b"])
    (message,) = queue.receive(1, lease=0.2)
    with ThreadPoolExecutor(1) as thread, place.application.connect() as connection:
        queue.ack(message, transaction=connection)
        time.sleep(0.3)  # the lease is over, and the row is locked
        found = thread.submit(queue.receive, 10, wait=0, lease=60).result(WAITS_FOR_LOCK_S)
        assert [one.body for one in found] == [b"b"]
        assert queue.size() >= 0
        connection.rollback()
    assert [one.attempts for one in queue.receive(wait=10)] == [2]


@of_several_writers
def test_what_is_committed_late_keeps_its_place_and_nobody_waiting(place: Place, queue: Queue) -> None:
    with ThreadPoolExecutor(1) as thread, place.application.connect() as connection:
        queue.send_many(["1", "2"], transaction=connection)
        queue.send_many(["3", "4"])
        found = thread.submit(queue.receive, 1, wait=0, lease=60).result(WAITS_FOR_LOCK_S)
        assert [one.body for one in found] == [b"3"]
        connection.commit()
    assert [one.body for one in queue.receive(wait=0, lease=60)] == [b"1", b"2", b"4"]


@of_several_writers
def test_takers_of_a_queue_that_collapses_take_turns_and_senders_have_none(place: Place) -> None:
    with storage_for(place.url) as storage, ThreadPoolExecutor(1) as thread:
        storage.create("c", collapse=True)
        queue = storage.open("c")
        with place.application.connect() as connection:
            queue.send_many(["sent late", "a"], transaction=connection)
            queue.send_many(["a", "a", "b"])
            found = thread.submit(queue.receive, 10, wait=0, lease=60).result(WAITS_FOR_LOCK_S)
            assert [one.body for one in found] == [b"a", b"b"]
            connection.commit()
        with place.application.connect() as connection:
            engine = queue._engine
            cursor = engine._dialect.cursor(connection.connection.driver_connection)
            engine._dialect.begin(cursor)
            cursor.execute(engine._sql["take_turn"], engine._parameters(queue._queue))
            waits = thread.submit(queue.receive, 10, wait=0, lease=60)
            queue.send("sent meanwhile")
            with pytest.raises(TimeoutError):
                waits.result(0.5)
            cursor.execute("ROLLBACK")
            bodies = [one.body for one in waits.result(WAITS_FOR_LOCK_S)]
        assert bodies == [b"sent late", b"a", b"sent meanwhile"]
        storage.delete("c")
        left = place.execute(f"SELECT count(*) FROM {place.prefix}meta")
    assert left == [(2,)]


@of_several_writers
def test_a_message_that_a_transaction_ends_is_left_and_its_twins_are_handed_out(place: Place) -> None:
    with place.queue(collapse=True) as queue, ThreadPoolExecutor(1) as thread:
        first, second, _ = queue.send_many(["a", "a", "a"])
        with place.application.connect() as connection:
            queue.ack(queue.receipt(first), transaction=connection)
            found = thread.submit(queue.receive, 10, wait=0, lease=60).result(WAITS_FOR_LOCK_S)
            assert [one.id for one in found] == [second]
            connection.rollback()
        assert [one.id for one in queue.receive(10, wait=5, lease=60)] == [first]


@of_several_writers
def test_a_nack_that_meets_a_lock_counts_once(place: Place, queue: Queue) -> None:
    queue.send("x")
    (message,) = queue.receive(1, lease=60)
    with place.application.connect() as connection, ThreadPoolExecutor(1) as thread:
        queue.ack(message, transaction=connection)
        nack = thread.submit(queue.nack, message)
        time.sleep(0.2)
        connection.rollback()
        nack.result(60)
    assert [one.attempts for one in queue.receive()] == [2]


def test_a_receipt_with_the_largest_numbers_finishes_nothing(queue: Queue) -> None:
    queue.send("x")
    (message,) = queue.receive(1, lease=60)
    prefix, number, _ = message.receipt.rsplit(".", 2)
    largest = 2**63 - 1
    forged = [f"{prefix}.{number}.{largest}", f"{prefix}.{largest}.1", f"{prefix}.{largest}.{largest}"]
    queue.ack(forged)
    queue.nack(forged)
    assert queue.extend(forged, lease=60) == forged
    assert queue.dead_letters.redrive([str(largest)]) == 0
    assert queue.in_flight() == 1


@pytest.mark.parametrize("pool", [sqlalchemy.NullPool, sqlalchemy.QueuePool])
def test_a_storage_connects_as_an_engine_of_the_application_does(place: Place, pool: Any) -> None:
    engine = sqlalchemy.create_engine(place.application.url, poolclass=pool)
    connected: list[Any] = []
    sqlalchemy.event.listen(engine, "connect", lambda connection, _: connected.append(connection))
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")  # one that the engine's pool may keep
    with storage_for(f"{place.name}:?prefix={place.prefix}", engine=engine) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many(["a", "b"])
        with engine.begin() as connection:
            queue.send("c", transaction=connection)
        messages = queue.receive()
        assert [message.body for message in messages] == [b"a", b"b", b"c"]
        queue.ack(messages)
        assert connected
    with engine.begin() as connection:  # it is as it was, and no connection is lost
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    assert pool is sqlalchemy.NullPool or engine.pool.checkedout() == 0
    engine.dispose()


@pytest.mark.parametrize(
    "pool", [sqlalchemy.StaticPool, sqlalchemy.SingletonThreadPool, sqlalchemy.AssertionPool]
)
def test_a_connection_that_the_application_uses_stays_its_own(place: Place, pool: Any) -> None:
    engine = sqlalchemy.create_engine(place.application.url, poolclass=pool)
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
        ours = connection.connection.driver_connection
        with storage_for(f"{place.name}:?prefix={place.prefix}", engine=engine) as storage:
            storage.create("q")
            storage.open("q").send("x")
        assert connection.connection.driver_connection is ours
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    engine.dispose()


def test_engines_that_do_not_fit_are_refused(place: Place) -> None:
    engine, scheme = place.application, place.name
    other = "sqlite" if scheme != "sqlite" else "mariadb"
    for url, wrong, text in (
        (f"{other}:", engine, f"{other}: needs one for"),
        (f"{scheme}://host/database", engine, f"write the url as {scheme}:"),
        (f"{scheme}:", "text", "str is not an engine of SQLAlchemy"),
        ("memory:", engine, "memory: is neither an SQL database nor Redis"),
        ("sqlite:", sqlalchemy.create_engine("sqlite://"), "use memory:"),
    ):
        with pytest.raises(ConfigError, match=text):
            storage_for(url, engine=wrong)
