"""Idle connections that a load balancer or firewall has forgotten silently; new ones are fine."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from kmqpy.core import sockets
from kmqpy.queue import Queue, queue_for
from kmqpy.storages.redis import arrival_subscriber, server
from kmqpy.storages.sql import arrivals, connections
from tests.chaos.proxy import Cut, Gate, Proxy

pytestmark = pytest.mark.breadth

SERVERS = ("postgresql", "mariadb", "mysql", "redis", "valkey")


@pytest.fixture(params=SERVERS)
def far(request: pytest.FixtureRequest, database_url: Callable[[str], str], queue_name: str) -> Iterator[Any]:
    """A queue beyond a proxy, and the proxy's gate."""
    url = database_url(request.param)
    port = urlsplit(url).port
    assert port is not None
    with Proxy() as proxy:
        gate = proxy.gate()
        near = url.replace(f":{port}", f":{proxy.listen(gate, lambda: port)}")
        prefix = f"t{queue_name[-8:]}_"
        with queue_for(f"{near}?queue=q&create=true&timeout_ms=8000&prefix={prefix}") as queue:
            yield queue, gate, f"{near}?queue=q&timeout_ms=8000&prefix={prefix}"


def idle_connections(queue: Queue) -> None:
    """Let the queue's pool have several."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(queue.size)


@contextmanager
def while_it_waits(engine: Any) -> Iterator[None]:
    """Let the thread that receives ask nothing in this block: on PostgreSQL it waits for each answer."""
    if not isinstance(engine._arrivals, arrivals.ArrivalCounts):
        yield
        return
    changed = engine._arrivals._changed
    with changed:
        while not changed._waiters:
            changed.release()
            time.sleep(0.01)
            changed.acquire()
        yield


def test_a_call_after_the_network_forgot_idle_connections_succeeds_on_a_new_one(
    far: tuple[Queue, Gate, str],
) -> None:
    queue, gate, _ = far
    idle_connections(queue)
    for call in (partial(queue.send, "a"), queue.receive, queue.size):  # a send is not repeated
        time.sleep(1.1)  # idle for so long they are checked
        gate.cut(Cut.FORGET)
        began = time.monotonic()
        call()
        queue.size()  # the other ones were closed with the first
        assert time.monotonic() - began < 3
    assert (queue.size(), queue.in_flight()) == (0, 1)


@pytest.mark.parametrize("far", ["postgresql", "redis", "valkey"], indirect=True)  # others tell of nothing
def test_who_waits_hears_of_messages_after_the_network_forgot_its_connection(
    far: tuple[Queue, Gate, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_CHECK_SILENCE_S", 0.5)
    monkeypatch.setattr(arrival_subscriber, "_PING_AFTER_S", 0.5)
    queue, gate, url = far
    engine: Any = queue._engine  # type: ignore[attr-defined]
    if hasattr(engine, "_dialect"):
        engine._dialect.waits_ms = 600_000  # it does not look again by itself
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            received = threads.submit(queue.receive, wait=60)
            time.sleep(1.1)
            with while_it_waits(engine):
                gate.cut(Cut.FORGET)
                time.sleep(0.1)
            time.sleep(4)  # until the thread that listens has noticed
            with queue_for(url) as elsewhere:
                elsewhere.send("x")
            (message,) = received.result(10)
            message.ack()


def test_tcp_asks_whether_the_other_end_is_there(far: tuple[Queue, Gate, str]) -> None:
    engine: Any = far[0]._engine  # type: ignore[attr-defined]
    with ExitStack() as opened:
        if hasattr(engine, "_connections"):
            pool = engine._connections.pool
            connection = opened.enter_context(closing(pool.raw_connection())).driver_connection
            fileno = engine._dialect.fileno(connection)
        else:
            pool = engine._server._pool
            connection = pool.get_connection()
            opened.callback(pool.release, connection)
            fileno = connection._sock.fileno()
        with socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM) as same:
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for option, value in sockets.keepalive_options().items():
                assert same.getsockopt(socket.IPPROTO_TCP, option) == value


def test_a_connection_that_was_just_used_is_not_checked(
    far: tuple[Queue, Gate, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost a round trip for each call."""
    queue = far[0]
    checked: list[Any] = []
    monkeypatch.setattr(connections.Connections, "is_alive", lambda *call: checked.append(call) or True)
    monkeypatch.setattr(server, "_CHECK_S", 0.0)  # a ping would fail
    for module in (connections, server):
        monkeypatch.setattr(module, "_CHECK_AFTER_IDLE_S", 60.0)
    engine: Any = queue._engine  # type: ignore[attr-defined]
    for _ in range(10):
        queue.send("a")
    assert not checked
    assert hasattr(engine, "_connections") or engine._server._broke_at == 0
