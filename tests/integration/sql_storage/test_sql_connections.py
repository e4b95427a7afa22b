"""Queues in SQL: connections that a failover, a firewall or a late start leaves behind."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest
from sql_support import Place

from kmqpy.errors import AccessDenied, Unavailable
from kmqpy.queue import Queue, queue_for, storage_for
from kmqpy.storages.sql.connections import Connections

SERVERS = ("postgresql", "mariadb", pytest.param("mysql", marks=pytest.mark.breadth))
TO_READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    **dict.fromkeys(("mariadb", "mysql"), "SET SESSION TRANSACTION READ ONLY"),
}


def connections_of(owner: Any) -> Connections:
    found: Connections = owner._engine._connections
    return found


def turn_read_only(queue: Queue) -> None:
    """Make the sessions of three idle connections read-only, as they are when the server is a standby."""
    connections = connections_of(queue)
    with ExitStack() as open_ones:
        for _ in range(3):
            proxy = open_ones.enter_context(closing(connections.pool.raw_connection()))
            proxy.driver_connection.cursor().execute(TO_READ_ONLY[connections.dialect.name])


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_sessions_that_a_failover_left_read_only_are_replaced(queue: Queue) -> None:
    turn_read_only(queue)
    queue.send("a")
    assert connections_of(queue).moves == 1  # the idle ones went together
    turn_read_only(queue)
    (message,) = queue.receive(wait=5)
    turn_read_only(queue)
    message.ack()


@pytest.fixture
def user(place: Place) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The URL of a user whose new sessions are read-only, or not, as told."""
    name = f"u{place.prefix[1:13]}"
    if place.name == "postgresql":
        made = (f"CREATE ROLE {name} LOGIN PASSWORD 'pw'", f"GRANT ALL ON SCHEMA public TO {name}")
        forms = {
            "writable": f"ALTER ROLE {name} RESET default_transaction_read_only",
            "read-only": f"ALTER ROLE {name} SET default_transaction_read_only = on",
        }
        gone = (f"DROP OWNED BY {name}", f"DROP ROLE {name}")
    else:
        made = (
            f"CREATE USER {name}@'%%' IDENTIFIED BY 'pw'",
            f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX ON kmq.* TO {name}@'%%'",
        )
        forms = {"writable": "SET GLOBAL read_only = 0", "read-only": "SET GLOBAL read_only = 1"}
        gone = (f"DROP USER {name}@'%%'",)
    place.execute(*made)
    scheme, _, rest = place.url.partition("://")
    yield (
        f"{scheme}://{name}:pw@{rest.partition('@')[2]}&timeout_ms=6000",
        lambda form: place.execute(forms[form]),
    )
    place.execute(forms["writable"])
    place.execute(*gone)


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_a_server_that_is_read_only_for_a_while_is_waited_for(
    place: Place, user: tuple[str, Callable[[str], None]]
) -> None:
    url, turn = user
    with ThreadPoolExecutor(1) as thread:
        turn("read-only")
        opening = thread.submit(storage_for, url)  # it is to make the tables
        with pytest.raises(TimeoutError):
            opening.result(0.5)
        turn("writable")
        with opening.result(30) as storage:
            storage.create("q")
            queue = storage.open("q")
            connections_of(queue).pool.dispose()
            turn("read-only")
            sending = thread.submit(queue.send, "b")
            with pytest.raises(TimeoutError):
                sending.result(0.5)
            turn("writable")
            sending.result(30)
            (message,) = queue.receive()
            message.ack()


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_the_first_error_of_statements_sent_at_once_is_told(
    place: Place, user: tuple[str, Callable[[str], None]]
) -> None:
    url, _ = user
    with queue_for(f"{url}&queue=q&create=true&order=group") as queue:
        queue.send("a", group="g")
        place.execute(f"REVOKE UPDATE ON {place.names.tables['messages']} FROM {urlsplit(url).username}")
        with pytest.raises(AccessDenied, match="permission denied for table"):
            queue.receive(wait=0)


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_a_server_that_stays_read_only_is_unavailable_in_time_and_told(
    place: Place, user: tuple[str, Callable[[str], None]]
) -> None:
    url, turn = user
    with queue_for(f"{url}&queue=q&create=true".replace("=6000", "=500")) as queue:
        connections_of(queue).pool.dispose()
        turn("read-only")
        with pytest.raises(Unavailable, match=r"read.only.*the server that takes writes"):
            queue.send("a")


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_who_listens_connects_anew_after_a_failover(place: Place, queue: Queue) -> None:
    """It would hear of nothing on the server that was the primary."""
    engine: Any = queue._engine  # type: ignore[attr-defined]
    listened = threading.Semaphore(0)
    listen = engine._listener._listen

    def listen_and_tell(*args: Any) -> None:
        listened.release()
        listen(*args)

    engine._listener._listen = listen_and_tell
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(queue.receive, wait=60)
        assert listened.acquire(timeout=30)
        turn_read_only(queue)
        queue.send("a")
        (message,) = received.result(60)
        message.ack()
        assert listened.acquire(timeout=30)


@pytest.mark.parametrize("place", ["mariadb"], indirect=True)
def test_errors_are_known_beside_django_which_makes_a_copy_of_pymysql(
    place: Place, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With install_as_MySQLdb() it imports `MySQLdb.err`, which becomes the attribute `pymysql.err`."""
    assert place.name == "mariadb"
    monkeypatch.setattr(pymysql, "err", SimpleNamespace(Error=KeyError, InterfaceError=KeyError))
    turn_read_only(queue)
    queue.send("a")
