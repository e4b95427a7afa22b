"""What is special of queues in SQL: the tables, transactions of the application, locks, waiting."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest
import sqlalchemy

from kmqpy.cli.app import run
from kmqpy.dev.ports import free_ports
from kmqpy.errors import ConfigError, MessageError, NotSupported, QueueNotFound, ReceiptError, Unavailable
from kmqpy.queue import Queue, parse_url, queue_for, storage_for
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.engine import SqlEngine
from kmqpy.storages.sql.opening import dialect_of
from kmqpy.storages.sql.schema import Schema
from kmqpy.storages.sql.statements import SCHEMA_VERSION, Names, script

DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
}


class Place:
    """A database, and a prefix in it that no other test has."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.prefix = f"t{uuid4().hex[:12]}_"
        self.url = f"{url}?prefix={self.prefix}"
        self.names = Names(prefix=self.prefix)
        self.application = sqlalchemy.create_engine(
            DRIVERS[name] + url.removeprefix(name), poolclass=sqlalchemy.NullPool
        )

    def execute(self, *statements: str) -> list[Any]:
        """The rows of the last one."""
        with self.application.begin() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
            return list(result) if result.returns_rows else []


@pytest.fixture(params=DRIVERS)
def place(
    request: pytest.FixtureRequest, database_url: Callable[[str], str], tmp_path: Path
) -> Iterator[Place]:
    name = request.param
    made = Place(name, f"sqlite:///{tmp_path}/queues.db" if name == "sqlite" else database_url(name))
    yield made
    tables = made.names.tables
    kind = dict.fromkeys(tables, "TABLE")
    kind["numbers"] = "TABLE" if name == "sqlite" else "SEQUENCE"
    made.execute(*(f"DROP {kind[what]} IF EXISTS {table}" for what, table in tables.items()))


@pytest.fixture
def queue(place: Place) -> Iterator[Queue]:
    with storage_for(place.url) as storage:
        storage.create("q")
        yield storage.open("q")


# --- the tables ---------------------------------------------------------------------------------------


def test_many_who_open_it_first_create_the_tables_once(place: Place) -> None:
    together = threading.Barrier(8)

    def opened(_: int) -> str:
        together.wait(60)
        with storage_for(place.url) as storage:
            return storage._engine.storage_id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(opened, range(8)))) == 1
    versions = place.execute(f"SELECT value FROM {place.prefix}meta WHERE name = 'schema_version'")
    assert versions == [(str(SCHEMA_VERSION),)]


@pytest.mark.parametrize("table", ["meta", "queues", "messages"])
def test_a_table_of_another_program_is_left_as_it_is(place: Place, table: str) -> None:
    theirs = place.prefix + table
    place.execute(f"CREATE TABLE {theirs} (a integer)", f"INSERT INTO {theirs} VALUES (5)")
    with pytest.raises(ConfigError, match=rf"{theirs}.*not one of kmqpy.*prefix"):
        storage_for(place.url)
    assert place.execute(f"SELECT * FROM {theirs}") == [(5,)]
    there = sqlalchemy.inspect(place.application).get_table_names()
    assert [name for name in there if name.startswith(place.prefix)] == [theirs]


def test_tables_of_a_newer_kmqpy_are_refused_and_left_as_they_are(place: Place) -> None:
    with storage_for(place.url) as storage:
        storage.create("q")
    place.execute(f"UPDATE {place.prefix}meta SET value = '999' WHERE name = 'schema_version'")
    with pytest.raises(ConfigError, match=r"999 is of a newer kmqpy.*upgrade"):
        storage_for(place.url)
    assert place.execute(f"SELECT name FROM {place.prefix}queues") == [("q",)]


@pytest.mark.parametrize("version", ["0", "9" * 50, "two", ""])
def test_a_version_that_is_none_is_told(place: Place, version: str) -> None:
    storage_for(place.url).close()
    place.execute(f"UPDATE {place.prefix}meta SET value = '{version}' WHERE name = 'schema_version'")
    with pytest.raises(ConfigError, match=rf"{place.prefix}meta.*not one of kmqpy"):
        storage_for(place.url)


@pytest.mark.parametrize("row", ["schema_version", "storage_id"])
def test_a_file_with_values_of_other_types_is_told(tmp_path: Path, row: str) -> None:
    place = Place("sqlite", f"sqlite:///{tmp_path}/queues.db")
    storage_for(place.url).close()
    place.execute(f"UPDATE {place.prefix}meta SET value = x'ff' WHERE name = '{row}'")
    with pytest.raises(ConfigError, match=rf"{place.prefix}meta.*not one of kmqpy"):
        storage_for(place.url)


def test_the_smallest_pool_creates_the_tables(place: Place) -> None:
    with queue_for(f"{place.url}&queue=q&create=true&pool_size=2") as queue:
        queue.send("x")
        assert queue.size() == 1


