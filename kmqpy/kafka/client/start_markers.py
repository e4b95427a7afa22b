"""Writes start markers ("a client took this message"), and says which of them Kafka has confirmed.

There are up to two producers, because librdkafka takes as long to report the outcome of a marker as to write
the marker. One producer reports every outcome, so the client learns where in the log its markers stand. The
other reports errors only: most markers of a large number go to it. A range marker is one record that is the
start marker of many messages.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import Clock
from kmqpy.core.throttle import Throttle
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.markers_producer import Report, produce, produce_all
from kmqpy.kafka.client.unconfirmed_starts import UnconfirmedStarts
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.places import Place

_log = logging.getLogger(__name__)

POLL_S = 0.01
"""One poll of a producer waits for at most this long for delivery reports, or for room in its queue."""
_ERRORS_ONLY_POLL_S = 0.001
"""One poll of the producer that reports errors only waits for at most this long. The time is short, because
the confirmation of a marker does not end such a poll."""
_CLOSING_S = 0.5
"""A client that closes waits no longer for its start markers, in seconds."""
_WARN_EVERY_S = 10.0
"""The writer logs at most one warning of markers that a producer did not accept in this time."""
_MIN_ERRORS_ONLY = 200
"""If a batch has at least this many start markers of one partition, all but the last go to the producer that
reports errors only. Range markers never go to it, nor start markers that name a holder."""


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """The outcome of writing start markers, by partition.

    last_at     the markers offset of the last start marker that was confirmed, where one was
    failed      the lowest queue offset whose start marker was not confirmed, where there is one
    given_back  True: the messages were given back, because confirmation took too long
    """

    last_at: dict[int, int]
    failed: dict[int, int]
    given_back: bool = False


@dataclass
class _PartitionStarts:
    """The start markers of one partition in a batch; each goes to one of the two producers."""

    reported: list[int] = field(default_factory=list)
    """The lowest queue offset of each marker for the producer that reports every outcome."""
    confirmed: list[Any] = field(default_factory=list)
    """Those of these records that Kafka has confirmed. Any thread that polls the producer appends to the
    list."""
    errors_only: Sequence[int] = ()
    """The queue offsets whose markers are for the producer that reports errors only."""
    refused: list[int] = field(default_factory=list)
    """The queue offsets of `errors_only` whose markers the producer did not accept, or reported as failed."""

    def outcome(self, *, unknown: bool) -> tuple[int | None, int | None]:
        """Return the markers offset of the last confirmed marker, and the lowest queue offset not confirmed.

        `unknown`: the producer that reports errors only still holds markers, so their outcome is not known.
        """
        confirmed = list(self.confirmed)  # a copy: another thread that polls the producer may append to it
        failed = list(self.refused)
        if unknown or not confirmed:  # without a confirmed marker, the markers offset is not known
            failed += self.errors_only[:1]
        if len(confirmed) < len(self.reported):
            offsets = {codec.decode_key(record.key())[1] for record in confirmed}
            failed += [offset for offset in self.reported if offset not in offsets]
        return confirmed[-1].offset() if confirmed else None, min(failed, default=None)


class StartBatch:
    """Start markers whose outcome is awaited. One thread uses a batch; any thread may poll the producers.

    producer       reports the outcome of each marker
    give_up        called after a fatal error, and when the producer that reports errors only still holds
                   markers at the time-out: purges both producers, so that they report unwritten markers
    all_confirmed  called with each partition of which every start marker was confirmed
    """

    def __init__(
        self,
        producer: Producer,
        clock: Clock,
        timeout_s: float,
        give_up: Callable[[], None],
        all_confirmed: Callable[[int], None],
    ) -> None:
        self._producer = producer
        self._errors_only: Producer | None = None
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_s
        self._give_up = give_up
        self._all_confirmed = all_confirmed
        self._partitions: dict[int, _PartitionStarts] = {}
        self._refused: list[KafkaError | None] = []
        self._refused_errors_only: list[KafkaError | None] = []
        self._write_back: Callable[[], None] = lambda: None
        self._give_back_at = math.inf
        self._given_back = False

    def left_s(self) -> float:
        """Seconds until the time-out."""
        return self._deadline - self._clock.monotonic()

    def expect(self, partition: int, offsets: Sequence[int]) -> Report:
        """Register markers by their lowest queue offsets; returns their delivery callback."""
        starts = self._partitions.setdefault(partition, _PartitionStarts())
        starts.reported.extend(offsets)
        confirmed = starts.confirmed

        def report(error: KafkaError | None, record: Any) -> None:
            if error is None:
                confirmed.append(record)
            else:
                self.refuse(error)

        return report

    def expect_errors_only(self, producer: Producer, partition: int, offsets: Sequence[int]) -> Report:
        """Register markers for the producer that reports errors only; returns their delivery callback."""
        self._errors_only = producer
        self._partitions.setdefault(partition, _PartitionStarts()).errors_only = offsets

        def report(error: KafkaError | None, record: Any) -> None:
            self.refuse_errors_only(error, record.key())

        return report

    def refuse(self, error: KafkaError | None) -> None:
        """Note that a marker failed that was for the producer that reports every outcome."""
        self._refused.append(error)

    def refuse_errors_only(self, error: KafkaError | None, key: bytes) -> None:
        """Note that a marker failed that was for the producer that reports errors only."""
        partition, offset = codec.decode_key(key)
        self._partitions[partition].refused.append(offset)
        self._refused_errors_only.append(error)

    def producer_of(self, partition: int, offset: int) -> Producer:
        """Return the producer that got the start marker of this message."""
        starts = self._partitions.get(partition)
        if self._errors_only is None or starts is None or not len(starts.errors_only):
            return self._producer
        return self._errors_only if offset <= starts.errors_only[-1] else self._producer

    def give_back_at(self, moment: float, write_back: Callable[[], None]) -> None:
        """Have `write_back` give the messages back if the markers are not confirmed at `moment`."""
        self._give_back_at, self._write_back = moment, write_back

    def give_back(self) -> None:
        """Give the messages back, once. In the log, their nacks come after their start markers."""
        if not self._given_back:
            self._given_back = True
            self._write_back()

    def wait_until_confirmed(self, closed: threading.Event | None = None) -> StartOutcome:
        """Wait until the markers are confirmed, at most until the time-out; returns the outcome.

        Once `closed` is set, it waits for half a second at most: close() waits for it.

        A marker that failed is not confirmed: it may be in the log, or be appended later, see
        UnconfirmedStarts.
        """
        while self._has_unreported() and (left_s := self.left_s()) > 0:
            self._give_back_when_late()
            self._hurry(closed)
            # Short, because another thread may have polled the report that this one waits for.
            self._producer.poll(min(left_s, POLL_S))
        if self._errors_only is not None:
            while len(self._errors_only) and self.left_s() > 0:
                self._give_back_when_late()
                self._hurry(closed)
                self._errors_only.poll(_ERRORS_ONLY_POLL_S)
        # Once given up, the producer that reports errors only says which markers it held: a
        # partition without a leader stops only itself (rule R18).
        fatal = any(map(kafka_errors.is_fatal, self._refused + self._refused_errors_only))
        if fatal or self._has_ended_producer() or self._errors_only_holds_markers():
            self._give_up()
        unknown = self._errors_only_holds_markers()
        last_at: dict[int, int] = {}
        failed: dict[int, int] = {}
        for partition, starts in self._partitions.items():
            last, lowest = starts.outcome(unknown=unknown)
            if last is not None:
                last_at[partition] = last
            if lowest is None:
                self._all_confirmed(partition)
            else:
                failed[partition] = lowest
        return StartOutcome(last_at, failed, self._given_back)

    def _hurry(self, closed: threading.Event | None) -> None:
        if closed is not None and closed.is_set():
            self._deadline = min(self._deadline, self._clock.monotonic() + _CLOSING_S)

    def _give_back_when_late(self) -> None:
        if self._clock.monotonic() >= self._give_back_at:
            self.give_back()

    def _has_ended_producer(self) -> bool:
        return any(one is not None and one.fatal_error for one in (self._producer, self._errors_only))

    def _errors_only_holds_markers(self) -> bool:
        return self._errors_only is not None and len(self._errors_only) > 0

    def _has_unreported(self) -> bool:
        left = sum(len(starts.reported) - len(starts.confirmed) for starts in self._partitions.values())
        return left > len(self._refused)


class StartMarkerWriter:
    """Writes start markers. One thread at a time may use it.

    Failed start markers are not sent again: the client reads their messages again and writes new start
    markers (rule R18).

    new_producer  makes a producer; the settings given override the usual ones
    ranges        True: write range markers, not one marker for each message
    closing       set when the client closes: no further marker is handed to a producer
    """

    def __init__(
        self,
        topic: str,
        new_producer: Callable[..., Producer],
        clock: Clock,
        *,
        ranges: bool,
        closing: threading.Event,
    ) -> None:
        self._topic = topic
        self._new_producer = new_producer
        self._clock = clock
        self._ranges = ranges
        self._closing = closing
        self._reporting: Producer | None = None
        self._errors_only: Producer | None = None
        self._used_at = clock.monotonic()
        self._warnings = Throttle(_WARN_EVERY_S, clock)
        self._unconfirmed: dict[int, UnconfirmedStarts] = {}
        """By partition, the start markers whose outcome is not known."""

    def get_ready(self) -> None:
        """Make a producer, so that the first start marker does not wait for its connection."""
        self._reporting_producer()

    def start(
        self,
        takes: Mapping[int, Sequence[int]],
        delays: Mapping[Place, int],
        lease_ms: int,
        holder: str | None,
        timeout_s: float,
        hand_out_until: float = math.inf,
    ) -> StartBatch:
        """Hand start markers to the producers; the caller then waits with the batch's wait_until_confirmed().

        takes           ascending offsets of the messages taken, by partition
        delays          messages not due yet, with the ms until they are
        timeout_s       markers that are not confirmed after this time count as failed
        hand_out_until  the messages are given back if they are not confirmed at this monotonic time
        """
        batch = StartBatch(
            self._reporting_producer(), self._clock, timeout_s, self._drop_producers, self._forget_unconfirmed
        )
        batch.give_back_at(hand_out_until, partial(self._give_back, batch, takes))
        try:
            self._begin(batch, takes, delays, lease_ms, holder)
        except BaseException:  # of a signal handler, too: only start() knows of these start markers
            batch.give_back()
            raise
        return batch

    def outcome_known(self, partition: int) -> bool:
        """Return True if Kafka can append no start marker of this partition any more. Does not wait.

        After start markers of unknown outcome, each call of outcome_known() sends the missing ticks of
        UnconfirmedStarts: call again until True.
        """
        unconfirmed = self._unconfirmed.get(partition)
        if unconfirmed is not None and unconfirmed.passed():
            del self._unconfirmed[partition]
        return partition not in self._unconfirmed

    def all_outcomes_known(self) -> bool:
        """Return True if outcome_known() holds for every partition."""
        return not [partition for partition in list(self._unconfirmed) if not self.outcome_known(partition)]

    def poll_unused(self) -> None:
        """Poll producers not used for over 1 s, whose log lines would pile up; for any thread."""
        if self._clock.monotonic() - self._used_at > 1:
            for producer in (self._reporting, self._errors_only):  # another thread may drop them meanwhile
                if producer is not None:
                    producer.poll(0)

    def producers(self) -> list[Producer]:
        """Return the producers in use for new start markers."""
        return [producer for producer in (self._reporting, self._errors_only) if producer is not None]

    def producers_in_use(self) -> set[Producer]:
        """Return all producers whose start markers may still be appended, former ones too; for any thread."""
        unconfirmed = list(self._unconfirmed.values())
        return {*self.producers(), *(producer for one in unconfirmed for producer in one.producers())}

    def replace(self, cut_off: Collection[Producer]) -> None:
        """Use new producers instead of these, which are cut off: they never reach Kafka again."""
        if not set(cut_off).isdisjoint(self.producers()):
            self._drop_producers()
        for one in self._unconfirmed.values():
            one.forget(cut_off)
        for producer in cut_off:
            _purge(producer)  # former producers may hold ticks

    def _begin(
        self,
        batch: StartBatch,
        takes: Mapping[int, Sequence[int]],
        delays: Mapping[Place, int],
        lease_ms: int,
        holder: str | None,
    ) -> None:
        reporting = self._reporting_producer()
        for partition in {*takes, *(partition for partition, _ in delays)}:
            self._unconfirmed_in(partition).add(reporting)
        headers = codec.encode(Marker(0, 0, Op.TAKE, holder=holder))[2] or None
        for partition, offsets in takes.items():
            if self._ranges:
                fields = {"redeliver_after_ms": lease_ms, "holder": holder}
                for marker in codec.ranges(partition, Op.TAKE, offsets, **fields):
                    self._produce(batch, reporting, marker, batch.expect(partition, [marker.offset]))
                continue
            value = codec.encode_start(lease_ms)
            if headers is None and len(offsets) >= _MIN_ERRORS_ONLY:
                # The report of the last marker says where in the log the markers are.
                self._produce_errors_only(batch, partition, offsets[:-1], value)
                offsets = offsets[-1:]
            report = batch.expect(partition, offsets)
            if headers is None:
                keys = produce_all(reporting, self._topic, partition, offsets, value, report)
            else:  # librdkafka's batches have no headers
                keys = iter(codec.encode_keys(partition, offsets))
            for key in keys:
                self._produce_or_refuse(
                    batch, reporting, partition, (key, value, headers), report, batch.refuse
                )
        for (partition, offset), wait_ms in delays.items():
            delay = Marker(partition, offset, Op.DELAY, wait_ms, counts=False)
            self._produce(batch, reporting, delay, batch.expect(partition, [offset]))

    def _produce(self, batch: StartBatch, producer: Producer, marker: Marker, report: Report) -> None:
        self._produce_or_refuse(batch, producer, marker.partition, codec.encode(marker), report, batch.refuse)

    def _produce_errors_only(
        self, batch: StartBatch, partition: int, offsets: Sequence[int], value: bytes
    ) -> None:
        producer = self._errors_only_producer()
        self._unconfirmed_in(partition).add(producer)
        report = batch.expect_errors_only(producer, partition, offsets)
        for key in produce_all(producer, self._topic, partition, offsets, value, report):
            refuse = partial(batch.refuse_errors_only, key=key)
            self._produce_or_refuse(batch, producer, partition, (key, value, None), report, refuse)

    def _produce_or_refuse(
        self,
        batch: StartBatch,
        producer: Producer,
        partition: int,
        marker: codec.Encoded,
        report: Report,
        refuse: Callable[[KafkaError | None], None],
    ) -> None:
        """Hand one marker to the producer, wait for room if need be; call `refuse` if that fails."""
        error: KafkaError | None = None
        while not self._closing.is_set():
            try:
                produce(producer, self._topic, partition, marker, report)
            except BufferError:
                if batch.left_s() <= 0:
                    break
                producer.poll(POLL_S)
            except KafkaException as exception:
                if librdkafka.refresh_partition(producer, self._topic, partition, exception):
                    continue
                error = kafka_errors.error_of(exception)
                if self._warnings.allows():  # an ended producer accepts none of the others, either
                    name = kafka_errors.error_name(exception)
                    _log.warning("markers not accepted", extra={"topic": self._topic, "error": name})
                break
            else:
                return
        refuse(error)

    def _give_back(self, batch: StartBatch, takes: Mapping[int, Sequence[int]]) -> None:
        """Write nack markers for messages whose start markers are not confirmed yet.

        The nacks go to the same producers as the start markers, so they come after these in the log, and at
        about the same time. Nacks that fail are not sent again.
        """
        for partition, offsets in takes.items():
            if self._ranges:
                back = codec.ranges(partition, Op.NACK, offsets, counts=False)
            else:
                back = [Marker(partition, offset, Op.NACK, counts=False) for offset in offsets]
            for marker in back:
                producer = batch.producer_of(partition, marker.offset)
                try:
                    produce(producer, self._topic, partition, codec.encode(marker), _ignore_report)
                except (BufferError, KafkaException):
                    return

    def _unconfirmed_in(self, partition: int) -> UnconfirmedStarts:
        if partition not in self._unconfirmed:
            self._unconfirmed[partition] = UnconfirmedStarts(self._topic, partition, self._clock)
        return self._unconfirmed[partition]

    def _forget_unconfirmed(self, partition: int) -> None:
        self._unconfirmed.pop(partition, None)

    def _reporting_producer(self) -> Producer:
        if any(one.fatal_error for one in self.producers()):  # since the last start markers
            self._drop_producers()
        if self._reporting is None:
            self._reporting = self._new_producer(**{"linger.ms": 0})
        self._used_at = self._clock.monotonic()
        return self._reporting

    def _errors_only_producer(self) -> Producer:
        if self._errors_only is None:
            self._errors_only = self._new_producer(**{"linger.ms": 0, "delivery.report.only.error": True})
        return self._errors_only

    def _drop_producers(self) -> None:
        """Drop the producers after a fatal error or a time-out, or when one is cut off."""
        _log.error("start markers' producers replaced", extra={"topic": self._topic})
        for producer in self.producers():
            _purge(producer)
        self._reporting = self._errors_only = None


def _purge(producer: Producer) -> None:
    """Have the producer report unwritten markers as failed: unreported ones would keep it alive."""
    producer.purge()
    producer.flush(1)


def _ignore_report(_error: KafkaError | None, _record: Any) -> None:
    pass
