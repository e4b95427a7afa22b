"""KmqClient: one queue on Kafka. Hands calls on to a consumer, a sender and an administrator.

The consumer works as in the JVM library kmq. It fetches a batch, writes a start marker ("a client took this
message") for each message, and waits until Kafka has confirmed the start markers. From then on it may commit
the offsets of the messages, and it hands them out. `ack` writes an end marker. A tracker redelivers a message
whose end marker does not come before the message's lease ends.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, Unpack

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.core.stack import is_inside
from kmqpy.errors import (
    Closed,
    KmqError,
    NotSupported,
    QueueNotFound,
    ReceiptError,
    shown,
)
from kmqpy.kafka.client.client_options import MAX_IN_FLIGHT, ClientOptions, split_options
from kmqpy.kafka.client.lazy_consumer import LazyConsumer
from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.kafka.client.sender import QueueSender
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.places import lane_in_id
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection
from kmqpy.kafka.settings_mirror import CurrentSettings, check_topics, settings_of
from kmqpy.kafka.shared_connections import SharedConnections
from kmqpy.kafka.topics import MAX_MESSAGE_BYTES
from kmqpy.message import HeadersLike, Message, MessagesLike, OutgoingMessage, check_bodies
from kmqpy.queue import Capabilities, Codec, DeadLetter, DeadLetters, Orphan
from kmqpy.queue.arguments import check_age
from kmqpy.queue.storage import encode_body
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection

# What a program that only sends does not need is imported by its first call.
if TYPE_CHECKING:
    from kmqpy.kafka.admin.admin import Admin
    from kmqpy.kafka.admin.stats import InFlightMessage, QueueStats
    from kmqpy.kafka.client.consumer import QueueConsumer
    from kmqpy.kafka.client.lanes import LanesConsumer
    from kmqpy.kafka.dead_letters import KafkaDeadLetter, KafkaDeadLetters
    from kmqpy.kafka.markers.life import MessageLife

CAPABILITIES = Capabilities(
    fifo=False,  # messages of a partition, so of a key, are in order, except redelivered ones
    priority=False,  # of a queue with lanes True
    requeue_to_front=False,
    manual_redelivery=False,
    at_most_once=False,
    collapse=True,
    retry_delays=True,
    blocking_take=True,
    max_body_bytes=MAX_MESSAGE_BYTES,
    immediate=False,
    receipts_by_id=False,  # of a queue with late acks True
    late_ack=False,
    tells_lost=False,  # extend() tells of some
    exact_sizes=False,
    any_name=False,
    bound_handles=False,
    many_queues=False,
)


class KmqClient(Closeable):
    """One queue on Kafka: sends, takes, acknowledges, counts and administers its messages; see kmqpy.Queue.

    Who only sends joins no consumer group, and who only receives opens no producer for messages. The first
    receive() joins the group. Clients share a queue by its partitions: one client takes from each partition,
    further clients are on standby. Delivery is at least once: a message can come twice, when its lease ended
    or when a client was killed. Redelivery and dead letters need a tracker that runs.

    In a forked child of the process that made the client, its calls raise Forked. A client that is collected
    and was not closed leaves its group soon, and logs a warning.

    When the
    queue topic is recreated (deleted and made again under the same name), the client goes on with the new
    topic. If the markers topic was not recreated as well, receive() raises TopicError until somebody
    recreates it.

    The options:

    - `max_in_flight`: receive() waits while so many messages are taken, not finished, and within their leases
    - `holder`: a name for this client, shown beside the messages that it has taken
    - `instance_id`: static membership in the group: a restart within the session moves no partitions
    - `delivery_timeout`: the longest time that sending may take, in seconds
    - `max_message_bytes`: the largest message (key, body and headers) that send() accepts

    Args:
        queue: The queue's name, or QueueSettings; fields that you leave out come from the queue's stored
            settings, and fields that contradict them raise ConfigError.
        connection: Where Kafka is.
        zookeeper: Where ZooKeeper is, if known. With it, `size`, `in_flight` and the like read less of the
            markers topic, and without it the whole topic.
        codec: Turns objects into bodies and back.
        shared: For KafkaStorage: connections that it closes itself, used instead of `zookeeper`.
        on_close: For KafkaStorage: called by the first close().
        options: Those above; and `telemetry`, which is told of every event, and `clock`, for tests.

    Raises:
        QueueNotFound: There is no such queue.
        TopicError: A topic of the queue is missing, or was recreated without the other.
        Unavailable: The storage does not answer.
        ConfigError: An argument or setting is invalid.
    """

    def __init__(
        self,
        queue: str | QueueSettings,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection = NO_ZOOKEEPER,
        *,
        codec: Codec | None = None,
        shared: SharedConnections | None = None,
        on_close: Callable[[], None] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        receiving, limits = split_options(options)
        self._max_in_flight = receiving.get("max_in_flight", MAX_IN_FLIGHT)
        self._connection = check_connection(connection)
        settings = settings_of(queue, connection)
        self._current = current = CurrentSettings(settings, connection, options.get("clock", SYSTEM_CLOCK))
        self._limits = limits
        self._clock = options.get("clock", SYSTEM_CLOCK)
        self._telemetry = options.get("telemetry") or Telemetry()
        self._codec = codec
        self._on_close = on_close
        connections = shared or SharedConnections(connection, zookeeper, clock=self._clock, limits=limits)
        self._shared = connections
        there = connections.topics().check(settings)
        check_topics(settings, there, connection)
        self._topic_id = there.queue.topic_id
        self._owns_shared = shared is None

        # The consumer's thread and messages keep the LazyConsumer, so nothing in there may keep this object.
        def consumer(owner: LazyConsumer) -> QueueConsumer | LanesConsumer:
            from kmqpy.kafka.client.consumer import QueueConsumer
            from kmqpy.kafka.client.lanes import LanesConsumer

            def consumer_of(settings: QueueSettings) -> QueueConsumer | LanesConsumer:
                made = LanesConsumer if settings.has_lanes else QueueConsumer
                return made(settings, connection, owner=owner, topics=connections.topics(), **receiving)

            settings = current.recent()
            try:
                return consumer_of(settings)
            except QueueNotFound:
                if (now := current.refresh()).lane_names == settings.lane_names:
                    raise
                return consumer_of(now)  # somebody has just removed a lane

        self._consumer = LazyConsumer(
            consumer, f"the client of queue {settings.name!r}", self._clock, current.refresh
        )
        weakref.finalize(self, self._consumer.abandon).atexit = False
        self._guard = ForkGuard(f"the client of queue {settings.name!r}")
        self._opening = threading.Lock()
        self._sender: QueueSender | None = None
        self._dead_letters = _DeadLetters(current, connection, self._consumer, self._clock)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.settings.name

    @property
    def unique_id(self) -> str:
        """See Queue.unique_id: the id of the queue topic, as it was when the queue was opened."""
        return self._topic_id

    @property
    def capabilities(self) -> Capabilities:
        """See Queue.capabilities; a queue with late acks has `receipts_by_id`, one with lanes `priority`."""
        return dataclasses.replace(
            CAPABILITIES, receipts_by_id=self.settings.late_acks, priority=self.settings.priorities > 1
        )

    @property
    def settings(self) -> QueueSettings:
        """The queue's settings, as they were when it was opened, or when its lanes changed."""
        return self._current.value

    @property
    def default_lease(self) -> float:
        """See Queue.default_lease."""
        return self.settings.lease_ms / 1000

    @property
    def max_lease(self) -> float:
        """See Queue.max_lease."""
        return self.settings.max_lease_ms / 1000

    @property
    def max_in_flight(self) -> int:
        """See Queue.max_in_flight."""
        return self._max_in_flight

    @property
    def in_groups(self) -> bool:
        """See Queue.in_groups; False: a queue on Kafka has no groups."""
        return False

    @property
    def delays_retries(self) -> bool:
        """See Queue.delays_retries."""
        return bool(self.settings.retry_delays)

    @property
    def at_most_once(self) -> bool:
        """See Queue.at_most_once; a queue on Kafka never is."""
        return False

    @property
    def dead_letters(self) -> DeadLetters:
        """See Queue.dead_letters."""
        return self._dead_letters

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        body: Any,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        group: str | None = None,
        dedup_id: str | None = None,
        transaction: Any = None,
        partition: int | None = None,
    ) -> str:
        """Send one message, to `partition` or to that of its key, and wait for Kafka's confirmation.

        A message is sent once it is on all in-sync replicas. Retries inside the client make no duplicates.
        Headers named `kmq-…` are left out: they belong to kmqpy.

        Args:
            body: As for Queue.send().
            key: Decides the partition, unless `partition` does.
            headers: As for Queue.send().
            delay: Seconds or timedelta during which nobody is handed the message; the wait costs it no
                attempt.
            priority: Above 0 the message goes to the lane of that priority, or the highest that the queue
                has.
            group: Not on Kafka.
            dedup_id: Not on Kafka.
            transaction: Not on Kafka.
            partition: Where to append the message; default: by its key.

        Returns:
            The message's id.

        Raises:
            MessageError: The message is too large, its delay is above the queue's max_delay_ms, or a key,
                header or body is neither bytes nor text.
            ConfigError: The queue does not have this partition.
            NotSupported: For a `group`, `dedup_id` or `transaction`, and for a `priority` if the queue has
                none.
            Unavailable: Kafka did not confirm it; the message may have been sent.
        """
        message = OutgoingMessage(
            body, key=key, headers=headers, delay=delay, priority=priority, group=group, dedup_id=dedup_id
        )
        return self.send_many([message], transaction=transaction, partition=partition)[0]

    def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        group: str | None = None,
        transaction: Any = None,
        partition: int | None = None,
    ) -> list[str]:
        """Send messages and wait until all are confirmed; returns their ids in order.

        Not atomic: when it raises, some of the messages may have been sent.

        Args:
            bodies: Bodies or OutgoingMessages, as for Queue.send_many().
            key: As for send(), of the bodies that are no OutgoingMessage.
            headers: As for send(), of the bodies that are no OutgoingMessage.
            delay: As for send(), of the bodies that are no OutgoingMessage.
            priority: As for send(), of the bodies that are no OutgoingMessage.
            group: As for send(), of the bodies that are no OutgoingMessage.
            transaction: As for send(), of the bodies that are no OutgoingMessage.
            partition: Where to append all of them; default: by their keys.

        Raises:
            MessageError: As for send(); none was sent.
            NotSupported: For a group or a transaction.
            Unavailable: Some may have been sent.
            Unfinished: Some were sent, and others are above the topic's own limit of size.
        """
        if transaction is not None:
            raise NotSupported("transaction: Kafka takes no part in a transaction of yours (transactions)")
        if group is not None:
            raise NotSupported("group: queues on Kafka have none; a key keeps messages in one partition")
        check_bodies(bodies)
        encoded = bodies if self._codec is None else [_encoded(self._codec, body) for body in bodies]
        return self._opened_sender().send_many(
            encoded, key=key, headers=headers, delay=delay, priority=priority, partition=partition
        )

    def decode(self, message: Message | DeadLetter) -> Any:
        """See Queue.decode."""
        return message.body if self._codec is None else self._codec.decode(message.body)

    def _opened_sender(self) -> QueueSender:
        self._consumer.check_open()  # before the lock, which may be held for ever in a child
        if (opened := self._sender) is not None:  # a handler of a signal may send while its thread does
            return opened
        with self._opening:
            self._consumer.check_open()
            if self._sender is None:
                settings, topics = self.settings, self._shared.topics()
                self._sender = QueueSender(
                    settings,
                    self._connection,
                    self._shared.producer,
                    self._limits,
                    partitions=lambda: topics.check(settings).partitions,
                    settings=self._current.recent,
                    keeps=self._current.keeps,
                    telemetry=self._telemetry,
                    clock=self._clock,
                )
            return self._sender

    # --- receiving and finishing --------------------------------------------------------------------

    def receive(
        self,
        max_messages: int = 100,
        *,
        wait: Duration = 1.0,
        lease: Duration | None = None,
        one_per_group: bool = False,  # noqa: ARG002 - there are no groups
    ) -> list[KafkaMessage]:
        """Take up to `max_messages`; returns as soon as there are some, and [] after `wait`.

        The first call joins the consumer group. See `partitions`.

        A tracker redelivers a message after its `lease` unless it is acknowledged before. The client makes
        the lease longer where writing start markers takes more than an eighth of it. It gives back a message
        that it can't hand out with half of the lease left. That counts as no attempt, unless this process
        dies first or the broker writes the marker that gives the message back after the end of the lease.

        If the queue's setting `late_acks` is on, the client checks copies (messages that a tracker has
        appended again) for markers that earlier consumers wrote when the tracker was copying the message
        already. It leaves out copies that are acknowledged or that are to become dead letters. It puts off
        copies for which an earlier consumer asked for a delay or a longer lease. It gives back copies that it
        can't check.

        Args:
            max_messages: The most to take.
            wait: Seconds or timedelta, joining the group included; 0: do not wait.
            lease: How long a message is this caller's; default: the queue's lease_ms; at least 100 ms.
            one_per_group: Does nothing: there are no groups on Kafka.

        Raises:
            ConfigError: For bad numbers.
            TopicError: The queue's topic is gone or was recreated without its markers topic.
            Fenced: The group goes on without this client.
            Closed: It was closed.
        """
        deadline = self._clock.monotonic() + duration_ms(wait, "wait") / 1000
        with self._telemetry.operating(self.name, "receive"):
            while True:
                left_s = max(0.0, deadline - self._clock.monotonic())
                with self._consumer.use(takes=True) as consumer:
                    found: list[KafkaMessage] = []
                    try:
                        found = consumer.receive(max_messages, wait=left_s, lease=lease)
                    except Closed:
                        self._consumer.check_open()  # else leave_group() or another taker has closed it
                if found or not consumer.outdated or self._clock.monotonic() >= deadline:
                    return found

    def __iter__(self) -> Iterator[KafkaMessage]:
        """Yield messages one by one, for as long as the client is open.

        The client takes the messages in batches. It gives back messages whose leases run out before their
        turn, which does not count as an attempt.
        """
        self._guard.raise_if_inherited()
        while self._consumer.is_open:
            with self._consumer.use(takes=True) as consumer:
                yield from consumer

    def ack(self, *messages: MessagesLike, confirmed: bool = False, transaction: Any = None) -> None:
        """Acknowledge messages, or the messages that receipts name: trackers do not redeliver them.

        Returns at once; a thread writes the end markers, and sends them again until they are confirmed. An
        ack that comes after the redelivery is harmless.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            confirmed: Wait until the end markers of this call are confirmed.
            transaction: Not on Kafka.

        Raises:
            ReceiptError: A receipt is of another storage or queue, or is no receipt.
            Unavailable: The end markers are not confirmed after 10 s.
            NotSupported: For a `transaction`, because Kafka takes no part in transactions of databases.
        """
        if transaction is not None:
            raise NotSupported("transaction: Kafka takes no part in a transaction of yours (transactions)")
        with self._telemetry.operating(self.name, "ack"):
            self._consumer.ack(*messages, confirmed=confirmed)

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,
    ) -> None:
        """Give messages back: a tracker redelivers them after `delay` seconds.

        In a queue with late acks, a message that an earlier
        consumer has acknowledged does not become a dead letter: the tracker looks for that acknowledgement,
        for a few seconds at most.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            delay: Seconds or timedelta; default: as for Queue.nack().
            count: False: this delivery does not count as an attempt.
            reason: Text that a dead letter keeps as its reason.
            confirmed: As for ack().
        """
        with self._telemetry.operating(self.name, "nack"), self._consumer.use() as consumer:
            consumer.nack(*messages, delay=delay, count=count, reason=reason, confirmed=confirmed)

    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:
        """Let the leases of messages end `lease` seconds from now, even if that is earlier than before.

        The client finds out about lost messages only where the queue has late acks and the caller gives
        messages, not receipts. Lost messages are then copies that an earlier consumer has acknowledged. The
        client writes end markers for them, so that nobody gets them again. Reading the markers takes a
        quarter of the lease at most, and no more than 2 s.

        For a message that was finished meanwhile, the call does nothing. The same is true of a message that
        was redelivered, unless the queue has late acks: then a copy that no client has taken yet waits until
        this lease is over. nack(count=False) gives a message back.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            lease: Seconds or timedelta from now; at least 100 ms.
            confirmed: As for ack().

        Returns:
            The receipts of lost messages, those that are no longer the caller's, as far as the client finds
            out.

        Raises:
            ConfigError: For a lease below 100 ms.
        """
        with self._telemetry.operating(self.name, "extend"), self._consumer.use() as consumer:
            return consumer.extend(*messages, lease=lease, confirmed=confirmed)

    def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, confirmed: bool = False
    ) -> None:
        """Have a tracker move messages to the dead-letter topic, without another try.

        In a queue with late acks, messages that an earlier consumer has acknowledged do not become dead
        letters: the tracker looks for such acknowledgements, for a few seconds at most.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            reason: Text that a dead letter keeps as its reason.
            confirmed: As for ack().
        """
        with self._telemetry.operating(self.name, "dead-letter"), self._consumer.use() as consumer:
            consumer.dead_letter(*messages, reason=reason, confirmed=confirmed)

    def receipt(self, message_id: str) -> str:
        """See Queue.receipt. It takes no request.

        The receipt names the message's first record. What is written for that after a redelivery counts for
        the copy, as a late operation (rules R32 and R33 of docs/rules.md). So it is heeded when the next
        client takes the message, and the client that has it now is not disturbed.

        Args:
            message_id: The id that send() returned.

        Raises:
            ReceiptError: For what is not an id.
            NotSupported: The queue's setting `late_acks` is off.
        """
        self._consumer.check_open()
        found = lane_in_id(message_id)
        settings = self._current.recent() if found is not None and found[0] else self.settings
        lanes = {one.lane_ending: one for one in settings.lanes()}
        if found is None or found[0] not in lanes:
            raise ReceiptError(f"id: {shown(message_id)} is not that of a message; they look like 0-42")
        if not self.settings.late_acks:
            raise NotSupported(
                f"receipt: queue {self.name!r} has no late acks; "
                f"switch them on with: kmq queue alter {self.name} --late-acks"
            )
        consumer = self._consumer.current
        lane, place = lanes[found[0]], found[1]
        if lane.lane_of is not None:
            topic_id = self._shared.topics().check(lane).queue.topic_id
        else:
            topic_id = self._topic_id if consumer is None else consumer.topic_id
        return str(Receipt(lane.name, topic_id, *place))

    def flush(self, timeout: Duration = 30) -> None:
        """Wait until the markers of all calls so far are confirmed.

        flush() does not wait for markers of calls that other threads make meanwhile.

        Args:
            timeout: Seconds or timedelta.

        Raises:
            Unavailable: They were not confirmed within `timeout`.
        """
        self._consumer.check_open()
        if self._consumer.current is not None:  # without a consumer, no acknowledgement waits to be written
            with self._consumer.use() as consumer:
                consumer.flush(timeout)

    @property
    def leased(self) -> int:
        """How many messages this client has received that are not finished and whose leases still run."""
        consumer = self._consumer.current
        return 0 if consumer is None else consumer.leased

    @property
    def partitions(self) -> list[int]:
        """The partitions that this client takes messages from at the moment.

        Empty before its first receive() and while the consumer group assigns partitions. Where there are
        more clients than partitions, some clients get none.
        """
        consumer = self._consumer.current
        return [] if consumer is None else consumer.partitions

    # --- looking ------------------------------------------------------------------------------------

    def peek(self, limit: int = 10) -> list[KafkaMessage]:
        """See Queue.peek; delayed messages count towards `limit` and are left out."""
        from kmqpy.kafka.admin.looks import waiting_messages

        check_limit(limit, "limit")
        self._consumer.check_open()
        lanes = self._current.recent().lanes()
        return waiting_messages(self._connection, lanes, self._telemetry, self._clock.wall_ms(), limit)

    def size(self, limit: int | None = None) -> int:
        """See Queue.size; an upper bound if a partition has more than 10,000 records to count."""
        return self._count(lambda found: found.depth + found.released, limit)

    def in_flight(self, limit: int | None = None) -> int:
        """See Queue.in_flight; a rejected message is in flight until a tracker makes it a dead letter."""
        return self._count(lambda found: found.in_flight - found.released, limit)

    def _count(self, count_of: Callable[[QueueStats], int], limit: int | None) -> int:
        most = None if limit is None else check_limit(limit, "limit")
        with self._use_admin() as admin:
            count = count_of(admin.stats(self.settings))
        return count if most is None else min(count, most)

    def orphans(
        self,
        older_than: Duration | None = None,
        *,
        queued_before_ms: int | None = None,
        limit: int | None = None,
    ) -> list[Orphan]:
        """See Queue.orphans; a redelivered message counts as sent with its redelivery, for `limit`."""
        from kmqpy.kafka.admin.looks import orphans_of

        taken_before = self._clock.wall_ms() - (check_age(older_than, queued_before_ms) or 0)
        leased = [one for one in self._leased() if older_than is None or one.since_ms < taken_before]
        if limit is not None and queued_before_ms is None:
            oldest = sorted(leased, key=lambda one: one.offset)[: check_limit(limit, "limit")]
            leased = [one for one in leased if one in oldest]
        with self._use_admin() as admin:  # as in_flight() has them: lanes may have been added since
            lanes = {lane.name: lane for lane in admin.settings(self.settings).lanes()}
        found = orphans_of(self._connection, lanes, leased, self._telemetry, self._consumer)
        return [
            one
            for one in found
            if queued_before_ms is None or (one.message and one.message.enqueued_ms < queued_before_ms)
        ][:limit]

    def trace(self, message: Message | str) -> MessageLife:
        """The life of a message, read from Kafka: who took it, why it was redelivered, how it ended.

        The message may have been redelivered meanwhile, or be a copy itself.

        Args:
            message: A received message, a receipt, an id (`partition-offset`), or for a dead letter
                `topic:partition:offset`.

        Raises:
            ReceiptError: For a receipt of another queue or topic, and for a message that never existed.
            ConfigError: For a topic that holds no messages of this queue.
        """
        from kmqpy.kafka.trace import trace

        self._consumer.check_open()
        named = message.receipt if isinstance(message, Message) else message
        return trace(self._connection, self._current.recent(), named)

    def _leased(self) -> list[InFlightMessage]:
        """The messages that clients have leased; nacked and delayed messages wait for a tracker."""
        with self._use_admin() as admin:
            found = admin.in_flight(self.settings, limit=None)
        return [one for one in found if one.state is EntryState.LEASED]

    # --- administration -----------------------------------------------------------------------------

    def purge(self) -> int:
        """See Queue.purge; finishes messages in flight first, so that trackers do not report them as lost."""
        with self._use_admin() as admin:
            return admin.purge(self.settings)

    def release_all(self) -> int:
        """See Queue.release_all; nacked messages still wait until their delay is over."""
        leased = self._leased()
        if leased:
            self.nack([one.receipt for one in leased], count=False, confirmed=True)
        return len(leased)

    def leave_group(self) -> None:
        """Close the consumer, which leaves the consumer group; the next receive() makes another.

        Raises:
            KmqError: As close() does.
        """
        self._guard.raise_if_inherited()
        self.refuse_in_call()
        self._consumer.close_current()

    def leave_group_if_idle(self, idle_s: float) -> None:
        """Call leave_group() if no message is leased and the consumer was not used for so long.

        Args:
            idle_s: Seconds.
        """
        self._consumer.close_if_idle(idle_s)

    def close(self) -> None:
        """Give back messages that were not handed out, wait for unconfirmed markers, leave the group.

        A receive() that waits in another thread raises Closed. In a forked child close() does nothing:
        connections and threads belong to the parent.

        Raises:
            KmqError: In a signal handler that has interrupted a call of this client: close() would wait for
                the end of that call, which waits for the handler.
        """
        if self._guard.inherited or not self._consumer.is_open:
            return
        self.refuse_in_call()
        try:
            self._consumer.close()  # from here on, _opened_sender() makes no sender
        finally:
            with self._opening:
                self._sender = None
            if self._owns_shared:
                self._shared.close()
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    def refuse_in_call(self) -> None:
        """Raise KmqError in a signal handler that has interrupted a call of this client."""
        if is_inside(_CALLS, self) or is_inside([LazyConsumer.ack], self._consumer):
            raise KmqError(
                f"queue {self.name!r}: a signal handler can't close the client that it has interrupted; "
                "let the handler raise SystemExit, or set a flag, and close the client by `with`"
            )

    @contextmanager
    def _use_admin(self) -> Iterator[Admin]:
        self._consumer.check_open()
        with self._shared.admin() as admin:
            self._consumer.check_open()
            yield admin


