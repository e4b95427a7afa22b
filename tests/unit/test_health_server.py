"""What the probes of an orchestrator are answered: a status code is all that it looks at."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tracker.health.metrics import TrackerMetrics
from tracker.health.server import HealthServer


class Watched:
    def __init__(self) -> None:
        self.metrics = TrackerMetrics()
        self.is_alive = True
        self.found: list[str] = []

    def alive(self) -> bool:
        return self.is_alive

    def problems(self) -> list[str]:
        return self.found


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def server(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthServer]:
    monkeypatch.setattr("tracker.health.server._CHECK_EVERY_S", 0.02)  # close() waits for as long
    server = HealthServer(watched, "127.0.0.1", 0)
    yield server
    server.close()


def get(server: HealthServer, path: str) -> tuple[int, object]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_readyz_is_503_while_there_are_problems(server: HealthServer, watched: Watched) -> None:
    assert get(server, "/readyz") == (200, {"ready": True, "problems": []})
    watched.found = ["queue q, partition 0: stuck"]
    assert get(server, "/readyz?verbose") == (503, {"ready": False, "problems": watched.found})
    assert get(server, "/livez")[0] == 200, "a restart would mend nothing"
    watched.found = []
    assert get(server, "/readyz")[0] == 200


def test_livez_is_503_when_only_a_restart_can_help(server: HealthServer, watched: Watched) -> None:
    watched.is_alive = False
    assert get(server, "/livez")[0] == 503
    assert get(server, "/readyz")[0] == 200
    assert get(server, "/nothing")[0] == 404


class TestBacklog:
    def test_what_waits_or_is_overdue_counts_and_what_is_leased_does_not(self, server, watched) -> None:
        metrics = watched.metrics
        metrics.owned.labels("orders").set(2)
        metrics.owned.labels("others").set(1)
        metrics.show("orders", 0, depth=5, overdue=2)
        metrics.show("orders", 3, depth=7, overdue=0)
        metrics.show("others", 0, depth=1000, overdue=0)
        metrics.in_flight.labels("orders", "0").set(40)
        assert get(server, "/backlog/orders") == (200, {"queue": "orders", "backlog": 14})

    def test_all_lanes_of_a_queue_count(self, server, watched) -> None:
        metrics = watched.metrics
        metrics.lanes = {"orders": ["orders__retry", "orders"]}
        metrics.owned.labels("orders").set(1)
        metrics.owned.labels("orders__retry").set(1)
        metrics.show("orders", 0, depth=5, overdue=0)
        assert get(server, "/backlog/orders")[0] == 503
        metrics.show("orders__retry", 0, depth=3, overdue=1)
        assert get(server, "/backlog/orders") == (200, {"queue": "orders", "backlog": 9})

    def test_a_partition_that_is_not_counted_yet_is_no_empty_one(self, server, watched) -> None:
        watched.metrics.owned.labels("orders").set(2)
        watched.metrics.show("orders", 0, depth=0, overdue=0)
        watched.metrics.show("orders", 1, overdue=3)
        assert get(server, "/backlog/orders")[0] == 503

    def test_a_tracker_without_partitions_of_the_queue_adds_nothing(self, server, watched) -> None:
        watched.metrics.owned.labels("orders").set(0)
        assert get(server, "/backlog/orders") == (200, {"queue": "orders", "backlog": 0})

    @pytest.mark.parametrize("path", ["", "/", "/ordres", "/orders/x", "?queue=orders"])
    def test_an_unknown_queue_is_no_empty_one(self, server, watched, path) -> None:
        watched.metrics.owned.labels("orders").set(1)
        assert get(server, "/backlog" + path)[0] == 404


def ask(server: HealthServer, method: str, path: str) -> tuple[int, str | None, int, bytes]:
    """The status, the methods allowed, the length that is told, and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        told = int(answer.getheader("Content-Length") or 0)
        return answer.status, answer.getheader("Allow"), told, body


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz", "/backlog/q", "/nothing"])
def test_head_options_and_a_trailing_slash_are_answered_as_servers_do(
    server: HealthServer, path: str
) -> None:
    status, _, told, body = ask(server, "GET", path)
    assert told == len(body)
    assert ask(server, "HEAD", path)[:2] == (status, None)
    assert ask(server, "HEAD", path)[3] == b""
    assert ask(server, "GET", f"{path}/?a=b")[0] == ask(server, "HEAD", f"{path}/")[0] == status
    assert ask(server, "OPTIONS", path) == (204, "GET, HEAD, OPTIONS", 0, b"")
    assert ask(server, "POST", path)[:2] == (405, "GET, HEAD, OPTIONS")
