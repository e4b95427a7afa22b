"""Other gateways that are asked for messages: silent ones, and znodes that somebody has forged."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kmqpy.gateway.discovery import peers
from kmqpy.gateway.discovery.peers import Peer, Peers, parse_peer
from kmqpy.zookeeper.settings import ZooKeeperConnection

PLACE = ("", "jobs")


class NoRegistration:
    def __init__(self, *_):
        pass


@pytest.fixture
def asked(monkeypatch):
    """Asks the others that are given by their addresses."""
    monkeypatch.setattr(peers, "Registration", NoRegistration)
    with ThreadPoolExecutor(2) as threads:
        ours = Peers(ZooKeeperConnection(hosts="h:1"), "/kmq", "h:2", threads)

        def ask(*addresses):
            ours._others = tuple(Peer(address, "token") for address in addresses)
            return asyncio.run(ours.take(PLACE, 10, 30))

        yield ask


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
