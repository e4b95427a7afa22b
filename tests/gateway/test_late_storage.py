"""A gateway whose storage is away when it starts."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from kmqpy.core.clock import wait_until
from kmqpy.dev.ports import free_ports
from tests.chaos.gateways import ask
from tests.chaos.proxy import Cut, Proxy


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


@pytest.mark.parametrize("kind", ["redis", "postgresql", "mariadb"])
def test_a_storage_that_is_away_when_the_gateway_starts(database_url, kind):
    server = urlsplit(database_url(kind))
    with Proxy() as proxy:
        gate = proxy.gate()
        port = proxy.listen(gate, lambda: server.port)
        gate.cut(Cut.REFUSE)
        user = server.netloc.rpartition("@")[0]
        address = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
        url = server._replace(netloc=address, query=f"prefix=late_{uuid.uuid4().hex[:8]}_").geturl()
        with gateway(url) as (served, _):
            status, body = ask(served, "GET", "/queue/1/q/poll")
            assert (status, json.loads(body)["message"]) == (503, "the storage does not answer")
            assert ask(served, "GET", "/queue/1/ping")[0] == 200
            gate.heal()
            assert wait_until(lambda: ask(served, "POST", "/queue/1/q/send", 1)[0] == 200, 20)
            assert ask(served, "GET", "/queue/1/q/size") == (200, b"1")
