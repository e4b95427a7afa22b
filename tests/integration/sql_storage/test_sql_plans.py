"""The plans by which databases execute statements: none reads a whole table, whatever it was before."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy

from kmqpy.message import OutgoingMessage
from kmqpy.queue import storage_for
from kmqpy.storages.sql.postgresql import SESSION
from kmqpy.storages.sql.statements import Names, statements

BY_ID = ("pass_time", "finish", "extend", "bury", "give_back", "release_all", "redrive", "redrive_ids")
"""Statements that change rows whose ids are known, or were found by an index before."""


@pytest.fixture(scope="module")
def used(database_url: Callable[[str], str]) -> Iterator[tuple[Names, psycopg.Connection]]:
    """A database, and names of tables whose statistics say: hundreds of pages, and next to no row."""
    url = database_url("postgresql")
    names = Names(prefix=f"t{uuid4().hex[:12]}_")
    with storage_for(f"{url}?prefix={names.prefix}") as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many(["x" * 1000] * 3000)
        queue.ack(queue.receive(2999))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"VACUUM ANALYZE {names.tables['messages']}")
            for setting in SESSION:
                connection.execute(setting)
            connection.execute("SET kmqpy.groups = '{}'")  # what a statement before show_first_named sets
            yield names, connection
            connection.execute(
                f"DROP TABLE {', '.join(names.tables[one] for one in ('meta', 'queues', 'messages'))}"
            )
            connection.execute(f"DROP SEQUENCE {names.tables['numbers']}")


def test_postgresql_removes_dead_rows_soon_and_leaves_room_on_pages(
    used: tuple[Names, psycopg.Connection],
) -> None:
    names, connection = used
    ((found,),) = connection.execute(
        "SELECT reloptions FROM pg_class WHERE relname = %s", (names.tables["messages"],)
    ).fetchall()
    assert {*found} >= {
        "fillfactor=70",
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=5000",
        "autovacuum_vacuum_cost_delay=0",
    }


def scans(node: dict[str, Any], table: str) -> Iterator[dict[str, Any]]:
    if node.get("Relation Name") == table and "Scan" in node["Node Type"]:
        yield node
    for inner in node.get("Plans", ()):
        yield from scans(inner, table)


@pytest.mark.parametrize(
    "name", [name for name, text in statements("postgresql", Names()).items() if "kmq_messages" in text]
)
def test_postgresql_finds_messages_by_an_index(used: tuple[Names, psycopg.Connection], name: str) -> None:
    names, connection = used
    text = statements("postgresql", names)[name]
    parameters = list(dict.fromkeys(re.findall(r"%\((\w+)\)b", text)))
    text = re.sub(r"%\((\w+)\)b", lambda found: f"${parameters.index(found[1]) + 1}", text)
    text = text.replace("%%", "%")
    nulls = f"({', '.join(['NULL'] * len(parameters))})" if parameters else ""
    connection.execute(f"PREPARE {name} AS {text}")
    ((((plan,),),),) = [connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name}{nulls}").fetchall()]
    found = list(scans(plan["Plan"], names.tables["messages"]))
    assert all("Index Cond" in one for one in found), found
    if name == "remove_twins":
        assert any(one["Index Name"].endswith("_digest") for one in found), found
    if name in BY_ID:
        assert "id = ANY" in found[-1]["Index Cond"], found


def test_mariadb_reads_of_the_index_of_groups_what_it_needs(database_url: Callable[[str], str]) -> None:
    """Also when the statistics say that a group has many messages: those of an empty table do."""
    url = database_url("mariadb")
    names = Names(prefix=f"t{uuid4().hex[:12]}_")
    tables = names.tables.copy()
    with storage_for(f"{url}?prefix={names.prefix}") as storage:
        storage.create("q", fair=True)
        storage.open("q").send_many([OutgoingMessage("x", group="g")] * 3000)
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(url).set(drivername="mysql+pymysql"))
    with engine.connect() as connection:
        connection.exec_driver_sql(f"ANALYZE TABLE {tables['messages']}")
        text = statements("mariadb", names)["group_states"]
        plan = connection.exec_driver_sql(f"EXPLAIN {text}", {"listed": "[1, 2, 3]"}).mappings().all()
        connection.exec_driver_sql(f"DROP SEQUENCE {tables.pop('numbers')}")
        connection.exec_driver_sql(f"DROP TABLE {', '.join(tables.values())}")
    assert {one["type"] for one in plan} == {"ALL", "ref", "eq_ref"}, plan  # ALL: of those that are given