def test_older_tables_are_migrated_step_by_step(place: Place) -> None:
    with storage_for(place.url) as storage:
        storage.create("q")
        before = storage._engine.storage_id
    meta = place.names.tables["meta"]
    steps = {
        SCHEMA_VERSION + number: {
            place.name: (f"INSERT INTO {meta} (name, value) VALUES ('step', '{number}')",)
            if number == 0
            else (f"UPDATE {meta} SET value = '{number}' WHERE name = 'step'",)
        }
        for number in range(2)
    }
    connections = Connections(dialect_of(parse_url(place.url, names_queue=False)), 10)
    try:
        for _ in range(2):
            schema = Schema(connections, place.names, version=SCHEMA_VERSION + 2, migrations=steps)
            assert schema.prepare() == before
    finally:
        connections.close()
    found = dict(map(tuple, place.execute(f"SELECT name, value FROM {meta}")))
    assert (found["step"], found["schema_version"]) == ("1", str(SCHEMA_VERSION + 2))


def test_the_printed_schema_is_what_opening_finds(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sql", "schema", "--dialect", place.name, "--prefix", place.prefix]) == 0
    printed = capsys.readouterr().out
    assert printed == script(place.name, place.names)
    place.execute(*(one for one in printed.split(";\n") if one))
    with storage_for(place.url) as storage:
        storage.create("q")
        storage.open("q").send("x")
        assert storage.describe("q").ready == 1


def test_two_prefixes_are_two_storages(place: Place, queue: Queue) -> None:
    other = Place(place.name, place.url.partition("?")[0])
    with storage_for(other.url) as storage:
        assert storage.list() == []
        storage.create("q")
        queue.send("x")
        with pytest.raises(ReceiptError, match="another storage"):
            storage.open("q").ack(queue.receive())
    kind = "TABLE" if place.name == "sqlite" else "SEQUENCE"
    other.execute(*(f"DROP TABLE {other.prefix}{what}" for what in ("meta", "queues", "messages")))
    other.execute(f"DROP {kind} {other.prefix}numbers")


def test_a_deleted_queue_leaves_no_rows(place: Place, queue: Queue) -> None:
    queue.send_many(["x"] * 5)
    queue.send("later", delay=60)
    queue.dead_letter(queue.receive(1))
    queue.receive(1)
    with storage_for(place.url) as storage:
        storage.delete("q")
    assert place.execute(f"SELECT count(*) FROM {place.prefix}messages") == [(0,)]


# --- transactions of the application ------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_a_message_is_sent_and_acknowledged_with_the_transaction(
    place: Place, queue: Queue, raw: bool
) -> None:
    queue.send_many(["a", "b"])
    messages = queue.receive(2, lease=60)
    with place.application.connect() as connection:
        given = connection.connection.driver_connection if raw else connection
        for end in ("rollback", "commit"):
            queue.ack(messages, connection=given)
            sent = queue.send_many(["new", "too"], key="k", headers={"h": "1"}, connection=given)
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
        queue.send("result", connection=connection)
        with pytest.raises(ReceiptError, match="roll"):
            queue.ack(late, connection=connection)
        connection.rollback()
    assert (queue.size(), queue.in_flight()) == (0, 1)


def test_a_connection_to_elsewhere_sends_nothing(place: Place, queue: Queue, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="object is neither"):
        queue.send("x", connection=object())
    elsewhere = Place("sqlite", f"sqlite:///{tmp_path}/elsewhere.db")
    with closing(sqlite3.connect(tmp_path / "elsewhere.db")) as connection:
        if place.name == "sqlite":
            with pytest.raises(Unavailable, match="no such table"):
                queue.send("x", connection=connection)
            with storage_for(elsewhere.url.replace(elsewhere.prefix, place.prefix)) as other:
                other.create("q")
                with pytest.raises(QueueNotFound):
                    queue.send("x", connection=connection)
                connection.rollback()
    assert queue.size() == 0


def test_a_connection_that_is_closed_or_failed_is_told(place: Place, queue: Queue) -> None:
    queue.send("x")
    received = queue.receive(lease=60)
    connection = place.application.connect()
    driver = connection.connection.driver_connection
    connection.detach()
    connection.close()
    with pytest.raises(ConfigError, match=r"^connection: .* closed"):
        queue.send("y", connection=connection)
    with pytest.raises(Unavailable):
        queue.ack(*received, connection=driver)
    assert (queue.size(), queue.in_flight()) == (0, 1)
    with place.application.connect() as failed:
        failed.begin()
        failed.invalidate()
        with pytest.raises(ConfigError, match=r"^connection: .*[Rr]oll"):
            queue.send("y", connection=failed)
    assert (queue.size(), queue.in_flight()) == (0, 1)


