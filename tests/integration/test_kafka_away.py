"""A Kafka that is away: closing does not wait for it, and calls are tried for as long as the URL says."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kmqpy.dev import Cluster
from kmqpy.dev.ports import free_ports
from kmqpy.errors import Closed, ConfigError, Unavailable
from kmqpy.queue import queue_for, storage_for

_CLOSES_WITHIN_S = 4.5
"""3 s, and the rest for a busy machine. It took 15 s with acknowledgements that wait, and 5 s without."""
_WORKER = """
import os, sys, time
from kmqpy.queue import queue_for
from kmqpy.worker.worker import Worker

def handle(message):
    os.write(1, b"1\\n")
    time.sleep(0.1)

with queue_for(sys.argv[1]) as queue:
    Worker(queue, handle, drain_timeout=1).run()
"""


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    """One that may be halted."""
    with Cluster() as started:
        yield started


@pytest.fixture
def url(own_cluster: Cluster, queue_name: str) -> Iterator[str]:
    made = f"kafka://{own_cluster.bootstrap}?zookeeper={own_cluster.zookeeper}&queue={queue_name}"
    with queue_for(f"{made}&create=true&partitions=1") as queue:
        queue.send_many(["x"] * 50)
    yield made
    own_cluster.broker().resume()


@pytest.mark.parametrize("acks", [True, False])
def test_a_queue_is_closed_soon_when_kafka_is_away(own_cluster: Cluster, url: str, acks: bool) -> None:
    queue = queue_for(url)
    messages = queue.receive(10, wait=30)
    queue.ack(messages[:1], confirmed=True)
    own_cluster.broker().pause()
    if acks:
        queue.ack(messages[1:])
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < _CLOSES_WITHIN_S


def test_a_queue_is_closed_soon_while_start_markers_wait(own_cluster: Cluster, url: str) -> None:
    """It took 13 s: 3 s for the markers, 10 s until their outcome is known."""
    queue = queue_for(url)
    assert queue.receive(1, wait=30)  # the others are fetched, too
    own_cluster.broker().pause()

    def receive() -> None:
        with suppress(Closed):
            queue.receive(10)

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    time.sleep(0.3)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < _CLOSES_WITHIN_S
    receiving.join(5)
    assert not receiving.is_alive()


def test_acknowledgements_are_waited_for_while_kafka_answers(
    own_cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def answers(*client: object) -> bool:
        asked.append(client)
        own_cluster.broker().resume()  # it was silent, and is there again
        return True

    monkeypatch.setattr("kmqpy.kafka.librdkafka.answers", answers)
    queue = queue_for(url)
    messages = queue.receive(10, wait=30)
    queue.ack(messages[:1], confirmed=True)
    own_cluster.broker().pause()
    queue.ack(messages[1:])
    queue.close()
    assert len(asked) >= 2  # for the acknowledgements, and before it leaves the group
    with queue_for(url) as queue:
        assert queue.in_flight() == 0


def test_sigterm_ends_a_worker_soon_when_kafka_is_away(own_cluster: Cluster, url: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "1\n"
            own_cluster.broker().pause()
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=1 + 2 + _CLOSES_WITHIN_S)
        finally:
            worker.kill()
    assert worker.returncode == 0, errors


@pytest.mark.parametrize("timeout", ["300", "0.3s"])
def test_calls_are_tried_for_as_long_as_the_url_says(timeout: str) -> None:
    (nobody,) = free_ports(1)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="does not answer"):
        queue_for(f"kafka://127.0.0.1:{nobody}?queue=q&timeout_ms={timeout}")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("timeout", ["0", "soon", "-5s"])
def test_a_bad_timeout_is_told(timeout: str) -> None:
    with pytest.raises(ConfigError, match="timeout_ms"):
        storage_for(f"kafka://127.0.0.1:1?timeout_ms={timeout}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the sockets of the process by /proc")
def test_connections_have_tcp_keep_alive(own_cluster: Cluster, url: str) -> None:
    port = int(own_cluster.bootstrap.rpartition(":")[2])
    with queue_for(url) as queue:
        queue.send("x")
        assert queue.receive(wait=30)
        found = [*_keep_alive(port)]
    assert found
    assert all(found)


def _keep_alive(port: int) -> Iterator[bool]:
    """Whether keep-alive is set, for each connection of this process to a port."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    yield bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        except OSError:  # no socket, or none that is connected
            continue
