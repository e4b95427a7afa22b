"""Queues for tests on real servers."""

import pytest
from support import LiveQueue

from kmqpy.config import Connection


@pytest.fixture
def make_queue(cluster, queue_name):
    """Make a queue of its own on the shared servers: `make_queue(partitions, **settings)`."""
    import contextlib

    with contextlib.ExitStack() as queues:

        def make(partitions: int = 1, name: str = queue_name, **settings) -> LiveQueue:
            connection = Connection(bootstrap=cluster.bootstrap, zookeeper=cluster.zookeeper)
            return queues.enter_context(LiveQueue(connection, name, partitions, **settings))

        yield make


@pytest.fixture
def queue(make_queue):
    """A queue of one partition with leases of LEASE_S."""
    return make_queue()
