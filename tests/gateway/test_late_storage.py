"""A gateway whose storage is away when it starts, or goes away."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from kmqpy.core.clock import wait_until
from kmqpy.dev import Cluster
from kmqpy.dev.ports import free_ports
from tests.chaos.gateways import ask
from tests.chaos.proxy import Cut, Gate, Proxy

pytestmark = pytest.mark.breadth


@contextmanager
def gateway(url: str, *options: str, **environment: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A `kmq gateway` of its own that has begun to listen; its port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "from kmqpy.cli import main; main()", "gateway", *options]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--admin-port", "0", "--no-access-log"],
        env={**os.environ, "KMQ_QUEUE_URL": url, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert "gateway at" in process.stdout.readline()
            yield port, process
        finally:
            process.terminate()
    assert process.returncode == 0


@contextmanager
def reached_by_proxy(url: str) -> Iterator[tuple[str, Gate]]:
    """The url of a server by a proxy, with keys or tables of its own."""
    server = urlsplit(url)
    with Proxy() as proxy:
        gate = proxy.gate()
        port = proxy.listen(gate, lambda: server.port)
        user = server.netloc.rpartition("@")[0]
        address = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
        prefix = f"prefix=late_{uuid.uuid4().hex[:8]}_"
        yield server._replace(netloc=address, query=prefix).geturl(), gate


@pytest.mark.parametrize("kind", ["redis", "postgresql", "mariadb"])
def test_a_storage_that_is_away_when_the_gateway_starts(database_url, kind):
    with reached_by_proxy(database_url(kind)) as (url, gate):
        gate.cut(Cut.REFUSE)
        with gateway(url) as (port, _):
            status, body = ask(port, "GET", "/queue/1/q/poll")
            assert (status, json.loads(body)["message"]) == (503, "the storage does not answer")
            assert ask(port, "GET", "/queue/1/ping")[0] == 200
            gate.heal()
            assert wait_until(lambda: ask(port, "POST", "/queue/1/q/send", 1)[0] == 200, 20)
            assert ask(port, "GET", "/queue/1/q/size") == (200, b"1")


@pytest.mark.parametrize("kind", ["redis", "postgresql", "mariadb"])
def test_the_first_request_that_a_storage_does_not_answer_fails_in_time(database_url, kind):
    with reached_by_proxy(database_url(kind)) as (url, gate), gateway(url) as (port, _):
        assert wait_until(lambda: ask(port, "POST", "/queue/1/q/send", 1)[0] == 200, 20)
        gate.cut(Cut.BLACKHOLE)
        for method, call in (("DELETE", ""), ("POST", "/send"), ("POST", "/unclaimall"), ("GET", "/poll")):
            begun_s = time.monotonic()
            assert ask(port, method, f"/queue/1/q{call}", 2 if call == "/send" else None)[0] == 503
            assert time.monotonic() - begun_s < 1.5, "0.4 s, and what a busy machine takes"
        # The last number may be shown until it is known that the storage is away.
        assert wait_until(lambda: ask(port, "GET", "/queue/1/q/size")[0] == 503, 20)
        gate.heal()
        assert wait_until(lambda: ask(port, "POST", "/queue/1/q/send", 3)[0] == 200, 20)


def test_a_broker_that_hangs_is_told_in_time():
    with (
        Cluster() as cluster,
        gateway(f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}", "--no-tracker") as (port, _),
    ):
        assert wait_until(lambda: ask(port, "POST", "/queue/1/q/send", 1)[0] == 200, 20)
        assert wait_until(lambda: b"payload" in ask(port, "GET", "/queue/1/q/poll?ttl=3600")[1], 20)
        cluster.broker(1).pause()
        try:
            for _ in range(3):
                begun_s = time.monotonic()
                assert ask(port, "POST", "/queue/1/q/send", 2)[0] == 503
                assert ask(port, "GET", "/queue/1/q/poll") == (200, b"[]")
                assert ask(port, "GET", "/queue/1/q/size")[0] in (200, 503), "the last number, for a moment"
                assert time.monotonic() - begun_s < 2.5, "0.4, 0.1 and 0.3 s, and what a busy machine takes"
        finally:
            cluster.broker(1).resume()

        def is_back() -> bool:
            with suppress(TimeoutError):  # what opens the queue again may take longer than we wait for it
                return ask(port, "POST", "/queue/1/q/send", 3)[0] == 200
            return False

        assert wait_until(is_back, 60)
        polled = set()

        def poll():
            polled.update(one["payload"] for one in json.loads(ask(port, "GET", "/queue/1/q/poll")[1]))
            return 3 in polled

        assert wait_until(poll, 30), "the queue goes on; what was answered with 503 may be there, too"
        assert polled <= {2, 3}
