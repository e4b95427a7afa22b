"""Reads a partition of a markers topic from an offset to an end, one partition after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection

_TIMEOUT_S = 5.0
_READ_BATCH = 5_000


class MarkersReader:
    """Reads one partition of a markers topic at a time; for one thread."""

    def __init__(self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._consumer: Consumer = librdkafka.new_consumer(
            connection,
            {"enable.partition.eof": True, "auto.offset.reset": "error", "fetch.wait.max.ms": 20},
        )

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Log start and last stable offset; raises KafkaException."""
        place = TopicPartition(topic, partition)
        try:
            found = self._consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
        except KafkaException as exception:
            if not librdkafka.refresh_partition(self._consumer, topic, partition, exception):
                raise
            found = self._consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
        if found is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return found

    def read(self, topic: str, partition: int, start: int, end: int, deadline: float) -> Iterator[list[Any]]:
        """The records from `start` on, in lists, until all below `end` were read or it is too late.

        Raises KafkaException. An open transaction holds it up.
        """
        if start >= end:
            return
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            position = start
            while position < end and self._clock.monotonic() < deadline:
                # A lone consume(n, t) waits out t even when records are there.
                found = self._consumer.consume(1, 0.1)
                found += self._consumer.consume(_READ_BATCH - 1, 0) if found else []
                records = []
                for record in found:
                    error = record.error()
                    if error is None:
                        records.append(record)
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    position = max(position, int(record.offset() or 0) + (error is None))
                if records:
                    yield records
        finally:
            self._consumer.unassign()

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()
