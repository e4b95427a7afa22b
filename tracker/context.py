"""The settings, services and state that the parts of a tracker share."""

from __future__ import annotations

from dataclasses import dataclass

from kmqpy.core.clock import Clock
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.background import BackgroundJobs
from tracker.health.metrics import TrackerMetrics
from tracker.health.problems import Problems
from tracker.leadership.assignment import Partition
from tracker.leadership.leadership import Leadership
from tracker.partition.owned_partition import OwnedPartition
from tracker.settings import TrackerSettings
from tracker.supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """Objects that the parts of a tracker share.

    `partitions` holds the partitions that this tracker owns. Only PartitionLifecycle adds and removes
    partitions, in the main loop. Other threads read a copy of `partitions`.
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    settings: TrackerSettings
    clock: Clock
    metrics: TrackerMetrics
    problems: Problems
    jobs: BackgroundJobs
    leadership: Leadership
    supervisor: Supervisor
    partitions: dict[Partition, OwnedPartition]


class TrackerPart:
    """A part of a tracker, which has the objects of the context as attributes of its own."""

    def __init__(self, context: TrackerContext) -> None:
        self._connection = context.connection
        self._zookeeper = context.zookeeper
        self._settings = context.settings
        self._clock = context.clock
        self._metrics = context.metrics
        self._problems = context.problems
        self._jobs = context.jobs
        self._leadership = context.leadership
        self._supervisor = context.supervisor
        self._partitions = context.partitions
