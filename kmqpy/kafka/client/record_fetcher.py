"""Fetches the records of a queue with librdkafka's consumer, and polls the consumer while nobody receives."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmqpy.core.green import green_library, wait_for
from kmqpy.core.int64 import INT64_MAX


class RecordFetcher:
    """Fetches records, pauses partitions, and seeks in them.

    consumer  subscribed to `topic`. Its callbacks run inside fetch() and fetch_ahead(), and may call forget()
              and pause_only()
    """

    def __init__(self, consumer: Consumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic
        self._ahead: list[Any] = []
        """Records and errors that fetch_ahead() got, and that fetch() returns first."""
        self._paused: set[int] = set()

    def change_consumer(self, consumer: Consumer) -> None:
        """Go on with a new consumer, which has no partitions yet."""
        self._consumer = consumer
        self._ahead = []
        self._paused = set()

    def fetch(self, max_records: int, wait_s: float) -> list[Any]:
        """Return up to `max_records` records and errors; waits at most `wait_s` for the first."""
        # Two calls, because consume(n, t) waits for n records, or until t is over.
        records, self._ahead = self._ahead[:max_records], self._ahead[max_records:]
        if not records and green_library() is not None:
            records = wait_for(partial(self._consumer.consume, 1), wait_s)
        elif not records:
            records = self._consumer.consume(1, wait_s)
        if records and max_records > len(records):
            records += self._consumer.consume(max_records - len(records), 0)
        elif self._ahead:  # in case there is a rebalance, or an error, to be heard of
            came = self._consumer.consume(1, 0)
            self._ahead += [one for one in came if one.error() is None]
            records += [one for one in came if one.error() is not None]
        return records

    def fetch_ahead(self) -> list[Any]:
        """Poll once without waiting, so that the group keeps this member; returns the records that came.

        fetch() returns these records, too.
        """
        came = self._consumer.consume(1, 0)  # its callbacks may forget() partitions
        self._ahead += came
        return came

    @property
    def kept(self) -> int:
        """How many records fetch_ahead() has got that fetch() has not returned yet."""
        return len(self._ahead)

    def drop_ahead(self, partitions: Collection[int]) -> None:
        """Drop what fetch_ahead() kept of these partitions. librdkafka fetches it again only after a seek."""
        self._ahead = [record for record in self._ahead if record.partition() not in partitions]

    def log_bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset of the log and its end, as of the last fetch; 0 and INT64_MAX if unknown.

        Kafka may have deleted records since.
        """
        place = TopicPartition(self._topic, partition)
        bounds: tuple[int, int] | None = self._consumer.get_watermark_offsets(place, cached=True)
        return (0, INT64_MAX) if bounds is None or bounds[1] < 0 else bounds

    def seek(self, partition: int, offset: int) -> None:
        """Fetch this partition from `offset` on; drop its records that fetch_ahead() kept."""
        self.drop_ahead([partition])
        place = TopicPartition(self._topic, partition, offset)
        try:
            self._consumer.seek(place)
        except KafkaException:  # librdkafka does not fetch the partition yet
            self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
            self._paused.discard(partition)

    def pause_only(self, wanted: set[int], assigned: Collection[int]) -> None:
        """Pause the partitions `wanted`; resume those of `assigned` that are paused and not among them."""
        pause, resume = wanted - self._paused, (self._paused - wanted).intersection(assigned)
        if pause:
            self._consumer.pause([TopicPartition(self._topic, partition) for partition in pause])
        if resume:
            self._consumer.resume([TopicPartition(self._topic, partition) for partition in resume])
        self._paused = wanted

    def forget(self, partitions: Collection[int]) -> None:
        """Forget partitions that were just assigned or given up: none is paused, no record of them kept."""
        self.drop_ahead(partitions)
        self._paused.difference_update(partitions)
