"""Statements that are sent to PostgreSQL at once."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy

from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.groups import check_isolation
from kmqpy.storages.sql.pipeline import Pipeline
from kmqpy.storages.sql.postgresql import PostgreSql
from kmqpy.storages.sql.statements import Names

COUNT = "SELECT count(*) FROM numbers"
INSERT = "INSERT INTO numbers SELECT unnest(CAST(%(ids)b AS bigint[]))"


@pytest.fixture
def connection(database_url: Callable[[str], str]) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url("postgresql"), autocommit=True) as made:
        made.execute("CREATE TEMPORARY TABLE numbers (number bigint PRIMARY KEY)")
        yield made


def count(connection: psycopg.Connection[Any]) -> int:
    ((found,),) = connection.execute(COUNT).fetchall()
    return int(found)


def test_each_statement_sees_the_ones_before_it_and_returns_its_rows(
    connection: psycopg.Connection[Any],
) -> None:
    select = "SELECT number, CAST(%(text)b AS text), number %% 2, NULL FROM numbers WHERE number > %(over)b"
    one = [(INSERT, {"ids": "{1,2,3}"}), (COUNT, {})]
    for _ in range(2):
        found = Pipeline(connection).run(one, [(select, {"text": "\u00e9", "over": 1})])
        assert found == [[], [(3,)], [(2, "\u00e9", 0, None), (3, "\u00e9", 1, None)]]
        connection.execute("DELETE FROM numbers")


def test_a_transaction_with_a_statement_that_fails_is_rolled_back_and_the_next_one_is_not(
    connection: psycopg.Connection[Any],
) -> None:
    pipeline = Pipeline(connection)
    with pytest.raises(psycopg.errors.UniqueViolation):
        pipeline.run(
            [(INSERT, {"ids": "{1}"}), (INSERT, {"ids": "{1}"}), (COUNT, {})], [(INSERT, {"ids": "{7}"})]
        )
    assert connection.execute("SELECT number FROM numbers").fetchall() == [(7,)]
    assert pipeline.run([(COUNT, {})]) == [[(1,)]]


def test_a_statement_that_can_not_be_prepared_does_nothing(connection: psycopg.Connection[Any]) -> None:
    pipeline = Pipeline(connection)
    with pytest.raises(psycopg.errors.UndefinedTable):
        pipeline.run([(INSERT, {"ids": "{1}"})], [("SELECT * FROM nowhere", {})])
    assert count(connection) == 0
    assert pipeline.run([(COUNT, {})]) == [[(0,)]]


def test_statements_that_psycopg_or_a_proxy_has_deallocated_are_prepared_anew(
    connection: psycopg.Connection[Any],
) -> None:
    pipeline = Pipeline(connection)
    pipeline.run([(INSERT, {"ids": "{1}"})], [(COUNT, {})])
    connection.execute("DEALLOCATE ALL")
    assert pipeline.run([(INSERT, {"ids": "{2}"})], [(COUNT, {})]) == [[], [(2,)]]


def test_large_parameters_and_large_results_pass_one_another(connection: psycopg.Connection[Any]) -> None:
    many = 300_000
    large = ",".join(map(str, range(many)))
    found = Pipeline(connection).run(
        [(INSERT, {"ids": f"{{{large}}}"}), ("SELECT number FROM numbers", {})],
        [("SELECT CAST(%(text)b AS text)", {"text": large}), (COUNT, {})],
    )
    assert [len(one) for one in found] == [0, many, 1, 1]
    assert found[2:] == [[(large,)], [(many,)]]


def test_a_connection_that_ends_is_an_error(connection: psycopg.Connection[Any]) -> None:
    end = "SELECT pg_terminate_backend(pg_backend_pid())"
    with pytest.raises(psycopg.OperationalError):
        Pipeline(connection).run([(INSERT, {"ids": "{1}"}), (end, {}), (COUNT, {})], [(COUNT, {})])
    assert connection.broken


def test_transactions_see_what_others_commit_whatever_the_database_has_by_default(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_isolation=serializable")
    dialect = PostgreSql(sqlalchemy.make_url(database_url("postgresql")), Names(), pool_timeout=5)
    connections = Connections(dialect, timeout_s=5)
    connections.run(lambda cursor: check_isolation(dialect, cursor, "groups"), several=True)
    connections.close()
