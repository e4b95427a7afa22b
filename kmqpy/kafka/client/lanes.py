"""LanesConsumer: takes messages of a queue that has lanes, from all of them as if they were one queue.

A *lane* is a queue topic with its markers topic (see QueueSettings.lanes). Each has a QueueConsumer of its
own. That of the main lane joins the consumer group. The others follow it (see GroupMember): so one client has
all lanes of a partition, and there is one rebalance for all. The lanes share a lock and a limit of messages
in flight.

The lanes come in an order of precedence. Each but the last gets up to a share (QueueSettings.lane_share) of
what a call of receive() asks for, or of the calls that ask for one message, so that none waits for ever; what
others leave over goes to the first that has more. After an assignment, a lane waits until Kafka has told
what the higher ones have: else the first messages would be of the lane for which Kafka answers first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Unpack

from kmqpy import message as m
from kmqpy.core import garbage
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.throttle import Throttle
from kmqpy.errors import Closed, Fenced, KmqError, ReceiptError, TopicError
from kmqpy.kafka.client.assigned_partition import AssignedPartition
from kmqpy.kafka.client.client_options import ConsumerOptions
from kmqpy.kafka.client.consumer import MAX_POLL_WAIT_S, Owner, QueueConsumer
from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message, MessagesLike
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

_SLICE_S = 0.01
"""receive() waits for messages of the main lane for this long, then looks at the other lanes."""
_REMOVED_WITHIN_S = 20.0
"""When the topic of a lane is missing for longer, receive() raises TopicError."""
_LOOK_UP_EVERY_S = 0.05
"""An iteration looks this often whether a higher lane than that of its next message has messages."""
_LOOK_UP = 3
"""It takes so many of them, and yields at least one message of the lower lane before it looks again."""
_WARN_EVERY_S = 10.0
"""At most one warning in this time is logged of each lane that can't be read."""

_context_of = attrgetter("_context")


class _Lane:
    """One lane: its consumer, what this round has polled of it, and how much it has had beyond its share."""

    def __init__(self, consumer: QueueConsumer, share: float) -> None:
        self.consumer = consumer
        self._share = share
        self._owed = 0.0
        self._records: list[Any] = []
        self._offsets: dict[int, list[int]] = {}
        self._assigned: dict[int, AssignedPartition | None] = {}  # of what was polled, when it was
        self.asked = 0  # how many records this round has asked for

    def quota(self, room: int) -> int:
        """How many of `room` messages this lane may take before lower lanes were asked; 0: not its turn."""
        share = room * self._share - self._owed
        quota = min(room, math.ceil(share - 1e-9))
        self._owed = quota - share
        return quota

    def poll(self, most: int, wait_s: float = 0.0) -> int:
        """Poll up to `most` more records; returns how many came."""
        records, offsets = self.consumer.poll(most, wait_s)
        self._drop_lost()
        self.asked += most
        self._records += records
        for partition, ascending in offsets.items():
            self._offsets.setdefault(partition, []).extend(ascending)
            self._assigned[partition] = self.consumer.receiver.join().assigned(partition)
        return len(records)

    def _drop_lost(self) -> None:
        """Drop records of partitions that a poll of any lane has lost or begun anew: they are read again."""
        assigned = self.consumer.receiver.join().assigned
        lost = [one for one, state in self._assigned.items() if assigned(one) is not state]
        for partition in lost:
            del self._assigned[partition], self._offsets[partition]
        if lost:
            self._records = [one for one in self._records if one.partition() in self._assigned]

    @property
    def has_more(self) -> bool:
        """True if there may be more than this round has polled."""
        return len(self._records) == self.asked

    def start(self, lease_ms: int) -> None:
        """Have start markers written for what was polled."""
        if self.asked and not self.has_more:
            self._owed = 0.0  # the others have had all that they can have
        self._drop_lost()
        records, offsets = self._records, self._offsets
        self._forget()
        self.consumer.receiver.start(records, offsets, lease_ms)

    def drop(self) -> None:
        """Forget what was polled, which is read again."""
        self._forget()
        self.consumer.receiver.start_over()

    def _forget(self) -> None:
        self._records, self._offsets, self._assigned, self.asked = [], {}, {}, 0