_CLOSING = ("close", "leave_group", "refuse_in_call")
_CALLS = [
    method
    for name, method in vars(KmqClient).items()
    if isinstance(method, FunctionType) and name not in _CLOSING
]
"""The methods of a client for whose end close() may have to wait."""


class _DeadLetters:
    """The dead letters of an open queue, see kmqpy.queue.DeadLetters; connected only during each call."""

    def __init__(
        self, settings: CurrentSettings, connection: KafkaConnection, consumer: LazyConsumer, clock: Clock
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._consumer = consumer
        self._clock = clock

    @contextmanager
    def _open(self) -> Iterator[KafkaDeadLetters]:
        from kmqpy.kafka.dead_letters import KafkaDeadLetters

        self._consumer.check_open()
        with KafkaDeadLetters(self._settings.recent(), self._connection, self._clock) as letters:
            yield letters

    def list(self, limit: int = 100) -> Sequence[KafkaDeadLetter]:
        """See DeadLetters.list."""
        with self._open() as letters:
            return letters.list(limit)

    def peek(self, limit: int = 100) -> Sequence[KafkaDeadLetter]:
        """See DeadLetters.peek."""
        with self._open() as letters:
            return letters.peek(limit)

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """See DeadLetters.redrive. Raises Unfinished when the redrive was stopped halfway."""
        with self._open() as letters:
            return letters.redrive(ids, limit=limit)

    def purge(self) -> int:
        """See DeadLetters.purge."""
        with self._open() as letters:
            return letters.purge()


def _encoded(codec: Codec, body: Any) -> bytes | OutgoingMessage:
    if isinstance(body, OutgoingMessage):
        return dataclasses.replace(body, body=encode_body(codec, body.body))
    return encode_body(codec, body)
