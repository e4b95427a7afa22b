"""SIGTERM ends a worker whose storage is away soon after `drain_timeout`, whatever the time-outs of calls."""

import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from tests.chaos.proxy import Cut, Proxy

_ENDS_WITHIN_S = 8
"""drain_timeout, 2 s, and the rest for a busy machine: less than the time-out of one call, 10 s."""
_PROGRAM = """
import os, sys, time
from kmqpy.queue import queue_for
from kmqpy.worker.worker import Worker

def handle(message):
    os.write(1, b"1\\n")
    time.sleep(0.2)

with queue_for(sys.argv[1]) as queue:
    queue.send_many(["x"] * 200)
    Worker(queue, handle, drain_timeout=1).run()
"""


@pytest.fixture
def url(request, queue_name):
    if request.param == "zookeeper":
        return f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/{queue_name}?queue=q"
    return f"{request.getfixturevalue('database_url')(request.param)}?queue={queue_name}"


@pytest.mark.parametrize(
    ("url", "how"),
    [
        ("postgresql", Cut.BLACKHOLE),
        pytest.param("mariadb", Cut.BLACKHOLE, marks=pytest.mark.breadth),
        ("redis", Cut.BLACKHOLE),
        ("redis", Cut.REFUSE),
        ("zookeeper", Cut.BLACKHOLE),
    ],
    indirect=["url"],
)
def test_a_worker_whose_storage_is_away_ends_soon_after_the_drain_timeout(url, how):
    port = urlsplit(url).port
    with Proxy() as proxy:
        gate = proxy.gate()
        through = f"{url.replace(f':{port}', f':{proxy.listen(gate, lambda: port)}')}&create=true"
        worker = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, through],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with worker:
            try:
                assert [worker.stdout.readline() for _ in range(8)] == ["1\n"] * 8
                gate.cut(how)
                worker.send_signal(signal.SIGTERM)
                _, errors = worker.communicate(timeout=_ENDS_WITHIN_S)
            finally:
                worker.kill()
        assert worker.returncode == 0, errors
