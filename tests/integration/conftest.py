"""Queues for tests on real servers."""

import contextlib

import pytest
from security_support import live, secured  # noqa: F401  # fixtures
from support import LiveQueue

from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.settings import KafkaConnection


@pytest.fixture
def root(queue_name) -> str:
    """A root of its own in ZooKeeper."""
    return f"/kmq-{queue_name}"


@pytest.fixture
def registry(zk, root) -> Registry:
    return Registry(zk, root)


@pytest.fixture
def connection(cluster, root) -> KafkaConnection:
    return KafkaConnection(bootstrap=cluster.bootstrap, root=root)


@pytest.fixture
def admin(connection, zookeeper):
    with Admin(connection, zookeeper) as admin:
        yield admin


@pytest.fixture
def make_queue(cluster, zookeeper, queue_name):
    """Make a queue of its own on the shared servers: `make_queue(partitions, **settings)`."""
    with contextlib.ExitStack() as queues:

        def make(partitions: int = 1, name: str = queue_name, kafka=None, **settings) -> LiveQueue:
            connection = KafkaConnection(bootstrap=cluster.bootstrap, kafka=kafka or {})
            return queues.enter_context(LiveQueue(connection, zookeeper, name, partitions, **settings))

        yield make


@pytest.fixture
def queue(make_queue):
    """A queue of one partition with leases of LEASE_S."""
    return make_queue()


@pytest.fixture(params=["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def either_queue(request, make_queue):
    """The same, once for each format of markers."""
    return make_queue(markers=request.param)
