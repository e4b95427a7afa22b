"""KmqClient: take messages of a queue and acknowledge each one by itself.

The flow of the JVM library kmq: consume a batch, write a start marker for each message and wait until
they are confirmed, let the offsets be committed, hand the messages out; `ack` writes the end marker.
A message whose end marker does not come before its lease ends is redelivered by a tracker.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.errors import Closed, ConfigError, DecodeError, ReceiptError, Unavailable
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.client.local_leases import LocalLeases
from kmqpy.kafka.client.marker_writer import Item, MarkerWriter
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.client.settings_mirror import check_topics, settings_of
from kmqpy.kafka.client.start_markers import StartBatch, StartOutcome
from kmqpy.kafka.markers.codec import INT64_MAX, Marker, Op
from kmqpy.kafka.markers.records import by_partition, have_headers, read_headers
from kmqpy.kafka.message_headers import DELIVER_AT, int_header
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection
from kmqpy.kafka.topics import Topics, TopicWatch, earlier_markers_error
from kmqpy.message import Message, MessagesLike
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

_SLICE_S = 0.1
"""How long one wait for records may last, so that commits are not late and close is quick."""

_START_TIMEOUT_S = 3.0
"""How long start markers may take before their partitions have to wait (rule R18)."""

_MIN_LEASE_LEFT = 0.5
"""A message is handed out only while this part of its lease is left (rule R11)."""

_WATCHED_S = 2.0
"""A client that only acknowledges asks for the topic ids first when they are older than this (rule R24)."""
_LOOK_TIMEOUT_S = 3.0
_LOOK_POLL_S = 0.01

_SLOW_CONFIRMATION = 1 / 8
"""Start markers may take this part of a lease before it is lengthened."""

_CONFIRM_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0

_record_of = attrgetter("_record")
_batch_of = attrgetter("_batch")

_NOTHING: tuple[tuple[Message, ...], Offsets] = ((), {})

_MANY = 500

_MAX_REASON = 1_000
"""Characters of a reason; it is written with the marker, and again with the dead letter."""


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of KmqClient."""

    max_in_flight: int
    holder: str | None
    instance_id: str | None
    markers: Literal["jvm", "range"]
    coalesce_ms: float
    telemetry: Telemetry | None
    clock: Clock


