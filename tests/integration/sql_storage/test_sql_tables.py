"""Tables of queues in SQL: who creates them, versions, tables of others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy
from sql_support import Place

from kmqpy.cli.app import run
from kmqpy.errors import ConfigError, ReceiptError
from kmqpy.queue import Queue, parse_url, queue_for, storage_for
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.opening import dialect_of
from kmqpy.storages.sql.schema import Schema
from kmqpy.storages.sql.statements import script
from kmqpy.storages.sql.tables import SCHEMA_VERSION


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
    place.execute(
        f"ALTER TABLE {place.prefix}meta RENAME TO strict",
        f"CREATE TABLE {place.prefix}meta AS SELECT * FROM strict",
        f"UPDATE {place.prefix}meta SET value = x'ff' WHERE name = '{row}'",
    )
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
        SCHEMA_VERSION + number: (
            f"INSERT INTO {meta} (name, value) VALUES ('step', '{number}')"
            if number == 0
            else f"UPDATE {meta} SET value = '{number}' WHERE name = 'step'",
        )
        for number in range(2)
    }
    connections = Connections(dialect_of(parse_url(place.url, names_queue=False)), 10)
    try:
        for _ in range(2):
            schema = Schema(connections, place.names, version=SCHEMA_VERSION + 2, steps=steps)
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
    other.drop()


def test_a_deleted_queue_leaves_no_rows(place: Place, queue: Queue) -> None:
    queue.send_many(["x"] * 5)
    queue.send("later", delay=60)
    queue.dead_letter(queue.receive(1))
    queue.receive(1)
    with storage_for(place.url) as storage:
        storage.delete("q")
    assert place.execute(f"SELECT count(*) FROM {place.prefix}messages") == [(0,)]
