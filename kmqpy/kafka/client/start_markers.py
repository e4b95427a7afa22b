"""Start markers on their way: which of them are confirmed, and whether some may still come later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy.core.clock import Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.local_leases import Place
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import INT64_MAX

POLL_S = 0.01
_REST_S = 5.0
"""For how long a request may lie with a broker after its producer had a fatal error."""
_BULK_POLL_S = 0.001

Report = Callable[[KafkaError | None, Any], None]
"""What takes delivery reports."""


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """What became of start markers, by partition.

    last_at     the markers offset of the last one that was confirmed
    failed      the lowest queue offset that was not, where there is one
    given_back  whether the messages were given back, because confirmation took too long
    """

    last_at: dict[int, int]
    failed: dict[int, int]
    given_back: bool = False


class StartBarrier:
    """Ticks behind start markers of one partition, one by each producer that was given some of them.

    An idempotent producer writes in order, also when it has given something up: once its tick is
    written, nothing that it was given before can be. One with a fatal error can't write a tick; what
    it sent before may be on its way still, and gets a while to arrive.
    """

    def __init__(self, topic: str, partition: int, clock: Clock) -> None:
        self._topic = topic
        self._partition = partition
        self._clock = clock
        self._ticks: dict[Producer, object | None] = {}  # on their way
        self._rest_until = 0.0

    def add(self, producer: Producer) -> None:
        """It was given start markers; a tick on its way stands before them."""
        self._ticks[producer] = None

    def passed(self) -> bool:
        """Whether all ticks are written; sends those that are not on their way."""
        for producer, tick in list(self._ticks.items()):
            if tick is None:
                self._send(producer)
            producer.poll(0)
            # What reports failures only has written what it holds no more.
            if self._ticks.get(producer) and not len(producer):
                self._ticks.pop(producer, None)
        return not self._ticks and self._clock.monotonic() >= self._rest_until

    def _send(self, producer: Producer) -> None:
        key, value, headers = codec.encode(codec.tick(self._partition))
        tick = self._ticks[producer] = object()

        def report(error: KafkaError | None, _: Any) -> None:
            if self._ticks.get(producer) is not tick:
                return
            if is_fatal(error):
                self._rest_until = self._clock.monotonic() + _REST_S
            unknown = error is not None and error.code() == KafkaError._UNKNOWN_PARTITION
            if error is None or unknown or is_fatal(error):
                del self._ticks[producer]
            else:
                self._ticks[producer] = None

        try:
            producer.produce(
                self._topic,
                value,
                key,
                self._partition,
                on_delivery=report,
                headers=headers,  # type: ignore[arg-type]
            )
        except BufferError:
            self._ticks[producer] = None
        except KafkaException as exception:
            report(librdkafka.error_of(exception) or KafkaError(KafkaError._FAIL), None)


class StartBatch:
    """Start markers on their way; used by one thread."""

    def __init__(
        self,
        producer: Producer,
        clock: Clock,
        timeout_s: float,
        give_up: Callable[[], None],
        settle: Callable[[int], None],
    ) -> None:
        self._producer = producer
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_s
        self._give_up = give_up
        self._settle = settle
        self._expected: dict[int, list[int]] = {}
        self._size = 0
        # Written by whoever polls the producer.
        self._written: dict[int, list[Any]] = {}
        self._refused: list[tuple[KafkaError | None, Place]] = []
        self._bulk: Producer | None = None
        self._quiet: dict[int, Sequence[int]] = {}
        self._refused_quietly: list[tuple[KafkaError | None, Place]] = []
        self._write_back: Callable[[], None] = lambda: None
        self._back_at = math.inf
        self._given_back = False

    def left_s(self) -> float:
        """Seconds until the time-out."""
        return self._deadline - self._clock.monotonic()

    def expect(self, partition: int, offsets: Sequence[int]) -> Report:
        """There are markers of which these are the lowest offsets; returns what takes their reports."""
        self._expected.setdefault(partition, []).extend(offsets)
        self._size += len(offsets)
        written = self._written.setdefault(partition, [])

        def report(error: KafkaError | None, message: Any) -> None:
            if error is None:
                written.append(message)
            else:
                self.refuse(error, message.key(), quiet=False)

        return report

    def producer_of(self, *, quiet: bool) -> Producer:
        """What the markers are given to, that are expected quietly or not."""
        return self._bulk if quiet and self._bulk is not None else self._producer

    def is_quiet(self, partition: int, offset: int) -> bool:
        """Whether the marker of this message was given to the producer that reports failures only."""
        quiet = self._quiet.get(partition, ())
        return len(quiet) > 0 and offset <= quiet[-1]

    def expect_quietly(self, bulk: Producer, partition: int, offsets: Sequence[int]) -> Report:
        """The same of markers given to a producer that reports failures only."""
        self._bulk = bulk
        self._quiet[partition] = offsets

        def report(error: KafkaError | None, message: Any) -> None:
            self.refuse(error, message.key(), quiet=True)

        return report

    def refuse(self, error: KafkaError | None, key: bytes, *, quiet: bool) -> None:
        """The marker of that key failed."""
        (self._refused_quietly if quiet else self._refused).append((error, codec.decode_key(key)))

    def give_back_at(self, moment: float, write_back: Callable[[], None]) -> None:
        """Call `write_back`, which gives the messages back, if they are not confirmed at `moment`."""
        self._back_at, self._write_back = moment, write_back

    def give_back(self) -> None:
        """Give the messages back, once; in the log that is behind their start markers."""
        if not self._given_back:
            self._given_back = True
            self._write_back()

    def confirmed(self) -> StartOutcome:
        """Wait until they are confirmed, until the time-out at most.

        One that counts as failed may have been written all the same, or be so later.
        """
        while self._pending() and (left_s := self.left_s()) > 0:
            self._give_back_when_late()
            # Another thread may have polled what this one waits for.
            self._producer.poll(min(left_s, POLL_S))
        if self._bulk is not None:
            while len(self._bulk) and self.left_s() > 0:
                self._give_back_when_late()
                self._bulk.poll(_BULK_POLL_S)
        # Giving up a quiet producer has it say which markers it still holds (rule R18).
        stuck = self._bulk is not None and len(self._bulk) > 0
        if stuck or any(map(is_fatal, (error for error, _ in self._refused + self._refused_quietly))):
            self._give_up()
        failed: dict[int, int] = {}
        last_at: dict[int, int] = {}
        for partition, offsets in self._expected.items():
            written = self._written[partition][:]
            if written:
                last_at[partition] = written[-1].offset()
            if len(written) < len(offsets):
                done = {codec.decode_key(message.key())[1] for message in written}
                failed[partition] = min(offset for offset in offsets if offset not in done)
        if self._bulk is not None and len(self._bulk):  # it did not say
            failed.update((partition, offsets[0]) for partition, offsets in self._quiet.items())
        for _, (partition, offset) in self._refused_quietly:
            failed[partition] = min(offset, failed.get(partition, offset))
        for partition in self._expected.keys() - last_at.keys():  # nor where they are
            failed[partition] = min(
                *self._quiet.get(partition, ())[:1], *self._expected[partition], INT64_MAX
            )
        for partition in self._expected.keys() - failed.keys():
            self._settle(partition)
        return StartOutcome(last_at, failed, self._given_back)

    def _give_back_when_late(self) -> None:
        if self._clock.monotonic() >= self._back_at:
            self.give_back()

    def _pending(self) -> bool:
        return len(self._refused) + sum(map(len, self._written.values())) < self._size


def is_fatal(error: KafkaError | None) -> bool:
    """Whether the producer that met it can do nothing more."""
    return error is not None and (error.fatal() or error.code() == KafkaError._FATAL)
