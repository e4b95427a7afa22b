"""The handler of our ZooKeeper clients waits for sockets as kazoo's does, and more cheaply."""

import selectors
import socket
from contextlib import suppress

import pytest
from kazoo.handlers.threading import SequentialThreadingHandler

from kmqpy.zookeeper.session import new_client
from kmqpy.zookeeper.settings import ZooKeeperConnection

NOT_AT_ALL_S = 0.0
MOST_S = 60.0


@pytest.fixture(params=["kmqpy", "kazoo"])
def handler(request):
    if request.param == "kazoo":
        return SequentialThreadingHandler()
    return new_client(ZooKeeperConnection(hosts="127.0.0.1:1")).handler


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_it_tells_which_sockets_are_ready(handler, ends):
    one, other = ends
    assert handler.select([one, other], [], [], NOT_AT_ALL_S) == ([], [], [])
    assert handler.select([], [one], [], MOST_S) == ([], [one], [])
    other.send(b"x")
    assert handler.select([other, one], [], [], MOST_S) == ([one], [], [])
    assert handler.select([one], [other], [], MOST_S) == ([one], [other], [])
    assert handler.select([one], [], []) == ([one], [], [])


def test_a_socket_whose_other_end_is_closed_is_ready(handler, ends):
    one, other = ends
    other.close()
    assert handler.select([one], [], [], MOST_S) == ([one], [], [])
    assert one.recv(1) == b""
    assert handler.select([], [one], [], MOST_S) == ([], [one], [])


def test_a_full_socket_is_not_ready_to_send(handler, ends):
    one, _ = ends
    one.settimeout(0)
    with suppress(BlockingIOError):
        while one.send(bytes(2**16)):
            pass
    assert handler.select([], [one], [], NOT_AT_ALL_S) == ([], [], [])


def test_it_waits_for_as_long_as_it_is_told(handler, ends):
    one, _ = ends
    assert handler.select([one], [], [], 0.0001) == ([], [], [])


def test_a_closed_socket_is_an_error(handler, ends):
    one, _ = ends
    one.close()
    with pytest.raises((TypeError, ValueError)):
        handler.select([one], [], [], MOST_S)


def test_ours_makes_no_selector(ends, monkeypatch):
    monkeypatch.delattr(selectors, "DefaultSelector")
    one, other = ends
    other.send(b"x")
    found = new_client(ZooKeeperConnection(hosts="127.0.0.1:1")).handler.select([one], [], [], MOST_S)
    assert found == ([one], [], [])
