"""Administration of queues: their topics in Kafka together with the registry in ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.context import AdminContext, name_of
from kmqpy.kafka.admin.doctor import Doctor
from kmqpy.kafka.admin.findings import Finding
from kmqpy.kafka.admin.queue_alteration import QueueAlteration
from kmqpy.kafka.admin.queue_creation import QueueCreation
from kmqpy.kafka.admin.queue_deletion import Deletion, QueueDeletion
from kmqpy.kafka.admin.queue_purge import QueuePurge
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.admin.stats import InFlightMessage, QueueStats
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection, is_topic_name
from kmqpy.kafka.topics import QueueTopics, TopicInfo
from kmqpy.zookeeper.settings import ZooKeeperConnection, check_zookeeper


@dataclass(frozen=True, kw_only=True)
class QueueDescription:
    """The settings of a queue, its topics, and its trackers.

    registered     whether trackers know of it
    topics         those of its four topics that exist, with the Kafka settings that matter
    owners         tracker id by partition
    offsets        stored markers offset by partition
    """

    settings: QueueSettings
    registered: bool
    deleting: bool
    partitions: int
    topics: tuple[TopicInfo, ...]
    owners: dict[int, str]
    offsets: dict[int, int]


class Admin(Closeable):
    """Creates, describes, changes, checks and deletes queues.

    A queue is given by its name or its settings. Admin asks ZooKeeper only where it needs the registry. With
    NO_ZOOKEEPER it never does, and takes the settings of a queue from the topic kmq.queues, as clients do.
    `timeout` (seconds) bounds each answer.

    Every call may raise Unavailable, and QueueNotFound for a queue that is not there.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        *,
        timeout: Duration = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        timeout_s = duration_ms(timeout, "timeout") / 1000
        self._context = AdminContext(
            check_connection(connection), check_zookeeper(zookeeper), timeout_s, clock
        )

    def create_queue(
        self,
        queue: str | QueueSettings,
        *,
        partitions: int | None = None,
        replication: int | None = None,
        retention: Duration | None = None,
    ) -> QueueTopics:
        """Create the topics of the queue that are missing, then register the queue.

        Does nothing if the queue is registered with these settings already. Where only a name is given, the
        settings are those that are registered, else the defaults. A markers topic whose messages are gone is
        recreated: the topic of the messages is missing, or was recreated since (rule R24).

        partitions   default: those of the queue topic if it exists, else as many as its other topics have or
                     trackers know of, at least 1
        replication  default: 3, or the number of brokers if there are fewer
        retention    seconds; default: 14 days, or more where the longest lease or delay asks for it

        Raises ConfigError for bad numbers, for a name that ends like those of other topics, when the queue
        exists with other settings, and for a topic of another queue; TopicError when existing topics do not
        fit, for example because they hold markers of another queue.
        """
        return QueueCreation(self._context).create(queue, partitions, replication, retention)

    def has_root(self) -> bool:
        """True if ZooKeeper holds anything of kmqpy under the connection's root."""
        return self._context.registry.has_root()

    def list_queues(self) -> list[RegisteredQueue]:
        """The registered queues, by name."""
        return self._context.registry.queues()

    def describe_queue(self, queue: str | QueueSettings) -> QueueDescription:
        """Settings, topics, and who tracks which partition."""
        settings, known = self._context.find(queue)
        topics = self._context.described(settings, known)
        owners, stored = self._context.tracked(settings.name, known)
        messages = topics.get(settings.name)
        return QueueDescription(
            settings=settings,
            registered=known is not None,
            deleting=known is not None and known.deleting,
            partitions=messages.partitions if messages else 0,
            topics=tuple(topics.values()),
            owners=owners,
            offsets={partition: offset.offset for partition, offset in stored.items()},
        )

    def alter_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: Duration | None = None,
        **changes: Any,
    ) -> QueueSettings:
        """Change a registered queue: more partitions, other limits (`ALTERABLE`), another retention.

        Topics are changed before the registry, the markers topic first (rule R19). Clients that run and were
        given settings keep theirs.

        Raises ConfigError: a setting that can't be changed, fewer partitions, or a retention that is not
        longer than the longest lease or delay.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"name: {type(name).__name__} is no name; give the queue's name and the changes as arguments"
            )
        return QueueAlteration(self._context).alter(name, partitions, retention, changes)

    def follow_topic(self, queue: str | QueueSettings) -> None:
        """Register partitions that a registered queue's topic got by other means than `alter_queue`.

        Its other topics get as many, the markers topic first (rule R19). Where that fails, only those are
        registered that the markers topic has too, and the error is raised.
        """
        QueueAlteration(self._context).follow_topic(name_of(queue))

    def delete_queue(
        self,
        queue: str | QueueSettings,
        *,
        timeout: Duration = 30.0,
        if_empty: bool = False,
        leftovers: bool = False,
    ) -> Deletion:
        """Wait until trackers have let go of the queue, delete its topics, and take it out of the registry.

        All its messages and dead letters are gone then; topics that another queue uses stay. After an error,
        for example when trackers do not let go within `timeout` seconds, a second call goes on where the
        first one ended: until the topics are deleted, the registry keeps the queue, marked as deleting,
        since nothing else knows the names of its topics.

        if_empty   raise TopicError if the queue holds messages or dead letters
        leftovers  delete, instead of a registered queue, the topics that look like those of a queue of this
                   name and that no queue uses: none that is registered, and none of another root in
                   kmq.queues. Where no such topic is left, delete the queue's record in kmq.queues

        Returns what was deleted; deletion() tells before. Raises QueueNotFound where no such queue is
        registered, or nothing is left over.
        """
        deletion = QueueDeletion(self._context)
        return deletion.delete(name_of(queue), timeout=timeout, if_empty=if_empty, leftovers=leftovers)

    def deletion(self, queue: str | QueueSettings, *, leftovers: bool = False) -> Deletion:
        """Return the topics that delete_queue() would delete now; raises the same errors."""
        return QueueDeletion(self._context).deletion(name_of(queue), leftovers=leftovers)

    def in_flight(self, queue: str | QueueSettings, limit: int | None = 1_000) -> list[InFlightMessage]:
        """Messages taken and not finished, delayed ones included; those taken first come first."""
        settings, known = self._context.find(queue)
        stored = self._context.tracked(settings.name, known)[1]
        context = self._context
        return stats.in_flight(
            context.connection, settings, stored=stored, topics=context.topics, limit=limit
        )

    def stats(self, queue: str | QueueSettings) -> QueueStats:
        """Counts of the queue and of each partition, and who tracks it."""
        return self._context.stats(queue)

    def purge(self, queue: str | QueueSettings) -> int:
        """Delete every message of the queue, in flight or not; returns how many there were, about.

        Messages in flight are finished first, so that they never count as lost. Messages sent meanwhile stay.
        """
        return QueuePurge(self._context).purge(queue)

    def doctor(self, queue: str | QueueSettings | None = None) -> list[Finding]:
        """Findings about a queue, or about every one; errors first, `ok` where nothing is wrong."""
        doctor = Doctor(self._context)
        return doctor.examine_all() if queue is None else doctor.examine(queue)

    def diagnose(self, queue: str | QueueSettings) -> list[Finding]:
        """The quick part of doctor(), for a tracker that begins to serve a queue.

        Leaves out other consumer groups, which take a request for each group of the cluster, and unusable
        znodes, for which all znodes of the queue are read.
        """
        return Doctor(self._context).quick_look(queue)

    def unusable_znodes(self, queue: str | QueueSettings | None = None) -> list[UnusableZnode]:
        """Unusable znodes, for remove_unusable_znodes(): of one queue, or of all queues and trackers."""
        if queue is not None:
            return self._context.registry.unusable_znodes(name_of(queue))
        found = self._context.registry.stray_unusable_znodes()
        for name in filter(is_topic_name, self._context.registry.names()):
            found += self._context.registry.unusable_znodes(name)
        return found

    def remove_unusable_znodes(self, znodes: Iterable[UnusableZnode]) -> list[UnusableZnode]:
        """Remove those that are still as they were found; returns them."""
        return self._context.registry.remove_unusable_znodes(znodes)

    def settings(self, queue: str | QueueSettings) -> QueueSettings:
        """Return the settings of a registered queue; the defaults where it is not registered."""
        return self._context.find(queue)[0]

    def close(self) -> None:
        """Leave ZooKeeper."""
        self._context.close()
