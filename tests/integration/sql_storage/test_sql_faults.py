"""Queues in SQL: who waits, servers that are away, lost answers, bad urls."""

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pymysql.err import OperationalError
from sql_support import Place

from kmqpy.dev import Databases
from kmqpy.dev.ports import free_ports
from kmqpy.errors import ConfigError, NotSupported, Unavailable
from kmqpy.queue import Queue, queue_for, storage_for
from kmqpy.storages.sql import over_pymysql
from kmqpy.storages.sql.arrivals import ArrivalCounts
from kmqpy.storages.sql.engine import SqlEngine


def test_a_waiting_receive_learns_of_another_process_and_of_a_commit(place: Place, queue: Queue) -> None:
    with storage_for(place.url) as elsewhere, ThreadPoolExecutor(1) as thread:
        if place.name not in ("mariadb", "mysql"):  # these tell nothing: takers look again and again
            elsewhere._engine._dialect.waits_ms = 600_000  # type: ignore[attr-defined]
        waiting = elsewhere.open("q")
        for send in ("alone", "in a transaction"):
            received = thread.submit(waiting.receive, wait=120)
            time.sleep(0.5)  # it waits by now; if not, the test proves less, and passes
            if send == "alone":
                queue.send("x")
            else:
                with place.application.begin() as connection:
                    queue.send("x", transaction=connection)
            (message,) = received.result(60)
            message.ack()


@pytest.mark.parametrize("place", ["mariadb"], indirect=True)
def test_mariadb_which_tells_of_no_message_is_asked_for_it_soon_and_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    def wait(_arrivals: ArrivalCounts, _generation: str, _seen: int, seconds: float) -> bool:
        waits_s.append(seconds)
        if len(waits_s) == 3:
            queue.send("x")
        return False  # nobody tells

    monkeypatch.setattr(ArrivalCounts, "wait", wait)
    (message,) = queue.receive(wait=60)
    assert (message.body, len(waits_s)) == (b"x", 3)
    assert max(waits_s) <= 0.5


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


def test_a_postgresql_that_accepts_connections_and_says_nothing_is_unavailable_in_time() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="does not answer"):
            storage_for(f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/db?timeout_ms=300")
        assert time.monotonic() - began < 20


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_connection_to_postgresql_breaks_when_its_machine_is_gone(
    database_url: Callable[[str], str],
) -> None:
    with storage_for(f"{Place('postgresql', database_url('postgresql')).url}&timeout_ms=7000") as storage:
        proxy = storage._engine._connections.pool.raw_connection()
        with socket.socket(fileno=os.dup(proxy.driver_connection.fileno())) as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        proxy.close()


def test_a_mariadb_that_stands_still_is_unavailable_and_goes_on_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(over_pymysql, "_ANSWER_TIMEOUT_S", 0.5)
    with Databases("mariadb") as started:
        server = started.server("mariadb")
        with queue_for(f"{started.urls['mariadb']}?queue=q&create=true&timeout_ms=2000") as queue:
            queue.send("x")
            server.pause()
            for call in (lambda: queue.send("y"), queue.receive):
                with pytest.raises(Unavailable, match="does not answer"):
                    call()
            server.resume()
            assert b"x" in {message.body for message in queue.receive(wait=10)}


def test_a_connection_that_is_in_use_at_close_or_made_later_is_closed_when_it_comes_back(
    place: Place, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it stays open until Python frees the pool, and a driver may warn of that."""
    connections = queue._engine._connections  # type: ignore[attr-defined]
    closed = []
    monkeypatch.setattr(connections.pool.dialect, "do_close", lambda one: closed.append(one) or one.close())

    def used_around(replace: Callable[[], None]) -> object:
        with connections.pool.connect() as in_use:
            used = in_use.connection.driver_connection
            replace()
            assert used not in closed
        return used

    assert used_around(connections._drop) in closed
    assert used_around(lambda: None) not in closed
    assert used_around(connections.close) in closed
    assert used_around(lambda: None) in closed


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
            raise OperationalError(2013, "Lost connection to server during query")


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
        ("mysql://h,g/db", "one address"),
        ("mariadb://h/db?unix_socket=/s", "the url has an address, too"),
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
    with pytest.raises(NotSupported, match="no storage for oracle"):
        storage_for("oracle://h/db")
