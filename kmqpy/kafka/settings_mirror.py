"""Copies the settings of all queues from the registry to the topic kmq.queues, and reads them there.

Clients read the topic, because they don't reach ZooKeeper, where the registry is.

The topic is compacted and has one partition, with one record for each queue. The key is the path of the
queue's znode in the registry, so several roots can share a Kafka. The value is JSON: the settings, and the
ids of the topics that belong together (rule R24 of docs/rules.md). `kmq queue` writes records, and trackers
add and update them. Only `kmq queue delete` removes a record, whatever happens to ZooKeeper (rule R25).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import AccessDenied, ConfigError, KmqError, TopicError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka, partition_reader
from kmqpy.kafka.settings import (
    MAX_PRIORITIES,
    SETTINGS_TOPIC,
    KafkaConnection,
    QueueSettings,
    check_connection,
    is_topic_name,
)
from kmqpy.kafka.topic_identity import find_stale_markers, stale_markers_error
from kmqpy.kafka.topic_names import markers_topics, topics_of
from kmqpy.kafka.topics import QueueTopics, Topics

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0
"""Reading of the topic is given up after this time. The topic is small, unless others write to it."""
_MAX_CACHE_AGE_S = 10.0
"""This process uses records again for this long before it reads the topic again."""
_CONFIRMED_WITHIN_S = 3.0
"""Messages in lanes that were confirmed later may stand in one that is gone; see CurrentSettings.keeps()."""
_MAX_RECORD_BYTES = 64 * 1024
"""A record whose key and value have more bytes than this is ignored: kmqpy has not written it."""
_MAX_VALUES_PER_KEY = 8
"""The number of last values kept of each key, so that unreadable values hide none before them (rule R21)."""

_DEFAULTS_APPLY = (
    "clients use the default of each setting that their program does not give, and write JVM markers"
)

_TOPIC_IDS_FIELD = "topic_ids"
"""The JSON field of the topic ids; versions of kmqpy that don't know it leave it out when they read."""

_ValuesByKey = dict[bytes, deque[bytes]]
"""The last values of each key, in the order in which they were written."""


