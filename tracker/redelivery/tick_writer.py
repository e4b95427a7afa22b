"""Writes ticks: end markers for no message, whose timestamps tell a tracker the broker's time.

Rule R4 of docs/rules.md says when ticks are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.cut_off import RenewedProducer
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.settings import KafkaConnection, KafkaSettings

_PRODUCER_SETTINGS: KafkaSettings = {"linger.ms": 0, "message.timeout.ms": 5_000}


class Tick(NamedTuple):
    """A tick that was written.

    markers_offset  the offset of its record in the markers topic
    now_ms          the record's timestamp: the broker's time, in ms since 1970
    asked_at        the monotonic time just before the tick was sent, in seconds
    """

    markers_offset: int
    now_ms: int
    asked_at: float

    def latest_ms(self, now: float) -> int:
        """An upper bound of the broker's time at the monotonic time `now`.

        The true time must not be later: a timestamp that is limited to an earlier time ends a lease early.
        """
        return self.now_ms + max(0, int((now - self.asked_at) * 1000))


class TickWriter:
    """Appends ticks. Raises Unavailable when a tick can't be written. For any thread.

    A new producer replaces one that had a fatal error (a broker has lost acknowledged records, or denies
    access), or whose ticks were not written in time: that one may be cut off, which means that it never
    reaches Kafka again.
    """

    def __init__(self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._producers = RenewedProducer(partial(librdkafka.new_producer, connection, _PRODUCER_SETTINGS))

    def post_tick(
        self,
        topic: str,
        partition: int,
        written: Callable[[Tick], None],
        cuts: LogCuts = NO_CUTS,
        failed: Callable[[KafkaError], None] = lambda _: None,
    ) -> None:
        """Append a tick, which tells these cuts, without waiting until it is written.

        poll() calls `written` later, or `failed` if the tick can't be written: somebody must call poll().
        """
        asked_at = self._clock.monotonic()

        def report(error: KafkaError | None, record: Any) -> None:
            if error is None:
                written(_tick(record, asked_at))
            else:
                failed(error)

        try:
            self._produce(self._producers.current(), topic, codec.tick(partition, cuts), report)
        except KafkaException as exception:
            raise _no_tick(topic, partition, exception) from exception

    def post(self, topic: str, marker: Marker) -> None:
        """Append a marker of a tracker without waiting until it is written."""
        try:
            self._produce(self._producers.current(), topic, marker, lambda *_: None)
        except KafkaException as exception:
            raise _no_tick(topic, marker.partition, exception) from exception

    def send_tick(self, topic: str, partition: int, timeout_s: float, cuts: LogCuts = NO_CUTS) -> Tick:
        """Append a tick, which tells these cuts, and wait until it is written."""
        asked_at = self._clock.monotonic()
        (record,) = self.send_markers(topic, [codec.tick(partition, cuts)], timeout_s)
        return _tick(record, asked_at)

    def send_markers(self, topic: str, markers: Sequence[Marker], timeout_s: float) -> list[Any]:
        """Append markers, and wait until all of them are written; returns their records."""
        producer = self._producers.current()
        found: list[Any] = []

        def report(error: KafkaError | None, record: Any) -> None:
            found.append(None if error is not None else record)

        for marker in markers:
            try:
                self._produce(producer, topic, marker, report)
            except KafkaException as exception:
                if not librdkafka.refresh_partition(producer, topic, marker.partition, exception):
                    raise _no_tick(topic, marker.partition, exception) from exception
                self._produce(producer, topic, marker, report)
        deadline = self._clock.monotonic() + timeout_s
        while len(found) < len(markers) and self._clock.monotonic() < deadline:
            producer.poll(0.02)
        if len(found) < len(markers) or None in found:
            raise _no_tick(topic, markers[0].partition)
        return found

    def poll(self) -> None:
        """Serve the delivery reports of ticks written by post_tick()."""
        self._producers.poll()

    def close(self) -> None:
        """Wait up to a second for ticks that are sent and not acknowledged yet."""
        self._producers.flush(1)

    def _produce(self, producer: Producer, topic: str, marker: Marker, done: Callable[..., None]) -> None:
        ref = weakref.ref(producer)

        def report(error: KafkaError | None, record: Any) -> None:
            self._producers.note_failure(ref(), error)  # a strong reference would keep the producer alive
            done(error, record)

        key, value, headers = codec.encode(marker)
        try:
            producer.produce(topic, value, key, marker.partition, on_delivery=report, headers=headers)  # type: ignore[arg-type]
        except BufferError:
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
        except KafkaException as exception:
            self._producers.note_failure(producer, kafka_errors.error_of(exception))
            raise


def _tick(record: Any, asked_at: float) -> Tick:
    return Tick(record.offset(), record.timestamp()[1], asked_at)


def _no_tick(topic: str, partition: int, why: KafkaException | None = None) -> Unavailable:
    text = f"markers topic {topic}, partition {partition}: a tick could not be written"
    return Unavailable(text if why is None else f"{text}: {kafka_errors.error_name(why)}")
