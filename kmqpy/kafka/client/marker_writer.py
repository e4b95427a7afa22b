"""Writes a client's markers, other than start markers, and sends each again until Kafka has confirmed it.

How the writer knows what is confirmed: each marker belongs to a group (`_Group`), which counts markers when
they are queued, and again when the producer's delivery callback says that they are written. A marker that
failed is sent again, and counts once it is written after all. Who waits, waits until both counts are equal:
those of the group of its own markers, or, in flush(), those of all groups.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.forks import ForkGuard
from kmqpy.core.throttle import Throttle
from kmqpy.errors import ConfigError, ReceiptError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.markers_producer import produce, produce_all
from kmqpy.kafka.client.start_markers import POLL_S, StartMarkerWriter
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05
"""The writer's own thread looks for failed markers this often while no thread waits for a confirmation."""
_AWAITED_POLL_S = 0.001
"""While a thread waits, the writer's own thread waits no longer than this for the next confirmation."""
_COLLECT_S = 0.002
"""The writer's own thread collects markers for this long, to send them together."""
_COLLECT_RANGES_S = 0.005
"""The same for end markers that become range markers: the longer, the fewer they are."""
_MAX_COLLECTED = 100_000
"""put() blocks while more markers than this wait for the writer's own thread."""
_SEND_AGAIN_AFTER_S = 0.2
"""A marker that failed is sent again after this time."""
_REPLACE_EVERY_S = 1.0
"""The writer makes at most one new producer in this time; markers wait meanwhile."""
_SILENCE_S = 0.5
"""When close() has waited this long and nothing was confirmed, it asks whether Kafka is there at all."""
_WARN_EVERY_S = 10.0
"""The writer logs at most one warning of failed markers in this time."""

Item = Marker | tuple[int, Sequence[int]]
"""A marker to write; or a partition, and the offsets of messages in it whose end markers to write."""


class _Group:
    """Counts markers that are confirmed together, for those who wait for them.

    queued     how many markers were queued; changed under the writer's lock
    confirmed  how many of them Kafka has confirmed; changed by the writer's own thread
    """

    __slots__ = ("_failed", "confirmed", "queued")

    def __init__(self, failed: Callable[[_Group, KafkaError, Any, codec.Headers | None], None]) -> None:
        self._failed = failed
        self.queued = self.confirmed = 0

    @property
    def left(self) -> int:
        """How many markers are not confirmed."""
        return self.queued - self.confirmed

    def report(self, error: KafkaError | None, record: Any, *, headers: codec.Headers | None = None) -> None:
        """Count a marker as confirmed, or have it sent again: the delivery callback."""
        if error is None:
            self.confirmed += 1
        else:
            self._failed(self, error, record, headers)


class _QueuedMarkers(NamedTuple):
    """Markers that wait for the writer's own thread: the end markers of `ends`, or `other`, encoded.

    `topic` is that of the end markers, see Marker.
    """

    group: _Group
    ends: Sequence[int]
    topic: bytes | None = None
    other: tuple[bytes, bytes, codec.Headers] | None = None


class _MarkerToWrite(NamedTuple):
    """One encoded marker, its partition, and the group that the marker belongs to."""

    group: _Group
    partition: int
    encoded: codec.Encoded


class _Waiter:
    """A thread that waits until all markers of some groups are confirmed."""

    def __init__(self, groups: Iterable[_Group]) -> None:
        self._groups = [*groups]
        self.done = threading.Event()

    @property
    def left(self) -> int:
        """How many markers of the groups are not confirmed."""
        return sum(group.left for group in self._groups)


