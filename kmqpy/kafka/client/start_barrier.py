"""Finds out when start markers of unknown outcome can't be appended any more (rules R10 and R18)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy.core.clock import Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.markers_producer import produce
from kmqpy.kafka.markers import codec

_LATE_REQUEST_S = 5.0
"""How long after a producer's end a broker may still append what the producer had sent before."""


class StartBarrier:
    """Tells when no start marker of one partition can be appended any more, by ticks of their producers.

    An idempotent producer writes in order, even when it gives a marker up: once its tick is in the log,
    nothing that it sent earlier can follow. A producer with a fatal error, or that is cut off, can't write a
    tick; its earlier requests get `_LATE_REQUEST_S` to arrive.
    """

    def __init__(self, topic: str, partition: int, clock: Clock) -> None:
        self._topic = topic
        self._partition = partition
        self._clock = clock
        self._ticks: dict[Producer, object | None] = {}
        """The unconfirmed tick of each producer; None while it has to send one."""
        self._passed_after = 0.0

    def add(self, producer: Producer) -> None:
        """Note that `producer` sends start markers; a tick that it sent before them does not count."""
        self._ticks[producer] = None

    def passed(self) -> bool:
        """Return True if all ticks are in the log. Sends those that are not on their way; does not wait."""
        for producer, tick in list(self._ticks.items()):
            if tick is None:
                self._send(producer)
            producer.poll(0)
            # An empty queue means written: a failure has set the tick back to None by then.
            if self._ticks.get(producer) and not len(producer):
                self._ticks.pop(producer, None)
        return not self._ticks and self._clock.monotonic() >= self._passed_after

    def producers(self) -> list[Producer]:
        """The producers whose ticks are awaited; for any thread."""
        return list(self._ticks)

    def forget(self, cut_off: Collection[Producer]) -> None:
        """Wait no more for ticks of producers that never reach Kafka again."""
        for producer in self._ticks.keys() & set(cut_off):
            self._passed_after = self._clock.monotonic() + _LATE_REQUEST_S
            self._ticks.pop(producer, None)

    def _send(self, producer: Producer) -> None:
        tick = self._ticks[producer] = object()

        def report(error: KafkaError | None, _: Any) -> None:
            if self._ticks.get(producer) is not tick:
                return
            if librdkafka.is_fatal(error):
                self._passed_after = self._clock.monotonic() + _LATE_REQUEST_S
            unknown = error is not None and error.code() == KafkaError._UNKNOWN_PARTITION
            if error is None or unknown or librdkafka.is_fatal(error):
                del self._ticks[producer]
            else:
                self._ticks[producer] = None

        try:
            produce(producer, self._topic, self._partition, codec.encode(codec.tick(self._partition)), report)
        except BufferError:
            self._ticks[producer] = None
        except KafkaException as exception:
            report(librdkafka.error_of(exception) or KafkaError(KafkaError._FAIL), None)
