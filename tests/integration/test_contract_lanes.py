"""The contract of all storages, on Kafka, where each queue has lanes unless it collapses."""

import uuid
from dataclasses import replace
from typing import Any

import pytest

from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.storage import KafkaStorage
from kmqpy.queue import Capabilities
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

pytestmark = pytest.mark.breadth


class Laned(KafkaStorage):
    """Kafka, where new queues have lanes."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, priority=True)

    def create(self, name: str, **settings: Any) -> None:
        lanes = {} if settings.get("collapse") else {"retry_lane": True, "priorities": 2}
        super().create(name, **lanes, **settings)


@pytest.fixture(scope="module")
def kmq_target(cluster, zookeeper) -> Target:
    """The queues of a root of their own; a tracker serves them."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-lanes-{uuid.uuid4().hex[:8]}")
    url = f"kafka://{connection.bootstrap}?zookeeper={zookeeper.hosts}&root={connection.root}"
    settings = TrackerSettings(session_timeout_ms=2_000, offset_interval_ms=200, http_port=-1)
    with_tracker = Tracker(connection, zookeeper, settings).start()
    yield Target(open=lambda: Laned(connection, zookeeper), url=url)
    with_tracker.stop()