class MarkerWriter(Closeable):
    """Writes acknowledgements, nacks, extensions, dead-letter requests and assignment ticks, for one queue.

    If the queue's format is "range", end markers that wait, and start markers, are written as range markers.

    `put`, `put_one` and `end` queue markers, from any thread. They return at once, unless more than 100,000
    markers wait. A thread of the writer's own sends the markers, and sends failed ones again until they are
    confirmed or the writer is closed. `write` waits until its markers are confirmed. Each partition gets its
    markers in the order in which they were queued, except markers that are sent again.

    Start markers have producers of their own, see `starts`. A client waits for its start markers, which would
    otherwise queue after all these.

    delivery_timeout_ms  librdkafka reports a marker as failed when Kafka has not confirmed it after this time
    topic_id             the id of the queue topic. Markers that are written by receipt name it (rule R24),
                         except end markers of the JVM format, which would lose the speed of librdkafka's
                         batches
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        *,
        delivery_timeout_ms: int = 10_000,
        topic_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._tag = None if topic_id is None else codec.topic_tag(topic_id)
        self._topic = queue.markers_topic
        self._guard = ForkGuard(f"the writer of markers topic {self._topic}")
        self._connection = connection
        self._delivery_timeout_ms = delivery_timeout_ms
        self._writes_ranges = queue.writes_ranges
        self._collect_s = _COLLECT_RANGES_S if self._writes_ranges else _COLLECT_S
        self._clock = clock
        self._producer = self._new_producer()
        self._producer_is_broken = False
        self._throttle = Throttle(_WARN_EVERY_S, clock)
        self._replacements = Throttle(_REPLACE_EVERY_S, clock)
        self._queued: defaultdict[int, list[_QueuedMarkers]] = defaultdict(list)
        """By partition, the markers that wait for the writer's own thread, in order (case F14)."""
        self._collected = 0  # the number of markers in _queued
        self._failed: deque[tuple[float, _MarkerToWrite]] = deque()
        """Markers that failed, each with the monotonic time at which it is sent again."""
        self._changed = threading.Condition()
        self._group = self._new_group()
        """The group of markers that put() has queued, without a group of their own, since the last
        flush()."""
        self._groups = [self._group]
        """The groups that flush() waits for; some may be confirmed."""
        self._waiters: list[_Waiter] = []
        self.is_away = False
        self._work = threading.Event()  # wakes the writer's own thread
        self._stop_collecting = threading.Event()  # set while a thread waits, and when the writer closes
        self._closing = threading.Event()
        self._abandoned = False
        self._starts = StartMarkerWriter(
            self._topic, self._new_producer, clock, ranges=self._writes_ranges, closing=self._closing
        )
        self._thread = threading.Thread(target=self._serve, name="kmq-markers", daemon=True)
        self._thread.start()

    @property
    def starts(self) -> StartMarkerWriter:
        """The writer of start markers; for one thread at a time."""
        self._guard.raise_if_inherited()
        return self._starts

    def put(self, items: Iterable[Item], own: _Group | None = None, *, by_receipt: bool = False) -> None:
        """Queue these markers, which are sent until confirmed. Blocks only while more than 100,000 wait.

        `own` is a group for these markers only, for which the caller waits. `by_receipt`: the messages are
        named by receipts. Raises ReceiptError after abandon(), Unavailable after close().
        """
        topic = self._tag if by_receipt else None
        self._guard.raise_if_inherited()
        with self._changed:
            if self._abandoned:
                raise ReceiptError(f"markers topic {self._topic}: it belongs to another queue now, recreated")
            if self._closing.is_set():
                raise Unavailable(f"markers topic {self._topic}: the writer is closed")
            group = self._group if own is None else own
            for item in items:
                if isinstance(item, Marker):  # encoded here, so that the caller gets the error
                    partition, count = item.partition, 1
                    named = item if topic is None else replace(item, topic=topic)
                    queued = _QueuedMarkers(group, (), None, codec.encode(named))
                else:
                    partition, ends = item
                    queued, count = _QueuedMarkers(group, ends, topic), len(ends)
                group.queued += count  # before append(): at its end, a signal handler may raise
                self._queued[partition].append(queued)
                self._collected += count
            if not self._waiters:  # while a thread waits, the writer's own thread wakes up often enough
                self._work.set()
            if self._collected > _MAX_COLLECTED:
                self._changed.wait_for(self._has_room, None)

    def put_one(self, marker: Marker) -> None:
        self.put([marker])

    def give_back(self, places: Iterable[Place]) -> None:
        """Give back messages that were started and handed to nobody: this delivery counts as no attempt."""
        for place in places:
            self.put_one(Marker(*place, Op.NACK, counts=False))

    def end(self, partition: int, offsets: Sequence[int]) -> None:
        """Like put(), for the end markers of these messages."""
        self.put([(partition, offsets)])

    def write(self, items: Iterable[Item], timeout_s: float, *, by_receipt: bool = False) -> int:
        """Write these markers and wait until they are confirmed, whatever other callers write.

        Returns how many are not confirmed after the time-out; the writer goes on sending these (rule R26).
        """
        return self._wait(self._put_apart(items, by_receipt=by_receipt), timeout_s)

    def write_assignments(self, ticks: Collection[Marker], timeout_s: float) -> set[int]:
        """Write assignment ticks (see codec.assignment_tick) and wait for all of them together.

        Returns the partitions whose tick is not confirmed yet: the tick must stand before their first start
        marker. flush() waits for none of these ticks.
        """
        waiters = {tick.partition: self._put_unflushed(tick) for tick in ticks}
        deadline = self._clock.monotonic() + timeout_s
        return {
            partition
            for partition, waiter in waiters.items()
            if self._wait(waiter, max(0.0, deadline - self._clock.monotonic()))
        }

    def flush(self, timeout_s: float) -> int:
        """Wait until all markers queued so far are confirmed, except assignment ticks.

        Returns how many are not confirmed after the time-out.
        """
        self._guard.raise_if_inherited()
        with self._changed:
            waiter = _Waiter(self._groups)
            self._group = self._new_group()
            self._groups = [*self._unconfirmed_groups(), self._group]
        return self._wait(waiter, timeout_s)

    def _put_apart(self, items: Iterable[Item], *, by_receipt: bool = False) -> _Waiter:
        """Queue these markers as a group of their own, for which flush() waits, too; returns the waiter."""
        self._guard.raise_if_inherited()  # before the lock, which may be held for ever in a child
        group = self._new_group()
        with self._changed:
            self._groups = [*self._unconfirmed_groups(), self._group, group]
            self.put(items, group, by_receipt=by_receipt)
        return _Waiter([group])

    def _put_unflushed(self, marker: Marker) -> _Waiter:
        """Queue a marker as a group of its own, for which flush() does not wait; returns the waiter."""
        group = self._new_group()
        self.put([marker], group)
        return _Waiter([group])

    def _new_group(self) -> _Group:
        return _Group(self._send_failed_later)

    def _unconfirmed_groups(self) -> list[_Group]:
        return [group for group in self._groups if group.left and group is not self._group]

    def _has_room(self) -> bool:
        return self._collected <= _MAX_COLLECTED or self._closing.is_set()

    def _wait(self, waiter: _Waiter, timeout_s: float) -> int:
        """Have all markers sent at once, and wait; returns how many of the waiter's are not confirmed."""
        try:
            with self._changed:
                self._waiters.append(waiter)
                self._stop_collecting.set()
                self._work.set()
            if waiter.left:
                waiter.done.wait(timeout_s)
        finally:  # even when a signal handler raised: the thread would hurry for ever
            with self._changed:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return waiter.left

    def close(self, timeout_s: float = 10.0, waited_s: float = 0.0) -> int:
        """Flush and stop; returns how many markers stay unconfirmed. Their messages are redelivered.

        Gives up, and sets `is_away`, when nothing is confirmed and Kafka does not answer, see
        librdkafka.answers(). The `waited_s` for which the caller has waited for confirmations count as
        silence, too. For the thread that uses `starts`. Does nothing in a forked child: the markers
        are the parent's.
        """
        if self._guard.inherited:
            return 0
        deadline = self._clock.monotonic() + timeout_s
        asks_at = self._clock.monotonic() + _SILENCE_S - waited_s
        left = sum(group.left for group in self._groups)
        while left and (now := self._clock.monotonic()) < deadline and not self.is_away:
            before, left = left, self.flush(max(0.0, min(asks_at, deadline) - now))
            self.is_away = 0 < before <= left and not self._answers()
            asks_at = self._clock.monotonic() + _SILENCE_S
        # The next owner reads the start markers, which must all be in the log by then.
        while not (self.is_away or self._starts.all_outcomes_known()) and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL_S)
            if self._clock.monotonic() >= asks_at:
                self.is_away = not self._answers()
                asks_at = self._clock.monotonic() + _SILENCE_S
        self._stop_thread()
        if left:
            self._producer.purge()
            _log.error("end markers unconfirmed at close", extra={"topic": self._topic, "count": left})
        for producer in (self._producer, *self._starts.producers()):
            producer.flush(0 if self.is_away else 1)
        return left

    def _answers(self) -> bool:
        return librdkafka.answers(self._producer, self._topic, _SILENCE_S)

    def abandon(self) -> None:
        """Stop, and write nothing more: the markers left are for messages of a deleted topic (rule R24)."""
        self._stop_thread(abandoned=True)
        for producer in (self._producer, *self._starts.producers()):
            producer.purge()
            producer.flush(1)

    def _stop_thread(self, *, abandoned: bool = False) -> None:
        """End the writer's own thread, and wake the threads that wait for room or for confirmations."""
        with self._changed:
            self._abandoned = abandoned
            self._closing.set()
            self._changed.notify_all()
        self._stop_collecting.set()
        self._work.set()
        self._thread.join()
        for waiter in list(self._waiters):
            waiter.done.set()

    def _new_producer(self, **settings: Any) -> Producer:
        return librdkafka.new_producer(
            self._connection,
            {
                "linger.ms": 0 if self._writes_ranges else 1,  # few records, which _collect_s has gathered
                "message.timeout.ms": self._delivery_timeout_ms,
                "queue.buffering.max.messages": 200_000,
                **settings,
            },
        )

    # --- the writer's own thread --------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._waiters:
                self._work.wait(_IDLE_POLL_S)
            self._work.clear()
            if self._queued and not self._waiters:
                self._stop_collecting.wait(self._collect_s)
            try:
                self._send_queued()
                self._producer.poll(_AWAITED_POLL_S if self._waiters else 0)
                self._send_again()
            except Exception:  # without this thread nothing would be written any more
                _log.exception("writing markers failed", extra={"topic": self._topic})
                self._closing.wait(_AWAITED_POLL_S)
            self._starts.poll_unused()
            self._tell_waiters()

    def _tell_waiters(self) -> None:
        with self._changed:
            for waiter in [one for one in self._waiters if not one.left]:
                self._waiters.remove(waiter)  # its next markers find us waiting for work
                waiter.done.set()
            if not self._waiters:
                self._stop_collecting.clear()

    def _send_queued(self) -> None:
        """Send the markers that were collected, in each partition in the order in which they were queued."""
        with self._changed:
            queued, self._queued = self._queued, defaultdict(list)
            self._collected = 0
            self._changed.notify_all()
        for partition, markers in queued.items():
            for group, of_group in itertools.groupby(markers, attrgetter("group")):
                self._send_group(group, partition, of_group)

    def _send_group(self, group: _Group, partition: int, markers: Iterable[_QueuedMarkers]) -> None:
        ends: defaultdict[bytes | None, list[Sequence[int]]] = defaultdict(list)
        for queued in markers:
            if queued.other is None:
                ends[queued.topic].append(queued.ends)
                continue
            self._send_ends(group, partition, ends)
            self._send(_MarkerToWrite(group, partition, queued.other))
        self._send_ends(group, partition, ends)

    def _send_ends(
        self, group: _Group, partition: int, by_topic: dict[bytes | None, list[Sequence[int]]]
    ) -> None:
        """Send the end markers of these messages, by the topic that they name, and empty the dict."""
        while by_topic:
            self._send_ends_of(group, partition, *by_topic.popitem())

    def _send_ends_of(
        self, group: _Group, partition: int, topic: bytes | None, chunks: list[Sequence[int]]
    ) -> None:
        if self._writes_ranges:
            markers = _ranges(partition, chunks, topic)
            group.confirmed += sum(map(len, chunks)) - len(markers)  # one marker of a range will be confirmed
            for marker in markers:
                self._send(_MarkerToWrite(group, partition, codec.encode(marker)))
            return
        value = codec.encode_end()
        offsets = [*itertools.chain.from_iterable(chunks)]
        for key in produce_all(self._producer, self._topic, partition, offsets, value, group.report):
            self._send(_MarkerToWrite(group, partition, (key, value, None)))

    def _send(self, marker: _MarkerToWrite) -> None:
        group, partition, encoded = marker
        _, _, headers = encoded
        # A delivery report lacks the headers, without which a nack would be sent again as a take.
        report = partial(group.report, headers=headers) if headers else group.report
        while not self._closing.is_set():
            try:
                produce(self._producer, self._topic, partition, encoded, report)
            except BufferError:
                self._producer.poll(POLL_S)  # nobody else makes room
            except KafkaException as exception:
                if librdkafka.refresh_partition(self._producer, self._topic, partition, exception):
                    continue
                self._warn(kafka_errors.error_of(exception))
                if not (self._producer_is_broken and self._replace_producer()):
                    self._send_later(marker)  # the other markers must not wait for this one
                    return
            else:
                return
        self._send_later(marker)  # the writer is closing: the marker counts as unconfirmed

    def _send_again(self) -> None:
        """Send the failed markers whose time has come."""
        if self._producer_is_broken:
            self._replace_producer()
        while self._failed and self._failed[0][0] <= self._clock.monotonic():
            _, marker = self._failed.popleft()
            self._send(marker)

    def _send_later(self, marker: _MarkerToWrite) -> None:
        self._failed.append((self._clock.monotonic() + _SEND_AGAIN_AFTER_S, marker))

    def _send_failed_later(
        self, group: _Group, error: KafkaError, record: Any, headers: codec.Headers | None
    ) -> None:
        """Have a marker sent again later: its delivery report tells of a failure."""
        if not self._closing.is_set():
            self._warn(error)
        encoded = record.key(), record.value(), headers
        self._send_later(_MarkerToWrite(group, record.partition(), encoded))

    def _warn(self, error: KafkaError | None) -> None:
        """Log that a marker failed, unless that was done lately; note if the producer must be replaced."""
        cause = self._producer.fatal_error or error
        is_told = cause is None or cause.code() != KafkaError._FATAL  # else the producer's next poll tells it
        if is_told and self._throttle.allows():
            reason = cause.name() if cause is not None else "unknown"
            _log.warning("markers are sent again", extra={"topic": self._topic, "error": reason})
        self._producer_is_broken = self._producer_is_broken or may_be_cut_off(error)

    def _replace_producer(self) -> bool:
        """Make a new producer: the former may be cut off, or has met a fatal error, which ended it.

        A producer that is cut off never reaches Kafka again. A fatal error comes, for example, when the
        broker has lost markers that it had confirmed. It ends each producer while Kafka does not let us
        write. So _replace_producer() does nothing, and returns False, when it has made one lately. Nor does
        it while none can be made, say, because a file of certificates is missing.
        """
        if not self._replacements.allows():
            return False
        try:
            new = self._new_producer()
        except ConfigError as error:
            if self._throttle.allows("no producer"):
                _log.warning(
                    "no markers producer can be made", extra={"topic": self._topic, "error": str(error)}
                )
            return False
        self._producer.purge()
        self._producer.flush(1)  # serves the delivery reports, so that markers not confirmed are sent again
        cause = self._producer.fatal_error
        _log.warning(
            "markers producer replaced: it ended or got no answer",
            extra={"topic": self._topic, "error": "no answer" if cause is None else cause.name()},
        )
        self._producer, self._producer_is_broken = new, False
        return True


def _ranges(partition: int, chunks: Iterable[Sequence[int]], topic: bytes | None) -> list[Marker]:
    """Return range markers that end these messages, acknowledged at various times and in any order."""
    found: list[Marker] = []
    single: set[int] = set()
    for offsets in chunks:
        if isinstance(offsets, range):
            found += codec.ranges(partition, Op.END, offsets, topic=topic)
        else:
            single.update(offsets)
    if single:
        found += codec.ranges(partition, Op.END, sorted(single), topic=topic)
    return found
