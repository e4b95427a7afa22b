"""Fetches the markers of all partitions that a tracker reads, with one Kafka consumer."""

from __future__ import annotations

from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka import librdkafka
from kmqpy.kafka.markers.records import ascending_offsets, ascends, peak
from kmqpy.kafka.settings import KafkaConnection
from tracker.partition.owned_partition import OwnedPartition

_MAX_FETCHED_RECORDS = 5_000
"""One fetch() returns at most this many records."""
_SILENT_S = 5.0
"""A consumer that got no record for this long may be cut off. Trackers write ticks (markers that only bring
the broker's time) in less time."""
_MAX_UNREAD = 50_000
"""If more fetched markers of a partition wait to be applied, fetching this partition is paused."""


class Fetched(NamedTuple):
    """By partition: the fetched marker records, and the first error that Kafka has reported."""

    records: dict[OwnedPartition, list[Any]]
    errors: dict[OwnedPartition, KafkaError]


class MarkersConsumer:
    """Fetches the markers of partitions between `start` and `stop`. For the main loop."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._consumer = self._new_consumer()
        self._readers: dict[tuple[str, int], OwnedPartition] = {}
        """The partitions that are read, by markers topic and partition number."""
        self._heard_at = SYSTEM_CLOCK.monotonic()

    @property
    def consumer(self) -> Consumer:
        """The consumer of librdkafka, for CutOffCheck."""
        return self._consumer

    def is_silent(self) -> bool:
        """Return True if partitions are read and no record, not even a tick, has come for `_SILENT_S`."""
        return bool(self._readers) and SYSTEM_CLOCK.monotonic() - self._heard_at > _SILENT_S

    def renew(self) -> None:
        """Replace the consumer, which is cut off, and go on at the same positions."""
        self._consumer = self._new_consumer()
        places = []
        for (topic, number), part in self._readers.items():
            part.paused = False
            position = part.unread[-1].offset() + 1 if part.unread else part.state.position
            places.append(TopicPartition(topic, number, position))
        self._consumer.assign(places)

    def _new_consumer(self) -> Consumer:
        # An offset that the log does not have (any more) is an error: the partition is taken over again.
        return librdkafka.new_consumer(
            self._connection, {"fetch.wait.max.ms": 100, "auto.offset.reset": "error"}
        )

    def other_reader(self, part: OwnedPartition) -> OwnedPartition | None:
        """The other partition that reads the same markers partition, as with a shared topic; else None."""
        reader = self._readers.get((part.queue.markers_topic, part.number), part)
        return None if reader is part else reader

    def start(self, part: OwnedPartition) -> None:
        """Fetch markers from the position of the partition's state on."""
        topic = part.queue.markers_topic
        if not self._readers:
            self._heard_at = SYSTEM_CLOCK.monotonic()
        self._readers[topic, part.number] = part
        self._consumer.incremental_assign([TopicPartition(topic, part.number, part.state.position)])

    def stop(self, part: OwnedPartition) -> None:
        """Stop fetching the partition, if it is read, and set its `reading` to False."""
        topic = part.queue.markers_topic
        try:
            if part.reading and self._readers.get((topic, part.number)) is part:
                del self._readers[topic, part.number]
                self._resume(part)
                self._consumer.incremental_unassign([TopicPartition(topic, part.number)])
        finally:  # else no takeover would start it again
            part.reading = False

    def fetch(self, wait_s: float) -> Fetched:
        """Return the records that have arrived; waits up to `wait_s` for the first. Raises KafkaException."""
        records = self._consumer.consume(1, wait_s)
        if records:
            self._heard_at = SYSTEM_CLOCK.monotonic()
            records += self._consumer.consume(_MAX_FETCHED_RECORDS - 1, 0)
        fetched = Fetched({}, {})
        for record in records:
            part = self._readers.get((record.topic(), record.partition()))  # type: ignore[arg-type]
            if part is None:
                continue
            error = record.error()
            if error is None:
                fetched.records.setdefault(part, []).append(record)
            else:
                fetched.errors.setdefault(part, error)
        self._check_offsets(fetched)
        return fetched

    def _check_offsets(self, fetched: Fetched) -> None:
        """Make an error of offsets that can't be true: no checksum covers that of a batch."""
        for part, records in list(fetched.records.items()):
            offsets = ascending_offsets(records)
            place = TopicPartition(part.queue.markers_topic, part.number)
            bounds = self._consumer.get_watermark_offsets(place, cached=True)
            end = INT64_MAX if bounds is None else bounds[1]
            wrong = offsets[-1] if offsets[-1] >= end else None
            if not ascends(offsets):
                wrong = peak(offsets, part.unread[-1].offset() if part.unread else part.state.position - 1)
            if wrong is not None:
                del fetched.records[part]
                why = f"a batch says offset {wrong}, but lower ones stand behind it, or the log ends at {end}"
                fetched.errors.setdefault(part, KafkaError(KafkaError._BAD_MSG, why))

    def limit_unread(self, part: OwnedPartition) -> None:
        """Pause fetching while more than `_MAX_UNREAD` markers wait; resume it once no marker waits."""
        if len(part.unread) > _MAX_UNREAD and not part.paused:
            part.paused = True
            self._consumer.pause([TopicPartition(part.queue.markers_topic, part.number)])
        elif not part.unread:
            self._resume(part)

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _resume(self, part: OwnedPartition) -> None:
        if part.paused:
            part.paused = False
            self._consumer.resume([TopicPartition(part.queue.markers_topic, part.number)])
