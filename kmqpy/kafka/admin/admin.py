"""Administration of queues: their topics in Kafka together with the registry in ZooKeeper."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import build, nearest
from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin import doctor, stats
from kmqpy.kafka.admin.doctor import Facts, Finding
from kmqpy.kafka.admin.registry import Leftover, RegisteredQueue, Registry, StoredOffset, connect
from kmqpy.kafka.admin.stats import InFlightMessage, QueueStats
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.settings_mirror import Records, SettingsMirror, settings_of
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import (
    SETTINGS_TOPIC,
    KafkaConnection,
    QueueSettings,
    check_connection,
    check_new_queue_name,
    is_topic_name,
)
from kmqpy.kafka.topic_identity import TopicIds, earlier_markers
from kmqpy.kafka.topic_names import markers_topics, shared_topics, topics_of
from kmqpy.kafka.topics import (
    DEFAULT_RETENTION_MS,
    QueueTopics,
    TopicInfo,
    Topics,
    ample_retention_ms,
    check_retention,
)
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """What the deletion of a queue, or of what is left over from one, takes away.

    topics  how many records each of them holds, about
    kept    topics of the queue that stay, each with the other queue that uses it
    """

    queue: str
    topics: dict[str, int]
    kept: dict[str, str]


class Admin:
    """Creates, describes, changes, checks and deletes queues.

    ZooKeeper is asked only where the registry is needed; with NO_ZOOKEEPER never: then a
    queue's name stands for the settings that clients know of. A queue may be given by name or by its
    settings. `timeout` bounds each answer in seconds.

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
        self._connection = check_connection(connection)
        self._zookeeper = zookeeper
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

        Does nothing where it is there with these very settings, which are the default where only its name
        is given. Markers topics of messages that are gone are recreated: where the topic of the messages is
        missing, or was recreated since (rule R24). `partitions` defaults to those of the queue topic if it
        exists, else to as many as its other topics have or trackers know of, at least 1. `retention`
        (seconds) defaults to 14 days, or more where the longest hold or delay asks for it; `replication` to
        3, or fewer brokers.

        Raises ConfigError for bad numbers, for a name that ends like those of other topics, when the queue
        exists with other settings, and for a topic of another queue; TopicError when existing topics do not
        fit, markers of another queue for example.
        """
        settings = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
        # Asked first: without ZooKeeper nothing is created.
        registered, damaged = self._registry.every_queue() if self._has_registry else ([], [])
        there = {one.name: one for one in registered}.get(settings.name)
        known = None
        if there is None:
            check_new_queue_name(settings.name)
        elif settings.name not in damaged:  # settings that can't be read are replaced
            known = self._registered(settings.name)
        if there is not None and not isinstance(queue, QueueSettings):
            settings = there
        if known is not None and known.deleting:
            raise TopicError(
                f"queue {settings.name!r} is being deleted; run: kmq queue delete {settings.name}"
            )
        if known is not None and known.settings != settings:
            changed = ", ".join(_differences(known.settings, settings))
            raise ConfigError(
                f"queue {settings.name!r} exists with other settings ({changed}); use kmq queue alter"
            )
        if there is None or topics_of(there) != topics_of(settings):
            _check_topics(settings, registered)
        retention_ms = (
            max(DEFAULT_RETENTION_MS, ample_retention_ms(settings))
            if retention is None
            else duration_ms(retention, "retention")
        )
        existing = self._topics.describe(list(topics_of(settings)))
        tracked = 1 if known is None else known.partitions
        if partitions is None:
            most = max([tracked, *(topic.partitions for topic in existing.values())])
            wanted = existing[settings.name].partitions if settings.name in existing else most
        else:
            wanted = partitions
        obsolete = self._obsolete_markers(settings, known, registered, existing)
        kept = self._delete_markers(obsolete)
        found = self._topics.create(settings, wanted, replication, retention_ms, anew=kept)
        for topic, old_ms in kept.items():
            if retention is None and (old_ms == -1 or old_ms > retention_ms):
                self._topics.configure(topic, {"retention.ms": str(old_ms)})
        if settings.markers_topic in obsolete and settings.name in existing:
            if partitions is None and found.partitions < tracked:
                found = self._topics.grow(settings, tracked)  # a broker made it, with as many as it pleased
            self._give_back_what_was_taken(settings, found)
        if self._has_registry:
            self._registry.register(settings, found.partitions)
            ids = {settings.name: found.ids.queue, settings.markers_topic: found.ids.markers}
            self._mirror(lambda mirror: mirror.write([settings.with_topic_ids(ids)], certain=True))
        return found

    def _obsolete_markers(
        self,
        settings: QueueSettings,
        known: RegisteredQueue | None,
        registered: Iterable[QueueSettings],
        existing: Mapping[str, TopicInfo],
    ) -> dict[str, TopicInfo]:
        """The queue's markers topics whose markers are of messages that are gone; raises TopicError.

        It does where it is not known whether they are the queue's.
        """
        earlier = self._made_anew_beside_markers(settings, known, existing)
        there = any(topics_of(one) == topics_of(settings) for one in registered)
        used = {
            topic: one.name for one in registered if one.name != settings.name for topic in topics_of(one)
        }
        found = {}
        for messages, markers in markers_topics(settings).items():
            if markers not in existing or (messages in existing and messages not in earlier):
                continue
            if messages not in existing and (markers in used or not self._has_records(existing[markers])):
                continue
            if markers in used:
                raise TopicError(
                    f"topic {markers!r} has markers of an earlier topic {messages!r}, but queue "
                    f"{used[markers]!r} uses it as well; kmq doctor says how to give each its own"
                )
            if not (there or messages in earlier):
                raise TopicError(
                    f"topic {markers!r} holds records, but there is no topic {messages!r}: markers of an "
                    "earlier queue would count for the messages of the new one; delete that topic first"
                )
            found[markers] = existing[markers]
        return found

    def _has_records(self, topic: TopicInfo) -> bool:
        offsets = self._topics.offsets(topic.name, range(topic.partitions))
        return any(end > 0 for _low, end in offsets.values())

    def _made_anew_beside_markers(
        self, settings: QueueSettings, known: RegisteredQueue | None, topics: Mapping[str, TopicInfo]
    ) -> dict[str, str]:
        """See earlier_markers(): what was known before, stands in kmq.queues and in stored offsets."""
        now = {name: topic.topic_id for name, topic in topics.items()}
        found = earlier_markers(settings, self._recorded_ids(settings.name) if now else {}, now)
        if known is not None and {settings.name, settings.markers_topic} <= now.keys():
            ids = now[settings.name], now[settings.markers_topic]
            stored = self._registry.offsets(settings.name).values()
            if any(one.is_of_earlier_queue(*ids) for one in stored):
                found[settings.name] = settings.markers_topic
            elif any((one.queue_id, one.topic_id) == ids for one in stored):
                found.pop(settings.name, None)  # ZooKeeper knows better than a record that anybody can write
        return found

    def _recorded_ids(self, name: str) -> Mapping[str, str]:
        records, error = self._records()
        if error is not None:
            _log.warning("whether topics of queue %s were recreated is not known: %s", name, error)
        return {} if records is None or name not in records.own else records.own[name].topic_ids

    def _delete_markers(self, topics: Mapping[str, TopicInfo]) -> dict[str, int]:
        """Delete these topics, unless they have been recreated; returns how long they kept records, in ms."""
        if not topics:
            return {}
        found = self._topics.describe(list(topics), with_config=True)
        same = {name: one for name, one in found.items() if one.topic_id == topics[name].topic_id}
        _log.warning("markers of messages that are gone; recreated: %s", ", ".join(same))
        self._topics.delete(same)
        return {name: int(one.config.get("retention.ms", "0")) for name, one in same.items()}

    def _give_back_what_was_taken(self, settings: QueueSettings, topics: QueueTopics) -> None:
        """Have trackers redeliver what is in partitions of which somebody has committed offsets.

        Clients that can't know that the markers were of an earlier topic (of an older version, of the JVM
        library, without a right to read kmq.queues) took messages all the same, and the markers which said
        so are gone. Commits can't be taken back while clients are members of the group.
        """
        committed = stats.committed_offsets(self._connection, settings, topics.partitions, topics.ids)
        taken = [partition for partition, (offset, _) in committed.items() if offset > 0]
        with MarkerWriter(self._connection, settings.markers_topic) as writer:
            for partition, (low, end) in self._topics.offsets(settings.name, taken).items():
                for offset in range(low, end):
                    writer.post(Marker(partition, offset, Op.DELAY, counts=False))
            if writer.flush(_FLUSH_S):
                raise Unavailable(f"markers topic {settings.markers_topic}: markers are not confirmed")

    def has_root(self) -> bool:
        """Whether ZooKeeper holds anything of kmqpy under the connection's root."""
        return self._registry.has_root()

    def list_queues(self) -> list[RegisteredQueue]:
        """The registered queues, by name."""
        return self._registry.queues()

    def describe_queue(self, queue: str | QueueSettings) -> QueueDescription:
        """Settings, topics, and who tracks which partition."""
        settings, known = self._find(queue)
        topics = self._topics.describe(list(topics_of(settings)), with_config=True)
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
            for topic in self._topics.describe(list(topics_of(settings))):
                self._topics.configure(topic, {"retention.ms": retention_ms})
        self._registry.register(settings, max(counts))
        self._mirror(lambda mirror: mirror.write([settings]))
        return settings

    def follow_topic(self, name: str) -> None:
        """Register partitions that a registered queue's topic got by other means than `alter_queue`.

        Its other topics get as many, the markers topic first (rule R19). Where that fails, only those are
        registered that the markers topic has too, and the error is raised.
        """
        registered = self._registry.get(name)
        settings = registered.settings
        wanted = self._topics.describe([name]).get(name)
        if wanted is None:
            raise _not_found(name)
        if registered.deleting:
            return
        try:
            self._topics.grow(settings, wanted.partitions)
        finally:
            markers = self._topics.describe([settings.markers_topic]).get(settings.markers_topic)
            count = min(wanted.partitions, markers.partitions if markers is not None else 0)
            if count > registered.partitions:
                self._registry.register(settings, count)

    def delete_queue(
        self, name: str, *, timeout: Duration = 30.0, if_empty: bool = False, leftovers: bool = False
    ) -> Deletion:
        """Wait until trackers let go, delete the queue's topics, and take it out of the registry.

        All its messages and dead letters are gone; topics that another queue uses as well stay. After an
        error (trackers that do not let go within `timeout` seconds) a second call goes on where it ended:
        until the topics are gone, the registry keeps the queue, marked as deleting, since only it knows
        their names.

        `if_empty`: only if it holds neither messages nor dead letters, else TopicError. `leftovers`: delete
        instead the topics that look like those of a queue `name` and belong to no registered one, nor to one
        of another root that clients are told of; and, where none is left, what clients are told of a queue
        `name`. Returns what was deleted; deletion() tells before.

        Raises QueueNotFound where no such queue is registered, or nothing is left over.
        """
        found = self.deletion(name, leftovers=leftovers)
        if if_empty:
            self._check_empty(name)
        if leftovers:
            self._delete(name, list(found.topics))
        else:
            wait_s = duration_ms(timeout, "timeout") / 1000
            # A queue that was made meanwhile may use one of them.
            self._registry.remove(
                name, wait_s, released=lambda: self._delete(name, self._to_delete(name, leftovers)[0])
            )
        return found

    def deletion(self, name: str, *, leftovers: bool = False) -> Deletion:
        """What delete_queue() would take away now; raises what that does."""
        names, kept = self._to_delete(name, leftovers)
        topics = self._topics.describe(names)
        records = {
            topic: sum(
                end - first for first, end in self._topics.offsets(topic, range(one.partitions)).values()
            )
            for topic, one in topics.items()
        }
        return Deletion(queue=name, topics=records, kept=kept)

    def _to_delete(self, name: str, leftovers: bool) -> tuple[list[str], dict[str, str]]:
        """The topics to delete, which may not exist, and those to keep, with the queue that uses each."""
        registered, damaged = self._registry.every_queue()
        users = {topic: one.name for one in registered if one.name != name for topic in topics_of(one)}
        own = {one.name: one for one in registered}.get(name)
        if unknown := [one for one in damaged if one != name]:
            raise ConfigError(
                f"queue {unknown[0]!r}: its settings in the registry can't be read, so which topics it uses "
                f"is not known, and none is deleted; write them anew with: kmq queue create {unknown[0]}"
            )
        if not leftovers and own is None:
            part = f"; topic {name!r} is one of queue {users[name]!r}" if name in users else ""
            raise QueueNotFound(
                f"queue {name!r} is not registered{part}; topics that are left over from a queue are deleted "
                f"with: kmq queue delete {name} --leftovers"
            )
        if leftovers and own is not None:
            raise ConfigError(f"queue {name!r} is registered; delete it with: kmq queue delete {name}")
        if own is None:
            check_new_queue_name(name)
            own = QueueSettings(name=name)
        topics = list(topics_of(own))
        if leftovers:
            records, error = self._records()
            if error is not None:
                raise error
            records = records or Records()
            if name in records.strangers:
                raise TopicError(
                    f"topic {SETTINGS_TOPIC} has a record of a queue {name!r} of another ZooKeeper root that "
                    "can't be read, so whose these topics are is not known, and none is deleted"
                )
            users = {topic: one.name for one in records.others for topic in topics_of(one)} | users
            existing = self._topics.names()
            if own.markers_topic not in existing:
                topics.remove(name)  # then it does not look like a queue's
            topics = [topic for topic in topics if topic in existing]
            recorded = name in records.own and existing.isdisjoint(topics_of(records.own[name]))
            if not recorded and not any(topic not in users for topic in topics):
                raise QueueNotFound(
                    f"nothing is left over from a queue {name!r} that belongs to no other queue"
                )
        kept = {topic: users[topic] for topic in topics if topic in users}
        return [topic for topic in topics if topic not in kept], kept

    def _check_empty(self, name: str) -> None:
        counted = self.stats(name)
        held = {
            "waiting": counted.depth,
            "in flight": counted.in_flight,
            "dead letters": counted.dead_letters,
        }
        if any(held.values()):
            shown = ", ".join(f"{count} {what}" for what, count in held.items() if count)
            raise TopicError(f"queue {name!r} is not empty ({shown}); nothing was deleted")

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
        if known is None:
            self._check_no_part(settings.name)
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
        groups = self._topics.groups()
        records, error = self._records()
        if queue is not None:
            return self._diagnosis(queue, groups, records)
        registered, damaged = registry.every_queue()
        names = [one.name for one in registered]
        told = Records() if records is None else records
        used = {topic for one in (*registered, *told.own.values(), *told.others) for topic in topics_of(one)}
        # What a queue uses whose settings can't be read is not known.
        found = [] if damaged or error else doctor.unregistered(self._topics.names(), used)
        found += doctor.left_over("registry", registry.stray_leftovers())
        found += doctor.settings_topic(self._settings_topic(), error, names)
        nobodys = [topic for one in told.own.values() if one.name not in names for topic in topics_of(one)]
        found += doctor.records_of_no_queue(told, names, self._topics.describe(nobodys, with_config=True))
        for name in names:
            with contextlib.suppress(QueueNotFound):  # removed meanwhile
                found += self._diagnosis(name, groups, records)
        return found

    def _settings_topic(self) -> TopicInfo | None:
        try:
            found = self._topics.describe([SETTINGS_TOPIC], with_config=True)
        except AccessDenied:  # its settings are not for us to see
            found = self._topics.describe([SETTINGS_TOPIC])
        return found.get(SETTINGS_TOPIC)

    def _records(self) -> tuple[Records | None, Unavailable | None]:
        """What kmq.queues says, or why that is not known."""
        try:
            return SettingsMirror(self._connection).records(), None
        except Unavailable as error:
            return None, error

    def diagnose(self, queue: str) -> list[Finding]:
        """The quick part of doctor(), for a tracker that begins to serve a queue.

        Leaves out other consumer groups, which take a request for each group of the cluster, and unusable
        znodes, for which all znodes of the queue are read.
        """
        return doctor.check(self._facts(*self._find(queue), self._records()[0]))

    def leftovers(self, queue: str | None = None) -> list[Leftover]:
        """Unusable znodes, for clear_leftovers(): of one queue, or of all queues and trackers."""
        if queue is not None:
            return self._registry.leftovers(queue)
        found = self._registry.stray_leftovers()
        for name in filter(is_topic_name, self._registry.names()):
            found += self._registry.leftovers(name)
        return found

    def clear_leftovers(self, leftovers: Iterable[Leftover]) -> list[Leftover]:
        """Remove those that are still as they were found; returns them."""
        return self._registry.clear(leftovers)

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
        return bool(self._zookeeper.hosts)

    @property
    def _topics(self) -> Topics:
        if self._topics_ is None:
            self._topics_ = Topics(self._connection, self._timeout_s, self._clock)
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
                    self._zookeeper.hosts,
                    timeout=self._timeout_s,
                    security=self._zookeeper.security,
                )
            )
            self._registry_ = Registry(client, self._connection.root, timeout=self._timeout_s)
        return self._registry_

    def _delete(self, name: str, topics: list[str]) -> None:
        self._topics.delete(topics)
        self._mirror(lambda mirror: mirror.remove(name))

    def _mirror(self, change: Callable[[SettingsMirror], None]) -> None:
        """Tell clients; where we may not, trackers do, and the administrator is told."""
        try:
            change(SettingsMirror(self._connection))
        except AccessDenied as error:
            _log.error("clients are not told of it: %s", error)

    def _registered(self, name: str) -> RegisteredQueue | None:
        try:
            return self._registry.get(name)
        except QueueNotFound:
            return None

    def _find(self, queue: str | QueueSettings) -> tuple[QueueSettings, RegisteredQueue | None]:
        name = queue.name if isinstance(queue, QueueSettings) else queue
        if not self._has_registry:
            return settings_of(queue, self._connection), None
        default = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
        known = self._registered(name)
        if isinstance(queue, QueueSettings) or known is None:
            return default, known
        return known.settings, known

    def _tracked(
        self, name: str, known: RegisteredQueue | None
    ) -> tuple[dict[int, str], dict[int, StoredOffset]]:
        if known is None:
            return {}, {}
        return self._registry.owners(name), self._registry.offsets(name)

    def _check_no_part(self, name: str) -> None:
        """Raise ConfigError where `name`, which is no registered queue, is another topic of one."""
        registered = self._registry.every_queue()[0] if self._has_registry else []
        for one in registered:
            if name in topics_of(one):
                raise ConfigError(f"{name!r} is the {topics_of(one)[name]} of queue {one.name!r}, no queue")
        check_new_queue_name(name)

    def _check_retention(self, settings: QueueSettings, retention: Duration | None) -> None:
        if retention is not None:
            check_retention(settings, duration_ms(retention, "retention"))
        else:
            names = [settings.name, settings.markers_topic]
            topics = self._topics.describe(names, with_config=True).values()
            kept = [int(topic.config.get("retention.ms", "-1")) for topic in topics]
            limits = [ms for ms in kept if ms != -1]
            if limits:
                check_retention(settings, min(limits))

    def _end_all(
        self,
        settings: QueueSettings,
        stored: dict[int, StoredOffset],
        before: dict[int, int],
        writer: MarkerWriter,
    ) -> None:
        for partition, state in stats.open_entries(self._connection, settings, stored).items():
            for entry in state:
                if entry.offset < before.get(partition, 0):
                    writer.post(Marker(partition, entry.offset, Op.END))
        if writer.flush(_FLUSH_S):
            raise Unavailable(f"markers topic {settings.markers_topic}: end markers are not confirmed")

    def _diagnosis(
        self, queue: str | QueueSettings, groups: Mapping[str, list[str]], records: Records | None
    ) -> list[Finding]:
        try:
            settings, known = self._find(queue)
        except ConfigError as error:
            name = queue if isinstance(queue, str) else queue.name
            return [
                doctor.unreadable(name, error),
                *doctor.left_over(name, self._registry.leftovers(name)),
            ]
        return doctor.check(
            dataclasses.replace(
                self._facts(settings, known, records),
                groups=tuple(groups.get(settings.name, ())),
                shared=tuple(shared_topics(settings, self._registry.every_queue()[0])),
                leftovers=tuple(self._registry.leftovers(settings.name)),
            )
        )

    def _facts(
        self, settings: QueueSettings, known: RegisteredQueue | None, records: Records | None
    ) -> Facts:
        """What doctor.check() looks at, without `groups`, `shared` and `leftovers`."""
        topics = self._topics.describe(list(topics_of(settings)), with_config=True)
        if known is None and settings.name not in topics:
            raise _not_found(settings.name)
        owners, stored = self._tracked(settings.name, known)
        messages, markers = topics.get(settings.name), topics.get(settings.markers_topic)
        count = messages.partitions if messages else 0
        committed: dict[int, tuple[int, int | None]] = {}
        if messages is not None:
            ids = TopicIds(messages.topic_id, markers.topic_id if markers else "")
            committed = stats.committed_offsets(self._connection, settings, count, ids)
        return Facts(
            settings=settings,
            registered=known,
            topics=topics,
            brokers=self._topics.brokers(),
            trackers=tuple(self._registry.trackers()),
            owners=owners,
            stored=stored,
            markers_log=self._topics.offsets(markers.name, range(markers.partitions)) if markers else {},
            markers_latest=(
                self._topics.latest_timestamps(markers.name, range(markers.partitions)) if markers else {}
            ),
            now_ms=self._clock.wall_ms(),
            queue_log=self._topics.offsets(messages.name, range(count)) if messages else {},
            committed={partition: offset for partition, (offset, _) in committed.items()},
            records=records,
        )


def _check_topics(settings: QueueSettings, others: Iterable[QueueSettings]) -> None:
    """Raise ConfigError unless the queue's topics are four, and those of no other queue.

    Markers say only partition and offset: those of two queues can't be told apart.
    """
    if len(topics_of(settings)) < 4:
        raise ConfigError(
            f"markers_topic: {settings.markers_topic!r} is that of the dead letters; choose another name"
        )
    for shared in shared_topics(settings, others):
        fields = {"queue topic": "name", "markers topic": "markers_topic"}
        field = fields.get(shared.role, "dead_letter_topic")
        raise ConfigError(
            f"{field}: {shared.name!r} is the {shared.role_there} of queue {shared.other!r}; "
            "each queue needs topics of its own"
        )


def _differences(before: QueueSettings, after: QueueSettings) -> Iterable[str]:
    new = dataclasses.asdict(after)
    for key, old in dataclasses.asdict(before).items():
        if new[key] != old:
            yield f"{key}: {old}, not {new[key]}"


def _not_found(name: str) -> QueueNotFound:
    return QueueNotFound(f"queue {name!r}: there is no such queue; create it with: kmq queue create {name}")
