"""Rows and files of queues in SQL that others write, replace or delete."""

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sql_support import Place

from kmqpy.errors import ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.queue import Queue, queue_for, storage_for
from kmqpy.storages.sql import engine, postgresql


@pytest.mark.parametrize(
    "data", [b"{", b"[5]", b"[[5, null]]", b'[["a", "\\u0141"]]', b"\xff", b"[" * 100_000]
)
def test_headers_that_can_not_be_read_cost_neither_the_message_nor_others(
    place: Place, queue: Queue, data: bytes
) -> None:
    ids = queue.send_many([b"x", b"y"], headers={"a": b"b"})
    with place.application.begin() as connection:
        change = sqlalchemy.text(f"UPDATE {place.prefix}messages SET headers = :data WHERE id = :id")
        connection.execute(change, {"data": data, "id": int(ids[0])})
    found = queue.receive(lease=60)
    assert [(one.id, one.headers) for one in found] == [(ids[0], ()), (ids[1], (("a", b"b"),))]
    assert queue.ack(found) is None
    assert queue.in_flight() == 0


def test_a_queue_has_the_name_of_its_row(place: Place) -> None:
    with storage_for(place.url) as storage:
        storage.create("q")
        place.execute(f"UPDATE {place.prefix}queues SET name = 'renamed' WHERE name = 'q'")
        assert storage.describe("renamed").name == "renamed"
        assert storage.open("renamed").name == "renamed"


def test_an_open_queue_follows_what_another_process_alters(
    place: Place, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LOOKS_EACH_S", 0)
    queue.send_many(["x", "y"])
    x, _ = queue.receive(2, lease=60)
    with storage_for(place.url) as other:
        other.alter("q", retry_delays=["1h"], max_redeliveries=0)
    assert queue.receive(1, wait=0) == []
    queue.nack(x, confirmed=True)
    assert [one.id for one in queue.dead_letters.list()] == [x.id]
    with storage_for(place.url) as other:
        other.alter("q", max_redeliveries=1)
        assert queue.receive(1, wait=0) == []
        place.execute(f"UPDATE {place.prefix}queues SET settings = '{{}} of a newer version'")
        assert queue.receive(1, wait=0) == []
    assert queue.release_all() == 1
    queue.nack(queue.receive(1, wait=0, lease=60), confirmed=True)
    assert queue.receive(1, wait=0) == []
    assert queue.size() == 1


@pytest.mark.parametrize("damage", ["DELETE FROM {}", "INSERT INTO {} VALUES (5)"])
def test_a_damaged_sequence_of_sqlite_is_told(tmp_path: Path, damage: str) -> None:
    place = Place("sqlite", f"sqlite:///{tmp_path}/queues.db")
    with queue_for(f"{place.url}&queue=q&create=true") as queue:
        place.execute(damage.format(f"{place.prefix}numbers"))
        with pytest.raises(ConfigError, match=f"{place.prefix}numbers.*one row"):
            queue.send("x")
        place.execute(f"DELETE FROM {place.prefix}numbers", f"INSERT INTO {place.prefix}numbers VALUES (7)")
        queue.send("x")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("body", "'text'"),
        ("message_key", "5"),
        ("take", "'one'"),
        ("minus_priority", "x'ff'"),
        ("reason", "x'ff'"),
    ],
)
def test_sqlite_refuses_values_of_another_type(tmp_path: Path, column: str, value: str) -> None:
    place = Place("sqlite", f"sqlite:///{tmp_path}/queues.db")
    with queue_for(f"{place.url}&queue=q&create=true") as queue:
        queue.send("x")
        with pytest.raises(sqlalchemy.exc.IntegrityError, match="cannot store"):
            place.execute(f"UPDATE {place.prefix}messages SET {column} = {value}")
        assert queue.receive()[0].body == b"x"


