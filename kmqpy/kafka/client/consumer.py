"""QueueConsumer: takes messages of a queue on Kafka, and acknowledges each message by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.green import tell_once
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, Unavailable
from kmqpy.kafka.client.client_options import MAX_IN_FLIGHT
from kmqpy.kafka.client.housekeeper import Housekeeper
from kmqpy.kafka.client.in_flight_limit import InFlightLimit
from kmqpy.kafka.client.marker_writer import Item, MarkerWriter
from kmqpy.kafka.client.message_places import MessagePlaces, offsets_by_partition, some_are_receipts
from kmqpy.kafka.client.read_ahead import ReadAhead
from kmqpy.kafka.client.receiver import Receiver
from kmqpy.kafka.client.record_message import Acknowledges, KafkaMessage
from kmqpy.kafka.client.topics_in_use import TopicsInUse
from kmqpy.kafka.markers.codec import AT_ONCE_MS, MAX_REASON, Marker, Op
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import stale_markers_error
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message, MessagesLike
from kmqpy.queue.arguments import check_flag, clean_reason
from kmqpy.queue_policy import bounded
from kmqpy.telemetry.base import Telemetry

MAX_POLL_WAIT_S = 0.1
"""receive() splits a longer wait into polls of this length: so commits are not late, and close is quick."""

_MAX_TOPIC_IDS_AGE_S = 2.0
"""If a client has not received, its first call that names messages asks Kafka for the topic ids when the
known ids are older than this (rule R24 of docs/rules.md)."""
_TOPIC_IDS_TIMEOUT_S = 3.0
"""When Kafka has not told the topic ids after this time, the ids known so far count."""
_TOPIC_IDS_POLL_S = 0.01

_LATE_ACK_LOOK_SHARE = 1 / 4
"""extend() spends at most this part of the new lease on reading whether earlier consumers have acknowledged
the messages."""

_LOOK_FOR_LANES_EVERY_S = 10.0
"""While topics and settings do not agree about the queue's lanes, the settings are read this often."""

T = TypeVar("T")


class Owner(Acknowledges, Protocol):
    """The object that has made a consumer."""

    def close_if_abandoned(self) -> None:
        """Close the consumer if nobody can use it any more."""
        ...

    def current_settings(self) -> QueueSettings:
        """The queue's settings, with the lanes that it has now."""
        ...