def test_a_connection_of_another_thread_is_told(tmp_path: Path) -> None:
    with (
        queue_for(f"sqlite:///{tmp_path}/queues.db?queue=q&create=true") as queue,
        closing(sqlite3.connect(tmp_path / "queues.db")) as connection,
        ThreadPoolExecutor(1) as thread,
        pytest.raises(Unavailable, match="same thread"),
    ):
        thread.submit(queue.send, "x", connection=connection).result()


def test_large_headers_are_sent_in_several_statements(place: Place, queue: Queue) -> None:
    headers = {"large": b"h" * 2_000_000}
    ids = queue.send_many([b"x"] * 10, headers=headers)
    found = queue.receive(lease=60)
    assert [one.id for one in found] == ids
    assert all(one.headers == (("large", headers["large"]),) for one in found)


def test_an_acknowledgement_that_is_not_committed_keeps_nobody_waiting(place: Place, queue: Queue) -> None:
    if place.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    queue.send_many(["a", "b"])
    (message,) = queue.receive(1, lease=0.2)
    with place.application.connect() as connection:
        queue.ack(message, connection=connection)
        time.sleep(0.3)  # the lease is over, and the row is locked
        began = time.monotonic()
        found = queue.receive(10, wait=0, lease=60)
        assert [one.body for one in found] == [b"b"]
        assert queue.size() >= 0
        assert time.monotonic() - began < 4
        connection.rollback()
    assert [one.attempts for one in queue.receive(wait=10)] == [2]


def test_what_is_committed_late_keeps_its_place_and_nobody_waiting(place: Place, queue: Queue) -> None:
    if place.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    with place.application.connect() as connection:
        queue.send_many(["1", "2"], connection=connection)
        queue.send_many(["3", "4"])
        assert [one.body for one in queue.receive(1, wait=0, lease=60)] == [b"3"]
        connection.commit()
    assert [one.body for one in queue.receive(wait=0, lease=60)] == [b"1", b"2", b"4"]


def test_a_nack_that_meets_a_lock_counts_once(place: Place, queue: Queue) -> None:
    if place.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    queue.send("x")
    (message,) = queue.receive(1, lease=60)
    with place.application.connect() as connection, ThreadPoolExecutor(1) as thread:
        queue.ack(message, connection=connection)
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


# --- waiting, and servers that are away ---------------------------------------------------------------


def test_a_waiting_receive_learns_of_another_process_and_of_a_commit(place: Place, queue: Queue) -> None:
    with storage_for(place.url) as elsewhere, ThreadPoolExecutor(1) as thread:
        waiting = elsewhere.open("q")
        for send in ("alone", "in a transaction"):
            received = thread.submit(lambda: (waiting.receive(wait=60), time.monotonic()))
            time.sleep(0.5)
            if send == "alone":
                queue.send("x")
            else:
                with place.application.begin() as connection:
                    queue.send("x", connection=connection)
            sent_at = time.monotonic()
            (message,), at = received.result(60)
            message.ack()
            assert at - sent_at < 1.5


