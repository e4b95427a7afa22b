"""Clients that are slow, on purpose or not, take nothing from others: raw sockets, limits made small."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from gateway_support import JSON, Calls, Served, running

from kmqpy.gateway.limits import Limits
from kmqpy.gateway.service.served_queue import ServedQueue
from kmqpy.queue import storage_for

Connect = Callable[..., socket.socket]

_MESSAGE = "x" * 900_000
_LIMITS = Limits(
    max_requests=3, max_held_bytes=40_000_000, body_timeout_s=1.0, answer_timeout_s=2.0, head_timeout_s=60.0
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(storage_for("memory:"), limits=_LIMITS) as found:
        yield found


@pytest.fixture
def connect(served: Served) -> Iterator[Connect]:
    with ExitStack() as opened:

        def connect(receive_buffer: int | None = None) -> socket.socket:
            found = opened.enter_context(socket.socket())
            if receive_buffer is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            found.settimeout(30)
            found.connect(("127.0.0.1", served.gateway.port))
            return found

        yield connect


def test_requests_whose_bodies_are_late_take_no_place_of_others(served: Served, connect: Connect) -> None:
    late = [connect() for _ in range(2 * _LIMITS.max_requests)]
    for one in late:
        one.sendall(_head("POST", "/queue/1/late/send", 100) + b'"')
    _until(lambda: served.admin("/metrics").body.count(b"kmq_gateway_connections 7") == 1)

    assert Calls(served, "late").size() == 0

    assert [one.recv(20)[9:12] for one in late] == [b"408"] * len(late)


def test_a_connection_whose_body_never_ends_is_closed_though_its_request_is_answered(
    served: Served, connect: Connect
) -> None:
    one = connect()
    one.sendall(_head("POST", "/nothing", 100) + b"a")
    answer = one.recv(10_000)
    assert answer[9:12] == b"404"
    one.sendall(b"b")  # so the connection is not idle

    one.settimeout(10)
    while True:
        try:
            if not one.recv(10_000):
                break
        except ConnectionResetError:
            break


def test_an_answer_that_nobody_reads_counts_as_memory_until_its_connection_is_closed(
    served: Served, connect: Connect
) -> None:
    calls = Calls(served, "large")
    for _ in range(18):
        calls.send(_MESSAGE)

    one = connect(receive_buffer=4_096)
    one.sendall(_head("GET", "/queue/1/large/peek?limit=1000"))

    _until(lambda: served.gateway._app.held_bytes > 10_000_000)
    _until(lambda: served.gateway._app.held_bytes == 0)
    _until(lambda: served.admin("/metrics").body.count(b"kmq_gateway_connections 1") == 1)


def test_answers_that_are_not_read_do_not_fill_the_memory_and_claim_nothing(
    served: Served, connect: Connect
) -> None:
    calls = Calls(served, "crowd")
    for _ in range(60):
        calls.send(_MESSAGE)
    crowd = [connect(receive_buffer=4_096) for _ in range(3)]
    for one in crowd:
        one.sendall(_head("GET", "/queue/1/crowd/poll?limit=1000"))
    _until(lambda: served.gateway._app.held_bytes > 20_000_000)
    _until(lambda: served.gateway._app.running == 0)

    refused = served.ask("GET", "/queue/1/crowd/poll?limit=1000")

    assert refused.status == 503
    assert refused.exception is not None
    for one in crowd:
        one.close()
    _until(lambda: served.gateway._app.held_bytes == 0)
    claimed = calls.claims()
    assert claimed < 60
    assert len(calls.poll(limit=1_000)) == min(60 - claimed, 19)


@pytest.mark.parametrize("small_ones", [0, 150])
def test_a_peek_and_a_poll_end_when_they_have_16_mib(served: Served, small_ones: int) -> None:
    calls = Calls(served, f"much-{small_ones}")
    calls.send(*range(small_ones))
    for _ in range(30):
        calls.send(_MESSAGE)

    for call in ("peek", "poll"):
        answer = served.ask("GET", f"{calls.path}/{call}?limit=1000")
        assert 15_000_000 < len(answer.body) < 20_000_000, call
        assert len(json.loads(answer.body)) > small_ones


def test_a_request_with_very_many_messages_or_ids_is_done_in_pieces(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    for name in ("send", "ack", "extend", "release"):
        called = getattr(ServedQueue, name)

        async def noted(queue: ServedQueue, items: Any, *rest: Any, called: Any = called) -> Any:
            sizes.append(len(items))
            return await called(queue, items, *rest)

        monkeypatch.setattr(ServedQueue, name, noted)
    calls = Calls(served, "many")
    calls.send(*range(2_500))
    found = [message["id"] for message in calls.peek(limit=1_000)]
    given = [*found, *found, *found[:500]]

    assert served.ask("POST", f"{calls.path}/ack", [*given, "bad"]).status == 400
    calls.renew(*given)
    calls.renew(*given, ttl=0)
    assert calls.size() == 2_500
    calls.ack(*given)

    assert calls.size() == 1_500
    assert sizes == [1_000, 1_000, 500] * 4


def _head(method: str, path: str, length: int | None = None) -> bytes:
    headers = {"Host": "localhost", **JSON, **({} if length is None else {"Content-Length": str(length)})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
