"""Other gateways that are asked for messages: silent ones, and znodes that somebody has forged."""

import asyncio
import http.server
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kmqpy.gateway.discovery import peers
from kmqpy.gateway.discovery.peers import Peer, Peers, parse_hearsay, parse_peer
from kmqpy.gateway.service.claims import Said
from kmqpy.zookeeper.settings import ZooKeeperConnection

JOBS = "the unique id of jobs"


@pytest.fixture
def knows():
    """Our gateway, which knows others by their addresses."""
    with ThreadPoolExecutor(2) as threads:
        ours = Peers(ZooKeeperConnection(hosts="h:1"), "/kmq", "h:2", threads)

        def others(*addresses):
            ours._others = tuple(Peer(address, "token") for address in addresses)
            return ours

        yield others


@pytest.fixture
def asked(knows):
    """Asks the others that are given by their addresses."""
    return lambda *addresses: asyncio.run(knows(*addresses).take(JOBS, 10, 30))


def test_others_are_told_what_was_said_and_one_that_is_silent_holds_nobody_up(knows):
    heard = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.append((self.path, self.headers["x-kmq-peer"], parse_hearsay(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'["0-2"]')

        def log_message(self, *_):
            pass

    said = [Said(["0-1", "0-2"], None), Said(["0-3"], 1.5)]
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other, socket.create_server(("", 0)) as silent:
        threading.Thread(target=other.serve_forever).start()
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (silent, other.socket)]
        begun_s = time.monotonic()
        for one in said:
            ours = knows("127.0.0.1:1", *addresses)
            ours._silent_until_s.clear()
            assert asyncio.run(ours.tell(JOBS, one)) == {"0-2"}
        assert time.monotonic() - begun_s < 3 * peers._TIMEOUT_S
        other.shutdown()
    assert heard == [("/internal/said", "token", (JOBS, one)) for one in said]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"7",
        b"{}",
        b"[" * 100_000,
        b'{"unique_id": "u", "ids": ["0-1"], "lease_s": -1}',
    ],
)
def test_what_no_gateway_tells_is_refused(body):
    with pytest.raises(ValueError, match=r"."):
        parse_hearsay(body)


def test_silent_gateways_together_hold_a_poll_no_longer_than_one(asked):
    with ExitStack() as opened:
        silent = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        begun_s = time.monotonic()
        messages, why = asked(*(f"127.0.0.1:{one.getsockname()[1]}" for one in silent))
        assert time.monotonic() - begun_s < 2.5 * peers._TIMEOUT_S
    assert messages == []
    assert "gateways that do not answer" in why


@pytest.mark.parametrize("address", ["a\nb:1", "\ud800:1", "h:123456", "h", "", "h:x", "/:1", 7, None])
def test_what_no_gateway_writes_is_no_gateway(address):
    def data(address="h:1", token="t"):
        return json.dumps({"address": address, "token": token}).encode()

    assert parse_peer(data("::1:8081")) == Peer("::1:8081", "t")
    for forged in (data(address), data(token="t\n"), data(token=["t"]), b"", b"7", b"{}", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            parse_peer(forged)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:1", "127.0.0.1:1"])
def test_an_address_where_nobody_can_be_is_a_gateway_that_does_not_answer(asked, address):
    assert asked(address) == ([], f"messages may be at gateways that do not answer: {address}")


def test_one_that_is_silent_holds_no_threads_however_many_queues_are_polled(knows):
    async def main(ours):
        polls = (ours.take(f"queue {n}", 10, 30) for n in range(100))
        answers = await asyncio.gather(*polls)
        assert all(messages == [] and "do not answer" in why for messages, why in answers)
        await asyncio.gather(*(ours.tell(f"queue {n}", Said(["1"], None)) for n in range(100)))

    with socket.create_server(("127.0.0.1", 0)) as silent:
        ours = knows(f"127.0.0.1:{silent.getsockname()[1]}")
        begun_s = time.monotonic()
        asyncio.run(main(ours))
        assert time.monotonic() - begun_s < 3 * peers._TIMEOUT_S


def test_one_that_answers_a_call_wrongly_is_asked_for_other_queues(knows):
    asked = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["unique_id"])
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever).start()
        ours = knows(f"127.0.0.1:{other.server_port}")
        for queue in ("a", "b", "a"):
            asyncio.run(ours.take(queue, 10, 30))
        other.shutdown()
    assert asked == ["a", "b"]
