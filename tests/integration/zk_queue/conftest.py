"""Fixtures of the tests of the unit of work in ZooKeeper."""

import pytest

from kmqpy.zookeeper.queue import ZkQueue, ZkQueueSettings
from kmqpy.zookeeper.session import connect


@pytest.fixture
def make(zookeeper, queue_name):
    made = []

    def queue(**settings):
        settings = {"root": f"/zms-{queue_name}", "session_timeout_ms": 2_000, **settings}
        made.append(ZkQueue(zookeeper, ZkQueueSettings(**settings)))
        made[-1].init("in", "out", "other")
        return made[-1]

    yield queue
    for one in made:
        one.close()


@pytest.fixture
def zk(zookeeper):
    with connect(zookeeper) as client:
        yield client
