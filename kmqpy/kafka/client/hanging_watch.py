"""Logs that a client waits for messages which a hanging transaction, or a damaged log, holds back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict

from confluent_kafka import Consumer, TopicPartition

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import hanging
from kmqpy.kafka.damaged_logs import find_damage
from kmqpy.kafka.hanging import HangingTransactions
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.settings import KafkaConnection

_log = logging.getLogger(__name__)


class HangingWatch:
    """Looks for transactions that nobody ends, and for damage, in partitions where a client stands still.

    Logs each of them once. Asks Kafka only about partitions in which the client's position is below the end
    of the log and where it was the last time. (Control records with which a log ends move the position.)
    """

    def __init__(self, connection: KafkaConnection, topic: str, clock: Clock) -> None:
        self._connection = connection
        self._topic = topic
        self._clock = clock
        self._search = HangingTransactions(connection, clock)
        self._next_look = clock.monotonic() + hanging.LOOK_EVERY_S
        self._positions: dict[int, int] = {}
        """By partition: the client's position the last time, if it was below the end of the log."""
        self._standing: dict[TopicPlace, int] = {}
        """The partitions to look at next, and the client's positions."""
        self._seen: dict[TopicPlace, int] = {}
        """The positions at which find_damage() has looked already."""
        self._logged: dict[int, int] = {}
        """By partition: the offset of the hanging transaction that was logged."""

    def note_positions(self, consumer: Consumer, partitions: Iterable[int]) -> None:
        """Note in which of these partitions of `consumer` the client stands still, if that is due.

        For the thread that uses the consumer: confluent-kafka lets calls of one consumer wait for each other,
        so that another thread could wait for seconds while this one receives again and again.
        """
        if self._clock.monotonic() < self._next_look:
            return
        self._next_look = self._clock.monotonic() + hanging.LOOK_EVERY_S
        places = [TopicPartition(self._topic, p) for p in partitions]
        before, self._positions = self._positions, _positions_behind(consumer, places)
        self._standing = {
            (self._topic, p): position for p, position in self._positions.items() if before.get(p) == position
        }

    def look(self) -> None:
        """Look for what holds back messages in the partitions that were noted; for one thread at a time."""
        standing, self._standing = self._standing, {}
        if not standing:
            return
        for one in self._search.look(standing):
            if self._logged.get(one.partition) != one.offset:
                self._logged[one.partition] = one.offset
                _log.error(
                    "a transaction that nobody ends holds back messages; kmq doctor says how to end it",
                    extra={
                        "topic": one.topic,
                        "partition": one.partition,
                        "offset": one.offset,
                        "waiting": one.waiting,
                        "lasts_s": one.lasts_s(self._clock),
                    },
                )
        # A client that asks for no messages stands still, too: one look at each position is enough.
        new = {
            place: position
            for place, position in standing.items()
            if not self._search.is_open(place) and self._seen.get(place) != position
        }
        try:
            found = find_damage(self._connection, new, self._clock)
        except KmqError:
            return  # Kafka is away, or the topic is gone
        self._seen |= new
        for damaged in found:
            _log.error(
                "a damaged log: its partition stands still; docs/operations.md says what to do",
                extra=asdict(damaged),
            )


def _positions_behind(consumer: Consumer, places: list[TopicPartition]) -> dict[int, int]:
    """The position in each partition in which it is below the end of the log; from librdkafka's memory."""
    found = {}
    for place in consumer.position(places) if places else ():
        low, end = consumer.get_watermark_offsets(place, cached=True)
        position = max(place.offset, low)
        if position < end:
            found[place.partition] = position
    return found