class QueueConsumer(Closeable):
    """Takes messages from one queue; safe to use from any thread. KmqClient explains the arguments.

    owner   message.ack() calls its ack(), and the consumer's thread its close_if_abandoned(); without one,
            message.ack() calls that of this consumer
    topics  see TopicsInUse
    main    the consumer of the queue's main lane, if `queue` is another lane; see LanesConsumer
    """

    def __init__(
        self,
        queue: QueueSettings,
        connection: KafkaConnection,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        holder: str | None = None,
        instance_id: str | None = None,
        owner: Owner | None = None,
        topics: Topics | None = None,
        main: QueueConsumer | None = None,
        telemetry: Telemetry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_limit(max_in_flight, "max_in_flight")
        tell_once()
        self._owner = owner
        self.outdated = False
        """True: the queue has other lanes by now. The next use of the owner makes a new consumer."""
        self._look_at = clock.monotonic()
        self._connection = connection
        self._queue = queue
        self._guard = ForkGuard(f"the client of queue {self._queue.name!r}")
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._topics = TopicsInUse(connection, self._queue, clock, topics)
        self._in_flight: InFlightLimit = InFlightLimit(
            max_in_flight,
            self._queue.queue_name,
            self._telemetry,
            clock,
            beside=None if main is None else main._in_flight,
        )
        self.read_ahead = ReadAhead(self._queue, self._topics, self._in_flight, clock)
        self._closed = threading.Event()
        self.receiver: Receiver = Receiver(
            connection,
            self._queue,
            self._topics,
            self._in_flight,
            client=owner or self,
            holder=holder,
            instance_id=instance_id,
            look_for_topics=self._look_for_topics,
            closed=self._closed,
            telemetry=self._telemetry,
            clock=clock,
            leader=None if main is None else main.receiver,
        )
        # For the receiver, and for changing the topics; reentrant, since the receiver may have these changed.
        self.receiving: threading.RLock = threading.RLock() if main is None else main.receiving
        self._places = MessagePlaces(
            self._queue, self._topics, watch_topics=self._watch_topics, look_for_topics=self._look_for_topics
        )
        self._housekeeper = Housekeeper(
            self._queue,
            self.receiver,
            self.read_ahead,
            follow_topics=self._follow_topics,
            close_if_abandoned=self._ask_owner,
            receiving=self.receiving,
            closed=self._closed,
        )

    @property
    def name(self) -> str:
        """The name of the queue topic."""
        return self._queue.name

    @property
    def topic_id(self) -> str:
        """The id of the queue topic, as this consumer knows it."""
        return self._topics.ids.queue

    @property
    def leased(self) -> int:
        self._guard.raise_if_inherited()
        return len(self._in_flight)

    @property
    def partitions(self) -> list[int]:
        self._guard.raise_if_inherited()
        return self.receiver.partitions

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[KafkaMessage]:
        return self.receive_by(self._receive_once, max_messages, wait, lease, MAX_POLL_WAIT_S)

    def receive_by(
        self,
        take: Callable[[int, float, int], list[KafkaMessage]],
        max_messages: int,
        wait: Duration,
        lease: Duration | None,
        slice_s: float,
    ) -> list[KafkaMessage]:
        """Receive with `take`, which gets a number, seconds to wait (`slice_s` at most) and a lease in ms."""
        check_limit(max_messages, "max_messages")
        lease_ms = self.checked_lease_ms(lease)
        deadline = self._clock.monotonic() + duration_ms(wait, "wait") / 1000
        while True:
            self.check_open()
            left_s = max(0.0, deadline - self._clock.monotonic())
            if self.wait_for_room(min(left_s, MAX_POLL_WAIT_S)):
                with self.receiving:
                    room = self.wait_for_room(0)  # other threads may have used up the room
                    messages = take(min(room, max_messages), min(left_s, slice_s), lease_ms) if room else []
                if messages:
                    return messages
            if self.outdated or self._clock.monotonic() >= deadline:
                return []

    def __iter__(self) -> Iterator[KafkaMessage]:
        """Yield messages one by one, for as long as the consumer is open."""
        while not self._closed.is_set():
            self._guard.raise_if_inherited()
            self.read_ahead.give_back_stale()
            message = self.read_ahead.pop()
            if message is not None:
                yield message
                continue
            if self.outdated:
                return
            try:
                self._receive_ahead()
            except Closed:
                return

    def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        named = m.each_of(messages)
        writer, places = self._locate(self._places.offsets_of, named)
        self._write(writer, named, places.items(), confirmed=confirmed)
        self._note_finished(places, "ack")

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,
    ) -> None:
        check_flag(count, "count")
        delay_ms = bounded(duration_ms(delay or 0, "delay"), "delay", "max_delay_ms", self._queue)
        if delay is not None and not delay_ms and self._queue.retry_delays:
            delay_ms = AT_ONCE_MS
        cut = clean_reason(reason, MAX_REASON)
        named = m.each_of(messages)
        writer, places = self._locate(self._places.places_of, named)
        nacks = [Marker(*place, Op.NACK, delay_ms, count, cut) for place in places]
        self._write_and_finish(writer, named, nacks, "nack", confirmed=confirmed)

    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:
        lease_ms = self.checked_lease_ms(lease)
        named = m.each_of(messages)
        writer, places = self._locate(self._places.places_of, named)
        self.check_open()
        until = self._clock.monotonic() + lease_ms / 1000
        self._in_flight.extend_leases(places, until)
        extensions = [Marker(*place, Op.EXTEND, lease_ms) for place in places]
        self._write(writer, named, extensions, confirmed=confirmed)
        self._telemetry.finished(self._queue.queue_name, "extend", len(places))
        ended = self._end_acknowledged(writer, named, lease_ms / 1000 * _LATE_ACK_LOOK_SHARE)
        return [message.receipt for message in ended.values()]

    def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, confirmed: bool = False
    ) -> None:
        cut = clean_reason(reason, MAX_REASON)
        named = m.each_of(messages)
        writer, places = self._locate(self._places.places_of, named)
        requests = [Marker(*place, Op.DEAD_LETTER, 0, reason=cut) for place in places]
        self._write_and_finish(writer, named, requests, "dead-letter", confirmed=confirmed)

    def flush(self, timeout: Duration = 10.0) -> None:
        self._guard.raise_if_inherited()
        self._check_confirmed(self._topics.writer.flush(duration_ms(timeout, "timeout") / 1000))

    def close(self) -> None:
        """Give back messages that were not handed out, wait for unconfirmed markers, leave the group.

        In a forked child close() does nothing: connections and threads belong to the parent.
        """
        if self._closed.is_set() or self._guard.inherited:
            return
        self._closed.set()
        closing_at = self._clock.monotonic()
        self._housekeeper.join()
        with self.receiving:  # receive() waits for its start markers for a while yet
            self._topics.writer.give_back(self.read_ahead.pop_all())
            self.receiver.give_back_interrupted()
            writer = self._topics.writer
            writer.close(self._connection.timeout_s, self._clock.monotonic() - closing_at)
            self.receiver.close(is_away=writer.is_away)

    def check_names(self, named: Sequence[Message | str]) -> None:
        """Raise ReceiptError unless these are messages and receipts of this queue, or lane."""
        self.check_open()
        self._locate(self._places.places_of, named)

    # --- for LanesConsumer, which has locked `receiving` --------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True once close() has begun."""
        return self._closed.is_set()

    def wait_for_room(self, wait_s: float) -> int:
        """See InFlightLimit.wait_for_room; of all lanes together."""
        return self._in_flight.wait_for_room(wait_s)

    def poll(self, max_messages: int, wait_s: float) -> tuple[list[Any], Offsets]:
        """See Receiver.poll; the steps that follow are its start() and confirm(), and hand_out()."""
        self._get_ready(wait_s)
        return self.receiver.poll(max_messages, wait_s)

    def serve(self) -> None:
        self._get_ready(0)
        self.receiver.serve()

    def hand_out(self) -> list[KafkaMessage]:
        messages, offsets = self.receiver.hand_out()
        self._note_received(messages, offsets)
        return messages

    # --- receiving --------------------------------------------------------------------------------

    def _receive_ahead(self) -> None:
        """Receive the next batch for `__iter__`."""
        if not self.wait_for_room(MAX_POLL_WAIT_S):
            return
        with self.receiving:  # until close() finds the batch in _read_ahead
            asked = self._clock.monotonic()
            batch = self.receive(wait=MAX_POLL_WAIT_S)
            self.read_ahead.extend(batch, asked + self._queue.lease_ms / 1000)

    def _receive_once(self, max_messages: int, wait_s: float, lease_ms: int) -> list[KafkaMessage]:
        self._get_ready(wait_s)
        messages, offsets = self.receiver.receive(max_messages, wait_s, lease_ms)
        self._note_received(messages, offsets)
        return messages

    def _get_ready(self, wait_s: float) -> None:
        self.check_open()
        self.receiver.join()
        self._housekeeper.ensure_started()
        self._follow_topics()
        if self._topics.has_stale_markers:
            self._closed.wait(wait_s)  # so that a caller who tries again at once does not keep a CPU busy
            raise stale_markers_error(self._queue)

    def _note_received(self, messages: list[KafkaMessage], offsets: Offsets) -> None:
        if messages:
            self._places.remember(messages, offsets)
            self._telemetry.received(self._queue.queue_name, messages)

    # --- finishing --------------------------------------------------------------------------------

    def _locate(
        self, find: Callable[[Sequence[Message | str]], T], messages: Sequence[Message | str]
    ) -> tuple[MarkerWriter, T]:
        """Return the writer to use for these messages, and what `find` returns for them.

        `find` compares topic ids, and may itself have the client change to recreated topics. The writer that
        was read before then refuses markers, so both are read again (see TopicsInUse).
        """
        while True:
            writer = self._topics.writer
            found = find(messages)
            if writer is self._topics.writer:
                return writer, found

    def _end_acknowledged(
        self, writer: MarkerWriter, messages: Sequence[Message | str], within_s: float
    ) -> dict[Place, Message]:
        """End those of the messages that consumers of earlier deliveries have acknowledged; returns these.

        Reads markers for `within_s` at most, and never for more than 2 s (see LateAckCheck).
        """
        if not self._queue.late_acks:
            return {}
        self.check_open()
        named = {self._places.place_of(one): one for one in messages if isinstance(one, Message)}
        found = self.receiver.find_acknowledged(named, within_s)
        if found:
            offsets = offsets_by_partition(found)
            self._write(writer, messages, offsets.items(), confirmed=False)
            self._note_finished(offsets, "late-ack")
        return {place: named[place] for place in found}

    def _write_and_finish(
        self,
        writer: MarkerWriter,
        named: Sequence[Message | str],
        batch: Sequence[Marker],
        op: str,
        *,
        confirmed: bool,
    ) -> None:
        """Write markers that finish messages for this client, and count the messages in flight no more."""
        self._write(writer, named, batch, confirmed=confirmed)
        places = offsets_by_partition((marker.partition, marker.offset) for marker in batch)
        self._note_finished(places, op)

    def _note_finished(self, places: Offsets, op: str) -> None:
        self._in_flight.discard(places)
        self._telemetry.finished(self._queue.queue_name, op, sum(map(len, places.values())))

    def _write(
        self, writer: MarkerWriter, named: Sequence[Message | str], items: Iterable[Item], *, confirmed: bool
    ) -> None:
        """Write the markers of the messages that the caller has named."""
        self.check_open()
        by_receipt = some_are_receipts(named)
        try:
            if confirmed:
                self._check_confirmed(writer.write(items, self._connection.timeout_s, by_receipt=by_receipt))
            else:
                writer.put(items, by_receipt=by_receipt)
        except Unavailable:
            self.check_open()  # another thread may have closed the writer
            raise

    def _check_confirmed(self, left: int) -> None:
        if left:
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: {left} markers are not confirmed yet; "
                "they are sent again until they are"
            )

    # --- the rest ---------------------------------------------------------------------------------

    def _ask_owner(self) -> None:
        if self._owner is None:
            return
        self._owner.close_if_abandoned()
        if self._topics.lanes_differ and self._clock.monotonic() >= self._look_at:
            self._look_at = self._clock.monotonic() + _LOOK_FOR_LANES_EVERY_S
            self.outdated |= self._owner.current_settings().lane_names != self._queue.lane_names

    def checked_lease_ms(self, lease: Duration | None) -> int:
        """The milliseconds of a lease that a caller asks for; raises ConfigError."""
        asked_ms = self._queue.lease_ms if lease is None else lease_duration_ms(lease)
        return bounded(asked_ms, "lease", "max_lease_ms", self._queue)

    def check_open(self) -> None:
        """Raise Closed after close(), and Forked in a forked child."""
        self._guard.raise_if_inherited()
        if self._closed.is_set():
            raise Closed(f"the client of queue {self._queue.name!r} is closed")

    def _watch_topics(self) -> None:
        """Start the housekeeper, which notices recreated topics even in a client that never receives."""
        if not self._housekeeper.is_started:
            self._guard.raise_if_inherited()
            self._housekeeper.ensure_started()
            if not self._topics.knows_since(self._clock.monotonic() - _MAX_TOPIC_IDS_AGE_S):
                self._look_for_topics()

    def _follow_topics(self) -> None:
        """Change to the new topics if topics were recreated (rule R24); the caller holds `_receiving`."""
        ids = self._topics.look()
        if ids is None:
            return
        if ids.queue != self._topics.ids.queue:
            # Before the topics change: the new writer must write no marker for a message of the former topic.
            self.read_ahead.pop_all()
            self._places.forget()
            self._in_flight.clear()
        self.receiver.change_topics(ids)

    def _look_for_topics(self) -> None:
        """Wait until Kafka has told the ids of the topics, for 3 s at most; change to recreated topics."""
        started = self._clock.monotonic()
        while (
            not self._topics.knows_since(started) and self._clock.monotonic() < started + _TOPIC_IDS_TIMEOUT_S
        ):
            self._follow_topics_if_open()
            self._clock.sleep(_TOPIC_IDS_POLL_S)
        self._follow_topics_if_open()

    def _follow_topics_if_open(self) -> None:
        """Change to recreated topics. Raises Closed after close(): nobody would close a new writer."""
        with self.receiving:
            self.check_open()
            self._follow_topics()