class LanesConsumer(Closeable):
    """Takes messages from the lanes of one queue; see QueueConsumer, whose public methods it has."""

    def __init__(
        self,
        queue: QueueSettings,
        connection: KafkaConnection,
        *,
        owner: Owner | None = None,
        topics: Topics | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        self._clock = options.get("clock", SYSTEM_CLOCK)
        self._queue = queue
        self._telemetry = options.get("telemetry") or Telemetry()
        self._warnings = Throttle(_WARN_EVERY_S, self._clock)
        self._gone_at: float | None = None
        *others, own = queue.lanes()
        owner = owner or self
        self._main = QueueConsumer(own, connection, owner=owner, topics=topics, **options)
        options["instance_id"] = None  # of the member of the group
        self._lanes: list[_Lane] = []
        share = queue.lane_share
        try:
            for lane in others:
                consumer = QueueConsumer(
                    lane, connection, owner=owner, topics=topics, main=self._main, **options
                )
                self._lanes.append(_Lane(consumer, share))
        except BaseException:
            self._lanes.append(_Lane(self._main, share))
            self.close()
            raise
        self._lanes.append(_Lane(self._main, share))
        self._by_name = {one.consumer.name: one.consumer for one in self._lanes}
        self._look_at = 0.0

    def close_if_abandoned(self) -> None:
        """Do nothing: without another owner, whoever made this object closes it."""

    def current_settings(self) -> QueueSettings:
        """As an owner: the settings that this consumer was given."""
        return self._queue

    @property
    def outdated(self) -> bool:
        return self._main.outdated

    @property
    def topic_id(self) -> str:
        """The id of the main lane's topic, as this consumer knows it."""
        return self._main.topic_id

    @property
    def leased(self) -> int:
        return self._main.leased

    @property
    def partitions(self) -> list[int]:
        """See KmqClient.partitions: those of the main lane."""
        return self._main.partitions

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[KafkaMessage]:
        """See KmqClient.receive. Messages come lane by lane, in the order of precedence."""
        return self._main.receive_by(self._round, max_messages, wait, lease, _SLICE_S)

    def __iter__(self) -> Iterator[KafkaMessage]:
        """Yield messages one by one, for as long as the consumer is open."""
        while not self._main.is_closed:
            for lane in self._lanes:
                lane.consumer.read_ahead.give_back_stale()
            found = self._pop()
            try:
                if found is None and self.outdated:
                    return
                if found is None:
                    self._receive_ahead(self._lanes, 100, MAX_POLL_WAIT_S)
                    continue
                level, message = found
                yield message
                if level and self._clock.monotonic() >= self._look_at:
                    self._receive_ahead(self._lanes[:level], _LOOK_UP, 0)
            except Closed:
                return

    def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        for consumer, named in self._by_lane(messages):
            consumer.ack(named, confirmed=confirmed)

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,
    ) -> None:
        for consumer, named in self._by_lane(messages):
            consumer.nack(named, delay=delay, count=count, reason=reason, confirmed=confirmed)

    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:
        return [
            lost
            for consumer, named in self._by_lane(messages)
            for lost in consumer.extend(named, lease=lease, confirmed=confirmed)
        ]

    def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, confirmed: bool = False
    ) -> None:
        for consumer, named in self._by_lane(messages):
            consumer.dead_letter(named, reason=reason, confirmed=confirmed)

    def flush(self, timeout: Duration = 10.0) -> None:
        deadline = self._clock.monotonic() + duration_ms(timeout, "timeout") / 1000
        for lane in self._lanes:
            lane.consumer.flush(max(0.0, deadline - self._clock.monotonic()))

    def close(self) -> None:
        """Close the lanes; see QueueConsumer.close. The main lane is the last, as the others follow it."""
        if self._main.is_closed:
            return
        for lane in self._lanes:
            lane.consumer.close()

    # --- receiving --------------------------------------------------------------------------------

    def _round(
        self, room: int, wait_s: float, lease_ms: int, lanes: Sequence[_Lane] | None = None
    ) -> list[KafkaMessage]:
        """Take up to `room` messages of the lanes; waits `wait_s` at most for the first one.

        The lock is held. The start markers of all lanes are written at the same time. A lane that can't be
        read holds up no other: its error is raised when the others have nothing, and else logged.
        Without a turn of its own the main lane is served all the same: only its consumer is a member of the
        group. Lanes that wait for higher ones are served, too, so that they are ready when their turn comes.
        """
        if room <= 0:
            return []
        lanes = lanes or self._lanes
        main, well = self._lanes[-1], [*lanes]
        errors: dict[_Lane, KmqError] = {}
        found: list[KafkaMessage] = []
        left = room

        def each(step: Callable[[_Lane], None]) -> None:
            for lane in [*well]:
                try:
                    step(lane)
                except (Closed, Fenced):
                    raise
                except KmqError as error:
                    errors[lane] = error
                    well.remove(lane)
                    lane.drop()

        def waits(lane: _Lane) -> bool:
            return not all(one.consumer.receiver.has_heard for one in well[: well.index(lane)])

        def poll(lane: _Lane, most: int, wait_s: float = 0.0) -> None:
            nonlocal left
            if most:
                left -= lane.poll(most, wait_s)

        def take_turn(lane: _Lane) -> None:
            if not waits(lane):
                poll(lane, left if lane is lanes[-1] else lane.quota(left))

        def take_rest(lane: _Lane) -> None:
            poll(lane, left if lane.has_more and not waits(lane) else 0)

        def wait(lane: _Lane) -> None:
            if left == room and (lane is lanes[-1] or not lane.consumer.receiver.has_heard):
                poll(lane, 0 if waits(lane) else room, wait_s)

        def hand_out(lane: _Lane) -> None:
            found.extend(lane.consumer.hand_out())

        try:
            with garbage.paused(room):
                each(take_turn)
                each(take_rest)
                for lane in well if main in lanes else [*well, main]:
                    if not lane.asked and (lane is main or waits(lane)):
                        self._serve(lane)
                if wait_s:
                    each(wait)
                each(lambda lane: lane.start(lease_ms))
            each(lambda lane: lane.consumer.receiver.confirm())
            each(hand_out)  # last: meanwhile no lease runs down while another lane is waited for
        except BaseException:
            for lane in well:
                lane.drop()
            self._give_back(found)
            raise
        if not errors:
            self._gone_at = None
        elif not self._may_be_removed(errors):
            if not found:
                raise next(iter(errors.values()))
            self._warn(errors)
        return found

    def _serve(self, lane: _Lane) -> None:
        try:
            lane.consumer.serve()
        except (Closed, Fenced):
            raise
        except KmqError:
            pass  # its next poll raises it, too

    def _warn(self, errors: Mapping[_Lane, KmqError]) -> None:
        """Tell which lanes can't be read: while others have messages, their errors are not raised."""
        for lane, error in errors.items():
            name = lane.consumer.name
            self._telemetry.failed(name, "receive")
            if self._warnings.allows(name):
                _log.warning("a lane can't be read", extra={"queue": name, "error": str(error)})

    def _may_be_removed(self, errors: Mapping[_Lane, KmqError]) -> bool:
        """True if only topics of other lanes are missing, and not for long: the client notices that soon."""
        if self._lanes[-1] in errors or not all(isinstance(one, TopicError) for one in errors.values()):
            return False
        now = self._clock.monotonic()
        self._gone_at = self._gone_at or now
        return now - self._gone_at < _REMOVED_WITHIN_S

    def _receive_ahead(self, lanes: Sequence[_Lane], most: int, wait_s: float) -> None:
        """Receive for `__iter__`: up to `most` messages of these lanes."""
        if not self._main.wait_for_room(wait_s):
            return
        with self._main.receiving:  # until close() finds them in `read_ahead`
            asked = self._clock.monotonic()
            lease_ms = self._main.checked_lease_ms(None)
            if lanes is self._lanes:
                messages = self.receive(most, wait=wait_s)
            else:
                messages = self._round(min(most, self._main.wait_for_room(0)), 0.0, lease_ms, lanes)
            self._look_at = self._clock.monotonic() + _LOOK_UP_EVERY_S
            for consumer, named in self._split(messages):
                consumer.read_ahead.extend(named, asked + lease_ms / 1000)

    def _pop(self) -> tuple[int, KafkaMessage] | None:
        for level, lane in enumerate(self._lanes):
            message = lane.consumer.read_ahead.pop()
            if message is not None:
                return level, message
        return None

    def _give_back(self, messages: Sequence[KafkaMessage]) -> None:
        with suppress(KmqError):
            for consumer, named in self._split(messages):
                consumer.receiver.give_back(named)

    # --- finishing --------------------------------------------------------------------------------

    def _by_lane(self, messages: Sequence[MessagesLike]) -> list[tuple[QueueConsumer, Sequence[Any]]]:
        """The messages, receipts too, by the consumers of their lanes.

        Raises what their consumers would raise for names of no message, before anything is written for any.
        """
        lanes = self._split(m.each_of(tuple(messages)))
        if len(lanes) > 1:
            for consumer, named in lanes:
                consumer.check_names(named)
        return lanes

    def _split(self, named: Sequence[Any]) -> list[tuple[QueueConsumer, Sequence[Any]]]:
        if set(map(type, named)) == {KafkaMessage} and len(contexts := set(map(_context_of, named))) == 1:
            return [(self._by_name.get(contexts.pop().queue.name, self._main), named)]  # the usual case
        found: dict[str, list[Message | str]] = {} if named else {self._main.name: []}
        for one in named:
            found.setdefault(self._lane_of(one), []).append(one)
        return [(self._by_name[name], some) for name, some in found.items()]

    def _lane_of(self, message: Message | str) -> str:
        """The lane of a message. The main one gets what is of no lane, and says what is wrong with it."""
        if type(message) is KafkaMessage:
            name = _context_of(message).queue.name
        else:
            try:
                receipt = message.receipt if isinstance(message, Message) else message
                name = Receipt.parse(receipt).queue
            except ReceiptError:
                name = ""
        return name if name in self._by_name else self._main.name
