"""The health port: what idle, slow and many connections can't do."""

import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tracker.health import server as server_module
from tracker.health.metrics import TrackerMetrics
from tracker.health.server import MAX_CONNECTIONS, HealthServer

CHILD = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from tracker.health.server import HealthServer
from tracker.health.metrics import TrackerMetrics

class Watched:
    metrics = TrackerMetrics()
    taken = []

    def alive(self):
        return True

    def problems(self):
        '''Take the descriptors that are left.'''
        try:
            while True:
                self.taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            return [str(len(self.taken)), error.strerror]

print(HealthServer(Watched(), "127.0.0.1", 0).port, flush=True)
input()
"""


class Watched:
    metrics = TrackerMetrics()

    def alive(self) -> bool:
        return True

    def problems(self) -> list[str]:
        return ["none"]


@pytest.fixture
def server():
    with contextlib.closing(HealthServer(Watched(), "127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def idle():
    """Connect and say nothing."""
    with contextlib.ExitStack() as stack:

        def connect(port: int) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))

        yield connect


def get(port: int, path: str) -> dict:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def test_idle_connections_leave_the_process_its_descriptors_and_one_in_reserve(idle):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    with child:
        port = int(child.stdout.readline())
        for _ in range(300):
            idle(port)
        count, why = get(port, "/readyz")["problems"]
        assert why == "Too many open files"
        assert int(count) > 64
        assert get(port, "/livez") == {"alive": True}  # though nothing is left
        assert get(port, "/livez") == {"alive": True}
        child.kill()


def test_the_oldest_connection_ends_for_a_new_one(server, idle):
    many = [idle(server.port) for _ in range(MAX_CONNECTIONS)]
    assert get(server.port, "/livez") == {"alive": True}
    assert many[0].recv(1) == b""
    many[-1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
    assert many[-1].recv(12) == b"HTTP/1.0 503"


def test_a_slow_request_ends_after_a_while(monkeypatch, server, idle):
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.1)
    slow = idle(server.port)
    slow.sendall(b"GET /livez HTTP/1.1\r\nX: ")
    assert slow.recv(1) == b""


def test_close_ends_open_connections(idle):
    server = HealthServer(Watched(), "127.0.0.1", 0)
    connection = idle(server.port)
    get(server.port, "/livez")  # by then the other one is accepted
    server.close()
    assert connection.recv(1) == b""
