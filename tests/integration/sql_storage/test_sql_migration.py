"""A database that an older version of the tables is in: it is migrated, by many at once, and nothing is lost.

The folders version_… have the statements that made them, as `kmq sql schema` printed them.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import sqlalchemy
from sql_support import Place

from kmqpy.core.clock import wait_until
from kmqpy.errors import ConfigError
from kmqpy.queue import parse_url, storage_for
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.opening import dialect_of
from kmqpy.storages.sql.schema import Schema
from kmqpy.storages.sql.tables import SCHEMA_VERSION

FAR_MS = 4_000_000_000_000
QUEUE_ID = 2**61 + 7
STATES = {"ready": 0, "given back": 0, "delayed": 1, "taken": 2, "dead": 3}
SETTINGS = {"delivery": "at-least-once", "lease_ms": 60_000, "max_redeliveries": 5, "order": "fifo"}
DRAW = {
    "postgresql": "SELECT setval('{prefix}numbers', 100)",
    "mariadb": "SELECT setval({prefix}numbers, 100)",
    "sqlite": "UPDATE {prefix}numbers SET next = 100",
}


pytestmark = pytest.mark.parametrize("place", DRAW, indirect=True)  # MySQL came with version 3


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.breadth)])
def old(request: pytest.FixtureRequest, place: Place) -> Place:
    """A place with the tables of an older version, and a message in each state."""
    script = (Path(__file__).parent / f"version_{request.param}" / f"{place.name}.sql").read_text()
    place.execute(*(one for one in script.replace("prefix_", place.prefix).split(";\n") if one))
    settings = json.dumps(SETTINGS)
    place.execute(
        f"INSERT INTO {place.prefix}meta (name, value) VALUES ('storage_id', 'of before')",
        f"INSERT INTO {place.prefix}queues (id, name, settings) VALUES ({QUEUE_ID}, 'q', '{settings}')",
        *(insert(place, number, body, state) for number, (body, state) in enumerate(STATES.items(), 1)),
        DRAW[place.name].format(prefix=place.prefix),
    )
    return place


def insert(place: Place, row_id: int, body: str, state: int) -> str:
    """The statement by which an older version puts a row: it knows no later columns."""
    until_ms = FAR_MS if state in (1, 2) else 0
    take = int(body not in ("ready", "delayed"))
    data = f"X'{body.encode().hex()}'" if place.name != "postgresql" else f"'{body}'::bytea"
    into = f"{place.prefix}messages"
    columns = (
        "id, queue, place, until_ms, since_ms, enqueued_ms, first_enqueued_ms, take, requeues, state, "
        "minus_priority, reason, message_key, headers, body"
    )
    numbers = f"{row_id}, {QUEUE_ID}, {row_id}, {until_ms}, 5, 6, 7, {take}, 1, {state}, 0"
    return f"INSERT INTO {into} ({columns}) VALUES ({numbers}, 'why', NULL, NULL, {data})"


def version(place: Place) -> str:
    ((found,),) = place.execute(f"SELECT value FROM {place.prefix}meta WHERE name = 'schema_version'")
    return str(found)


def shape(place: Place) -> tuple[Any, ...]:
    """Columns and indexes of the messages and dedup keys."""
    found, tables = (
        sqlalchemy.inspect(place.application),
        [place.names.tables[one] for one in ("messages", "dedup")],
    )
    columns = {
        (one["name"], str(one["type"]), one["nullable"])
        for table in tables
        for one in found.get_columns(table)
    }
    indexes = {
        (str(one["name"]).removeprefix(place.prefix), tuple(one["column_names"]))
        for table in tables
        for one in found.get_indexes(table)
    }
    return columns, indexes


def test_a_database_of_version_1_keeps_its_messages(old: Place) -> None:
    with storage_for(old.url) as storage:
        assert storage._engine.storage_id == "of before"
        described = storage.describe("q")
        assert (described.ready, described.delayed, described.in_flight, described.dead) == (2, 1, 1, 1)
        assert described.settings["collapse"] is False
        assert described.settings["lease_ms"] == SETTINGS["lease_ms"]
        queue = storage.open("q")
        queue.send("new")
        messages = queue.receive(10)
        assert [(one.body, one.id) for one in messages] == [
            (b"ready", "1"),
            (b"given back", "2"),
            (b"new", messages[-1].id),
        ]
        assert int(messages[-1].id) >= 100
        queue.ack([*messages, queue.receipt("3"), queue.receipt("4")])
        assert queue.dead_letters.redrive() == 1
        assert [one.body for one in queue.receive()] == [b"dead"]
        storage.create("collapses", collapse=True)
        collapses = storage.open("collapses")
        collapses.send_many(["a", "a", "b"])
        assert [one.body for one in collapses.receive()] == [b"a", b"b"]
        storage.create("grouped", order="group")
        grouped = storage.open("grouped")
        grouped.send("1", group="g", dedup_id="d")
        grouped.send("2", group="g", dedup_id="d")
        grouped.send("3", group="g")
        assert [one.body for one in grouped.receive(1)] == [b"1"]
        assert grouped.receive(wait=0) == []
    assert version(old) == str(SCHEMA_VERSION)


def test_migrated_tables_are_those_that_are_made_today(old: Place) -> None:
    storage_for(old.url).close()
    new = Place(old.name, old.url.partition("?")[0])
    storage_for(new.url).close()
    try:
        assert shape(old) == shape(new)
    finally:
        new.drop()


@pytest.mark.breadth
def test_many_processes_migrate_it_at_once(old: Place) -> None:
    program = (
        "import sys; from kmqpy.queue import storage_for\n"
        "with storage_for(sys.argv[1]) as storage:\n"
        "    print(storage._engine.storage_id, storage.open('q').size())\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, old.url], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [one.communicate(timeout=120)[0] for one in started] == ["of before 3\n"] * 3
    assert version(old) == str(SCHEMA_VERSION)


def test_a_program_of_an_older_version_goes_on_and_can_not_open_it_again(old: Place) -> None:
    storage_for(old.url).close()
    old.execute(insert(old, 50, "sent by another", 0))
    with storage_for(old.url) as storage:
        assert [one.body for one in storage.open("q").receive(10)][-1] == b"sent by another"
    connections = Connections(dialect_of(parse_url(old.url, names_queue=False)), 10)
    try:
        with pytest.raises(ConfigError, match=r"schema version 3 is of a newer kmqpy.* knows 1: upgrade"):
            Schema(connections, old.names, version=1, steps={}).prepare()
    finally:
        connections.close()


def take_as_before(place: Place, found: list[int], is_over: Event) -> None:
    """Take and finish ready messages one by one, by statements that know no later columns."""
    messages = f"{place.prefix}messages"
    first = f"SELECT min(id) FROM {messages} WHERE queue = {QUEUE_ID} AND state = 0"
    while True:
        with suppress(sqlalchemy.exc.OperationalError):  # locked, or altered meanwhile: nothing was done
            was_over = is_over.is_set()
            ((row_id,),) = place.execute(first)
            if row_id is None and was_over:
                return
            with place.application.begin() as connection:
                taken = (
                    f"UPDATE {messages} SET state = 2, take = take + 1 WHERE id = {row_id or 0} AND state = 0"
                )
                is_mine = connection.exec_driver_sql(taken).rowcount == 1
                if is_mine:
                    connection.exec_driver_sql(f"DELETE FROM {messages} WHERE id = {row_id} AND state = 2")
            if row_id is not None and is_mine:
                found.append(row_id)


@pytest.mark.breadth
def test_it_is_migrated_while_takers_go_on(old: Place) -> None:
    numbers = [*range(50, 90)]
    old.execute(*(insert(old, number, f"{number}", 0) for number in numbers[:30]))
    is_over = Event()
    found: list[list[int]] = [[], []]
    with ThreadPoolExecutor(2) as takers:
        ends = [takers.submit(take_as_before, old, own, is_over) for own in found]
        try:
            assert wait_until(lambda: sum(map(len, found)) > 4, 60)
            with storage_for(old.url) as storage:
                assert version(old) == str(SCHEMA_VERSION)
                for number in numbers[30:]:
                    old.execute(insert(old, number, f"{number}", 0))
                assert storage.open("q").send("new") not in map(str, numbers)
        finally:
            is_over.set()
        for one in ends:
            one.result(60)
    taken = sorted(one for own in found for one in own)
    assert taken[:-1] == [1, 2, *numbers]  # and the new one
    with storage_for(old.url) as storage:
        assert storage.open("q").size() == 1  # the delayed one


def test_a_migration_of_mariadb_that_was_interrupted_goes_on(old: Place) -> None:
    if old.name != "mariadb":
        pytest.skip("its migration is one transaction")
    old.execute(
        f"ALTER TABLE {old.prefix}messages ADD COLUMN IF NOT EXISTS digest binary(16)",
        f"ALTER TABLE {old.prefix}messages ADD COLUMN group_id bigint",
    )
    with storage_for(old.url) as storage:
        assert len(storage.open("q").receive(10)) == 2
    assert version(old) == str(SCHEMA_VERSION)