def test_a_server_that_is_away_is_unavailable_in_time(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for url in (f"postgresql://me:secret@127.0.0.1:{port}/db", f"mariadb://me:secret@127.0.0.1:{port}/db"):
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            storage_for(f"{url}?timeout_ms=300")
        assert time.monotonic() - began < 20
        assert "secret" not in str(caught.value)
    with pytest.raises(Unavailable, match="unable to open"):
        storage_for(f"sqlite:///{tmp_path}/no/such/folder/q.db")
    (tmp_path / "text.db").write_text("this is no database" * 99)
    with pytest.raises(Unavailable, match="not a database"):
        storage_for(f"sqlite:///{tmp_path}/text.db")


class LosesAnswers:
    """The cursors of an engine; the connection breaks when the server has carried out what `lose` names."""

    def __init__(self, engine: SqlEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialect = dialect = engine._dialect
        self.lost = ""
        cursor_of = dialect.cursor
        monkeypatch.setattr(dialect, "cursor", lambda connection: LossyCursor(self, cursor_of(connection)))
        engine._connections.pool.dispose()  # connections keep their cursors

    def lose(self, name: str) -> None:
        """A transaction of several statements is carried out by its COMMIT."""
        several = not self.dialect.is_one_statement and name in ("put", "take")
        self.lost = "COMMIT" if several else self.dialect.sql[name]

    def carried_out(self, statement: str) -> None:
        if statement == self.lost:
            self.lost = ""
            if self.dialect.name == "postgresql":
                raise psycopg.OperationalError("the connection is lost")
            raise pymysql.err.OperationalError(2013, "Lost connection to server during query")


class LossyCursor:
    def __init__(self, losing: LosesAnswers, cursor: Any) -> None:
        self.losing = losing
        self.cursor = cursor

    def execute(self, statement: str, parameters: Any = None) -> Any:
        done = self.cursor.execute(statement, parameters)
        self.losing.carried_out(statement)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cursor, name)


def test_a_call_whose_answer_is_lost_is_repeated_but_for_send(
    place: Place, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.name == "sqlite":
        pytest.skip("SQLite has no connection that could break")
    losing = LosesAnswers(queue._engine, monkeypatch)  # type: ignore[attr-defined]
    losing.lose("put")
    with pytest.raises(Unavailable, match="does not answer"):
        queue.send("a")
    assert queue.size() == 1  # sent once
    queue.send("b")
    losing.lose("take")
    (message,) = queue.receive(1, lease=60)
    assert (message.body, queue.in_flight()) == (b"b", 2)
    losing.lose("extend")
    assert queue.extend(message, lease=60) == []
    losing.lose("give_back")
    queue.nack(message)
    (message,) = queue.receive(1, lease=60)
    assert message.attempts == 2
    losing.lose("bury")
    queue.dead_letter(message)
    assert [one.attempts for one in queue.dead_letters.list()] == [2]
    losing.lose("finish")
    queue.ack([one.receipt for one in queue.orphans()])
    assert (queue.size(), queue.in_flight(), losing.lost) == (0, 0, "")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:", "sqlite:///"),
        ("sqlite://host/f.db", "sqlite:///"),
        ("postgresql://host", "names no database"),
        ("postgresql://h,g/db", "one address"),
        ("mariadb://host/db?schema=x", "only PostgreSQL"),
        ("sqlite:///x.db?prefix=a;b", "prefix"),
        ("sqlite:///:memory:", "use memory:"),
        ("sqlite:///x.db?pool_size=1", "pool_size: 1 is not from 2"),
        ("sqlite:///x.db?pool=5", "did you mean pool_size"),
        ("sqlite:///x.db?timeout_ms=soon", "timeout_ms"),
    ],
)
def test_bad_urls_are_told(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        storage_for(url)


def test_a_url_creates_its_queue(place: Place) -> None:
    with queue_for(f"{place.url}&queue=q&create=true&max_redeliveries=none") as queue:
        assert queue.name == "q"
    with pytest.raises(NotSupported, match="no storage for mysql"):
        storage_for("mysql://h/db")


# --- what others write ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("damage", ["DELETE FROM {}", "UPDATE {} SET next = 1e300"])
def test_a_damaged_sequence_of_sqlite_is_told(tmp_path: Path, damage: str) -> None:
    place = Place("sqlite", f"sqlite:///{tmp_path}/queues.db")
    with queue_for(f"{place.url}&queue=q&create=true") as queue:
        place.execute(damage.format(f"{place.prefix}numbers"))
        with pytest.raises(ConfigError, match=f"{place.prefix}numbers.*one row"):
            queue.send("x")
        place.execute(f"DELETE FROM {place.prefix}numbers", f"INSERT INTO {place.prefix}numbers VALUES (7)")
        queue.send("x")


def test_text_that_was_written_by_hand_is_a_body(tmp_path: Path) -> None:
    place = Place("sqlite", f"sqlite:///{tmp_path}/queues.db")
    with queue_for(f"{place.url}&queue=q&create=true") as queue:
        queue.send("x")
        place.execute(f"UPDATE {place.prefix}messages SET body = 'caf\u00e9'")
        assert queue.receive()[0].body == "caf\u00e9".encode()


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


def test_a_message_that_is_too_large_with_its_headers_is_told(queue: Queue, place: Place) -> None:
    if place.name != "mariadb":
        pytest.skip("the others have a limit of bodies only")
    with pytest.raises(MessageError, match="more than MariaDB takes"):
        queue.send(b"x" * 4_000_000, headers={"large": b"h" * 4_000_000})
    queue.send(b"\xff" * 7_000_000)
    assert len(queue.receive()[0].body) == 7_000_000


def test_a_connection_of_postgresql_has_a_cursor_for_each_statement_and_keeps_no_result(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    cursor_of = psycopg.Connection.cursor

    def cursor(self: Any, **options: Any) -> Any:
        found = cursor_of(self, **options)
        if options:  # the notifier's has none
            made.append(found)
        return found

    with storage_for(Place("postgresql", database_url("postgresql")).url) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many([b"x"] * 6)
        monkeypatch.setattr(psycopg.Connection, "cursor", cursor)
        for count in (1, 1, 3, 1):
            messages = queue.receive(count, wait=0)
            assert [message.body for message in messages] == [b"x"] * count
            queue.ack(messages)
        assert len(made) == 2  # for the take and for the acknowledgement
        assert all(one.pgresult.ntuples == 0 for one in made)
        assert queue.size() == 0
