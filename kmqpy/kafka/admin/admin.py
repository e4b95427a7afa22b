"""`Admin` does the work of KafkaStorage and of the command kmq: queues, their topics, the registry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError, QueueNotFound
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.context import AdminContext, name_of
from kmqpy.kafka.admin.doctor import Doctor
from kmqpy.kafka.admin.findings import Finding
from kmqpy.kafka.admin.lane_removal import LaneRemoval
from kmqpy.kafka.admin.queue_alteration import QueueAlteration
from kmqpy.kafka.admin.queue_creation import QueueCreation
from kmqpy.kafka.admin.queue_deletion import Deletion, QueueDeletion
from kmqpy.kafka.admin.queue_purge import QueuePurge
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.admin.stats import InFlightMessage, QueueStats
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode
from kmqpy.kafka.copies.own_hanging import OwnTransaction, end_transaction
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection, is_topic_name
from kmqpy.kafka.topics import QueueTopics, TopicInfo
from kmqpy.zookeeper.settings import ZooKeeperConnection, check_zookeeper


@dataclass(frozen=True, kw_only=True)
class QueueDetails:
    """The settings of a queue, its topics, and its trackers.

    registered     whether the registry has the queue, so that trackers serve it
    deleting       whether the registry marks the queue as being deleted
    partitions     the number of partitions of the queue topic; 0 while that topic is missing
    topics         the existing topics among these, with the Kafka settings that matter: queue topic, markers
                   topic, dead-letter topic, markers topic of the dead letters, topics of further lanes
    owners         by partition: the id of the tracker that has the partition
    offsets        by partition: the markers offset that trackers have stored; the next tracker reads from it
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

    A queue is given by its name or its settings. `timeout` (seconds) bounds each answer of Kafka and of
    ZooKeeper; None: the connection's `timeout_ms`.

    With NO_ZOOKEEPER these calls work: create_queue(), describe_queue(), in_flight(), stats(), purge() and
    settings(). create_queue() then creates the topics and registers nothing. The other five take the settings
    of the queue from the topic kmq.queues, as clients do. All other calls raise ConfigError.

    Every call may raise Unavailable. For a queue that does not exist, every call raises QueueNotFound, except
    create_queue() and settings().
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        *,
        timeout: Duration | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        connection = check_connection(connection)
        timeout_s = connection.timeout_s if timeout is None else duration_ms(timeout, "timeout") / 1000
        self._context = AdminContext(connection, check_zookeeper(zookeeper), timeout_s, clock)

    def create_queue(
        self,
        queue: str | QueueSettings,
        *,
        partitions: int | None = None,
        replication: int | None = None,
        retention: Duration | None = None,
    ) -> QueueTopics:
        """Create the topics of the queue that are missing, then register the queue.

        Changes nothing if the queue is registered with these settings and all its topics exist. Where only a
        name is given, the settings are the registered ones, or else the defaults. A markers topic is
        recreated where its messages are gone, because the topic of the messages is missing or was recreated
        (rule R24 of docs/rules.md).

        partitions   default: as many as the queue topic has; without that topic, as many as the registry or
                     another of the queue's topics has, at least 1
        replication  default: 3, or the number of brokers if there are fewer
        retention    seconds; default: 14 days, or the longest lease or delay and a week if that is longer

        Raises ConfigError for bad numbers, for the name of a new queue that ends like the names of markers
        topics or dead-letter topics, for other settings than the registered ones, for a topic that another
        queue uses, and for range markers of a new queue while a JVM tracker reads its markers. Raises
        TopicError while the queue is being deleted, and for existing topics that do not fit, for example
        because they hold markers of another queue.
        """
        return QueueCreation(self._context).create(queue, partitions, replication, retention)

    def has_root(self) -> bool:
        """True if the connection's root znode exists in ZooKeeper."""
        return self._context.registry.has_root()

    def list_queues(self) -> list[RegisteredQueue]:
        """Return the registered queues in the order of their names; logs and skips unreadable ones."""
        return self._context.registry.queues()

    def is_registered(self, name: str) -> bool:
        """True if list_queues() has the queue; reads nothing of the others."""
        registry = self._context.registry
        try:
            return registry.get(name).settings.lane_of is None
        except (QueueNotFound, ConfigError):  # there is none, or its settings can't be read
            return False

    def queue_names(self) -> list[str]:
        """Return the names of the registered queues, sorted; also of those that can't be read."""
        return self._context.registry.queue_names()

    def describe_queue(self, queue: str | QueueSettings) -> QueueDetails:
        """Return the settings and topics of the queue, and which tracker has which partition."""
        settings, known = self._context.find(queue)
        topics = self._context.described(settings, known)
        owners, stored = self._context.tracked(settings, known)
        messages = topics.get(settings.name)
        return QueueDetails(
            settings=settings,
            registered=known is not None,
            deleting=known is not None and known.deleting,
            partitions=messages.partitions if messages else 0,
            topics=tuple(topics.values()),
            owners=owners,
            offsets={partition: offset.offset for partition, offset in stored.items()},
        )

    def alter_queue(
        self, name: str, *, partitions: int | None = None, retention: Duration | None = None, **changes: Any
    ) -> QueueSettings:
        """Change a registered queue: more partitions, other limits (`ALTERABLE`), another retention.

        Admin changes the topics before the registry, and adds partitions to the markers topic before the
        queue topic (rule R19 of docs/rules.md). Running clients keep the settings that they were made with.

        Raises ConfigError for a setting that can't be changed, for fewer partitions, for a retention that is
        not longer than the longest lease or delay, and for range markers while a JVM tracker reads the
        markers. Raises TopicError while the queue is being deleted.

        Lanes that are to go (`retry_lane=False`, fewer `priorities`) are first marked as draining;
        remove_lanes() ends that.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"name: an object of type {type(name).__name__} is not text; give the queue's name, and the "
                "changes as arguments"
            )
        return QueueAlteration(self._context).alter(name, partitions, retention, changes)

    def remove_lanes(self, name: str, *, timeout: Duration = 60.0) -> QueueSettings:
        """Remove the lanes of a queue that alter_queue() has marked; returns the settings.

        Waits until they are empty, and nothing has come into them for 15 seconds; then trackers let go of
        them, and their topics are deleted. Raises Unavailable if that lasts longer than `timeout` seconds.
        Another call then goes on where this one ended.
        """
        return LaneRemoval(self._context).finish(name_of(name), duration_ms(timeout, "timeout") / 1000)

    def follow_topic(self, queue: str | QueueSettings) -> None:
        """Register partitions that a registered queue's topic got by other means than `alter_queue`.

        First gives the queue's other topics as many partitions, because a message in a partition without a
        markers partition could not be tracked. Where that fails, registers only partitions that the markers
        topic has as well, and raises the error. Does nothing while the queue is being deleted.
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

        This deletes all messages and dead letters of the queue. Topics that another queue uses stay.

        After an error, for example when trackers do not let go within `timeout` seconds, a second call goes
        on where the first one ended. Until the topics are deleted, the registry keeps the queue, marked as
        deleting, because nothing else knows the names of its topics.

        if_empty   raise TopicError if the queue holds messages or dead letters
        leftovers  delete what is left over from a queue of this name, which must not be registered: its
                   record in kmq.queues, and the topics with its default names. Topics stay that a
                   registered queue uses, or a queue of another root that kmq.queues names

        Returns the topics that were deleted; deletion() returns them beforehand. Raises QueueNotFound where
        no such queue is registered, or nothing is left over. Raises ConfigError for `leftovers` of a
        registered queue, and while the settings of another registered queue can't be read.
        """
        deletion = QueueDeletion(self._context)
        return deletion.delete(name_of(queue), timeout=timeout, if_empty=if_empty, leftovers=leftovers)

    def deletion(self, queue: str | QueueSettings, *, leftovers: bool = False) -> Deletion:
        """Return what delete_queue() would delete now; raises its errors if it can delete nothing."""
        return QueueDeletion(self._context).deletion(name_of(queue), leftovers=leftovers)

    def in_flight(self, queue: str | QueueSettings, limit: int | None = 1_000) -> list[InFlightMessage]:
        """See KafkaStorage.in_flight."""
        context = self._context
        settings, known = context.find(queue)
        tracked = partial(context.tracked, known=known)
        return stats.in_flight(
            context.connection, settings, tracked=tracked, topics=context.topics, limit=limit
        )

    def stats(self, queue: str | QueueSettings) -> QueueStats:
        """See KafkaStorage.stats."""
        return self._context.stats(queue)

    def purge(self, queue: str | QueueSettings) -> int:
        """Delete every message of the queue, in flight or not. Returns about how many there were.

        Finishes messages in flight first, so that no tracker reports them as lost. Messages that are sent
        meanwhile stay, and so do dead letters.
        """
        return QueuePurge(self._context).purge(queue)

    def doctor(self, queue: str | QueueSettings | None = None, *, reads_logs: bool = False) -> list[Finding]:
        """See KafkaStorage.doctor.

        With `reads_logs`, all that clients and the next tracker have still to read is looked at for damage,
        not only where they begin.
        """
        doctor = Doctor(self._context, reads_logs=reads_logs)
        return doctor.examine_all() if queue is None else doctor.examine(queue)

    def unusable_znodes(self, queue: str | QueueSettings | None = None) -> list[UnusableZnode]:
        """Return the unusable znodes of one queue, or of all queues and trackers.

        Such a znode was made by hand, restored from a backup, or damaged (rule R25 of docs/rules.md).
        """
        if queue is not None:
            return self._context.registry.unusable_znodes(name_of(queue))
        found = self._context.registry.stray_unusable_znodes()
        for name in filter(is_topic_name, self._context.registry.names()):
            found += self._context.registry.unusable_znodes(name)
        return found

    def remove_unusable_znodes(self, znodes: Iterable[UnusableZnode]) -> list[UnusableZnode]:
        """Remove those of `znodes` that have not changed since they were found; returns the removed ones."""
        return self._context.registry.remove_unusable_znodes(znodes)

    def own_hanging(self, queue: str | QueueSettings | None = None) -> list[OwnTransaction]:
        """Return transactions that nobody ends and that kmqpy has written, of one queue or of all queues."""
        doctor = Doctor(self._context)
        queues = [one.settings for one in self.list_queues()] if queue is None else [queue]
        return [one for name in queues for one in doctor.own_hanging(name)]

    def end_transaction(self, own: OwnTransaction) -> bool:
        """End a transaction that own_hanging() has returned, if its `may_be_ended` is True.

        Returns False if Kafka does not know its producer any more; doctor() tells what to do then.
        """
        return end_transaction(self._context.connection, own)

    def settings(self, queue: str | QueueSettings) -> QueueSettings:
        """Return the registered settings of the queue with this name, or the defaults.

        Settings that are given instead of a name are returned as they are. With NO_ZOOKEEPER, kmq.queues
        gives the settings that `queue` leaves open.
        """
        return self._context.find(queue)[0]

    def close(self) -> None:
        """End the session with ZooKeeper, if there is one."""
        self._context.close()
