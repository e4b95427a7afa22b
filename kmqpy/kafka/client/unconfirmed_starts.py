"""Finds out when Kafka can't append start markers of unknown outcome any more."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import Clock
from kmqpy.kafka import kafka_errors
from kmqpy.kafka.client.markers_producer import produce
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers import codec

_LATE_REQUEST_S = 5.0
"""For this long after a producer's end, a broker may still append records that the producer had sent."""


class UnconfirmedStarts:
    """Tells when Kafka can't append start markers of one partition any more.

    It has each producer of such start markers send a tick: a marker that says nothing. An idempotent
    producer writes in order, even when it gives a marker up: once its tick is in the log, none of its earlier
    markers can follow. A producer with a fatal error, or that is cut off (never reaches Kafka again), can't
    write a tick. For its earlier requests, it waits `_LATE_REQUEST_S`. Rules R10 and R18 of
    docs/rules.md need it.
    """

    def __init__(self, topic: str, partition: int, clock: Clock) -> None:
        self._topic = topic
        self._partition = partition
        self._clock = clock
        self._ticks: dict[Producer, object | None] = {}
        """The unconfirmed tick of each producer; None: the producer has still to send a tick."""
        self._passed_after = 0.0
        """The monotonic time before which passed() is False."""

    def add(self, producer: Producer) -> None:
        """Note that `producer` sends start markers. A tick that it has sent before them does not count."""
        self._ticks[producer] = None

    def passed(self) -> bool:
        """Return True if no start marker can be appended any more. Sends missing ticks; does not wait."""
        for producer, tick in list(self._ticks.items()):
            if tick is None:
                self._send(producer)
            producer.poll(0)
            # If the producer's queue is empty, the tick is written: a failure would have set it to None.
            if self._ticks.get(producer) and not len(producer):
                self._ticks.pop(producer, None)
        return not self._ticks and self._clock.monotonic() >= self._passed_after

    def producers(self) -> list[Producer]:
        """The producers whose ticks are not in the log yet; for any thread."""
        return list(self._ticks)

    def forget(self, cut_off: Collection[Producer]) -> None:
        """Wait no more for the ticks of these producers, which never reach Kafka again."""
        for producer in self._ticks.keys() & set(cut_off):
            self._passed_after = self._clock.monotonic() + _LATE_REQUEST_S
            self._ticks.pop(producer, None)

    def _send(self, producer: Producer) -> None:
        tick = self._ticks[producer] = object()

        def report(error: KafkaError | None, _: Any) -> None:
            if self._ticks.get(producer) is not tick:
                return
            if kafka_errors.is_fatal(error):
                self._passed_after = self._clock.monotonic() + _LATE_REQUEST_S
            unknown = error is not None and error.code() == KafkaError._UNKNOWN_PARTITION
            if error is None or unknown or kafka_errors.is_fatal(error):
                del self._ticks[producer]
            else:
                self._ticks[producer] = None

        try:
            produce(producer, self._topic, self._partition, codec.encode(codec.tick(self._partition)), report)
        except BufferError:
            self._ticks[producer] = None
        except KafkaException as exception:
            report(kafka_errors.error_of(exception) or KafkaError(KafkaError._FAIL), None)
