"""Connects the parts of `Admin` to Kafka and ZooKeeper; opens each connection at its first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kmqpy.core.clock import Clock
from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound, Unavailable
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import Records, SettingsMirror, settings_of, write_record
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import TopicInfo, Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection

if TYPE_CHECKING:
    from kmqpy.kafka.admin.registry import Registry
    from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset
    from kmqpy.kafka.admin.stats import QueueStats

_log = logging.getLogger(__name__)


class AdminContext:
    """Gives the parts of `Admin` the topics in Kafka, the registry in ZooKeeper, and kmq.queues.

    kmq.queues is the topic that tells clients without ZooKeeper the settings of queues. `timeout_s` bounds
    each answer of a service. `topics`: one that asks Kafka already, if there is one.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        timeout_s: float,
        clock: Clock,
        topics: Topics | None = None,
    ) -> None:
        self.connection = connection
        self._zookeeper = zookeeper
        self._timeout_s = timeout_s
        self.clock = clock
        self._stack = ExitStack()
        self._topics = topics
        self._registry: Registry | None = None

    @property
    def has_registry(self) -> bool:
        """True if a ZooKeeper address was given; False with NO_ZOOKEEPER of kmqpy.zookeeper.settings."""
        return bool(self._zookeeper.hosts)

    @property
    def topics(self) -> Topics:
        if self._topics is None:
            self._topics = Topics(self.connection, self._timeout_s, self.clock)
        return self._topics

    @property
    def registry(self) -> Registry:
        """The registry in ZooKeeper; raises ConfigError with NO_ZOOKEEPER."""
        if not self.has_registry:
            raise ConfigError(
                "zookeeper: no address given, and this needs the registry; give one like host:2181"
            )
        if self._registry is None:
            from kmqpy.kafka.admin.registry import Registry
            from kmqpy.zookeeper.session import connect

            client = self._stack.enter_context(connect(self._zookeeper, timeout=self._timeout_s))
            self._registry = Registry(client, self.connection.root, timeout=self._timeout_s)
        return self._registry

    def close(self) -> None:
        """End the session with ZooKeeper, if there is one."""
        self._stack.close()
        self._registry = None

    def registered(self, name: str) -> RegisteredQueue | None:
        """The queue's entry in the registry, if there is one."""
        try:
            return self.registry.get(name)
        except QueueNotFound:
            return None

    def find(self, queue: str | QueueSettings) -> tuple[QueueSettings, RegisteredQueue | None]:
        """Return the settings of the queue, and its entry in the registry.

        For a name, or settings that were read from the store earlier, when there were perhaps other lanes,
        the settings are the registered ones, or the defaults without an entry. Settings that somebody else
        gives are returned as they are. Where nothing else is said, markers are JVM markers, which everybody
        can read. With NO_ZOOKEEPER, there is no entry, and settings_of() reads the settings from kmq.queues.
        """
        name = name_of(queue)
        read = isinstance(queue, QueueSettings) and queue.given_fields is None
        if not self.has_registry:
            mirror = SettingsMirror(self.connection)
            recent = (mirror.recent(name) or mirror.find(name)) if read else None
            return recent or settings_of(queue, self.connection), None
        given = queue if isinstance(queue, QueueSettings) else QueueSettings(name=name)
        known = self.registered(name)
        if (isinstance(queue, QueueSettings) and not read) or known is None:
            return given.unregistered(), known
        return known.settings, known

    def described(self, settings: QueueSettings, known: RegisteredQueue | None) -> dict[str, TopicInfo]:
        """Return the queue's existing topics, with Kafka's settings of them.

        Raises QueueNotFound if the queue has neither an entry in the registry nor a queue topic.
        """
        topics = self.topics.describe(list(topics_of(settings)), with_config=True)
        if known is None and settings.name not in topics:
            raise queue_not_found(settings.name)
        return topics

    def tracked(
        self, lane: QueueSettings, known: RegisteredQueue | None
    ) -> tuple[dict[int, str], dict[int, StoredOffset]]:
        """Return the tracker's id by partition of a lane, and the stored offset by partition.

        Both are empty where `known`, the queue's entry in the registry, is None, or the lane has none.
        """
        if known is None:
            return {}, {}
        try:
            return self.registry.owners(lane.name), self.registry.offsets(lane.name)
        except QueueNotFound:
            if lane.lane_of is None:
                raise
            return {}, {}

    def stats(self, queue: str | QueueSettings) -> QueueStats:
        from kmqpy.kafka.admin import stats

        settings, known = self.find(queue)
        return stats.queue_stats(
            self.connection,
            settings,
            tracked=partial(self.tracked, known=known),
            topics=self.topics,
            clock=self.clock,
        )

    def records(self, only: str | None = None) -> tuple[Records | None, Unavailable | None]:
        """Return the records of kmq.queues, or `only` of this queue, and the error if they can't be read.

        Without an error, None instead of records says that the topic does not exist.
        """
        try:
            return SettingsMirror(self.connection).records(only), None
        except Unavailable as error:
            return None, error

    def mirror(self, change: Callable[[SettingsMirror], None]) -> None:
        """Let `change` write to kmq.queues. Logs a refusal of Kafka: trackers will write the records then."""
        try:
            change(SettingsMirror(self.connection, self.topics))
        except AccessDenied as error:
            _log.error("clients are not told of the change (a tracker will tell them): %s", error)

    def mirror_settings(self, settings: QueueSettings) -> QueueSettings:
        """Write the settings of a queue to kmq.queues, as the registry has them in the end; returns these."""
        mirrored = None
        while mirrored != settings:  # others may alter it meanwhile, and write their record before this one
            mirrored = settings
            self.mirror(partial(write_record, settings))
            settings = self.registry.get(settings.name).settings
        return settings


def name_of(queue: str | QueueSettings) -> str:
    """Return the name of a queue that is given by its name or its settings; raises ConfigError otherwise."""
    if isinstance(queue, QueueSettings):
        return queue.name
    if not isinstance(queue, str):
        raise ConfigError(f"queue: {type(queue).__name__} is neither a name nor QueueSettings")
    return queue


def queue_not_found(name: str) -> QueueNotFound:
    """The error for a queue that is neither registered nor has a topic."""
    return QueueNotFound(f"queue {name!r}: there is no such queue; create it with: kmq queue create {name}")
