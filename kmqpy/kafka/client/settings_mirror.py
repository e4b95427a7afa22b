"""The settings of all queues for clients, which have no ZooKeeper: a copy of the registry in a topic.

The topic kmq.queues is compacted, with one partition; one record a queue, its key the path of the queue's
znode (so several roots share a Kafka), its value the settings as JSON, and the ids of the topics that belong
together (rule R24). `kmq queue` writes it, trackers add and update; nobody but `kmq queue delete` takes a
record away, whatever becomes of ZooKeeper (rule R25).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import AccessDenied, ConfigError, TopicError, Unavailable
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.settings import (
    SETTINGS_TOPIC,
    KafkaConnection,
    QueueSettings,
    check_connection,
    is_topic_name,
)
from kmqpy.kafka.topic_identity import find_stale_markers, stale_markers_error
from kmqpy.kafka.topic_names import markers_topics
from kmqpy.kafka.topics import QueueTopics, Topics

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0
"""How long reading all of it may take; it is small, unless others write to it."""
_MAX_CACHE_AGE_S = 10.0
"""How long what was read is used again in this process."""
_MAX_RECORD_BYTES = 64 * 1024
"""Bytes; what is larger is not ours."""
_MAX_VALUES_PER_KEY = 8
"""Last records of a key: those that can't be read hide none before them (rule R21)."""

_DEFAULTS_APPLY = "what clients are not told of a queue's settings counts as the default"

_TOPIC_IDS_FIELD = "topic_ids"
"""The key of the ids in a record; versions without them leave it out as one of a newer version."""

_ValuesByKey = dict[bytes, deque[bytes]]