class _TopicTooLong(Unavailable):
    """The topic has more records than can be read within `_READ_TIMEOUT_S`."""

    def __str__(self) -> str:
        return (
            f"topic {SETTINGS_TOPIC} is too long to be read; see who writes to it, and that its "
            "cleanup.policy is compact"
        )


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of kmq.queues.

    own                by queue under the connection's root: the settings in the last record that can be read
    unreadable         the queues under the connection's root whose last record can't be read
    others             the settings of queues under other roots
    unreadable_others  names of queues under other roots whose records can't be read
    """

    own: Mapping[str, QueueSettings] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    others: tuple[QueueSettings, ...] = ()
    unreadable_others: frozenset[str] = frozenset()


_cache: dict[tuple[str, int], tuple[float, _ValuesByKey]] = {}
"""By Kafka cluster: the monotonic time of the last read, and the values that it found."""
_logged: set[str] = set()
"""Warnings that this process has logged, each with its Kafka cluster."""


def settings_of(queue: str | QueueSettings, connection: KafkaConnection) -> QueueSettings:
    """Return the settings that a client of `queue` works with: those given, and for the rest the queue's own.

    A setting that is not known has its default, and `markers` are JVM markers. That is so if there is no
    readable record of the queue, if there is no topic kmq.queues, if the client may not read that topic, or
    if the topic is too long. A warning of each of these cases, except a missing record, is logged once in
    each process and cluster.

    Raises ConfigError where `queue` contradicts the queue's own settings, Unavailable.
    """
    check_connection(connection)
    given = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
    given_fields = given.given_fields
    if given_fields is None:
        return given
    mirror = SettingsMirror(connection)
    known = mirror.recent(given.name)
    if known is None or _contradictions(given, given_fields, known):  # the cache may be out of date
        known = mirror.find(given.name)
    if known is None:
        return QueueSettings.stored(dataclasses.asdict(given.unregistered()))
    for problem in _contradictions(given, given_fields, known):
        raise ConfigError(problem)
    return known


class CurrentSettings:
    """The settings of a queue that is open: as they were when it was opened, until its lanes change."""

    def __init__(
        self, settings: QueueSettings, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.value = settings
        self._connection = connection
        self._clock = clock
        self._asked_at = clock.monotonic()
        self._known_at = -math.inf  # a cache may have had what is given here for a while

    def recent(self) -> QueueSettings:
        """Return them with the lanes as of 10 s ago or later, or as far as Kafka answers."""
        if self._clock.monotonic() - self._asked_at > _MAX_CACHE_AGE_S:
            return self.refresh()
        return self.value

    def refresh(self) -> QueueSettings:
        """Read them anew, and return them."""
        self._asked_at = self._clock.monotonic()
        with contextlib.suppress(KmqError):
            found = SettingsMirror(self._connection).find(self.value.name)
            if found is not None and (found.lane_names, found.draining_lanes) != (
                self.value.lane_names,
                self.value.draining_lanes,
            ):
                self.value = found
            self._known_at = self._asked_at
        return self.value

    def keeps(self, lanes: Collection[str], since: float) -> bool:
        """False if messages that Kafka has confirmed in these lanes by now may go with them unseen.

        `since`: a monotonic time before recent() was asked for the lanes. Whoever removes a lane looks into
        it for the last time 15 s after saying so, at the earliest (`QUIET_S` in lane_removal). So what was
        confirmed 13 s after the settings were read is seen.
        """
        now = self._clock.monotonic()
        if since - self._known_at > _MAX_CACHE_AGE_S or now - since > _CONFIRMED_WITHIN_S:
            self.refresh()
            if self._known_at < now:
                return False
        return set(lanes) <= {self.value.priority_lane(level).name for level in range(1, MAX_PRIORITIES)}


def _contradictions(given: QueueSettings, given_fields: Iterable[str], known: QueueSettings) -> list[str]:
    return [
        f"{name}: {getattr(given, name)!r} is not what queue {given.name!r} was made with, "
        f"{getattr(known, name)!r} (topic {SETTINGS_TOPIC}); leave it out, or change the queue"
        for name in sorted(given_fields)
        if getattr(given, name) != getattr(known, name)
    ]


def check_topics(queue: QueueSettings, there: QueueTopics, connection: KafkaConnection) -> None:
    """Raise TopicError if the topic of `queue`, or lane, was recreated, and its markers topic was not (R24).

    `queue` is the result of settings_of(); `there` are the topics that exist. Reads kmq.queues only if this
    process has not done so in the last 10 s, or if the topics don't match the ids that it has read.
    """
    now = {queue.name: there.ids.queue, queue.markers_topic: there.ids.markers}
    before = queue.topic_ids
    if queue.given_fields is None and not before:
        before = SettingsMirror(connection).topic_ids(queue.queue_name)
    if find_stale_markers(queue, before, now):  # unless the cache is out of date
        before = SettingsMirror(connection).topic_ids(queue.queue_name, anew=True)
        if find_stale_markers(queue, before, now):
            raise stale_markers_error(queue)


class SettingsMirror:
    """Reads and writes the records of the queues under the connection's root.

    Every call that asks Kafka may raise Unavailable and AccessDenied. But find() and topic_ids() raise no
    AccessDenied if Kafka knows this client and only does not allow it to read the topic. `topics` is for
    write(), which makes a Topics of its own by default.
    """

    def __init__(self, connection: KafkaConnection, topics: Topics | None = None) -> None:
        self._connection = connection
        self._topics = topics
        self._cluster = kafka_errors.connection_key(connection)

    def recent(self, name: str) -> QueueSettings | None:
        """Return the settings of queue `name` if this process has read them in the last 10 s; else None."""
        read_at, found = _cache.get(self._cluster, (0.0, {}))
        if SYSTEM_CLOCK.monotonic() - read_at > _MAX_CACHE_AGE_S:
            return None
        return self._last_readable(name, found)

    def find(self, name: str) -> QueueSettings | None:
        """Read the settings of queue `name` now; None if they are not known.

        Logs a warning if the topic is missing, is too long or may not be read.
        """
        try:
            found = self._read()
        except AccessDenied as error:
            if not _is_not_allowed(error):
                raise
            _cache[self._cluster] = SYSTEM_CLOCK.monotonic(), {}
            self._warn(f"can't be read; {_DEFAULTS_APPLY}", str(error))
            return None
        except _TopicTooLong as error:
            self._warn(f"is too long to be read; {_DEFAULTS_APPLY}", str(error))
            return None
        if found is None:
            self._warn(
                f"does not exist; {_DEFAULTS_APPLY}", "kmq queue create, kmq queue alter and trackers make it"
            )
            return None
        return self._last_readable(name, found)

    def topic_ids(self, name: str, *, anew: bool = False) -> Mapping[str, str]:
        """Return the ids of the topics of queue `name`, as this process has read them in the last 10 s.

        Reads the ids now if the process has not, or if `anew` is True. Empty if the ids are not known.
        """
        read_at, found = _cache.get(self._cluster, (-_MAX_CACHE_AGE_S, {}))
        if anew or SYSTEM_CLOCK.monotonic() - read_at > _MAX_CACHE_AGE_S:
            try:
                found = self._read() or {}
            except _TopicTooLong:
                found = {}
            except AccessDenied as error:
                if not _is_not_allowed(error):
                    raise
                found = {}
        known = self._last_readable(name, found)
        return {} if known is None else known.topic_ids

    def records(self, only: str | None = None) -> Records | None:
        """Return the contents of kmq.queues, or `only` of this queue; None if there is no such topic."""
        found = self._read()
        if found is None:
            return None
        own, unreadable, others, unreadable_others = {}, set(), [], set()
        for key in found if only is None else found.keys() & {self._key(only)}:
            prefix, _, name = key.decode(errors="replace").rpartition("/")
            newest_first = (_readable_settings(name, value) for value in reversed(found[key]))
            newest = next(newest_first)
            readable = newest or next(filter(None, newest_first), None)
            if key != self._key(name):
                if prefix.startswith("/") and prefix.endswith("/queues"):
                    if readable:
                        others.append(readable)
                    elif is_topic_name(name):
                        unreadable_others.add(name)
                continue
            if readable:
                own[name] = readable
            if is_topic_name(name) and newest is None:
                unreadable.add(name)
        return Records(
            own=own,
            unreadable=frozenset(unreadable),
            others=tuple(others),
            unreadable_others=frozenset(unreadable_others),
        )

    def write(self, queues: Collection[QueueSettings], *, certain: bool = False) -> None:
        """Write the records of these queues that are missing or differ; create kmq.queues if it is missing.

        A new kmq.queues gets as many replicas as the queue topic that has the most. To settings that hold the
        ids of the queue topic and the markers topic, those of its other topics are added.

        A topic that was recreated while its markers topic was not keeps the ids that its record has, so that
        the fault stays known until it is mended. If that topic is a queue topic, TopicError is raised once
        all records are written. `certain`: the ids given are those of topics that belong together, whatever a
        record says.
        """
        topics = self._topics or Topics(self._connection)
        found = self._read()
        if found is None:
            described = topics.describe([queue.name for queue in queues])
            if not described:
                return  # queues without topics need no clients
            topics.create_compacted(SETTINGS_TOPIC, max(topic.replication for topic in described.values()))
            found = {}
        # The ids of queue and markers topic were read together, and belong together.
        names = [name for queue in queues if queue.topic_ids for name in _other_topics(queue)]
        others: dict[str, str] = {}
        with contextlib.suppress(AccessDenied):  # trackers work without these ids
            others = {name: topic.topic_id for name, topic in topics.describe(names).items()}
        changed: dict[bytes, bytes | None] = {}
        with_stale_markers = []
        for queue in queues:
            before = self._last_readable(queue.name, found)
            recorded = {} if before is None else before.topic_ids
            now = {
                **{name: others[name] for name in _other_topics(queue) if name in others},
                **queue.topic_ids,
            }
            believed = {name: one for name, one in recorded.items() if not certain or name not in now}
            ids, earlier = _ids_to_write(queue, believed, now if queue.topic_ids else {})
            if queue.name in earlier:
                with_stale_markers.append(queue)
            last = found.get(self._key(queue.name), (b"",))[-1]
            # A record that can't be read hides earlier ones as soon as Kafka has compacted these away.
            if before != queue or ids != recorded or _readable_settings(queue.name, last) is None:
                changed[self._key(queue.name)] = _encode_record(queue, ids)
        self._produce(changed)
        if with_stale_markers:
            raise stale_markers_error(with_stale_markers[0])

    def remove(self, name: str) -> None:
        """Delete the record of a queue that was deleted; does nothing if there is none."""
        with contextlib.suppress(_TopicTooLong):
            if self._key(name) not in (self._read() or {}):
                return
        self._produce({self._key(name): None})

    def _key(self, name: str) -> bytes:
        return f"{self._connection.root}/queues/{name}".encode()

    def _last_readable(self, name: str, found: _ValuesByKey) -> QueueSettings | None:
        """Return the settings in the last value of queue `name` that can be read; warn of unreadable ones."""
        for value in reversed(found.get(self._key(name), ())):
            try:
                settings = _parse_record(value)
            except ConfigError as error:
                self._warn(
                    f"has a record of queue {name} that can't be read; it counts for nothing", str(error)
                )
                continue
            if settings.name == name:
                return settings
        return None

    def _read(self) -> _ValuesByKey | None:
        """Return the last values of each key, and cache them; None if there is no such topic.

        Raises AccessDenied, Unavailable, and _TopicTooLong if there are too many records to read in time.
        """
        found: _ValuesByKey = {}
        deadline = SYSTEM_CLOCK.monotonic() + _READ_TIMEOUT_S

        def visit(record: Any) -> None:
            key, value = record.key(), record.value()
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise _TopicTooLong
            if key is None or len(key) + len(value or b"") > _MAX_RECORD_BYTES:
                return
            if value is None:
                found.pop(key, None)
            else:
                found.setdefault(key, deque(maxlen=_MAX_VALUES_PER_KEY)).append(value)

        try:
            # Uncommitted: nobody's open transaction may hide the records after it.
            partition_reader.scan(self._connection, SETTINGS_TOPIC, {0: 0}, visit, uncommitted=True)
        except TopicError:  # there is none
            _cache[self._cluster] = SYSTEM_CLOCK.monotonic(), {}
            return None
        _cache[self._cluster] = SYSTEM_CLOCK.monotonic(), found
        return found

    def _produce(self, records: dict[bytes, bytes | None]) -> None:
        if not records:
            return
        doing = f"write to {SETTINGS_TOPIC}"
        failed: list[KafkaError] = []

        def report(error: KafkaError | None, _record: Any) -> None:
            if error is not None:
                failed.append(error)

        timeout_s = self._connection.timeout_s
        # Not idempotent, which takes half a second more: a record written twice says the same.
        settings = {"message.timeout.ms": int(timeout_s * 1000), "enable.idempotence": False}
        producer = librdkafka.new_producer(self._connection, settings)
        with kafka_errors.translating(doing, self._connection):
            for key, value in records.items():
                producer.produce(SETTINGS_TOPIC, value, key, 0, on_delivery=report)
        left = producer.flush(timeout_s + 1)
        _cache.pop(self._cluster, None)
        if left or failed:
            error = failed[0] if failed else KafkaError(KafkaError._MSG_TIMED_OUT)
            raise kafka_errors.translated(error, doing, self._connection)

    def _warn(self, what: str, why: str) -> None:
        """Log a warning, once for each kind in a process and cluster."""
        text = f"topic {SETTINGS_TOPIC} {what}"
        if f"{self._cluster} {text}" not in _logged:
            _logged.add(f"{self._cluster} {text}")
            _log.warning(text, extra={"bootstrap": self._connection.bootstrap, "why": why})


def write_record(settings: QueueSettings, mirror: SettingsMirror) -> None:
    """Write the record of one queue; see SettingsMirror.write()."""
    mirror.write([settings])


def _parse_record(value: bytes) -> QueueSettings:
    """Return the settings in the value of a record, with the topic ids in it; raises ConfigError."""
    settings = QueueSettings.from_json(value, newer=True)
    ids = json.loads(value).get(_TOPIC_IDS_FIELD)
    if not isinstance(ids, dict):
        return settings
    return settings.with_topic_ids({name: one for name, one in ids.items() if one and isinstance(one, str)})


def _readable_settings(name: str, value: bytes) -> QueueSettings | None:
    """Return the settings in a record of queue `name`; None if unreadable, or of another queue."""
    try:
        settings = _parse_record(value)
    except ConfigError:
        return None
    return settings if settings.name == name else None


def _encode_record(queue: QueueSettings, ids: Mapping[str, str]) -> bytes:
    values = dataclasses.asdict(queue)
    return json.dumps({**values, _TOPIC_IDS_FIELD: dict(ids)} if ids else values, sort_keys=True).encode()


def _other_topics(queue: QueueSettings) -> list[str]:
    """Return the names of the topics of dead letters and lanes, without the queue topic and its markers."""
    return [name for name in topics_of(queue) if name not in (queue.name, queue.markers_topic)]


def _ids_to_write(
    queue: QueueSettings, recorded: Mapping[str, str], now: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the topic ids to write to the record, and the result of find_stale_markers().

    A topic with messages and its markers topic go together: the ids of both are taken from `now`, or of both
    from `recorded`.
    """
    earlier = find_stale_markers(queue, recorded, now)
    ids = {}
    for messages, markers in markers_topics(queue).items():
        both = {messages, markers}
        told = recorded if messages in earlier or not both <= now.keys() else now
        ids.update({name: told[name] for name in both & told.keys()})
    return ids, earlier


def _is_not_allowed(error: AccessDenied) -> bool:
    """Return True if Kafka knows this client, but does not allow it to use the topic."""
    cause = kafka_errors.error_of(error.__cause__) if error.__cause__ is not None else None
    return cause is not None and cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
