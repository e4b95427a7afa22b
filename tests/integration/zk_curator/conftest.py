"""A path of its own for each test, and a builder of queues there."""

import pytest

from kmqpy.zookeeper.curator import QueueBuilder
from kmqpy.zookeeper.session import connect


@pytest.fixture
def zk(zookeeper):
    with connect(zookeeper, 2_000) as client:
        yield client


@pytest.fixture
def path(queue_name):
    return f"/curator/{queue_name}/queue"


@pytest.fixture
def builder(zk, path):
    def make(client=zk, **options):
        return QueueBuilder(zk=client, path=path, **options)

    return make
