"""A registry of its own for each test, and trackers' leadership over it."""

import contextlib

import pytest
from leadership_support import SESSION_MS

from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.leadership import Leadership


@pytest.fixture
def zk(cluster):
    with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 4_000) as client:
        yield client


@pytest.fixture
def join(cluster, root):
    """Start a tracker's leadership; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(tracker_id: str, hosts: str = cluster.zookeeper, **settings) -> Leadership:
            settings = {"session_timeout_ms": SESSION_MS, **settings}
            leadership = Leadership(ZooKeeperConnection(hosts=hosts), tracker_id, root=root, **settings)
            stack.enter_context(leadership)
            return leadership.start(10)

        yield start