class _TopicTooLong(Unavailable):
    """There is more than can be read in time."""

    def __init__(self) -> None:
        super().__init__(
            f"topic {SETTINGS_TOPIC} is too long to be read; see who writes to it, and that its "
            "cleanup.policy is compact"
        )


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of kmq.queues.

    own         by queue, what its last readable record says
    unreadable  those of our queues whose last record can't be read
    others      the queues of other roots
    strangers   names of queues of other roots whose records can't be read
    """

    own: Mapping[str, QueueSettings] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    others: tuple[QueueSettings, ...] = ()
    unreadable_others: frozenset[str] = frozenset()


_cache: dict[tuple[str, int], tuple[float, _ValuesByKey]] = {}
_logged: set[str] = set()


def settings_of(queue: str | QueueSettings, connection: KafkaConnection) -> QueueSettings:
    """The settings that a client of `queue` works with: the queue's own, where `queue` leaves them open.

    A setting that is not known has its default: there is no record of the queue, no topic kmq.queues, or no
    right to read it. In the latter two cases a warning is logged, once for each process and cluster.

    Raises ConfigError where `queue` contradicts the queue's own settings, Unavailable.
    """
    check_connection(connection)
    given = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
    given_fields = given.given_fields
    if given_fields is None:
        return given
    mirror = SettingsMirror(connection)
    known = mirror.recent(given.name)
    if known is None or _contradictions(given, given_fields, known):  # it may be out of date
        known = mirror.find(given.name)
    if known is None:
        return QueueSettings.stored(dataclasses.asdict(given))
    for problem in _contradictions(given, given_fields, known):
        raise ConfigError(problem)
    return known


def _contradictions(given: QueueSettings, given_fields: Iterable[str], known: QueueSettings) -> list[str]:
    return [
        f"{name}: {getattr(given, name)!r} is not what queue {given.name!r} was made with, "
        f"{getattr(known, name)!r} (topic {SETTINGS_TOPIC}); leave it out, or change the queue"
        for name in sorted(given_fields)
        if getattr(given, name) != getattr(known, name)
    ]


def check_topics(queue: QueueSettings, there: QueueTopics, connection: KafkaConnection) -> None:
    """Raise TopicError where the topic of `queue` was recreated, but not its markers topic (rule R24).

    `queue` is what settings_of() returned, `there` are the topics there are. Reads kmq.queues only where this
    process has not done so in the last seconds, or the topics don't go with what it has read.
    """
    now = {queue.name: there.ids.queue, queue.markers_topic: there.ids.markers}
    before = queue.topic_ids
    if queue.given_fields is None and not before:
        before = SettingsMirror(connection).topic_ids(queue.name)
    if find_stale_markers(queue, before, now):  # or is it out of date?
        before = SettingsMirror(connection).topic_ids(queue.name, anew=True)
        if find_stale_markers(queue, before, now):
            raise stale_markers_error(queue)


class SettingsMirror:
    """Reads and writes the records of the queues under the connection's root.

    Every call may raise Unavailable; those that write AccessDenied. `topics` describes the topics for all
    calls; by default each call makes a Topics of its own.
    """

    def __init__(self, connection: KafkaConnection, topics: Topics | None = None) -> None:
        self._connection = connection
        self._topics = topics
        self._cluster = librdkafka.connection_key(connection)

    def recent(self, name: str) -> QueueSettings | None:
        """The settings of queue `name` as this process read them in the last seconds, if it did."""
        read_at, found = _cache.get(self._cluster, (0.0, {}))
        if SYSTEM_CLOCK.monotonic() - read_at > _MAX_CACHE_AGE_S:
            return None
        return self._last_readable(name, found)

    def find(self, name: str) -> QueueSettings | None:
        """The settings of queue `name`; None, maybe with a warning, where they are not known."""
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
        """Return the ids of the topics of queue `name`, as this process has read them in the last seconds.

        Reads them now if it has not, or if `anew` is True. Empty where they are not known.
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

    def records(self) -> Records | None:
        """Return what the topic holds; None if there is no such topic. Raises Unavailable, AccessDenied."""
        found = self._read()
        if found is None:
            return None
        own, unreadable, others, unreadable_others = {}, set(), [], set()
        for key, values in found.items():
            prefix, _, name = key.decode(errors="replace").rpartition("/")
            readable = [one for value in values if (one := _readable_settings(name, value)) is not None]
            if key != self._key(name):
                if prefix.startswith("/") and prefix.endswith("/queues"):
                    if readable:
                        others.append(readable[-1])
                    elif is_topic_name(name):
                        unreadable_others.add(name)
                continue
            if readable:
                own[name] = readable[-1]
            if is_topic_name(name) and _readable_settings(name, values[-1]) is None:
                unreadable.add(name)
        return Records(
            own=own,
            unreadable=frozenset(unreadable),
            others=tuple(others),
            unreadable_others=frozenset(unreadable_others),
        )

    def write(self, queues: Collection[QueueSettings], *, certain: bool = False) -> None:
        """Write records that are missing or differ; creates kmq.queues, replicated like the queues' topics.

        To settings that hold the ids of the queue topic and the markers topic, the ids of the dead-letter
        topics are added. The ids of a topic that was recreated while its markers topic was not are left out,
        so that this stays known until it is mended; if that topic is a queue topic, TopicError is raised in
        the end. `certain`: the ids given are those of topics that belong together, whatever a record says.
        """
        topics = self._topics or Topics(self._connection)
        found = self._read(topics)
        if found is None:
            described = topics.describe([queue.name for queue in queues])
            if not described:
                return  # queues without topics need no clients
            topics.create_compacted(SETTINGS_TOPIC, max(topic.replication for topic in described.values()))
            found = {}
        # The ids of queue and markers topic were read together, and belong together.
        names = [name for queue in queues if queue.topic_ids for name in _dead_letters(queue)]
        dead: dict[str, str] = {}
        with contextlib.suppress(AccessDenied):  # trackers don't need them
            dead = {name: topic.topic_id for name, topic in topics.describe(names).items()}
        changed: dict[bytes, bytes | None] = {}
        with_stale_markers = []
        for queue in queues:
            before = self._last_readable(queue.name, found)
            recorded = {} if before is None else before.topic_ids
            now = {**{name: dead[name] for name in _dead_letters(queue) if name in dead}, **queue.topic_ids}
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
        """Delete the record of a queue that was deleted; does nothing where there is none."""
        with contextlib.suppress(_TopicTooLong):
            if self._key(name) not in (self._read() or {}):
                return
        self._produce({self._key(name): None})

    def _key(self, name: str) -> bytes:
        return f"{self._connection.root}/queues/{name}".encode()

    def _last_readable(self, name: str, found: _ValuesByKey) -> QueueSettings | None:
        """The last value of the queue that can be read."""
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

    def _read(self, topics: Topics | None = None) -> _ValuesByKey | None:
        """Return the last value of each key; None where there is no topic.

        Raises AccessDenied, Unavailable, and _TooLong where others have written too much.
        """
        # Asked first: it takes a consumer ten times as long to find out that there is none.
        topics = topics or self._topics or Topics(self._connection)
        if SETTINGS_TOPIC not in topics.describe([SETTINGS_TOPIC]):
            _cache[self._cluster] = SYSTEM_CLOCK.monotonic(), {}
            return None
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
            # Uncommitted: nobody's open transaction may hide what comes after it.
            partition_reader.scan(self._connection, SETTINGS_TOPIC, {0: 0}, visit, uncommitted=True)
        except TopicError:  # it has just been deleted
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

        timeout_s = librdkafka.REQUEST_TIMEOUT_S
        # Not idempotent, which takes half a second more: a record written twice says the same.
        settings = {"message.timeout.ms": int(timeout_s * 1000), "enable.idempotence": False}
        producer = librdkafka.new_producer(self._connection, settings)
        with librdkafka.kafka_errors(doing, self._connection):
            for key, value in records.items():
                producer.produce(SETTINGS_TOPIC, value, key, 0, on_delivery=report)
        left = producer.flush(timeout_s + 1)
        _cache.pop(self._cluster, None)
        if left or failed:
            error = failed[0] if failed else KafkaError(KafkaError._MSG_TIMED_OUT)
            raise librdkafka.translated(error, doing, self._connection)

    def _warn(self, what: str, why: str) -> None:
        """Log a warning, once for each kind in a process and cluster."""
        text = f"topic {SETTINGS_TOPIC} {what}"
        if f"{self._cluster} {text}" not in _logged:
            _logged.add(f"{self._cluster} {text}")
            _log.warning(text, extra={"bootstrap": self._connection.bootstrap, "why": why})


