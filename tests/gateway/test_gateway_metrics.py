"""The metrics of a gateway, asked for over HTTP."""

import socket
from http.client import HTTPConnection

import pytest
from gateway_support import Calls, running
from prometheus_client.parser import text_string_to_metric_families
from support import until

from kmqpy.errors import Unavailable
from kmqpy.gateway.limits import Limits
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.testing import memory_storage


@pytest.fixture
def start():
    """Makes a gateway over memory with limits, and a connection to it."""
    opened = []

    def start(**limits):
        context = running(memory_storage(), limits=Limits(**limits))
        served = context.__enter__()
        connection = HTTPConnection("127.0.0.1", served.gateway.port, timeout=60)
        opened.append((context, connection))
        return served, connection

    yield start
    for context, connection in opened:
        connection.close()
        context.__exit__(None, None, None)


def metrics_of(served):
    """What /metrics shows, by name and labels, these by name: `kmq_gateway_refused_total{why="key"}`."""
    families = text_string_to_metric_families(served.admin("/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {_written(sample.name, sample.labels): sample.value for sample in samples}


def _written(name, labels):
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def test_requests_messages_and_what_is_open(start):
    served, connection = start()
    calls = Calls(served, "q")
    calls.send(1, 2, 3)
    (first, _) = calls.poll(2)
    calls.ack(first["id"])
    assert served.ask("GET", "/nothing", connection=connection).status == 404
    found = metrics_of(served)
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
    until(lambda: metrics_of(served)["kmq_gateway_connections"] == 1)


def test_moves_are_counted(start):
    served, _ = start()
    Calls(served, "a").send(1)
    assert served.ask("POST", "/queue/1/_move?from=a&to=b").status == 200
    until(lambda: metrics_of(served)['kmq_gateway_moves_total{outcome="complete"}'] == 1)


@pytest.mark.parametrize(
    ("limits", "body", "why"),
    [({"max_held_bytes": 100}, "x" * 100, "memory"), ({"max_requests": 0}, 1, "requests")],
)
def test_requests_that_a_limit_refuses(start, limits, body, why):
    served, _ = start(**limits)
    assert served.ask("POST", "/queue/1/q/send", body).status == 503
    assert metrics_of(served)[f'kmq_gateway_refused_total{{why="{why}"}}'] == 1


@pytest.mark.parametrize(
    ("limits", "sent", "why"),
    [
        ({"max_header_bytes": 1_000}, b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000 + b"\r\na: b", "head"),
        ({"head_timeout_s": 0.05}, b"GET /queue", "slow"),
    ],
)
def test_heads_that_a_limit_refuses(start, limits, sent, why):
    served, connection = start(**limits)
    connection.connect()
    connection.sock.sendall(sent)
    until(lambda: metrics_of(served)[f'kmq_gateway_refused_total{{why="{why}"}}'] == 1)


def test_a_line_of_a_head_that_does_not_end(start):
    served, connection = start(max_header_bytes=1_000)
    connection.connect()
    connection.sock.sendall(b"GET / HTTP/1.1\r\nx: y")
    until(lambda: metrics_of(served)["kmq_gateway_connections"] == 2)
    connection.sock.sendall(b"y" * 1_001)
    assert connection.sock.recv(12) == b"HTTP/1.1 431"
    assert metrics_of(served)['kmq_gateway_refused_total{why="head"}'] == 1


def test_connections_and_those_refused_are_counted(start):
    served, connection = start(max_connections=1)
    assert served.ask("GET", "/queue/1/ping", connection=connection).status == 200
    with socket.create_connection(("127.0.0.1", served.gateway.port)):
        until(lambda: metrics_of(served)['kmq_gateway_refused_total{why="connections"}'] == 1)
    until(lambda: metrics_of(served)["kmq_gateway_connections"] == 2)


class Away:
    """A storage that opens no queue."""

    def __init__(self, storage):
        self._storage = storage

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def open(self, name, **_):
        raise Unavailable("away")


def test_a_storage_that_does_not_answer():
    up = 'kmq_gateway_storage_up{storage="(default)"}'
    with running(memory_storage()) as served:
        assert metrics_of(served)[up] == 1
    with running(Away(memory_storage())) as served:
        until(lambda: metrics_of(served)[up] == 0, what="also without requests")
        assert served.admin("/readyz").status == 503
        assert served.ask("GET", "/queue/1/q/poll").status == 503


def test_metrics_say_where_it_is_registered(zookeeper, queue_name):
    of_clients = {"discovery": zookeeper, "cluster": queue_name}
    with running(memory_storage(), **of_clients, peers=zookeeper, roots={"": f"/{queue_name}"}) as served:
        for where in ("discovery", "gateways"):
            until(lambda name=f'kmq_gateway_registered{{where="{where}"}}': metrics_of(served)[name] == 1)
        assert metrics_of(served)["kmq_gateway_others"] == 0
        with running(memory_storage(), peers=zookeeper, roots={"": f"/{queue_name}"}):
            until(lambda: metrics_of(served)["kmq_gateway_others"] == 1)


def test_a_tracker_beside_the_gateway():
    label = '{storage="(default)"}'
    deaths, runs = f"kmq_gateway_tracker_deaths_total{label}", f"kmq_gateway_tracker_running{label}"
    told = b"ok; the tracker of storage (default) does not run: it has ended "
    ends_at_once = TrackerProcess("kafka://127.0.0.1:1?unknown=setting")
    with ends_at_once, running(memory_storage(), trackers={"": ends_at_once}) as served:
        until(lambda: metrics_of(served)[deaths] >= 1, what="dead once")
        assert ends_at_once.last_exit not in {None, 0}
        until(lambda: metrics_of(served)[runs] == 0, what="does not run")
        until(lambda: served.admin("/readyz").body.startswith(told), what="told")
        assert served.admin("/readyz").status == 200, "other trackers may do its work"
        until(lambda: metrics_of(served)[deaths] >= 2, what="dead again")
