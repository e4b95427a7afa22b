"""Receives for a client: polls records, has their start markers written, and makes messages of them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

from kmqpy import message as m
from kmqpy.core import garbage
from kmqpy.core.clock import Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.client.collapsing import Collapsing
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.client.hanging_watch import HangingWatch
from kmqpy.kafka.client.in_flight_limit import InFlightLimit
from kmqpy.kafka.client.message_places import offsets_by_partition
from kmqpy.kafka.client.record_message import Acknowledges, KafkaMessage, ReceiveContext
from kmqpy.kafka.client.start_markers import StartBatch, StartOutcome
from kmqpy.kafka.client.topics_in_use import TopicsInUse
from kmqpy.kafka.copies.late_acks import CheckedCopies, LateAckCheck
from kmqpy.kafka.cut_off import Client, CutOffCheck
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.late_operations import CopyHeaders
from kmqpy.kafka.markers.records import have_headers, read_headers
from kmqpy.kafka.message_headers import DELIVER_AT, int_header
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.message import Message
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

MIN_LEASE_LEFT = 0.5
"""A message is handed out only while at least this part of its lease is left (rule R11 of docs/rules.md)."""

_START_TIMEOUT_S = 3.0
"""Start markers not confirmed after this time count as failed, and their partitions back off (rule R18)."""

_ASSIGNMENT_TICKS_TIMEOUT_S = 2.0
"""New partitions whose assignment ticks Kafka has not confirmed after this time back off. An assignment tick
is a marker that says from which offset this client takes messages of a partition that Kafka has assigned to
it. The other partitions wait meanwhile."""

_MAX_CONFIRMATION_SHARE = 1 / 8
"""If Kafka took longer than this part of a lease to confirm the client's last start markers, the client asks
for longer leases than its caller: otherwise, little of a short lease would be left for the caller."""

_CHECK_CUT_OFF_AFTER_S = 5.0
"""When nothing was received for this long, the client checks whether it still reaches Kafka."""

_record_of = attrgetter("_record")


@dataclass(frozen=True, slots=True)
class _StartedMessages:
    """Messages whose start markers are confirmed; their leases, of `lease_ms`, end at `until` (monotonic)."""

    messages: list[KafkaMessage]
    offsets: Offsets
    until: float
    lease_ms: int


_NONE_STARTED = _StartedMessages([], {}, 0.0, 0)


@dataclass(frozen=True, slots=True)
class _Starting:
    """Messages of which Kafka has not confirmed the start markers yet.

    polled   all that were polled, by their numbers; `due` are those to hand out, `delays` those to wait
    until    the monotonic time at which the leases end, `lease_ms` after `started_at`
    """

    messages: list[KafkaMessage]
    polled: Offsets
    due: Offsets
    delays: dict[Place, int]
    context: ReceiveContext
    started_at: float
    until: float
    lease_ms: int
    with_headers: bool


class Receiver:
    """Receives the messages of a client, and gives back those that the client can't hand out in time.

    One thread at a time uses it, under a lock of the client. But any thread may call find_acknowledged(), and
    the housekeeper's thread calls find_cut_off() and look_for_hanging() without that lock.

    client           the object whose ack() the messages call
    holder           a name for this client in start markers, shown to people
    leader           that of the queue's main lane, if this one is of another lane; see GroupMember
    look_for_topics  waits until the topic ids are known as of now, and changes `topics` to these
    closed           set when the client closes
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        topics: TopicsInUse,
        in_flight: InFlightLimit,
        *,
        client: Acknowledges,
        holder: str | None,
        instance_id: str | None,
        look_for_topics: Callable[[], None],
        closed: threading.Event,
        telemetry: Telemetry,
        clock: Clock,
        leader: Receiver | None = None,
    ) -> None:
        self._leader = leader
        self._connection = connection
        self._queue = queue
        self._topics = topics
        self._in_flight = in_flight
        self._client = client
        self._holder = holder
        self._instance_id = instance_id
        self._look_for_topics = look_for_topics
        self._closed = closed
        self._telemetry = telemetry
        self._clock = clock
        self._copy_check: LateAckCheck | None = None
        if queue.late_acks:
            self._copy_check = LateAckCheck(connection, queue, clock, lambda: topics.ids.queue)
        self._collapsing = Collapsing(connection, queue, telemetry) if queue.collapse else None
        self._cut_off = CutOffCheck(connection, self._queue.markers_topic, clock, closed.is_set)
        self._hanging = HangingWatch(connection, queue.name, clock)
        self._received_at = clock.monotonic()
        self._member: GroupMember | None = None
        self._start_batch: StartBatch | None = None  # of messages that are not handed out yet
        self._starting: _Starting | None = None
        self._started = _NONE_STARTED
        self._confirmed_in_s = 0.0  # how long it took to write the last start markers

    @property
    def partitions(self) -> list[int]:
        """The partitions whose messages the client receives at the moment; none before join()."""
        return [] if self._member is None else self._member.partitions

    @property
    def has_heard(self) -> bool:
        """See GroupMember.has_heard."""
        return self._member is None or self._member.has_heard

    def join(self) -> GroupMember:
        """Join the consumer group, unless this client has; returns the member."""
        if self._member is None:
            leader = None if self._leader is None else self._leader.join()
            self._topics.writer.starts.get_ready()
            self._member = GroupMember(
                self._connection,
                self._queue,
                self._telemetry,
                ids=self._topics.ids,
                outcome_known=self._outcome_known,
                ids_known=self._topics.knows_since,
                write_assignment_ticks=lambda ticks: self._topics.writer.write_assignments(
                    ticks, _ASSIGNMENT_TICKS_TIMEOUT_S
                ),
                instance_id=self._instance_id,
                leader=leader,
                clock=self._clock,
            )
        return self._member

    def receive(self, max_messages: int, wait_s: float, lease_ms: int) -> tuple[list[KafkaMessage], Offsets]:
        """Return messages for the caller, and their numbers by partition; waits `wait_s` at most for records.

        Also reads the markers of partitions that are new to this client; see GroupMember.poll().
        """
        with garbage.paused(max_messages):
            records, offsets = self.poll(max_messages, wait_s)
            self.start(records, offsets, lease_ms)
        self.confirm()
        return self.hand_out()

    def poll(self, max_messages: int, wait_s: float) -> tuple[list[Any], Offsets]:
        """The first step of receive(): records, and their numbers by partition, for start().

        Who does not go on, calls start_over().
        """
        member = self.join()
        with _starts_over(member):
            self.give_back_interrupted()
            if self._collapsing is None:
                records, offsets = member.poll(max_messages, wait_s)
            else:
                records, offsets = self._collapsing.poll(member, max_messages, wait_s)
            self._topics.writer.give_back(member.pop_orphaned_starts())
            return records, offsets

    def serve(self) -> None:
        """Stay in the group, in place of a poll() by a client that receives from other lanes."""
        member = self.join()
        with _starts_over(member):
            member.serve()
            self._topics.writer.give_back(member.pop_orphaned_starts())

    def start(self, records: list[Any], offsets: Offsets, lease_ms: int) -> None:
        """The second step: have the start markers of these records written, if there are any."""
        if not records:
            return
        member = self.join()
        with _starts_over(member):
            self._start(member, records, offsets, self._lengthen_lease(lease_ms))

    def confirm(self) -> None:
        """The third step: wait until Kafka has confirmed the markers, and until copies are examined."""
        member = self.join()
        starting, self._starting = self._starting, None
        if starting is not None:
            with _starts_over(member):
                self._started = self._confirm(member, starting)

    def hand_out(self) -> tuple[list[KafkaMessage], Offsets]:
        """The last step, which waits for nothing: the messages of start() for the caller."""
        started, self._started = self._started, _NONE_STARTED
        # This may commit messages that are given back below: trackers know them by their start markers.
        self._maintain(self.join())
        leases_run = started.messages and self._begin_leases(started)
        self._start_batch = None
        if not leases_run:
            return [], {}
        self._received_at = self._clock.monotonic()
        return started.messages, started.offsets

    def start_over(self) -> None:
        """Read again what was polled and not handed out."""
        self._starting, self._started = None, _NONE_STARTED
        if self._member is not None:
            self._member.start_over()

    def give_back(self, messages: Iterable[KafkaMessage]) -> None:
        """Give back messages that were handed out, and that the caller does not get."""
        places = [message.place for message in messages]
        self._in_flight.discard(offsets_by_partition(places))
        self._topics.writer.give_back(places)

    def find_acknowledged(self, messages: Mapping[Place, Message], within_s: float) -> list[Place]:
        """Return the copies among these messages that an earlier consumer has acknowledged by now.

        A copy is a message that a tracker has appended again. Reads markers for `within_s` at most, and no
        more than 2 s; copies that could not be checked are left out. Empty where the queue has no late acks.
        """
        if self._copy_check is None:
            return []
        copies: dict[int, dict[int, CopyHeaders]] = {}
        for (partition, offset), message in messages.items():
            copy = self._copy_check.copy_headers(message.headers, partition)
            if copy is not None:
                copies.setdefault(partition, {})[offset] = copy
        return self._copy_check.find_acknowledged(copies, within_s) if copies else []

    def keep_alive(self) -> None:
        """Stay in the group and commit while nobody receives; call it often.

        Also gives back messages that were started and handed to nobody.
        """
        if self._member is not None:
            self.give_back_interrupted()
            self._maintain(self._member)
            self._member.keep_alive()
            self._topics.writer.give_back(self._member.pop_orphaned_starts())

    def _maintain(self, member: GroupMember) -> None:
        member.maintain()
        self._hanging.note_positions(member.consumer, member.partitions)

    def find_cut_off(self) -> list[Client]:
        """Return the clients of librdkafka that are cut off: that never reach Kafka again.

        Asks Kafka only when nothing was received for 5 s.
        """
        silent = self._clock.monotonic() - self._received_at > _CHECK_CUT_OFF_AFTER_S
        return self._cut_off.find(self._clients()) if silent and self._cut_off.is_due() else []

    def look_for_hanging(self) -> None:
        """Log transactions that nobody ends and that hold back the client's messages; see HangingWatch."""
        self._hanging.look()

    def replace(self, cut_off: Collection[Client]) -> None:
        """Go on with new clients of librdkafka instead of these, which are cut off."""
        self._topics.writer.starts.replace([one for one in cut_off if isinstance(one, Producer)])
        if self._collapsing is not None:
            self._collapsing.replace(cut_off)
        if self._member is not None and self._member.consumer in cut_off:
            self._member.join_again()

    def give_back_interrupted(self) -> None:
        """Give back the messages of a receive() that an exception (of a signal handler, say) interrupted."""
        if self._start_batch is not None:
            self._start_batch.give_back()
            self._start_batch = None

    def change_topics(self, ids: TopicIds) -> None:
        """Change to the topics of these ids, because topics were recreated."""
        recreated = ids.queue != self._topics.ids.queue
        if recreated:
            self._start_batch = None
        if self._copy_check is not None:
            self._copy_check.forget()
        self._topics.change_to(ids)
        if self._member is not None:
            self._member.follow(ids)
            if recreated:
                self._topics.writer.starts.get_ready()

    def close(self, *, is_away: bool = False) -> None:
        """Commit and leave the group; with `is_away`, Kafka does not answer, so leave it at that."""
        if self._copy_check is not None:
            self._copy_check.close()
        if self._collapsing is not None:
            self._collapsing.close()
        if self._member is not None:
            self._member.close(is_away=is_away)

    def _clients(self) -> list[Client]:
        """The clients of librdkafka that are replaced only when they are known to be cut off."""
        consumers = [] if self._member is None else [self._member.consumer]
        others = [] if self._collapsing is None else [self._collapsing.consumer]
        return [*consumers, *others, *self._topics.writer.starts.producers_in_use()]

    def _start(self, member: GroupMember, records: list[Any], offsets: Offsets, lease_ms: int) -> None:
        """Have start markers written for records; `_starting` says which."""
        # The lease counts from a moment before its start marker is written (rule R11).
        started_at = self._clock.monotonic()
        until = started_at + lease_ms / 1000
        now_ms = self._clock.wall_ms()
        context = ReceiveContext(
            self._queue, self._topics.ids.queue, now_ms + lease_ms, self._telemetry, self._client, member.cuts
        )
        with_headers = have_headers(records)
        delays = self._delays(records, context, now_ms) if with_headers else {}
        due = offsets if not delays else _without(offsets, delays)
        start_batch = self._topics.writer.starts.start(
            due, delays, lease_ms, self._holder, _START_TIMEOUT_S, _hand_out_until(until, lease_ms)
        )
        self._start_batch = start_batch
        # While the broker writes the start markers:
        messages: list[KafkaMessage] = list(map(KafkaMessage, records, repeat(context)))
        self._starting = _Starting(
            messages, offsets, due, delays, context, started_at, until, lease_ms, with_headers
        )
        garbage.put_off(len(messages))
        if self._collapsing is not None:
            self._collapsing.note_ends()

    def _confirm(self, member: GroupMember, starting: _Starting) -> _StartedMessages:
        """Wait until Kafka has confirmed the start markers; returns the messages to hand out."""
        messages, offsets, due, delays = starting.messages, starting.polled, starting.due, starting.delays
        until, lease_ms, start_batch = starting.until, starting.lease_ms, self._start_batch
        assert start_batch is not None
        outcome = start_batch.wait_until_confirmed(self._closed)
        if not outcome.failed:
            self._confirmed_in_s = self._clock.monotonic() - starting.started_at
        goes_back_in = member.goes_back_in(outcome.last_at)
        if goes_back_in:
            # The markers topic was recreated or cut back. If the queue topic was recreated, too, these
            # messages are of the old one.
            ids, now = self._topics.ids, self._clock.monotonic()
            self._look_for_topics()
            if self._topics.ids.queue != ids.queue:
                # If they are of the new one all the same, they are redelivered at once, not after the lease.
                self._topics.writer.give_back((p, offset) for p, ones in due.items() for offset in ones)
                return _NONE_STARTED
            if not self._topics.knows_since(now):
                start_batch.give_back()
                member.start_over()
                return _NONE_STARTED
            if self._topics.ids != ids:
                goes_back_in = []
        member.apply_start_outcome(offsets, outcome)
        if goes_back_in:  # start markers are lost; their messages are looked for
            member.start_over(goes_back_in)
        if delays or outcome.failed:
            messages = [message for message in messages if _is_started(message, delays, outcome)]
            offsets = offsets_by_partition(message.place for message in messages)
        if outcome.given_back:
            return _StartedMessages(messages, offsets, -math.inf, lease_ms)  # nothing is left of their leases
        if self._copy_check is not None and starting.with_headers:
            places = starting.context.place_of
            copies = self._copy_check.copies_among(list(map(_record_of, messages)), places)
            if copies:
                left_s = _hand_out_until(until, lease_ms) - self._clock.monotonic()
                checked = self._copy_check.examine(copies, left_s / 2)
                messages, offsets = self._without_late_acked(messages, offsets, checked)
        return _StartedMessages(messages, offsets, until, lease_ms)

    def _without_late_acked(
        self, messages: list[KafkaMessage], offsets: Offsets, checked: CheckedCopies
    ) -> tuple[list[KafkaMessage], Offsets]:
        """Return the messages to hand out; acknowledge, dead-letter, postpone or give back the others."""
        left = checked.places()
        if not left:
            return messages, offsets
        writer = self._topics.writer
        for partition, acknowledged in offsets_by_partition(checked.acknowledged).items():
            writer.end(partition, acknowledged)
        writer.put(
            Marker(*place, Op.DEAD_LETTER, reason=reason) for place, reason in checked.rejected.items()
        )
        writer.put(
            Marker(*place, Op.NACK, wait_ms, counts=False) for place, wait_ms in checked.postponed.items()
        )
        writer.give_back(checked.unread)
        name = self._queue.queue_name
        for op, places in (
            ("late-ack", checked.acknowledged),
            ("late-dead-letter", checked.rejected),
            ("late-postpone", checked.postponed),
        ):
            if places:
                self._telemetry.finished(name, op, len(places))
        if checked.unread:
            self._telemetry.failed(name, "late acks unread", len(checked.unread))
        kept = [one for one in messages if one.place not in left]
        return kept, offsets_by_partition(message.place for message in kept)

    def _lengthen_lease(self, lease_ms: int) -> int:
        """Return the lease for start markers: longer if Kafka took over an eighth of it to confirm the last.

        Over a slow link, little or nothing of a short lease would be left for the caller otherwise. The
        longer lease has twice the time of that confirmation added, but is at most the queue's max_lease, or
        the lease that the caller asked for if that is longer.
        """
        confirmed_in_ms = self._confirmed_in_s * 1000
        if confirmed_in_ms <= lease_ms * _MAX_CONFIRMATION_SHARE:
            return lease_ms
        return min(lease_ms + 2 * math.ceil(confirmed_in_ms), max(lease_ms, self._queue.max_lease_ms))

    def _begin_leases(self, started: _StartedMessages) -> bool:
        """Count messages as in flight; if their leases have run down by half, give back and return False."""
        if self._clock.monotonic() <= _hand_out_until(started.until, started.lease_ms):
            self._in_flight.add(started.offsets, started.until)
            return True
        count = len(started.messages)
        _log.warning(
            "leases too short for how long their start markers took; given back",
            extra={"queue": self._queue.name, "count": count, "lease_ms": started.lease_ms},
        )
        self._telemetry.failed(self._queue.queue_name, "stale leases", count)
        self._topics.writer.give_back((p, offset) for p, ones in started.offsets.items() for offset in ones)
        return False

    def _delays(self, records: list[Any], context: ReceiveContext, now_ms: int) -> dict[Place, int]:
        """Return the places of records that are not due yet, each with the ms until it is."""
        delays: dict[Place, int] = {}
        for record in records:
            headers, unreadable = read_headers(record)
            if unreadable:
                self._telemetry.failed(self._queue.queue_name, "undecodable header", unreadable)
            if headers and (wait_ms := self._wait_ms(headers, now_ms)) > 0:
                delays[context.place_of(record)] = min(wait_ms, 2**62)
        return delays

    def _wait_ms(self, raw: Any, now_ms: int) -> int:
        try:
            deliver_at = int_header(m.headers_of(raw), DELIVER_AT)
        except DecodeError:
            self._telemetry.failed(self._queue.queue_name, "undecodable kmq-deliver-at")
            return 0
        return 0 if deliver_at is None else deliver_at - now_ms

    def _outcome_known(self, partition: int) -> bool:
        return self._topics.writer.starts.outcome_known(partition)


@contextmanager
def _starts_over(member: GroupMember) -> Iterator[None]:
    """Have the member start over after an error: it has polled messages that nobody gets."""
    try:
        yield
    except BaseException:  # of a signal handler, too
        member.start_over()
        raise


def _is_started(message: KafkaMessage, delays: Collection[Place], outcome: StartOutcome) -> bool:
    partition, offset = message.place
    return (partition, offset) not in delays and offset < outcome.failed.get(partition, INT64_MAX)


def _without(offsets: Offsets, places: Collection[Place]) -> Offsets:
    return {p: [o for o in ascending if (p, o) not in places] for p, ascending in offsets.items()}


def _hand_out_until(lease_until: float, lease_ms: int) -> float:
    """Return until when a message may be handed out whose lease ends at `lease_until` (rule R11)."""
    return lease_until - lease_ms / 1000 * MIN_LEASE_LEFT
