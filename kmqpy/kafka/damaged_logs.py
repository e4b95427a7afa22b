"""Finds logs that can't be read on, because a batch of records is damaged on a broker's disk.

Kafka checks batches when it gets them, when followers copy them, and after it was killed those that it had
not flushed. It hands out a damaged one like any other, or nothing from there on. librdkafka reports what the
checksum covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.settings import KafkaConnection

_SILENT_S = 10.0
"""A partition of which nothing comes within this time can't be read."""
_POLL_S = 0.1
_FETCH_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class DamagedLog:
    """A partition in which nobody can read on from `offset`, though the log goes on; `why` says it."""

    topic: str
    partition: int
    offset: int
    why: str


def find_damage(
    connection: KafkaConnection, places: Mapping[TopicPlace, int], clock: Clock = SYSTEM_CLOCK
) -> list[DamagedLog]:
    """Return the partitions in which the next record at or behind these offsets can't be read.

    Waits 10 s where nothing comes. Raises Unavailable when Kafka does not answer, TopicError when a topic is
    gone.
    """
    if not places:
        return []
    settings = {
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 20,
        "fetch.message.max.bytes": _FETCH_BYTES,
        "queued.min.messages": 1,
    }
    with (
        closing(librdkafka.new_consumer(connection, settings)) as consumer,
        librdkafka.kafka_errors("look for damaged logs", connection),
    ):
        found, silent = _read(consumer, places, clock)
        for place, offset in silent.items():
            ask = partial(librdkafka.watermarks, consumer, *place)
            low, end = librdkafka.retrying(ask, connection.timeout_s, connection, clock=clock)
            if low <= offset < end:
                why = f"nothing comes, though the log goes on to offset {end}"
                found.append(DamagedLog(*place, offset, why))
    return found


def _read(
    consumer: Consumer, places: Mapping[TopicPlace, int], clock: Clock
) -> tuple[list[DamagedLog], dict[TopicPlace, int]]:
    """Return where damage was met, and the places of which nothing came."""
    found, waiting = [], dict(places)
    consumer.assign([TopicPartition(*place, offset) for place, offset in places.items()])
    deadline = clock.monotonic() + _SILENT_S
    while waiting and clock.monotonic() < deadline:
        for record in consumer.consume(1, _POLL_S):
            place, error = (str(record.topic()), record.partition() or 0), record.error()
            damaged = librdkafka.is_damage(error)
            if place not in waiting or not (
                error is None or damaged or error.code() == KafkaError._PARTITION_EOF
            ):
                continue
            offset = waiting.pop(place)
            if error is not None and damaged:
                found.append(DamagedLog(*place, offset, error.str()))
            consumer.pause([TopicPartition(*place)])
            deadline = clock.monotonic() + _SILENT_S
    return found, waiting
