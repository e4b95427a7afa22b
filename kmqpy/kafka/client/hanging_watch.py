"""Logs that a client waits for messages which a hanging transaction holds back."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from confluent_kafka import Consumer, TopicPartition

from kmqpy.core.clock import Clock
from kmqpy.kafka import hanging
from kmqpy.kafka.hanging import HangingTransactions
from kmqpy.kafka.settings import KafkaConnection

_log = logging.getLogger(__name__)


class HangingWatch:
    """Looks for transactions that nobody ends, in partitions where a client stands still; for one thread.

    Logs each of them once. Asks Kafka only about partitions in which the client's position is below the end
    of the log and where it was in the last look. (Control records with which a log ends move the position.)
    """

    def __init__(self, connection: KafkaConnection, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._search = HangingTransactions(connection, clock)
        self._next_look = clock.monotonic() + hanging.LOOK_EVERY_S
        self._positions: dict[int, int] = {}
        """By partition: the client's position in the last look, if it was below the end of the log."""
        self._logged: dict[int, int] = {}
        """By partition: the offset of the hanging transaction that was logged."""

    def look(self, consumer: Consumer, partitions: Iterable[int]) -> None:
        """Look for hanging transactions in these partitions of `consumer`, if that is due."""
        if self._clock.monotonic() < self._next_look:
            return
        self._next_look = self._clock.monotonic() + hanging.LOOK_EVERY_S
        places = [TopicPartition(self._topic, p) for p in partitions]
        before, self._positions = self._positions, _positions_behind(consumer, places)
        standing = [(self._topic, p) for p, position in self._positions.items() if before.get(p) == position]
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


def _positions_behind(consumer: Consumer, places: list[TopicPartition]) -> dict[int, int]:
    """The position in each partition in which it is below the end of the log; from librdkafka's memory."""
    found = {}
    for place in consumer.position(places) if places else ():
        low, end = consumer.get_watermark_offsets(place, cached=True)
        position = max(place.offset, low)
        if position < end:
            found[place.partition] = position
    return found
