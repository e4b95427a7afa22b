"""Counts waiting messages and dead letters for /metrics.

Costs little however large a queue is: of what waits, the first records are read and the others counted by
their offsets; dead letters and their markers are read once, then only new ones. Nobody waits for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import dead_letter_queue
from tracker.leadership.assignment import Partition

_log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
"""The time-out of one round of counting; counts that are not known by then are left for the next."""
_REQUEST_TIMEOUT_S = 2.0
_ASKERS = 16
"""Groups whose consumers are kept; each has a thread for each broker."""
_SLICE_S = 0.1
_BATCH = 500
_WAITING = 100
"""How many waiting messages of a partition are looked at one by one."""
_AT_ONCE = 10_000
"""How many dead letters of a partition, or markers of them, are read each time."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The messages and dead letters of one partition, besides messages in flight.

    waiting       the first messages from the group's commit on: offset and enqueued_ms; what was taken since
                  that commit is among them
    more          how many there are after these, at the most; None: it is not known what waits
    dead_letters  those neither redriven nor purged; None: not known
    """

    waiting: tuple[tuple[int, int], ...] = ()
    more: int | None = None
    dead_letters: int | None = None


@dataclass(slots=True)
class _Reading:
    """A partition of a topic that is read from `position`, `limit` records at the most.

    at_end  whether the end of the log was reached
    failed  whether it can't be read
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
        """The position to read from, as librdkafka takes it."""
        return TopicPartition(self.topic, self.partition, self.position)

    def take(self, record: Any) -> bool:
        """Note a record or event; returns whether it was the last."""
        error = record.error()
        if error is None:
            self.records.append(record)
            self.position = record.offset() + 1
            return len(self.records) >= self.limit
        if error.code() == KafkaError._PARTITION_EOF:
            self.at_end = True
            self.position = record.offset()
        else:
            self.failed = not librdkafka.is_retriable(error)
        return self.at_end or self.failed


@dataclass(slots=True)
class _Letters:
    """The dead letters of a partition that were seen, and those that are finished, as offsets."""

    position: int = OFFSET_BEGINNING
    markers_position: int = OFFSET_BEGINNING
    seen: OffsetRuns = field(default_factory=OffsetRuns)
    ended: OffsetRuns = field(default_factory=OffsetRuns)

    def add(self, letters: _Reading, markers: _Reading) -> None:
        """Take in what was read."""
        if letters.position < self.position:  # the topic was recreated
            self.seen = OffsetRuns()
        if markers.position < self.markers_position:
            self.ended = OffsetRuns()
        self.position, self.markers_position = letters.position, markers.position
        self.seen.add_runs((record.offset(), 1) for record in letters.records)
        for record in markers.records:
            try:
                marker = read_marker(record)
            except DecodeError:
                continue
            if marker.op is Op.END:
                self.ended.add_runs(marker.runs or ((marker.offset, 1),))

    def alive(self) -> int:
        """How many are not finished."""
        return len(self.seen - self.ended)


