"""Requests of Kafka that the proxy of the chaos tests holds back."""

import itertools
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.chaos.proxy import Cut, Gate, Proxy
from tests.chaos.requests import Api, Hold, Holder, Request, RequestReader, Way

_DELAY_S = 0.3
TLS = bytes.fromhex("16030100c8010000c40303") + bytes(194)


def request(api: int, body: bytes = b"body") -> bytes:
    rest = struct.pack(">hhi", api, 3, 77) + body
    return struct.pack(">i", len(rest)) + rest


def found(*chunks: bytes) -> list[tuple[int, int]]:
    """The API key of each request that is found, and where it ends."""
    reader, before, requests = RequestReader(), 0, []
    for chunk in chunks:
        requests += [(one.api, before + one.at + one.rest) for one in reader.feed(chunk)]
        before += len(chunk)
    return requests


# --- the reader -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 20, 1_000])
def test_requests_are_found_however_they_are_cut(size: int) -> None:
    apis = [18, Api.PRODUCE, Api.END_TXN, 3, Api.END_TXN]
    data, ends = b"", []
    for n, api in enumerate(apis):
        data += request(api, bytes(n * 5))
        ends.append(len(data))
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    assert found(*chunks) == list(zip(apis, ends, strict=True))


@pytest.mark.parametrize(
    "data",
    [
        TLS,
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">ihh", -1, 26, 3) + bytes(100),
        struct.pack(">ihh", 3, 26, 3) + bytes(100),
        struct.pack(">ihh", (100 << 20) + 1, 26, 3) + bytes(100),
        struct.pack(">ihh", 100, -26, 3) + bytes(100),
        struct.pack(">ihh", 100, 26, 3_000) + bytes(100),
    ],
)
def test_what_does_not_begin_like_a_request_is_none_and_nothing_behind_it(data: bytes) -> None:
    assert found(request(18), data, request(Api.END_TXN)) == [(18, len(request(18)))]


