"""Counts the waiting messages and the dead letters of partitions, for /metrics.

A message waits from its send until a client takes it. The cost does not grow with the queue: of the waiting
messages the first `_MAX_WAITING_READ` are read, and the others are counted by their offsets. Dead letters and
their markers are read once; each later count reads only new ones.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.offset_commits import commit_of
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.ended_letters import EndedLetters
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topic_names import dead_letter_queue
from tracker.leadership.assignment import Partition

_log = logging.getLogger(__name__)

_COUNT_TIMEOUT_S = 3.0
"""count() stops after this time; partitions that it has not counted by then wait for a later count()."""
_REQUEST_TIMEOUT_S = 2.0
"""A request for the commits of one consumer group fails after this time."""
_MAX_KEPT_CONSUMERS = 16
"""At most this many consumers of groups are kept open after use: each has a thread per broker."""
_CONSUME_WAIT_S = 0.1
_CONSUME_RECORDS = 500
_MAX_WAITING_READ = 100
"""One count() reads at most this many waiting messages of a partition; offsets count the others."""
_MAX_LETTERS_READ = 10_000
"""One count() reads at most this many dead letters of a partition, and at most this many of their markers."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one partition.

    waiting       offset and enqueued_ms of the first messages from the group's commit on; messages that
                  clients have taken since that commit are among them
    more          an upper bound of the number of messages after `waiting`; None: neither is known
    dead_letters  the number of dead letters that are neither redriven nor purged; None: not known, or this is
                  not the queue's main lane
    """

    waiting: tuple[tuple[int, int], ...] = ()
    more: int | None = None
    dead_letters: int | None = None


@dataclass(frozen=True, slots=True)
class ToCount:
    """A partition to count: its queue, the topic ids, and the cuts of its log (rule R39 of docs/rules.md)."""

    queue: QueueSettings
    ids: TopicIds
    cuts: LogCuts


@dataclass(slots=True)
class _Reading:
    """Records that one count() reads from a partition of any topic, up to `limit` from `position` on.

    failed  True once Kafka has reported an error that a later try would not cure
    """

    topic: str
    partition: int
    position: int
    limit: int
    records: list[Any] = field(default_factory=list)
    at_end: bool = False
    failed: bool = False

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition, self.position)

    def take(self, record: Any) -> bool:
        """Note a record, the end of the log or an error; returns True if reading this partition is over."""
        error = record.error()
        if error is None:
            self.records.append(record)
            self.position = record.offset() + 1
            return len(self.records) >= self.limit
        if error.code() == KafkaError._PARTITION_EOF:
            self.at_end = True
            self.position = record.offset()
        else:
            self.failed = not kafka_errors.is_retriable(error)
        return self.at_end or self.failed


@dataclass(slots=True)
class _DeadLetters:
    """The offsets of a partition's dead letters that were read so far, and of those that are finished."""

    position: int = OFFSET_BEGINNING
    markers_position: int = OFFSET_BEGINNING
    seen: OffsetRuns = field(default_factory=OffsetRuns)
    ended: EndedLetters = field(default_factory=EndedLetters)

    def add(self, letters: _Reading, markers: _Reading) -> None:
        if letters.position < self.position:  # the topic was recreated
            self.seen = OffsetRuns()
        if markers.position < self.markers_position:
            self.ended = EndedLetters()
        self.position, self.markers_position = letters.position, markers.position
        self.seen.add_runs((record.offset(), 1) for record in letters.records)
        for record in markers.records:
            with suppress(DecodeError):
                self.ended.read(read_marker(record), record)

    def count_unfinished(self) -> int:
        return len(self.seen - self.ended.offsets())