class QueueCounts:
    """Counts for the partitions of one tracker; for one thread. Its clients are made at the first count."""

    def __init__(self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._connection = connection
        self._clock = clock
        self._consumer: Any = None
        self._askers: dict[str, Any] = {}
        """By group, consumers that are asked for its commits."""
        self._letters: dict[Partition, _Letters] = {}
        self._logged: set[str] = set()
        self._deadline = 0.0

    def count(
        self,
        wanted: Mapping[Partition, QueueSettings],
        owned: Collection[Partition],
        stopping: Callable[[], bool],
    ) -> dict[Partition, Counted]:
        """Count what partitions hold, as far as it is known in time; raises KmqError, KafkaException.

        `owned`: all those that may be asked for again.
        """
        self._deadline = self._clock.monotonic() + _TIMEOUT_S
        self._letters = {key: self._letters.get(key, _Letters()) for key in owned}
        starts = self._committed(wanted)
        waiting = {
            (queue, number): _Reading(queue, number, start, _WAITING)
            for (queue, number), start in starts.items()
        }
        letters: dict[Partition, tuple[_Reading, _Reading]] = {}
        for key, queue in wanted.items():
            dead, known = dead_letter_queue(queue), self._letters[key]
            letters[key] = (
                _Reading(dead.name, key[1], known.position, _AT_ONCE),
                _Reading(dead.markers_topic, key[1], known.markers_position, _AT_ONCE),
            )
        pairs = (one for pair in letters.values() for one in pair)
        self._read([*waiting.values(), *pairs], lambda: stopping() or not self._left_s())
        found: dict[Partition, Counted] = {}
        for key in wanted:
            counted = self._counted_letters(key, *letters[key])
            reading = waiting.get(key)
            first = () if reading is None else tuple((r.offset(), r.timestamp()[1]) for r in reading.records)
            found[key] = Counted(first, None if reading is None else self._more(reading), counted)
        return found

    def close(self) -> None:
        """Release the connections."""
        for consumer in (self._consumer, *self._askers.values()):
            if consumer is not None:
                consumer.close()

    def _committed(self, wanted: Mapping[Partition, QueueSettings]) -> dict[Partition, int]:
        """Where the groups' commits stand; the log's start where there is none, nothing where nobody says.

        Asked of a consumer for each group: an AdminClient that loses its connection to a group's coordinator
        at the wrong moment ends the whole process (librdkafka's issue 4605).
        """
        places: dict[str, list[TopicPartition]] = {}
        groups: dict[str, str] = {}
        for key, queue in wanted.items():
            places.setdefault(queue.consumer_group, []).append(TopicPartition(*key))
            groups[queue.consumer_group] = queue.name
        for group in self._askers.keys() - places.keys():
            self._askers.pop(group).close()
        found: dict[Partition, int] = {}
        for group in random.sample(sorted(places), len(places)):  # the last ones may have no time left
            if not self._left_s():
                break
            try:
                with self._asker(group) as asker:
                    answer = asker.committed(places[group], timeout=min(_REQUEST_TIMEOUT_S, self._left_s()))
            except (KafkaException, KmqError) as error:
                if not librdkafka.is_retriable(librdkafka.error_of(error)):
                    self._warn(groups[group], str(error))
                if may_be_cut_off(librdkafka.error_of(error)) and group in self._askers:
                    self._askers.pop(group).close()
                continue
            for place in answer:
                if place.error is None:
                    found[place.topic, place.partition] = (
                        place.offset if place.offset >= 0 else OFFSET_BEGINNING
                    )
        return found

    @contextmanager
    def _asker(self, group: str) -> Iterator[Any]:
        """A consumer that is asked for the commits of a group and never joins it; some are kept."""
        asker = self._askers.get(group)
        if asker is None:
            asker = librdkafka.new_consumer(self._connection, {"group.id": group})
            if len(self._askers) < _ASKERS:
                self._askers[group] = asker
        try:
            yield asker
        finally:
            if group not in self._askers:
                asker.close()

    def _read(self, readings: Iterable[_Reading], is_late: Callable[[], bool]) -> None:
        consumer = self._reader()
        left = {(one.topic, one.partition): one for one in readings}
        silent = bool(left)
        consumer.assign([one.place for one in left.values()])
        try:
            while left and not is_late():
                done = []
                for record in consumer.consume(_BATCH, _SLICE_S):
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
        if silent:  # it may be cut off
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

    def _counted_letters(self, key: Partition, letters: _Reading, markers: _Reading) -> int | None:
        if letters.failed or markers.failed:
            return None
        known = self._letters[key]
        known.add(letters, markers)
        if not (letters.at_end and markers.at_end):
            return None
        if known.alive():
            if not self._left_s():
                return None
            consumer = self._reader()
            try:
                bounds = consumer.get_watermark_offsets(letters.place, timeout=self._left_s())
            except KafkaException:
                return None
            if bounds is None:
                return None
            known.seen.discard_below(bounds[0])  # they were purged
        return known.alive()

    def _reader(self) -> Any:
        if self._consumer is None:
            settings = {
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,  # waiting for more would delay the next count
                "fetch.message.max.bytes": 65_536,
                "queued.min.messages": _WAITING,
                "queued.max.messages.kbytes": 4_096,
            }
            self._consumer = librdkafka.new_consumer(self._connection, settings)
        return self._consumer

    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._clock.monotonic())

    def _warn(self, queue: str, error: str) -> None:
        if queue not in self._logged:
            self._logged.add(queue)
            _log.warning("the depth of a queue is not known", extra={"queue": queue, "error": error})