def _parse_record(value: bytes) -> QueueSettings:
    """The settings in a record, with the ids of topics that it says; raises ConfigError."""
    settings = QueueSettings.from_json(value, newer=True)
    ids = json.loads(value).get(_TOPIC_IDS_FIELD)
    if not isinstance(ids, dict):
        return settings
    return settings.with_topic_ids({name: one for name, one in ids.items() if one and isinstance(one, str)})


def _readable_settings(name: str, value: bytes) -> QueueSettings | None:
    """The settings in a record of queue `name`; None where it says none, or those of another queue."""
    try:
        settings = _parse_record(value)
    except ConfigError:
        return None
    return settings if settings.name == name else None


def _encode_record(queue: QueueSettings, ids: Mapping[str, str]) -> bytes:
    """The value of a queue's record."""
    values = dataclasses.asdict(queue)
    return json.dumps({**values, _TOPIC_IDS_FIELD: dict(ids)} if ids else values, sort_keys=True).encode()


def _dead_letters(queue: QueueSettings) -> list[str]:
    """The names of the dead-letter topic and of its markers topic."""
    (_, dead) = markers_topics(queue).items()
    return list(dead)


def _ids_to_write(
    queue: QueueSettings, recorded: Mapping[str, str], now: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The ids that the record is to say, and what find_stale_markers() says of them.

    Topics with messages and their markers topics go together: of such a pair, both ids are taken from `now`
    or none.
    """
    earlier = find_stale_markers(queue, recorded, now)
    ids = {}
    for messages, markers in markers_topics(queue).items():
        both = {messages, markers}
        told = recorded if messages in earlier or not both <= now.keys() else now
        ids.update({name: told[name] for name in both & told.keys()})
    return ids, earlier


def _is_not_allowed(error: AccessDenied) -> bool:
    """Return True if Kafka knows who we are, and does not allow this request."""
    cause = librdkafka.error_of(error.__cause__) if error.__cause__ is not None else None
    return cause is not None and cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