class KmqClient:
    """Takes messages from one queue; safe to use from any thread.

    Clients share a queue by its partitions: one client takes from each, further clients are on standby.

    queue          its name; or settings, of which those that are not given are the queue's own
    connection     where Kafka is; ZooKeeper is not needed
    max_in_flight  messages taken and neither finished nor expired; receive() waits when they are as
                   many
    holder         a name that stands beside the messages this client holds; for people
    instance_id    static membership in the group: a restart within the session moves no partitions
    markers        "jvm": the format of the JVM library; "range": kmqpy's own, one marker for many
                   messages, several times as fast. A queue that JVM trackers look after must stay
                   with "jvm"; kmqpy's trackers read both, mixed.
    coalesce_ms    for how long end markers are collected into ranges

    At-least-once: a message can come twice, when its lease ended or when a client was killed.

    Not usable in a forked child of the process that made it: there its calls raise Forked.

    Raises QueueNotFound, TopicError, Unavailable when it is made, ConfigError for settings that contradict
    the queue's own. Where the queue topic is made anew, the client goes on with the new one; where that was
    done without its markers topic, receive() raises TopicError until that is made anew, too.
    """

    def __init__(
        self,
        queue: str | QueueSettings,
        connection: KafkaConnection,
        *,
        max_in_flight: int = 10_000,
        holder: str | None = None,
        instance_id: str | None = None,
        markers: Literal["jvm", "range"] = "jvm",
        coalesce_ms: float = 5,
        telemetry: Telemetry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight: {max_in_flight} must be at least 1")
        if markers not in ("jvm", "range"):
            raise ConfigError(f"markers: {markers!r} is neither 'jvm' nor 'range'")
        if not 0 <= coalesce_ms <= 1_000:
            raise ConfigError(f"coalesce_ms: {coalesce_ms!r} must be from 0 to 1000")
        self._connection = check_connection(connection)
        self._queue = settings_of(queue, connection)
        self._guard = ForkGuard(f"the client of queue {self._queue.name!r}")
        self._max_in_flight = max_in_flight
        self._holder = holder
        self._instance_id = instance_id
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        topics = Topics(connection).check(self._queue)
        check_topics(self._queue, topics, connection)
        self._ids = topics.ids
        self._beside_earlier_markers = False  # the queue topic was recreated, its markers topic was not
        self._watch = TopicWatch(connection, self._queue, topics.ids, clock)
        self._partitions = topics.markers.partitions
        self._coalesce_ms = coalesce_ms if markers == "range" else None
        self._writer = self._new_writer()
        self._source: GroupMember | None = None
        self._held = LocalLeases()
        self._room = threading.Condition()
        self._taking = threading.RLock()
        self._start_batch: StartBatch | None = None  # of messages that are not handed out yet
        self._confirmed_in_s = 0.0  # how long it took to write the last start markers
        self._handed_out = _NOTHING  # last, while it is not acknowledged
        self._iterating: deque[tuple[float, Message]] = deque()  # with the end of its lease
        self._closed = threading.Event()
        self._housekeeper: threading.Thread | None = None

    @property
    def queue(self) -> QueueSettings:
        """The queue's settings, as this client knows them."""
        return self._queue

    @property
    def held(self) -> int:
        """How many messages this client has received whose leases run and which it has not finished."""
        self._guard.raise_if_inherited()
        with self._room:
            self._held.expire(self._clock.monotonic())
            return len(self._held)

    @property
    def partitions(self) -> list[int]:
        """The partitions that this client takes messages from at the moment.

        Empty before its first receive() and while the consumer group assigns them; a client too many,
        beside as many others as there are partitions, gets none.
        """
        self._guard.raise_if_inherited()
        return [] if self._source is None else self._source.partitions

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[Message]:
        """Take up to `max_messages`; returns as soon as there are some, [] after `wait` seconds.

        The first call joins the consumer group; that is part of `wait`, see `partitions`.

        Each is this caller's for `lease` seconds (default: the queue's redeliver_after; at least 0.1; longer
        where writing start markers takes more than an eighth of it) and comes again unless it is
        acknowledged before. A message that can't be handed out with half of its
        lease left is given back, which does not count as an attempt, unless this process dies first or the
        broker writes the marker that gives it back after the end of the lease.

        Raises ConfigError for bad numbers, TopicError when the queue's topic is gone, or was made anew
        without its markers topic.
        """
        if max_messages < 1:
            raise ConfigError(f"max_messages: {max_messages} must be at least 1")
        lease_ms = self._lease_ms(lease)
        deadline = self._clock.monotonic() + duration_ms(wait, "wait") / 1000
        while True:
            self._check_open()
            left = deadline - self._clock.monotonic()
            room = self._wait_for_room(max(0.0, min(left, _SLICE_S)))
            if room:
                with self._taking:
                    room = self._wait_for_room(0)  # others may have taken it meanwhile
                    wait_s = max(0.0, min(left, _SLICE_S))
                    messages = self._take(min(room, max_messages), wait_s, lease_ms) if room else []
                if messages:
                    return messages
            if self._clock.monotonic() >= deadline:
                return []

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, for as long as the client is open.

        They are taken in batches. Those whose leases run out before it is their turn are given back,
        which does not count as an attempt.
        """
        while not self._closed.is_set():
            self._guard.raise_if_inherited()
            self._release_stale()
            with self._room:
                message = self._iterating.popleft()[1] if self._iterating else None
            if message is not None:
                yield message
                continue
            try:
                self._take_ahead()
            except Closed:
                return

    def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """Acknowledge messages, or the messages of receipts: they do not come again.

        They may be several arguments or one list, here and below.

        Returns at once; the end markers are written in the background, and sent again until they are
        confirmed. With `wait`, it waits until its own end markers are confirmed, and raises Unavailable
        when they are not after 10 s. An ack that comes after the redelivery is harmless.

        Raises ReceiptError.
        """
        writer = self._writer  # before anything is looked at, so that it is of the same topics (rule R24)
        places = self._places(m.each_of(messages))
        self._write(writer, places.items(), wait=wait)
        self._finished(places, "ack")

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration = 0,
        count: bool = True,
        reason: str | None = None,
        wait: bool = False,
    ) -> None:
        """Give messages back: they are redelivered after `delay` seconds.

        `count=False`: this delivery does not count as an attempt. `reason` stands in the dead letter
        if it comes to that.
        """
        delay_ms = self._bounded(duration_ms(delay, "delay"), self._queue.max_delay_ms, "delay")
        self._finish(
            self._writer,
            [
                Marker(*self._place(one), Op.NACK, delay_ms, count, _cut(reason))
                for one in m.each_of(messages)
            ],
            "nack",
            wait=wait,
        )

    def extend(self, *messages: MessagesLike, lease: Duration, wait: bool = False) -> None:
        """Let the lease of messages end `lease` seconds from now, sooner or later than it would.

        Does nothing when the message was finished or redelivered meanwhile. `lease=0` means
        `nack(count=False)`; raises ConfigError for other leases below 0.1 s.
        """
        if not duration_ms(lease, "lease"):
            self.nack(*messages, count=False, wait=wait)
            return
        lease_ms = self._lease_ms(lease)
        writer = self._writer
        places = [self._place(message) for message in m.each_of(messages)]
        self._check_open()
        until = self._clock.monotonic() + lease_ms / 1000
        with self._room:
            self._held.extend(places, until)
        self._write(writer, [Marker(*place, Op.EXTEND, lease_ms) for place in places], wait=wait)
        self._telemetry.finished(self._queue.name, "extend", len(places))

    def dead_letter(self, *messages: MessagesLike, reason: str | None = None, wait: bool = False) -> None:
        """Have messages moved to the dead-letter topic, without another try."""
        self._finish(
            self._writer,
            [
                Marker(*self._place(one), Op.DEAD_LETTER, 0, reason=_cut(reason))
                for one in m.each_of(messages)
            ],
            "dead-letter",
            wait=wait,
        )

    def flush(self, timeout: Duration = 10.0) -> None:
        """Wait until every ack, nack and extend so far is confirmed; raises Unavailable if not.

        It does not wait for what other threads do after this call began.
        """
        self._guard.raise_if_inherited()
        self._check_confirmed(self._writer.flush(duration_ms(timeout, "timeout") / 1000))

    def close(self) -> None:
        """Give back what was taken and not handed out, confirm what is to be confirmed, leave.

        In a forked child it does nothing: what is open belongs to the parent.
        """
        if self._closed.is_set() or self._guard.inherited:
            return
        self._closed.set()
        if self._housekeeper is not None:
            self._housekeeper.join()
        with self._taking:
            with self._room:
                ahead, self._iterating = self._iterating, deque()
            self._release((one.partition, one.offset) for _, one in ahead)
            self._give_back_interrupted()
            self._writer.close(_CLOSE_TIMEOUT_S)
            if self._source is not None:
                self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- taking -----------------------------------------------------------------------------------

    def _take_ahead(self) -> None:
        """Take a batch to be iterated over."""
        if not self._wait_for_room(_SLICE_S):
            return
        with self._taking:  # until the batch is where close() looks for it
            asked = self._clock.monotonic()
            batch = self.receive(wait=_SLICE_S)
            until = asked + self._queue.redeliver_after_ms / 1000
            with self._room:
                self._iterating.extend((until, one) for one in batch)

    def _take(self, max_messages: int, wait_s: float, lease_ms: int) -> list[Message]:
        source = self._open_source()
        self._follow_topics()
        if self._beside_earlier_markers:
            self._closed.wait(wait_s)  # else who tries again at once would do nothing else
            raise earlier_markers_error(self._queue)
        lease_ms = self._lengthened(lease_ms)
        try:
            messages, offsets, until = self._take_from(source, max_messages, wait_s, lease_ms)
        except BaseException:  # of a signal handler too; the source has moved on, and nobody got anything
            source.start_over()
            raise
        source.maintain()
        handed_out = messages and self._hold(offsets, until, lease_ms)
        self._start_batch = None
        if not handed_out:
            return []
        self._handed_out = tuple(messages), offsets
        self._telemetry.received(self._queue.name, messages)
        return messages

    def _take_from(
        self, source: GroupMember, max_messages: int, wait_s: float, lease_ms: int
    ) -> tuple[list[Message], Offsets, float]:
        """Messages whose start markers are confirmed, their places, and when their leases end."""
        with _collecting_later(max_messages):
            self._give_back_interrupted()
            records, offsets = source.poll(max_messages, wait_s)
            self._release(source.pop_orphaned_starts())
            # The lease is counted from before its start marker is written (rule R11).
            until = self._clock.monotonic() + lease_ms / 1000
            if not records:
                return [], {}, until
            now_ms = self._clock.wall_ms()
            delays = self._delays(records, now_ms) if have_headers(records) else {}
            due = offsets if not delays else _without(offsets, delays)
            start_batch = self._writer.starts.start(
                due, delays, lease_ms, self._holder, _START_TIMEOUT_S, _hand_out_until(until, lease_ms)
            )
            self._start_batch = start_batch
            # While the broker works:
            batch = ReceiveContext(self._queue, self._ids.queue, now_ms + lease_ms, self._telemetry, self)
            messages: list[Message] = list(map(KafkaMessage, records, repeat(batch)))
        written = start_batch.confirmed()
        if not written.failed:
            self._confirmed_in_s = self._clock.monotonic() - until + lease_ms / 1000
        if not source.continues_at(written.last_at):
            # The markers topic is another one. If the queue topic is, too, these messages are of the old one.
            ids, now = self._ids, self._clock.monotonic()
            self._look_for_topics()
            if self._ids.queue != ids.queue:
                # If these were messages of the new one, they come again at once, not after the lease.
                self._release((p, offset) for p, ascending in due.items() for offset in ascending)
                return [], {}, until
            if not self._watch.knows_since(now):
                start_batch.give_back()
                source.start_over()
                return [], {}, until
        source.settle(offsets, written)
        if written.failed:
            self._telemetry.failed(self._queue.name, "start markers", len(written.failed))
            _log.warning(
                "start markers are not confirmed; their messages will come again",
                extra={"queue": self._queue.name, "partitions": sorted(written.failed)},
            )
        if delays or written.failed:
            messages = [message for message in messages if _is_taken(message, delays, written)]
            offsets = by_partition(list(map(_record_of, messages)))
        if written.given_back:
            until = -math.inf  # nothing is left of their leases
        return messages, offsets, until

    def _lengthened(self, lease_ms: int) -> int:
        """The lease to write in start markers: longer where these took a good part of it last time.

        Over a slow link the taker would otherwise get little or nothing of a short lease.
        """
        confirmed_in_ms = self._confirmed_in_s * 1000
        if confirmed_in_ms <= lease_ms * _SLOW_CONFIRMATION:
            return lease_ms
        return min(lease_ms + 2 * math.ceil(confirmed_in_ms), max(lease_ms, self._queue.max_hold_ms))

    def _hold(self, taken: Offsets, until: float, lease_ms: int) -> bool:
        """Count messages as held; False, and they are given back, if their leases have run down."""
        if self._clock.monotonic() > _hand_out_until(until, lease_ms):
            count = sum(map(len, taken.values()))
            _log.warning(
                "leases too short for how long their start markers took; given back",
                extra={"queue": self._queue.name, "count": count, "lease_ms": lease_ms},
            )
            self._telemetry.failed(self._queue.name, "stale leases", count)
            self._release((p, offset) for p, offsets in taken.items() for offset in offsets)
            return False
        with self._room:
            self._held.expire(self._clock.monotonic())
            for partition, offsets in taken.items():
                self._held.add(partition, offsets, until)
            self._telemetry.in_flight(self._queue.name, len(self._held))
        return True

    def _give_back_interrupted(self) -> None:
        """Give back what a receive() took that an exception, of a signal handler for example, interrupted."""
        if self._start_batch is not None:
            self._start_batch.give_back()
            self._start_batch = None

    def _release(self, places: Iterable[Place]) -> None:
        """Give back what nobody was handed; it was no attempt."""
        for place in places:
            self._writer.post(Marker(*place, Op.NACK, counts=False))

    def _delays(self, records: list[Any], now_ms: int) -> dict[Place, int]:
        """The places of records not yet due, with the ms until they are."""
        delays: dict[Place, int] = {}
        for record in records:
            headers, unreadable = read_headers(record)
            if unreadable:
                self._telemetry.failed(self._queue.name, "undecodable header", unreadable)
            if headers and (wait_ms := self._wait_ms(headers, now_ms)) > 0:
                delays[record.partition(), record.offset()] = min(wait_ms, 2**62)
        return delays

    def _wait_ms(self, raw: Any, now_ms: int) -> int:
        try:
            deliver_at = int_header(m.headers_of(raw), DELIVER_AT)
        except DecodeError:
            self._telemetry.failed(self._queue.name, "undecodable kmq-deliver-at")
            return 0
        return 0 if deliver_at is None else deliver_at - now_ms

    def message_of(self, record: Any, lease_until_ms: int) -> Message:
        """A record of the queue topic as a message, whoever read it."""
        return KafkaMessage(
            record, ReceiveContext(self._queue, self._ids.queue, lease_until_ms, self._telemetry)
        )

    def _wait_for_room(self, wait_s: float) -> int:
        with self._room:
            if len(self._held) >= self._max_in_flight:
                self._held.expire(self._clock.monotonic())
            if len(self._held) >= self._max_in_flight:
                self._room.wait(wait_s)
            return max(0, self._max_in_flight - len(self._held))

    # --- finishing --------------------------------------------------------------------------------

    def _places(self, messages: Sequence[Message | str]) -> Offsets:
        """The offsets of messages, by partition."""
        handed_out, offsets = self._handed_out
        if len(messages) == len(handed_out) and all(map(is_, messages, handed_out)):  # the usual case
            self._handed_out = _NOTHING
            return offsets
        places: dict[int, list[int]] = {}
        if set(map(type, messages)) == {KafkaMessage}:
            for batch in set(map(_batch_of, messages)):
                self._check_source("message", batch.queue.name, batch.topic_id)
            for record in map(_record_of, messages):
                places.setdefault(record.partition(), []).append(record.offset())
            return places
        for message in messages:
            partition, offset = self._place(message)
            places.setdefault(partition, []).append(offset)
        return places

    def _place(self, message: Message | str) -> Place:
        """Where a message of this queue stands; raises ReceiptError."""
        if type(message) is KafkaMessage:
            batch = _batch_of(message)
            self._check_source("message", batch.queue.name, batch.topic_id)
            return message.partition, message.offset
        # A message that was copied or pickled is known by its receipt, and so is one of another storage.
        receipt = Receipt.parse(message.receipt if isinstance(message, Message) else message)
        self._check_source("receipt", receipt.queue, receipt.topic_id)
        if not self._has(receipt.partition):
            raise ReceiptError(f"receipt: queue {receipt.queue!r} has no partition {receipt.partition}")
        return receipt.partition, receipt.offset

    def _check_source(self, what: str, queue: str, topic_id: str) -> None:
        if queue != self._queue.name:
            raise ReceiptError(f"{what}: it is of queue {queue!r}, not of {self._queue.name!r}")
        if self._housekeeper is None:
            self._guard.raise_if_inherited()
            self._start_housekeeper()
            if not self._watch.knows_since(self._clock.monotonic() - _WATCHED_S):
                self._look_for_topics()
        if topic_id != self._ids.queue:
            self._look_for_topics()
        if topic_id != self._ids.queue:
            if self._beside_earlier_markers:
                raise earlier_markers_error(self._queue)
            raise ReceiptError(f"{what}: it is of another topic named {queue!r}, which was deleted since")

    def _has(self, partition: int) -> bool:
        if partition >= self._partitions:  # a queue can grow
            self._partitions = Topics(self._connection).check(self._queue).partitions
        return partition < self._partitions

    def _finish(self, writer: MarkerWriter, batch: Sequence[Marker], op: str, *, wait: bool) -> None:
        self._write(writer, batch, wait=wait)
        places: dict[int, list[int]] = {}
        for marker in batch:
            places.setdefault(marker.partition, []).append(marker.offset)
        self._finished(places, op)

    def _finished(self, places: Offsets, op: str) -> None:
        with self._room:
            for partition, offsets in places.items():
                self._held.discard(partition, offsets)
            self._room.notify_all()
            self._telemetry.in_flight(self._queue.name, len(self._held))
        self._telemetry.finished(self._queue.name, op, sum(map(len, places.values())))

    def _write(self, writer: MarkerWriter, items: Iterable[Item], *, wait: bool) -> None:
        self._check_open()
        if wait:
            self._check_confirmed(writer.write(items, _CONFIRM_TIMEOUT_S))
        else:
            writer.put(items)

    def _check_confirmed(self, left: int) -> None:
        if left:
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: {left} markers are not confirmed yet; "
                "they are sent again until they are"
            )

    # --- the rest ---------------------------------------------------------------------------------

    def _lease_ms(self, lease: Duration | None) -> int:
        asked_ms = self._queue.redeliver_after_ms if lease is None else lease_duration_ms(lease)
        return self._bounded(asked_ms, self._queue.max_hold_ms, "lease")

    def _bounded(self, value_ms: int, limit_ms: int, name: str) -> int:
        if value_ms > limit_ms:
            raise ConfigError(f"{name}: {value_ms} ms is longer than the queue allows, {limit_ms} ms")
        return value_ms

    def _check_open(self) -> None:
        self._guard.raise_if_inherited()
        if self._closed.is_set():
            raise Closed(f"the client of queue {self._queue.name!r} is closed")

    def _open_source(self) -> GroupMember:
        self._check_open()
        if self._source is None:
            self._writer.starts.get_ready()
            self._source = GroupMember(
                self._connection,
                self._queue,
                self._telemetry,
                ids=self._ids,
                outcome_known=self._outcome_known,
                ids_known=self._watch.knows_since,
                instance_id=self._instance_id,
                clock=self._clock,
            )
            self._start_housekeeper()
        return self._source

    def _start_housekeeper(self) -> None:
        if self._housekeeper is None:
            with self._room:
                if self._housekeeper is None and not self._closed.is_set():
                    keeper = threading.Thread(target=self._keep_house, name="kmq-client", daemon=True)
                    keeper.start()
                    self._housekeeper = keeper

    def _keep_house(self) -> None:
        """Commits and group membership, while the user's code is busy with what it received."""
        slice_s = min(_SLICE_S, self._queue.redeliver_after_ms / 1000 * _MIN_LEASE_LEFT / 5)
        while not self._closed.wait(slice_s):
            try:
                self._release_stale()
                if self._taking.acquire(blocking=False):
                    try:
                        self._keep_source()
                    finally:
                        self._taking.release()
            except Exception:  # the thread must live; receive() meets the same error and raises it
                _log.exception("housekeeping failed", extra={"queue": self._queue.name})

    def _keep_source(self) -> None:
        self._follow_topics()
        if self._source is None:
            return
        self._give_back_interrupted()
        self._source.maintain()
        self._source.keep_alive()
        self._release(self._source.pop_orphaned_starts())

    def _outcome_known(self, partition: int) -> bool:
        return self._writer.starts.outcome_known(partition)

    def _new_writer(self) -> MarkerWriter:
        return MarkerWriter(
            self._connection, self._queue.markers_topic, coalesce_ms=self._coalesce_ms, clock=self._clock
        )

    def _follow_topics(self) -> None:
        """Begin anew where the topics were made anew (rule R24); by who holds `_taking`."""
        ids = self._watch.look()
        mixed = ids.beside_earlier_markers(self._ids)
        if mixed and not self._beside_earlier_markers:
            _log.error("%s", earlier_markers_error(self._queue))
        self._beside_earlier_markers = mixed
        if mixed or ids == self._ids:
            return
        _log.warning("the queue was made anew; beginning anew", extra={"queue": self._queue.name})
        before, writer = self._ids, self._writer
        if ids.queue == before.queue:
            self._ids = ids
        else:
            self._partitions = 0  # to be asked for
            with self._room:
                self._writer = self._new_writer()
                self._ids = ids
                self._held = LocalLeases()
                self._iterating.clear()
                self._handed_out = _NOTHING
                self._start_batch = None
                self._room.notify_all()
        if self._source is not None:
            self._source.follow(ids)
        if writer is not self._writer:
            writer.abandon()
            if self._source is not None:
                self._writer.starts.get_ready()

    def _look_for_topics(self) -> None:
        """Wait until it is known which topics there are now, or until Kafka has not answered for a while."""
        started = self._clock.monotonic()
        while not self._watch.knows_since(started) and self._clock.monotonic() < started + _LOOK_TIMEOUT_S:
            with self._taking:
                self._follow_topics()
            self._clock.sleep(_LOOK_POLL_S)
        with self._taking:
            self._follow_topics()

    def _release_stale(self) -> None:
        """Give back what waits to be iterated over and has not enough of its lease left (rule R11)."""
        needed = self._clock.monotonic() + self._queue.redeliver_after_ms / 1000 * _MIN_LEASE_LEFT
        with self._room:
            if not self._iterating or self._iterating[0][0] >= needed:
                return  # the first is the first to run out
            kept = deque((until, one) for until, one in self._iterating if until >= needed)
            stale = [(one.partition, one.offset) for until, one in self._iterating if until < needed]
            self._iterating = kept
            for partition, offset in stale:
                self._held.discard(partition, (offset,))
            self._release(stale)  # before close(), which waits for us here, closes the writer


@contextmanager
def _collecting_later(count: int) -> Iterator[None]:
    """Lets Python's garbage collector sleep while `count` objects are made, if they are many.

    None of them is garbage, but it would look at all objects there are again and again: with batches of
    5,000 that takes a third of the time of receive().
    """
    if count < _MANY or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_taken(message: Message, delays: Collection[Place], written: StartOutcome) -> bool:
    partition, offset = message.partition, message.offset
    return (partition, offset) not in delays and offset < written.failed.get(partition, INT64_MAX)


def _without(offsets: Offsets, places: Collection[Place]) -> Offsets:
    return {p: [o for o in ascending if (p, o) not in places] for p, ascending in offsets.items()}


def _hand_out_until(lease_until: float, lease_ms: int) -> float:
    """Until when a message with a lease until `lease_until` may be handed out (rule R11)."""
    return lease_until - lease_ms / 1000 * _MIN_LEASE_LEFT


def _cut(reason: str | None) -> str | None:
    return None if reason is None else reason[:_MAX_REASON]