def test_a_huge_request_is_passed_over_without_being_kept() -> None:
    size, chunk = 90 << 20, bytes(1 << 20)
    reader = RequestReader()
    (one,) = reader.feed(struct.pack(">ihh", size, Api.PRODUCE, 9))
    assert one.rest == size - 4
    for _ in range(size // len(chunk) - 1):
        assert reader.feed(chunk) == []
    last = reader.feed(chunk[4:] + request(Api.END_TXN))
    assert [one.api for one in last] == [Api.END_TXN]


# --- the choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", Way)
def test_a_seed_fixes_what_is_held_back_and_one_now_and_then_is(way: Way) -> None:
    def chosen(seed: str) -> list[Hold | None]:
        times = itertools.count()
        holder = Holder(way, seed, lambda: next(times) / 100)
        holds = [holder.hold(Request(api, 8, 20)) for _ in range(500) for api in (18, *Api)]
        assert not any(holds[::5])  # of no transaction
        assert all(0 < holder.held[api] < holder.seen[api] == 500 for api in Api)
        assert Counter(hold.way for hold in holds if hold)[way] >= holder.held.total()
        assert [way for _, _, way, _ in holder.log] == [hold.way for hold in holds if hold]
        assert all(0.1 <= hold.delay_s <= 3.0 for hold in holds if hold)
        return holds

    assert chosen("1") == chosen("1") != chosen("2")


def test_a_huge_request_is_not_held_back() -> None:
    holder = Holder(Way.AFTER_RESET, "1")
    assert not any(holder.hold(Request(api, 8, 5 << 20)) for _ in range(100) for api in Api)


# --- the proxy --------------------------------------------------------------------------------------


class EndTxnOnly(Holder):
    """Holds every EndTxn back for `_DELAY_S`."""

    def __init__(self, way: Way) -> None:
        super().__init__(way, "")

    def hold(self, request: Request) -> Hold | None:
        return Hold(self.way, _DELAY_S) if request.api == Api.END_TXN else None


@dataclass
class Network:
    """A server, that is the test itself, and clients that reach it through the gate."""

    gate: Gate
    port: int
    server: socket.socket
    ends: ExitStack = field(repr=False)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The client's end of a connection, and the server's."""
        client = self.ends.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=20))
        accepted, _ = self.server.accept()
        accepted.settimeout(20)
        return client, self.ends.enter_context(accepted)


@pytest.fixture
def network() -> Iterator[Callable[[Way], Network]]:
    with ExitStack() as ends:

        def make(way: Way) -> Network:
            server = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
            proxy = ends.enter_context(Proxy())
            gate = proxy.gate()
            gate.holder = EndTxnOnly(way)
            return Network(gate, proxy.listen(gate, lambda: server.getsockname()[1]), server, ends)

        yield make


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, f"ended after {len(data)} of {count} bytes"
        data += more
    return data


BEFORE, HELD, BEHIND = request(3), request(Api.END_TXN, b"x" * 100), request(Api.PRODUCE)


@pytest.mark.parametrize("first", [0, 1, 5, 8, 11, 60])
def test_a_request_comes_late_after_its_connection_was_reset(
    network: Callable[[Way], Network], first: int
) -> None:
    net = network(Way.AFTER_RESET)
    client, server = net.connect()
    client.sendall(BEFORE + HELD[:first])
    assert exactly(server, len(BEFORE)) == BEFORE
    client.sendall(HELD[first:] + BEHIND)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    began = time.monotonic()
    other, _ = net.connect()  # the client goes on while its request is on the way
    assert exactly(server, len(HELD)) == HELD
    assert time.monotonic() - began > _DELAY_S / 2
    server.sendall(b"an answer that nobody gets")
    assert server.recv(1) == b""  # what was behind it is lost
    other.sendall(BEFORE)


def test_a_request_comes_late_and_what_is_behind_it_after_it(network: Callable[[Way], Network]) -> None:
    client, server = network(Way.LATE).connect()
    began = time.monotonic()
    client.sendall(BEFORE + HELD + BEHIND)
    assert exactly(server, len(BEFORE)) == BEFORE
    server.sendall(b"one")
    assert exactly(client, 3) == b"one"  # answers pass meanwhile
    assert exactly(server, len(HELD + BEHIND)) == HELD + BEHIND
    assert time.monotonic() - began > _DELAY_S
    server.sendall(b"two")
    assert exactly(client, 3) == b"two"


def test_the_answer_of_a_request_is_lost_with_its_connection(network: Callable[[Way], Network]) -> None:
    client, server = network(Way.UNANSWERED).connect()
    client.sendall(HELD)
    assert exactly(server, len(HELD)) == HELD
    server.sendall(b"an answer that nobody gets")
    with pytest.raises(ConnectionResetError):
        client.recv(100)


@pytest.mark.parametrize("way", Way)
def test_what_is_no_request_passes_as_it_is(network: Callable[[Way], Network], way: Way) -> None:
    client, server = network(way).connect()
    client.sendall(TLS + HELD)
    assert exactly(server, len(TLS + HELD)) == TLS + HELD
    server.sendall(HELD)  # nor is an answer
    assert exactly(client, len(HELD)) == HELD


def test_a_part_of_a_head_passes_at_once(network: Callable[[Way], Network]) -> None:
    client, server = network(Way.AFTER_RESET).connect()
    client.sendall(HELD[:3])
    assert exactly(server, 3) == HELD[:3]


def test_a_request_that_its_client_does_not_finish_reaches_nobody(network: Callable[[Way], Network]) -> None:
    client, server = network(Way.AFTER_RESET).connect()
    client.sendall(HELD[:60])
    client.close()
    assert len(server.recv(100)) < len(HELD)
    assert server.recv(1) == b""


def test_a_request_that_is_held_back_is_lost_when_the_server_is_cut_off(
    network: Callable[[Way], Network],
) -> None:
    net = network(Way.AFTER_RESET)
    client, server = net.connect()
    client.sendall(BEFORE + HELD)
    assert exactly(server, len(BEFORE)) == BEFORE
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    net.gate.cut(Cut.REFUSE)
    with pytest.raises(ConnectionResetError):
        exactly(server, len(HELD))
    net.gate.heal()
    client, server = net.connect()
    client.sendall(BEFORE)
    assert exactly(server, len(BEFORE)) == BEFORE
