"""The metrics of a gateway, asked for over HTTP."""

import http.client
import json
import socket

import pytest
from support import until

from kmqpy.errors import Unavailable
from kmqpy.gateway.limits import Limits
from kmqpy.gateway.server import GatewaySettings
from kmqpy.testing import memory_storage
from tests.deploy.gateways import metrics_of, running_gateway


def settings(**limits):
    return GatewaySettings(port=0, admin_port=0, drain_s=0, limits=Limits(**limits))


def call(connection, method, path, body=None, status=200):
    content = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, body, content)
    response = connection.getresponse()
    text = response.read()
    assert response.status == status, text
    return text


@pytest.fixture
def gateway_of():
    """Makes a connection to a new gateway."""
    opened = []

    def start(**limits):
        running = running_gateway(settings(**limits))
        gateway = running.__enter__()
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        opened.append((running, connection))
        return gateway, connection

    yield start
    for running, connection in opened:
        connection.close()
        running.__exit__(None, None, None)


def test_requests_messages_and_what_is_open(gateway_of):
    gateway, connection = gateway_of()
    call(connection, "POST", "/queue/1/q/sendbatch", "[1, 2, 3]")
    (first, _) = json.loads(call(connection, "GET", "/queue/1/q/poll?limit=2"))
    call(connection, "POST", "/queue/1/q/ack", json.dumps([first["id"]]))
    call(connection, "GET", "/nothing", status=404)
    found = metrics_of(gateway)
    for verb, count in (("sendbatch", 3), ("poll", 2), ("ack", 1)):
        of_call = f'call="{verb}",dialect="emodb"'
        assert found[f'kmq_gateway_requests_total{{{of_call},status="200"}}'] == 1
        assert found[f"kmq_gateway_request_seconds_count{{{of_call}}}"] == 1
        assert found[f'kmq_gateway_messages_total{{{of_call},queue="q"}}'] == count
    assert found['kmq_gateway_requests_total{call="unknown",dialect="none",status="404"}'] == 1
    assert found['kmq_gateway_storage_up{storage="(default)"}'] == 1
    assert found["kmq_gateway_open_queues"] == 1
    assert found["kmq_gateway_connections"] == 2  # ours, and the one that asks for this
    assert found["kmq_gateway_running_requests"] == found["kmq_gateway_late_messages"] == 0
    assert {value for name, value in found.items() if "refused_total" in name} == {0}
    connection.close()
    until(lambda: metrics_of(gateway)["kmq_gateway_connections"] == 1)


def test_moves(gateway_of):
    gateway, connection = gateway_of()
    call(connection, "POST", "/queue/1/a/send", "1")
    call(connection, "POST", "/queue/1/_move?from=a&to=b")
    until(lambda: metrics_of(gateway)['kmq_gateway_moves_total{outcome="complete"}'] == 1)


@pytest.mark.parametrize(
    ("limits", "body", "why"),
    [({"max_held_bytes": 100}, json.dumps("x" * 100), "memory"), ({"max_requests": 0}, "1", "requests")],
)
def test_requests_that_a_limit_refuses(gateway_of, limits, body, why):
    gateway, connection = gateway_of(**limits)
    call(connection, "POST", "/queue/1/q/send", body, status=503)
    assert metrics_of(gateway)[f'kmq_gateway_refused_total{{why="{why}"}}'] == 1


@pytest.mark.parametrize(
    ("limits", "sent", "why"),
    [
        ({"max_header_bytes": 1_000}, b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000 + b"\r\na: b", "head"),
        ({"head_timeout_s": 0.05}, b"GET /queue", "slow"),
    ],
)
def test_heads_that_a_limit_refuses(gateway_of, limits, sent, why):
    gateway, connection = gateway_of(**limits)
    connection.connect()
    connection.sock.sendall(sent)
    until(lambda: metrics_of(gateway)[f'kmq_gateway_refused_total{{why="{why}"}}'] == 1)


def test_a_line_of_a_head_that_does_not_end(gateway_of):
    gateway, connection = gateway_of(max_header_bytes=1_000)
    connection.connect()
    connection.sock.sendall(b"GET / HTTP/1.1\r\nx: y")
    until(lambda: metrics_of(gateway)["kmq_gateway_connections"] == 2)
    connection.sock.sendall(b"y" * 1_001)
    assert connection.sock.recv(12) == b"HTTP/1.1 431"
    assert metrics_of(gateway)['kmq_gateway_refused_total{why="head"}'] == 1


def test_too_many_connections(gateway_of):
    gateway, connection = gateway_of(max_connections=1)
    call(connection, "GET", "/queue/1/ping")
    with socket.create_connection(("127.0.0.1", gateway.port)):
        until(lambda: metrics_of(gateway)['kmq_gateway_refused_total{why="connections"}'] == 1)
    until(lambda: metrics_of(gateway)["kmq_gateway_connections"] == 2)


def test_a_storage_that_does_not_answer():
    class Away:
        """A storage of which nothing but the name answers."""

        def __init__(self, storage):
            self._storage = storage

        def __getattr__(self, name):
            return getattr(self._storage, name)

        def open(self, name, **_):
            raise Unavailable("away")

    with (
        memory_storage() as here,
        memory_storage() as lost,
        running_gateway(settings(), {"": here, "other": Away(lost)}) as gateway,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        call(connection, "GET", "/queue/1/other:q/poll", status=503)
        call(connection, "GET", "/queue/1/q/poll")
        found = metrics_of(gateway)
        assert found['kmq_gateway_storage_up{storage="(default)"}'] == 1
        assert found['kmq_gateway_storage_up{storage="other"}'] == 0
        connection.close()
