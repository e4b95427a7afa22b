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

    Logs each of them once. Asks Kafka only about partitions whose log ends beyond the client's position, and
    only if something was appended since Kafka has said that no transaction is open.
    """

    def __init__(self, connection: KafkaConnection, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._search = HangingTransactions(connection, clock)
        self._next_look = clock.monotonic() + hanging.LOOK_EVERY_S
        self._free_to: dict[int, int] = {}
        """By partition: the end of the log when no transaction was open."""
        self._logged: dict[int, int] = {}
        """By partition: the offset of the hanging transaction that was logged."""

    def look(self, consumer: Consumer, partitions: Iterable[int]) -> None:
        """Look for hanging transactions in these partitions of `consumer`, if that is due."""
        if self._clock.monotonic() < self._next_look:
            return
        self._next_look = self._clock.monotonic() + hanging.LOOK_EVERY_S
        ends = _ends_beyond_position(consumer, [TopicPartition(self._topic, p) for p in partitions])
        wanted = {(self._topic, p): end for p, end in ends.items() if self._free_to.get(p) != end}
        if not wanted:
            return
        for one in self._search.look(wanted):
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
        for place, end in wanted.items():
            if not self._search.is_open(place):
                self._free_to[place[1]] = end


def _ends_beyond_position(consumer: Consumer, places: list[TopicPartition]) -> dict[int, int]:
    """The end of the log of each partition in which it is beyond the position; from librdkafka's memory."""
    found = {}
    for place in consumer.position(places) if places else ():
        low, end = consumer.get_watermark_offsets(place, cached=True)
        if end > max(place.offset, low):
            found[place.partition] = end
    return found
