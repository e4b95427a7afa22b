"""Storages that are opened before their server runs: `timeout_ms` holds for opening, too."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from kmqpy.errors import Unavailable
from kmqpy.queue import queue_for
from tests.chaos.proxy import Cut, Proxy

pytestmark = pytest.mark.breadth

STORAGES = ("postgresql", "mariadb", "redis", "valkey", "zookeeper")


@pytest.fixture(params=STORAGES)
def url(request: pytest.FixtureRequest, queue_name: str) -> str:
    if request.param == "zookeeper":
        return f"zookeeper://{request.getfixturevalue('cluster').zookeeper}/{queue_name}?queue=q&create=true"
    database_url: Callable[[str], str] = request.getfixturevalue("database_url")
    return f"{database_url(request.param)}?queue=q&create=true&prefix=t{queue_name[-8:]}_"


@pytest.mark.parametrize("how", [Cut.REFUSE, Cut.BLACKHOLE])
def test_a_storage_whose_server_comes_late_is_opened(url: str, how: Cut) -> None:
    port = urlsplit(url).port
    assert port is not None
    with Proxy() as proxy, ThreadPoolExecutor(1) as threads:
        gate = proxy.gate()
        near = url.replace(f":{port}", f":{proxy.listen(gate, lambda: port)}")
        gate.cut(how)
        opening = threads.submit(queue_for, f"{near}&timeout_ms=30000")
        with pytest.raises(TimeoutError):
            opening.result(3)
        gate.heal()
        with opening.result(60) as queue:
            queue.send("x")
            (message,) = queue.receive(wait=5)
            message.ack()
        gate.cut(how)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            queue_for(f"{near}&timeout_ms=2000")
        assert 1.5 < time.monotonic() - began < 8
        gate.heal()
