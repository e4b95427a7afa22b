"""Connections of a client by url: they are kept, and never used when the gateway has ended them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kmqpy.core.sockets import is_readable
from kmqpy.storages.http import connections
from kmqpy.storages.http.connections import Answer, Connections, Failed


class Gateway:
    """Answers each request with the number of its connection, and keeps what one recv() gave it of it."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._listening.getsockname()[1]}/some path"
        self.heard: list[bytes] = []
        self.more = b""
        self.made: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                self.made.append(self._listening.accept()[0])
                threading.Thread(target=self._answer, args=(len(self.made),), daemon=True).start()
        except OSError:
            return

    def _answer(self, number: int) -> None:
        made = self.made[number - 1]
        while request := made.recv(65_536):
            self.heard.append(request)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; x=y\r\nContent-Length: 1\r\n"
            made.sendall(head + self.more + b"\r\n%d" % number)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        for one in (self._listening, *self.made):
            one.close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[Connections]:
    made = Connections(None)
    yield made
    made.close()


def ask(client: Connections, gateway: Gateway, body: bytes | None = b"body") -> bytes:
    found = client.ask("POST", gateway.base, "/q?a=1", body, {"kmq": "x"}, timeout_s=5)
    assert found == Answer(200, "text/plain", found.body)
    return found.body


def test_a_request_comes_in_one_piece_and_its_connection_is_kept(client, gateway):
    assert [ask(client, gateway), ask(client, gateway)] == [b"1", b"1"]
    assert len(gateway.heard) == 2
    assert gateway.heard[0].startswith(b"POST /some%20path/q?a=1 HTTP/1.1\r\n")
    assert gateway.heard[0].endswith(b"\r\n\r\nbody")
    client.close()
    assert ask(client, gateway) == b"2", "what comes after close() is not kept"
    assert ask(client, gateway) == b"3"


def test_what_the_gateway_has_ended_or_said_it_ends_is_not_used(client, gateway):
    assert ask(client, gateway) == b"1"
    kept = client._kept[gateway.base][0].sock
    gateway.made[0].shutdown(socket.SHUT_RDWR)
    assert is_readable(kept.fileno(), 5)
    gateway.more = b"Connection: close\r\n"
    assert [ask(client, gateway), ask(client, gateway)] == [b"2", b"3"]


def test_idle_connections_end_after_a_while(client, gateway, monkeypatch):
    assert ask(client, gateway) == b"1"
    monkeypatch.setattr(connections, "_KEPT_S", 0.0)
    assert ask(client, gateway) == b"2"


def test_a_failure_says_whether_anything_was_sent(client, gateway):
    gateway.more = b"HTTP/1.1 is not this\r\n" * 200
    with pytest.raises(Failed) as failed:
        ask(client, gateway)
    assert not failed.value.not_done
    assert not client._kept[gateway.base]
    gateway.close()
    with pytest.raises(Failed, match="refused") as failed:
        ask(client, gateway)
    assert failed.value.not_done