class QueueCounts:
    """Counts messages in the partitions of one tracker. For one thread; the first count opens the clients."""

    def __init__(self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._connection = connection
        self._clock = clock
        self._consumer: Any = None
        self._group_consumers: dict[str, Any] = {}
        """By consumer group: the consumer with which its commits are read."""
        self._letters: dict[Partition, _DeadLetters] = {}
        self._warned_queues: set[str] = set()
        self._deadline = 0.0

    def count(
        self, wanted: Mapping[Partition, ToCount], owned: Collection[Partition], stopping: Callable[[], bool]
    ) -> dict[Partition, Counted]:
        """Count the messages and dead letters of the partitions `wanted`; forget those not `owned`.

        What is not known after `_COUNT_TIMEOUT_S` is None. Raises KmqError and KafkaException.
        """
        self._deadline = self._clock.monotonic() + _COUNT_TIMEOUT_S
        self._letters = {key: self._letters.get(key, _DeadLetters()) for key in owned}
        starts = self._committed(wanted)
        waiting = {
            (queue, number): _Reading(queue, number, start, _MAX_WAITING_READ)
            for (queue, number), start in starts.items()
        }
        letters: dict[Partition, tuple[_Reading, _Reading]] = {}
        for key, one in wanted.items():
            if one.queue.lane_of is not None:
                continue  # the main lane's counts have them
            dead, known = dead_letter_queue(one.queue), self._letters[key]
            letters[key] = (
                _Reading(dead.name, key[1], known.position, _MAX_LETTERS_READ),
                _Reading(dead.markers_topic, key[1], known.markers_position, _MAX_LETTERS_READ),
            )
        pairs = (one for pair in letters.values() for one in pair)
        self._read([*waiting.values(), *pairs], lambda: stopping() or not self._left_s())
        found: dict[Partition, Counted] = {}
        for key in wanted:
            counted = self._count_dead_letters(key, *letters[key]) if key in letters else None
            reading = waiting.get(key)
            first = () if reading is None else tuple((r.offset(), r.timestamp()[1]) for r in reading.records)
            found[key] = Counted(first, None if reading is None else self._more(reading), counted)
        return found

    def close(self) -> None:
        for consumer in (self._consumer, *self._group_consumers.values()):
            if consumer is not None:
                consumer.close()

    def _committed(self, wanted: Mapping[Partition, ToCount]) -> dict[Partition, int]:
        """The offset from which messages wait: that of the commit, or of a cut that the commit does not know.

        Partitions for which Kafka gives no answer are left out. A consumer of each group asks: an AdminClient
        that loses its connection to the coordinator can end the whole process (librdkafka's issue 4605).
        """
        places: dict[str, list[TopicPartition]] = {}
        groups: dict[str, str] = {}
        for key, one in wanted.items():
            places.setdefault(one.queue.consumer_group, []).append(TopicPartition(*key))
            groups[one.queue.consumer_group] = one.queue.name
        for group in self._group_consumers.keys() - places.keys():
            self._group_consumers.pop(group).close()
        found: dict[Partition, int] = {}
        # In another order each time: the time may end before the last ones.
        for group in random.sample(sorted(places), len(places)):
            if not self._left_s():
                break
            try:
                timeout_s = min(_REQUEST_TIMEOUT_S, self._left_s())
                with self._group_consumer(group) as consumer:
                    answer = consumer.committed(places[group], timeout=timeout_s)
            except (KafkaException, KmqError) as error:
                if not kafka_errors.is_retriable(kafka_errors.error_of(error)):
                    self._warn(groups[group], str(error))
                if may_be_cut_off(kafka_errors.error_of(error)) and group in self._group_consumers:
                    self._group_consumers.pop(group).close()
                continue
            for place in answer:
                if place.error is None:
                    key = place.topic, place.partition
                    commit = commit_of(place, wanted[key].ids)
                    known = None if commit is None else commit.with_cuts(wanted[key].cuts)
                    found[key] = OFFSET_BEGINNING if known is None else known.offset
        return found

    @contextmanager
    def _group_consumer(self, group: str) -> Iterator[Any]:
        """Lend a consumer that reads the commits of a group, and never joins the group."""
        consumer = self._group_consumers.get(group)
        if consumer is None:
            consumer = librdkafka.new_consumer(self._connection, {"group.id": group})
            if len(self._group_consumers) < _MAX_KEPT_CONSUMERS:
                self._group_consumers[group] = consumer
        try:
            yield consumer
        finally:
            if group not in self._group_consumers:
                consumer.close()

    def _read(self, readings: Iterable[_Reading], must_stop: Callable[[], bool]) -> None:
        consumer = self._reader()
        left = {(one.topic, one.partition): one for one in readings}
        silent = bool(left)
        consumer.assign([one.place for one in left.values()])
        try:
            while left and not must_stop():
                done = []
                for record in consumer.consume(_CONSUME_RECORDS, _CONSUME_WAIT_S):
                    silent = False
                    key = record.topic(), record.partition()
                    reading = left.get(key)
                    if reading is not None and reading.take(record):
                        del left[key]
                        done.append(TopicPartition(*key))
                if done:
                    consumer.incremental_unassign(done)
        finally:
            consumer.unassign()
        if silent:  # the consumer may be cut off: it may never reach Kafka again
            consumer.close()
            self._consumer = None

    def _more(self, reading: _Reading) -> int | None:
        if reading.at_end:
            return 0
        if reading.failed or len(reading.records) < reading.limit:
            return None
        consumer = self._reader()
        _low, high = consumer.get_watermark_offsets(reading.place, cached=True)
        return max(0, int(high) - reading.position)

    def _count_dead_letters(self, key: Partition, letters: _Reading, markers: _Reading) -> int | None:
        if letters.failed or markers.failed:
            return None
        known = self._letters[key]
        known.add(letters, markers)
        if not (letters.at_end and markers.at_end):
            return None
        if known.count_unfinished():
            if not self._left_s():
                return None
            consumer = self._reader()
            try:
                bounds = consumer.get_watermark_offsets(letters.place, timeout=self._left_s())
            except KafkaException:
                return None
            if bounds is None:
                return None
            known.seen.discard_below(bounds[0])  # dead letters below the log start were purged
        return known.count_unfinished()

    def _reader(self) -> Any:
        if self._consumer is None:
            settings = {
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,  # a fetch that waited longer for records would delay the next count
                "fetch.message.max.bytes": 65_536,
                "queued.min.messages": _MAX_WAITING_READ,
                "queued.max.messages.kbytes": 4_096,
            }
            self._consumer = librdkafka.new_consumer(self._connection, settings)
        return self._consumer

    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._clock.monotonic())

    def _warn(self, queue: str, error: str) -> None:
        if queue not in self._warned_queues:
            self._warned_queues.add(queue)
            _log.warning("the depth of a queue is not known", extra={"queue": queue, "error": error})