def test_a_damaged_file_of_sqlite_is_named_and_hands_out_no_other_message(tmp_path: Path) -> None:
    sent = {f"{number:05d}".encode() * 100 for number in range(300)}
    file, dice, told = tmp_path / "queues.db", random.Random(1), 0
    with queue_for(f"sqlite:///{file}?queue=q&create=true") as queue:
        queue.send_many(sorted(sent))
    whole = file.read_bytes()
    for _ in range(12):
        damaged, at = bytearray(whole), dice.randrange(len(whole) // 4096) * 4096
        damaged[at : at + 512] = bytes(512)  # the head of a page
        file.write_bytes(damaged[: len(damaged) if dice.random() < 0.5 else at + 2048])
        try:
            with queue_for(f"sqlite:///{file}?queue=q&timeout_ms=1s") as queue:
                while found := queue.receive(50, wait=0):
                    assert {message.body for message in found} <= sent
                    queue.ack(found)
        except Unavailable as error:
            told += "queues.db" in str(error) and "`.recover`" in str(error)
        except QueueNotFound:
            pass
    assert told > 3


def test_a_damaged_log_of_sqlite_ends_where_the_damage_is_and_hands_out_no_other_message(
    tmp_path: Path,
) -> None:
    sent, file, dice = (
        [f"{number:03d}".encode() * 100 for number in range(60)],
        tmp_path / "queues.db",
        random.Random(1),
    )
    with queue_for(f"sqlite:///{file}?queue=q&create=true") as queue:
        for body in sent:
            queue.send(body)
        whole, log = file.read_bytes(), file.with_name("queues.db-wal").read_bytes()
    left = set()
    for number in range(8):
        place = tmp_path / f"{number}"
        place.mkdir()
        damaged, at = bytearray(log), dice.randrange(len(log) // 2, len(log))
        damaged[at] ^= 1 << dice.randrange(8)
        (place / "queues.db").write_bytes(whole)
        (place / "queues.db-wal").write_bytes(damaged[: len(log) if dice.random() < 0.5 else at])
        with queue_for(f"sqlite:///{place}/queues.db?queue=q") as queue:
            found = [message.body for message in queue.receive(100)]
        assert found == sent[: len(found)]
        left.add(len(found))
    assert len(left) > 3


def test_an_sqlite_that_is_too_old_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(ConfigError, match=r"older than 3\.37"):
        storage_for(f"sqlite:///{tmp_path}/queues.db")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_deleted_takes_no_messages(tmp_path: Path, replaced: bool) -> None:
    file = tmp_path / "queues.db"
    with queue_for(f"sqlite:///{file}?queue=q&create=true") as queue:
        queue.send("x")
        for one in tmp_path.iterdir():
            one.unlink()
        if replaced:
            queue_for(f"sqlite:///{file}?queue=q&create=true").close()
        with pytest.raises(Unavailable, match=r"queues.db was deleted or replaced"):
            queue.send("y")
        with pytest.raises(Unavailable, match=r"queues.db was deleted or replaced"):
            queue.receive()


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_more_bytes_at_once_than_the_server_takes_are_told(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server takes 1,022 messages of 1 MiB, and closes the connection at 1,024."""
    monkeypatch.setattr(postgresql, "MAX_STATEMENT_BYTES", 1_000_000)
    bodies = [b"x" * 100_000] * 10
    for options in ({}, {"key": "k" * 20_000}, {"headers": {"h": b"h" * 20_000}}):
        with pytest.raises(MessageError, match=r"messages: 1\d{6} bytes at once .*, 1000000; send fewer"):
            queue.send_many(bodies, **options)
        assert len(queue.send_many(bodies[:8], **options)) == 8
    assert queue.size() == 24


def test_a_message_that_is_too_large_with_its_headers_is_told(queue: Queue, place: Place) -> None:
    if place.name not in ("mariadb", "mysql"):
        pytest.skip("the others have a limit of bodies only")
    with pytest.raises(MessageError, match=f"more than {place.name} takes"):
        queue.send(b"x" * 4_000_000, headers={"large": b"h" * 4_000_000})
    queue.send(b"\xff" * 7_000_000)
    assert len(queue.receive()[0].body) == 7_000_000


def test_a_connection_of_postgresql_has_a_cursor_for_each_statement_and_keeps_no_result(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Cursor(psycopg.Cursor[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    with storage_for(Place("postgresql", database_url("postgresql")).url) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many([b"x"] * 6)
        monkeypatch.setattr(psycopg, "Cursor", Cursor)
        for count in (1, 1, 3, 1):
            messages = queue.receive(count, wait=0)
            assert [message.body for message in messages] == [b"x"] * count
            queue.ack(messages)
        assert len(made) == 2  # for the take and for the acknowledgement
        assert all(one.pgresult.ntuples == 0 for one in made)
        assert queue.size() == 0
