"""The contract of all storages, on Kafka with a tracker of this process."""

import uuid

import pytest

from kmqpy.kafka.settings import KafkaConnection
from kmqpy.queue import storage_for
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker


@pytest.fixture(scope="module")
def kmq_target(cluster, zookeeper) -> Target:
    """The queues of a root of their own; a tracker serves them."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-contract-{uuid.uuid4().hex[:8]}")
    url = f"kafka://{connection.bootstrap}?zookeeper={zookeeper.hosts}&root={connection.root}"
    settings = TrackerSettings(session_timeout_ms=2_000, offset_interval_ms=200, http_port=-1)
    with_tracker = Tracker(connection, zookeeper, settings).start()
    yield Target(open=lambda: storage_for(url), url=url)
    with_tracker.stop()
