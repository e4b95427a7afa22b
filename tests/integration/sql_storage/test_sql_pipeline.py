"""Statements that are sent to PostgreSQL at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy

from kmqpy.errors import Unavailable
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage, storage_for
from kmqpy.storages.sql import pipeline
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
    text = "chr(233) || CAST(%(text)b AS text)"
    select = f"SELECT number, {text}, number %% 2, NULL FROM numbers WHERE number > %(over)b"
    one = [(INSERT, {"ids": "{1,2,3}"}), (COUNT, {})]
    for _ in range(2):
        found = Pipeline(connection).run(one, [(select, {"text": "x", "over": 1})])
        assert found == [[], [(3,)], [(2, "\u00e9x", 0, None), (3, "\u00e9x", 1, None)]]
        connection.execute("DELETE FROM numbers")


def test_a_transaction_with_a_statement_that_fails_is_rolled_back_and_the_next_one_is_not(
    connection: psycopg.Connection[Any],
) -> None:
    made = Pipeline(connection)
    with pytest.raises(psycopg.errors.UniqueViolation):
        made.run(
            [(INSERT, {"ids": "{1}"}), (INSERT, {"ids": "{1}"}), (COUNT, {})], [(INSERT, {"ids": "{7}"})]
        )
    assert connection.execute("SELECT number FROM numbers").fetchall() == [(7,)]
    assert made.run([(COUNT, {})]) == [[(1,)]]


def test_a_transaction_with_a_statement_that_can_not_be_prepared_does_nothing(
    connection: psycopg.Connection[Any],
) -> None:
    made = Pipeline(connection)
    with pytest.raises(psycopg.errors.UndefinedTable):
        made.run([(INSERT, {"ids": "{1}"}), ("SELECT * FROM nowhere", {})])
    assert count(connection) == 0
    assert made.run([(COUNT, {})]) == [[(0,)]]


def test_statements_that_psycopg_or_a_proxy_has_deallocated_are_prepared_anew(
    connection: psycopg.Connection[Any],
) -> None:
    made = Pipeline(connection)
    made.run([(INSERT, {"ids": "{1}"})], [(COUNT, {})])
    connection.execute("DEALLOCATE ALL")
    assert made.run([(INSERT, {"ids": "{2}"})], [(COUNT, {})]) == [[], [(2,)]]


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


def test_a_connection_that_ends_while_a_statement_is_prepared_is_an_error_of_the_connection(
    connection: psycopg.Connection[Any], database_url: Callable[[str], str]
) -> None:
    with psycopg.connect(database_url("postgresql"), autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        while other.execute(
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s", [connection.info.backend_pid]
        ).fetchall():
            pass
    with pytest.raises(psycopg.OperationalError):
        Pipeline(connection).run([(COUNT, {})])


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_an_exception_in_between_cancels_and_leaves_nothing_to_read(
    connection: psycopg.Connection[Any],
    database_url: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    slow = "INSERT INTO kmqpy_slow SELECT 1 FROM pg_sleep(60)"
    running = "SELECT 1 FROM pg_stat_activity WHERE query = %s AND state = 'active'"
    with psycopg.connect(database_url("postgresql"), autocommit=True) as other:

        def raising(*_: Any) -> None:
            while not other.execute(running, [slow]).fetchall():
                pass  # a server that has not begun can't cancel it
            raise error

        monkeypatch.setattr(pipeline, "is_readable", raising)
        other.execute("CREATE TABLE kmqpy_slow (number int)")
        try:
            with pytest.raises(error):
                Pipeline(connection).run([(slow, {})])
            assert connection.closed
            while other.execute("SELECT 1 FROM pg_stat_activity WHERE query = %s", [slow]).fetchall():
                pass
            assert other.execute("SELECT * FROM kmqpy_slow").fetchall() == []
        finally:
            other.execute("DROP TABLE kmqpy_slow")


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_an_interrupted_take_leaves_the_next_operation_a_connection_of_its_own(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def raising(*_: Any) -> None:
        raise error

    with storage_for(database_url("postgresql")) as storage, closing_queue(storage) as queue:
        queue.send("1", group="g")
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "is_readable", raising)
            with pytest.raises(error):
                queue.receive(1, wait=0, lease=60)
        queue.send("2", group="h")
        assert b"2" in [one.body for one in queue.receive(9, wait=0, lease=60)]


def test_errors_leave_no_prepared_statements_behind(database_url: Callable[[str], str]) -> None:
    with storage_for(database_url("postgresql")) as storage, closing_queue(storage) as queue:
        queue.send("1", group="g")
        (message,) = queue.receive(1, wait=0, lease=60)
        queue.ack(message)
        engine: Any = queue._engine  # type: ignore[attr-defined]

        def statements(cursor: Any) -> int:
            cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'kmqpy%%'", {})
            ((found,),) = cursor.fetchall()
            return int(found)

        def fail(cursor: Any) -> None:
            cursor.transact([(engine._sql["take_turn"], engine._parameters(queue._queue))], [("1", {})])

        assert engine._run(statements) == 5
        for _ in range(3):
            with pytest.raises(Unavailable):
                engine._run(fail)
        assert engine._run(statements) == 5


def test_only_a_take_that_has_found_something_syncs(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    run = Pipeline.run

    def noting(self: Pipeline, *transactions: Any) -> Any:
        found = run(self, *transactions)
        synced.append(bool(found[-1]))
        return found

    with storage_for(database_url("postgresql")) as storage, closing_queue(storage) as queue:
        queue.send_many([OutgoingMessage("x", group=group) for group in "ab"])
        monkeypatch.setattr(Pipeline, "run", noting)
        for _ in range(3):
            queue.receive(1, wait=0, lease=60)
    assert synced == [True, True, False]


@contextmanager
def closing_queue(storage: Storage) -> Iterator[Queue]:
    storage.create("in order", order="group")
    try:
        yield storage.open("in order")
    finally:
        storage.delete("in order")


def test_transactions_see_what_others_commit_whatever_the_database_has_by_default(
    database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_isolation=serializable")
    dialect = PostgreSql(sqlalchemy.make_url(database_url("postgresql")), Names(), pool_timeout=5)
    connections = Connections(dialect, timeout_s=5)
    connections.run(lambda cursor: check_isolation(dialect, cursor, "groups"), several=True)
    connections.close()
