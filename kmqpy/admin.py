"""Administration of queues: their topics in Kafka together with the registry in ZooKeeper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kmqpy import doctor, stats
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import DAY_MS, Connection, Duration, QueueSettings, build, duration_ms, nearest
from kmqpy.doctor import Facts, Finding
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.inflight import Entry
from kmqpy.marker_writer import MarkerWriter
from kmqpy.markers import Marker, Op
from kmqpy.registry import RegisteredQueue, Registry, StoredOffset, connect
from kmqpy.stats import InFlightMessage, QueueStats
from kmqpy.topics import DEFAULT_RETENTION_MS, QueueTopics, TopicInfo, Topics, dead_letter_queue

ALTERABLE = ("max_redeliveries", "redeliver_after_ms", "max_delay_ms", "max_hold_ms")
"""The settings of a queue that can be changed while it exists."""

_FLUSH_S = 10.0


@dataclass(frozen=True, kw_only=True)
class QueueDescription:
    """A queue as it is.

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


class Admin:
    """Creates, describes, changes, checks and deletes queues.

    ZooKeeper is asked only where the registry is needed; with `Connection(zookeeper="")` never: then a
    queue's name stands for default settings. A queue may be given by name or by its settings.
    `timeout` bounds each answer in seconds.

    Every call may raise Unavailable, and QueueNotFound for a queue that is not there.
    """

    def __init__(
        self, connection: Connection, *, timeout: Duration = 10.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._connection = connection
        self._timeout_s = duration_ms(timeout, "timeout") / 1000
        self._clock = clock
        self._stack = ExitStack()
        self._topics_: Topics | None = None
        self._registry_: Registry | None = None

    def create_queue(
        self,
        queue: str | QueueSettings,
        *,
        partitions: int | None = None,
        replication: int | None = None,
        retention: Duration | None = None,
    ) -> QueueTopics:
        """Create the queue's topics, as far as they are missing, and then register it.

        Does nothing where it is there with these very settings. `partitions` defaults to those of the
        queue topic if it exists, else to 1. `retention` (seconds) defaults to 14
        days, or more where the longest hold or delay asks for it; `replication` to 3, or fewer brokers.

        Raises ConfigError for bad numbers, when the queue exists with other settings and for the markers
        topic of another queue; TopicError when existing topics do not fit.
        """
        settings = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
        # Asked first: without ZooKeeper nothing is created.
        known = self._registered(settings.name) if self._has_registry else None
        if known is not None and known.deleting:
            raise TopicError(
                f"queue {settings.name!r} is being deleted; run: kmq queue delete {settings.name}"
            )
        if known is not None and known.settings != settings:
            changed = ", ".join(_differences(known.settings, settings))
            raise ConfigError(
                f"queue {settings.name!r} exists with other settings ({changed}); use kmq queue alter"
            )
        if known is None and self._has_registry:
            self._check_markers_topic(settings)
        longest = max(settings.max_delay_ms, settings.max_hold_ms)
        retention_ms = (
            max(DEFAULT_RETENTION_MS, longest + 7 * DAY_MS)
            if retention is None
            else duration_ms(retention, "retention")
        )
        if partitions is None:
            existing = self._topics.describe([settings.name]).get(settings.name)
            partitions = existing.partitions if existing else 1
        found = self._topics.create(settings, partitions, replication, retention_ms)
        if self._has_registry:
            self._registry.register(settings, found.partitions)
        return found

    def list_queues(self) -> list[RegisteredQueue]:
        """The registered queues, by name."""
        return self._registry.queues()

    def describe_queue(self, queue: str | QueueSettings) -> QueueDescription:
        """Settings, topics, and who tracks which partition."""
        settings, known = self._find(queue)
        topics = self._topics.describe(_topic_names(settings), with_config=True)
        if known is None and settings.name not in topics:
            raise _not_found(settings.name)
        owners, stored = self._tracked(settings.name, known)
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

        Topics are changed before the registry, the markers topic first (rule R19). Running clients that
        were given settings keep theirs.

        Raises ConfigError: a setting that can't be changed, fewer partitions, or a retention that is not
        longer than the longest hold or delay.
        """
        for key in changes:
            if key not in ALTERABLE:
                known = [field.name for field in dataclasses.fields(QueueSettings)]
                hint = "it can't be changed" if key in known else f"unknown setting{nearest(key, ALTERABLE)}"
                raise ConfigError(f"{key}: {hint}")
        registered = self._registry.get(name)
        before = registered.settings
        settings = build(QueueSettings, dataclasses.asdict(before), changes)
        existing = self._topics.describe([name]).get(name)
        if existing is None:
            raise _not_found(name)
        counts = [existing.partitions, registered.partitions]
        self._check_retention(settings, retention)
        if partitions is not None:
            self._topics.grow(before, partitions)
            counts.append(partitions)  # a broker may still tell the former number
        if retention is not None:
            retention_ms = str(duration_ms(retention, "retention"))
            for topic in self._topics.describe(_topic_names(settings)):
                self._topics.configure(topic, {"retention.ms": retention_ms})
        self._registry.register(settings, max(counts))
        return settings

    def delete_queue(self, name: str, *, timeout: Duration = 30.0) -> None:
        """Wait until trackers let go, delete the queue's topics, and take it out of the registry.

        All its messages and dead letters are gone. After an error (trackers that do not let go within
        `timeout` seconds) a second call goes on where it ended: until the topics are gone, the registry
        keeps the queue, marked as deleting, since only it knows their names.
        """
        settings, known = self._find(name)
        if known is not None:
            wait_s = duration_ms(timeout, "timeout") / 1000
            self._registry.remove(name, wait_s, released=lambda: self._delete_topics(settings))
        elif self._topics.describe(_topic_names(settings)):
            self._delete_topics(settings)
        else:
            raise _not_found(name)

    def in_flight(self, queue: str | QueueSettings, limit: int | None = 1_000) -> list[InFlightMessage]:
        """Messages taken and not ended, delayed ones included; those taken first come first."""
        settings, known = self._find(queue)
        stored = self._tracked(settings.name, known)[1]
        return stats.in_flight(self._connection, settings, stored=stored, limit=limit)

    def stats(self, queue: str | QueueSettings) -> QueueStats:
        """Counts of the queue and of each partition, and who tracks it."""
        settings, known = self._find(queue)
        owners, stored = self._tracked(settings.name, known)
        return stats.queue_stats(self._connection, settings, owners=owners, stored=stored, clock=self._clock)

    def purge(self, queue: str | QueueSettings) -> int:
        """Delete every message of the queue, in flight or not; returns how many there were, about.

        What is in flight is ended first, so that it never counts as lost. Messages sent meanwhile stay.
        """
        settings, known = self._find(queue)
        topics = self._topics.check(settings)
        stored = self._tracked(settings.name, known)[1]
        counted = stats.queue_stats(self._connection, settings, stored=stored, clock=self._clock)
        log = self._topics.offsets(settings.name, range(topics.partitions))
        before = {partition: end for partition, (_low, end) in log.items()}
        with MarkerWriter(self._connection, settings.markers_topic) as writer:
            self._end_all(settings, stored, before, writer)
            self._topics.delete_records(settings.name, before)
            self._end_all(settings, stored, before, writer)  # taken since the first look
        return counted.depth + counted.in_flight

    def doctor(self, queue: str | QueueSettings | None = None) -> list[Finding]:
        """What is wrong with a queue, or with every one; errors first, `ok` where nothing is."""
        registry = self._registry
        if queue is not None:
            return doctor.check(self._facts(*self._find(queue)))
        registered = registry.queues()
        names = {one.settings.name for one in registered}
        found = doctor.unregistered(self._topics.names(), names)
        for one in registered:
            found += doctor.check(self._facts(one.settings, one))
        return found

    def settings(self, queue: str | QueueSettings) -> QueueSettings:
        """The settings of a queue by the registry; the defaults where it is not registered."""
        return self._find(queue)[0]

    def close(self) -> None:
        """Leave ZooKeeper."""
        self._stack.close()
        self._registry_ = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _has_registry(self) -> bool:
        return bool(self._connection.zookeeper)

    @property
    def _topics(self) -> Topics:
        if self._topics_ is None:
            self._topics_ = Topics(self._connection, self._timeout_s)
        return self._topics_

    @property
    def _registry(self) -> Registry:
        if not self._has_registry:
            raise ConfigError(
                "zookeeper: no address given, and this needs the registry; name it as host:2181"
            )
        if self._registry_ is None:
            client = self._stack.enter_context(
                connect(
                    self._connection.zookeeper,
                    timeout=self._timeout_s,
                    security=self._connection.zookeeper_security,
                )
            )
            self._registry_ = Registry(client, self._connection.root, timeout=self._timeout_s)
        return self._registry_

    def _registered(self, name: str) -> RegisteredQueue | None:
        try:
            return self._registry.get(name)
        except QueueNotFound:
            return None

    def _find(self, queue: str | QueueSettings) -> tuple[QueueSettings, RegisteredQueue | None]:
        name = queue.name if isinstance(queue, QueueSettings) else queue
        default = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
        known = self._registered(name) if self._has_registry else None
        if isinstance(queue, QueueSettings) or known is None:
            return default, known
        return known.settings, known

    def _tracked(
        self, name: str, known: RegisteredQueue | None
    ) -> tuple[dict[int, str], dict[int, StoredOffset]]:
        if known is None:
            return {}, {}
        return self._registry.owners(name), self._registry.offsets(name)

    def _check_markers_topic(self, settings: QueueSettings) -> None:
        """Markers say only partition and offset: those of two queues can't be told apart."""
        if settings.markers_topic == QueueSettings(name=settings.name).markers_topic:
            return  # not worth reading the whole registry
        for other in self._registry.queues():
            if settings.markers_topic == other.settings.markers_topic:
                raise ConfigError(
                    f"markers_topic: {settings.markers_topic!r} is that of queue {other.settings.name!r}; "
                    "each queue needs its own"
                )

    def _delete_topics(self, settings: QueueSettings) -> None:
        self._topics.delete(settings)
        deadline = self._clock.monotonic() + self._timeout_s
        while self._topics.describe(_topic_names(settings)) and self._clock.monotonic() < deadline:
            self._clock.sleep(0.02)  # brokers hear of it a little later

    def _check_retention(self, settings: QueueSettings, retention: Duration | None) -> None:
        longest = max(settings.max_delay_ms, settings.max_hold_ms)
        if retention is not None:
            shortest = duration_ms(retention, "retention")
        else:
            names = [settings.name, settings.markers_topic]
            topics = self._topics.describe(names, with_config=True).values()
            kept = [int(topic.config.get("retention.ms", "-1")) for topic in topics]
            shortest = min((ms for ms in kept if ms != -1), default=longest + 1)
        if shortest <= longest:
            raise ConfigError(
                f"retention: {shortest} ms must be longer than max_delay and max_hold ({longest} ms), "
                "or a held message could disappear"
            )

    def _end_all(
        self,
        settings: QueueSettings,
        stored: dict[int, StoredOffset],
        before: dict[int, int],
        writer: MarkerWriter,
    ) -> None:
        entries: dict[int, list[Entry]] = stats.open_entries(self._connection, settings, stored)
        for partition, ones in entries.items():
            for entry in ones:
                if entry.offset < before.get(partition, 0):
                    writer.post(Marker(partition, entry.offset, Op.END))
        if writer.flush(_FLUSH_S):
            raise Unavailable(f"markers topic {settings.markers_topic}: end markers are not confirmed")

    def _facts(self, settings: QueueSettings, known: RegisteredQueue | None) -> Facts:
        topics = self._topics.describe(_topic_names(settings), with_config=True)
        if known is None and settings.name not in topics:
            raise _not_found(settings.name)
        owners, stored = self._tracked(settings.name, known)
        messages, markers = topics.get(settings.name), topics.get(settings.markers_topic)
        count = messages.partitions if messages else 0
        committed = stats.committed_offsets(self._connection, settings, count) if messages else {}
        return Facts(
            settings=settings,
            registered=known,
            topics=topics,
            brokers=self._topics.brokers(),
            trackers=tuple(self._registry.trackers()),
            owners=owners,
            stored=stored,
            markers_log=self._topics.offsets(markers.name, range(markers.partitions)) if markers else {},
            queue_log=self._topics.offsets(messages.name, range(count)) if messages else {},
            committed={partition: offset for partition, (offset, _) in committed.items()},
            groups=tuple(self._topics.groups(messages.name, count)) if messages else (),
        )


def _topic_names(settings: QueueSettings) -> list[str]:
    dead = dead_letter_queue(settings)
    return [settings.name, settings.markers_topic, dead.name, dead.markers_topic]


def _differences(before: QueueSettings, after: QueueSettings) -> Iterable[str]:
    new = dataclasses.asdict(after)
    for key, old in dataclasses.asdict(before).items():
        if new[key] != old:
            yield f"{key}: {old}, not {new[key]}"


def _not_found(name: str) -> QueueNotFound:
    return QueueNotFound(f"queue {name!r}: there is no such queue; create it with: kmq queue create {name}")
