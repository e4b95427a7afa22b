"""The settings of all queues for clients, which have no ZooKeeper: a copy of the registry in a topic.

The topic kmq.queues is compacted, with one partition; one record a queue, its key the path of the queue's
znode (so several roots share a Kafka), its value the settings as JSON. `kmq queue` writes it, trackers add
and update; nobody but `kmq queue delete` takes a record away, whatever becomes of ZooKeeper (rule R25).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import AccessDenied, ConfigError, TopicError
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.settings import SETTINGS_TOPIC, Connection, QueueSettings, check_connection
from kmqpy.kafka.topics import Topics

_log = logging.getLogger(__name__)

_READ_S = 5.0
"""How long reading all of it may take; it is small, unless others write to it."""
_USE_S = 10.0
"""How long what was read is used again in this process."""
_LARGEST_RECORD = 64 * 1024
"""Bytes; what is larger is not ours."""
_KEPT = 8
"""Last records of a key: those that can't be read hide none before them (rule R21)."""

_CONSEQUENCE = "what clients are not told of a queue's settings counts as the default"

_Found = dict[bytes, deque[bytes]]


class _TooLong(Exception):
    """Raised to stop reading."""


_cache: dict[tuple[str, int], tuple[float, _Found]] = {}
_complained: set[str] = set()


def settings_of(queue: str | QueueSettings, connection: Connection) -> QueueSettings:
    """The settings that a client of `queue` works with: the queue's own, where `queue` leaves them open.

    What is not known (no record of the queue, no topic kmq.queues, no right to read it) has its default; of
    the latter two a warning tells, once a process and cluster.

    Raises ConfigError where `queue` contradicts the queue's own settings, Unavailable.
    """
    check_connection(connection)
    given = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
    said = given.said
    if said is None:
        return given
    mirror = SettingsMirror(connection)
    known = mirror.recent(given.name)
    if known is None or _contradictions(given, said, known):  # it may be out of date
        known = mirror.find(given.name)
    if known is None:
        return QueueSettings.stored(dataclasses.asdict(given))
    for problem in _contradictions(given, said, known):
        raise ConfigError(problem)
    return known


def _contradictions(given: QueueSettings, said: Iterable[str], known: QueueSettings) -> list[str]:
    return [
        f"{name}: {getattr(given, name)!r} is not what queue {given.name!r} was made with, "
        f"{getattr(known, name)!r} (topic {SETTINGS_TOPIC}); leave it out, or change the queue"
        for name in sorted(said)
        if getattr(given, name) != getattr(known, name)
    ]


class SettingsMirror:
    """Reads and writes the records of the queues under the connection's root.

    Every call may raise Unavailable; those that write AccessDenied.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cluster = librdkafka.connection_key(connection)

    def recent(self, name: str) -> QueueSettings | None:
        """The settings of queue `name` as this process read them in the last seconds, if it did."""
        read_at, found = _cache.get(self._cluster, (0.0, {}))
        if SYSTEM_CLOCK.monotonic() - read_at > _USE_S:
            return None
        return self._decode(name, found)

    def find(self, name: str) -> QueueSettings | None:
        """The settings of queue `name`; None, maybe with a warning, where they are not known."""
        try:
            found = self._read()
        except AccessDenied as error:
            if not _is_not_allowed(error):
                raise
            self._warn(f"can't be read; {_CONSEQUENCE}", str(error))
            return None
        if found is None:
            self._warn(
                f"does not exist; {_CONSEQUENCE}", "kmq queue create, kmq queue alter and trackers make it"
            )
            return None
        return self._decode(name, found)

    def write(self, queues: Collection[QueueSettings]) -> None:
        """Write those that are not there yet, or are other ones; makes the topic, replicated as theirs."""
        found = self._read()
        if found is None:
            topics = Topics(self._connection)
            described = topics.describe([queue.name for queue in queues])
            if not described:
                return  # queues without topics need no clients
            topics.create_compacted(SETTINGS_TOPIC, max(topic.replication for topic in described.values()))
            found = {}
        self._produce(
            {
                self._key(queue.name): queue.to_json()
                for queue in queues
                if self._decode(queue.name, found) != queue
            }
        )

    def remove(self, name: str) -> None:
        """Take away the record of a queue that was deleted; does nothing where there is none."""
        if self._key(name) in (self._read() or {}):
            self._produce({self._key(name): None})

    def _key(self, name: str) -> bytes:
        return f"{self._connection.root}/queues/{name}".encode()

    def _decode(self, name: str, found: _Found) -> QueueSettings | None:
        """The last value of the queue that can be read."""
        for value in reversed(found.get(self._key(name), ())):
            try:
                settings = QueueSettings.from_json(value, newer=True)
            except ConfigError as error:
                self._warn(
                    f"has a record of queue {name} that can't be read; it counts for nothing", str(error)
                )
                continue
            if settings.name == name:
                return settings
        return None

    def _read(self) -> _Found | None:
        """The last values of each key; None where there is no topic. Raises AccessDenied, Unavailable."""
        # Asked first: it takes a consumer ten times as long to find out that there is none.
        if SETTINGS_TOPIC not in Topics(self._connection).describe([SETTINGS_TOPIC]):
            return None
        found: _Found = {}
        deadline = SYSTEM_CLOCK.monotonic() + _READ_S

        def visit(record: Any) -> None:
            key, value = record.key(), record.value()
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise _TooLong
            if key is None or len(key) + len(value or b"") > _LARGEST_RECORD:
                return
            if value is None:
                found.pop(key, None)
            else:
                found.setdefault(key, deque(maxlen=_KEPT)).append(value)

        try:
            # Uncommitted: nobody's open transaction may hide what comes after it.
            partition_reader.scan(self._connection, SETTINGS_TOPIC, {0: 0}, visit, uncommitted=True)
        except TopicError:  # it has just been deleted
            return None
        except _TooLong:
            self._warn(
                f"is too long to be read; {_CONSEQUENCE}",
                "see who writes to it, and that its cleanup.policy is compact",
            )
            return {}
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
        producer = librdkafka.new_producer(self._connection, {"message.timeout.ms": int(timeout_s * 1000)})
        with librdkafka.kafka_errors(doing, self._connection):
            for key, value in records.items():
                producer.produce(SETTINGS_TOPIC, value, key, 0, on_delivery=report)
        left = producer.flush(timeout_s + 1)
        _cache.pop(self._cluster, None)
        if left or failed:
            error = failed[0] if failed else KafkaError(KafkaError._MSG_TIMED_OUT)
            raise librdkafka.translated(error, doing, self._connection)

    def _warn(self, what: str, why: str) -> None:
        """Once for each kind in a process and cluster."""
        text = f"topic {SETTINGS_TOPIC} {what}"
        if f"{self._cluster} {text}" not in _complained:
            _complained.add(f"{self._cluster} {text}")
            _log.warning(text, extra={"bootstrap": self._connection.bootstrap, "why": why})


def _is_not_allowed(error: AccessDenied) -> bool:
    """Whether Kafka knows who we are, and does not allow this."""
    cause = librdkafka.error_of(error.__cause__) if error.__cause__ is not None else None
    return cause is not None and cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
