"""The `Queue` protocol for queues on Kafka: hands calls on to a client, a producer and an administrator."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.durations import Duration
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, DecodeError, NotSupported
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.stats import InFlightMessage
from kmqpy.kafka.client.client import KmqClient
from kmqpy.kafka.client.client_options import ClientOptions, check_options
from kmqpy.kafka.client.lazy_client import LazyClient
from kmqpy.kafka.client.producer import KmqProducer
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.dead_letters import KafkaDeadLetter, KafkaDeadLetters
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.markers.life import MessageLife
from kmqpy.kafka.markers.log_cuts import cuts_behind
from kmqpy.kafka.message_headers import DELIVER_AT, int_header
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import check_topics, settings_of
from kmqpy.kafka.shared_connections import SharedConnections
from kmqpy.kafka.topics import MAX_MESSAGE_BYTES
from kmqpy.kafka.trace import trace
from kmqpy.message import HeadersLike, Message, OutgoingMessage, check_bodies
from kmqpy.queue import Capabilities, Codec, DeadLetter, DeadLetters, Orphan
from kmqpy.queue.arguments import check_age
from kmqpy.queue.storage import encode_body
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection

P = ParamSpec("P")
R = TypeVar("R")

CAPABILITIES = Capabilities(
    fifo=False,  # messages of a partition, so of a key, are in order, except redelivered ones
    priority=False,
    requeue_to_front=False,
    manual_redelivery=False,
    at_most_once=False,
    blocking_take=True,
    max_body_bytes=MAX_MESSAGE_BYTES,
    immediate=False,
    stable_ids=False,
    late_ack=False,
    tells_lost=False,  # only KmqClient.extend() tells
    exact_sizes=False,
    any_name=False,
    bound_handles=False,
    many_queues=False,
)


def _client_method(
    method: Callable[Concatenate[KmqClient, P], R],
) -> Callable[Concatenate[KafkaQueue, P], R]:
    """Make a method of KafkaQueue that calls `method` of the queue's client."""

    @functools.wraps(method)
    def call(queue: KafkaQueue, /, *args: P.args, **arguments: P.kwargs) -> R:
        with queue._client.use() as client:
            return method(client, *args, **arguments)

    return call


class KafkaQueue:
    """Sends, receives, counts and administers messages of a queue on Kafka; see kmqpy.queue.Queue.

    queue       the queue's name, or QueueSettings; fields that you leave out come from the queue's stored
                settings, and fields that contradict them raise ConfigError
    connection  where Kafka is. Redelivery and dead letters need a tracker that runs
    zookeeper   where ZooKeeper is; `size`, `in_flight` and the like read less of the markers topic with
                ZooKeeper, and the whole topic without
    shared      a producer and an administrator that several queues use and the caller closes; see
                KafkaStorage. `zookeeper` is not used then. Without `shared`, the queue makes and closes its
                own
    codec       turns objects into bodies and back
    on_close    called once, by the first close()
    The other arguments are those of KmqClient. The queue makes its client, which joins the consumer group,
    when the first message is received or finished. Received messages are KafkaMessages.

    The constructor raises QueueNotFound, TopicError, Unavailable, and ConfigError for bad arguments.
    """

    def __init__(
        self,
        queue: str | QueueSettings,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection = NO_ZOOKEEPER,
        *,
        shared: SharedConnections | None = None,
        codec: Codec | None = None,
        on_close: Callable[[], None] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        check_options(options)
        self._settings = settings = settings_of(queue, connection)
        self._connection = connection
        self._clock = options.get("clock", SYSTEM_CLOCK)
        self._telemetry = options.get("telemetry") or Telemetry()
        self._codec = codec
        self._on_close = on_close
        self._shared = shared or SharedConnections(connection, zookeeper, clock=self._clock)
        check_topics(settings, self._shared.topics().check(settings), connection)
        self._owns_shared = shared is None
        options.setdefault("acknowledged_by", self)
        self._client = LazyClient(
            lambda: KmqClient(settings, connection, **options), f"queue {settings.name!r}", self._clock
        )
        self._guard = ForkGuard(f"queue {settings.name!r}")
        self._opening = threading.RLock()
        self._producer: KmqProducer | None = None
        self._dead_letters = _DeadLetters(self)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._settings.name

    @property
    def capabilities(self) -> Capabilities:
        """See Queue.capabilities."""
        return CAPABILITIES

    @property
    def settings(self) -> QueueSettings:
        """The queue's settings, as they were when it was opened."""
        return self._settings

    @property
    def default_lease(self) -> float:
        """See Queue.default_lease."""
        return self._settings.lease_ms / 1000

    @property
    def max_lease(self) -> float:
        """See Queue.max_lease."""
        return self._settings.max_lease_ms / 1000

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
        transaction: Any = None,
    ) -> str:
        """See Queue.send. Messages of one key go to one partition."""
        message = OutgoingMessage(body, key=key, headers=headers, delay=delay, priority=priority)
        return self.send_many([message], transaction=transaction)[0]

    def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        transaction: Any = None,
    ) -> list[str]:
        """See Queue.send_many. Raises Unfinished if some messages were sent and others were too large."""
        if transaction is not None:
            raise NotSupported("transaction: Kafka takes no part in a transaction of yours (transactions)")
        check_bodies(bodies)
        encoded = bodies if self._codec is None else [_encoded(self._codec, body) for body in bodies]
        return self._sender().send_many(encoded, key=key, headers=headers, delay=delay, priority=priority)

    def decode(self, message: Message | DeadLetter) -> Any:
        """See Queue.decode."""
        return message.body if self._codec is None else self._codec.decode(message.body)

    def _sender(self) -> KmqProducer:
        self._client.check_open()  # before the lock, which may be held for ever in a child
        with self._opening:
            self._client.check_open()
            if self._producer is None:
                self._producer = KmqProducer(
                    self._settings,
                    self._connection,
                    shared=self._shared.producer(),
                    telemetry=self._telemetry,
                    clock=self._clock,
                )
            return self._producer

    # --- receiving and finishing --------------------------------------------------------------------

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[Message]:
        """See KmqClient.receive; the messages are KafkaMessages."""
        with self._client.use() as client:
            try:
                return [*client.receive(max_messages, wait=wait, lease=lease)]
            except Closed:
                self._client.check_open()
                return []  # the queue is open; leave_group() has closed the client

    ack = _client_method(KmqClient.ack)
    nack = _client_method(KmqClient.nack)
    extend = _client_method(KmqClient.extend)
    dead_letter = _client_method(KmqClient.dead_letter)

    def flush(self, timeout: Duration = 30) -> None:
        """See Queue.flush."""
        self._client.check_open()
        if self._client.current is not None:  # without a client, no acknowledgement waits to be written
            with self._client.use() as client:
                client.flush(timeout)

    @property
    def partitions(self) -> list[int]:
        """See KmqClient.partitions."""
        client = self._client.current
        return [] if client is None else client.partitions

    # --- looking ------------------------------------------------------------------------------------

    def peek(self, limit: int = 10) -> list[Message]:
        """See Queue.peek; delayed messages count towards `limit` and are left out."""
        check_limit(limit, "limit")
        self._client.check_open()
        records = stats.waiting_records(self._connection, self._settings, limit=limit)
        now_ms = self._clock.wall_ms()
        context = ReceiveContext(self._settings, "", now_ms, self._telemetry)
        found = [KafkaMessage(record, context) for record in records]
        return [message for message in found if not _is_delayed(message, now_ms)]

    def size(self, limit: int | None = None) -> int:
        """See Queue.size; an upper bound if a partition has more than 10,000 records to count."""
        most = None if limit is None else check_limit(limit, "limit")
        with self._use_admin() as admin:
            found = admin.stats(self._settings)
        size = found.depth + found.released
        return size if most is None else min(size, most)

    def in_flight(self) -> int:
        """See Queue.in_flight; a rejected message is in flight until a tracker makes it a dead letter."""
        with self._use_admin() as admin:
            found = admin.stats(self._settings)
        return found.in_flight - found.released

    def orphans(
        self, older_than: Duration | None = None, *, queued_before_ms: int | None = None
    ) -> list[Orphan]:
        """See Queue.orphans."""
        taken_before = self._clock.wall_ms() - (check_age(older_than, queued_before_ms) or 0)
        leased = [one for one in self._leased() if older_than is None or one.since_ms < taken_before]
        places = [(one.partition, one.offset) for one in leased]
        records = partition_reader.read_at(self._connection, self.name, places) if places else {}
        found = [self._orphan(one, records.get((one.partition, one.offset))) for one in leased]
        return [
            one
            for one in found
            if queued_before_ms is None or (one.message and one.message.enqueued_ms < queued_before_ms)
        ]

    def trace(self, message: Message | str) -> MessageLife:
        """The life of a message, read from Kafka: who took it, why it was redelivered, how it ended.

        `message`: a received message, a receipt, an id (`partition-offset`), or for a dead letter
        `topic:partition:offset`. The message may have been redelivered meanwhile, or be a copy itself.

        Raises ReceiptError for a receipt of another queue or topic, and for a message that never existed;
        ConfigError for a topic that holds no messages of this queue.
        """
        self._client.check_open()
        named = message.receipt if isinstance(message, Message) else message
        return trace(self._connection, self._settings, named)

    def _orphan(self, one: InFlightMessage, record: Any) -> Orphan:
        receipt = Receipt.parse(one.receipt)
        context = ReceiveContext(
            self._settings,
            receipt.topic_id,
            one.lease_until_ms,
            self._telemetry,
            self,
            {one.partition: cuts_behind(receipt.offset)},
        )
        return Orphan(
            receipt=one.receipt,
            holder=one.holder,
            since_ms=one.since_ms,
            lease_until_ms=one.lease_until_ms,
            message=None if record is None else KafkaMessage(record, context),
        )

    def _leased(self) -> list[InFlightMessage]:
        """The messages that clients have leased; nacked and delayed messages wait for a tracker."""
        with self._use_admin() as admin:
            found = admin.in_flight(self._settings, limit=None)
        return [one for one in found if one.state is EntryState.LEASED]

    # --- administration -----------------------------------------------------------------------------

    def purge(self) -> int:
        """See Queue.purge; finishes messages in flight first, so that trackers do not report them as lost."""
        with self._use_admin() as admin:
            return admin.purge(self._settings)

    def redrive(self, limit: int | None = None) -> int:
        """See Queue.redrive. Raises Unfinished when the redrive was stopped halfway."""
        return self._dead_letters.redrive(limit=limit)

    def release_all(self) -> int:
        """See Queue.release_all; nacked messages still wait until their delay is over."""
        leased = self._leased()
        if leased:
            self.nack([one.receipt for one in leased], count=False, confirmed=True)
        return len(leased)

    def leave_group(self) -> None:
        """Close the client, which leaves the consumer group; the next receive() makes another client."""
        self._client.close_current()

    def leave_group_if_idle(self, idle_s: float) -> None:
        """Call leave_group() if the client has no message in flight and was not used for `idle_s` seconds."""
        self._client.close_if_idle(idle_s)

    def close(self) -> None:
        """See Queue.close. A receive() that waits in another thread raises Closed."""
        if self._guard.inherited:
            return
        try:
            self._client.close()  # from here on, _sender() makes no producer
        finally:
            with self._opening:
                self._producer = None
            if self._owns_shared:
                self._shared.close()
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _use_admin(self) -> Iterator[Admin]:
        self._client.check_open()
        with self._shared.admin() as admin:
            self._client.check_open()
            yield admin

    @contextmanager
    def _open_dead_letters(self) -> Iterator[KafkaDeadLetters]:
        self._client.check_open()
        with KafkaDeadLetters(self._settings, self._connection, self._clock) as letters:
            yield letters


class _DeadLetters:
    """The dead letters of an open queue, see kmqpy.queue.DeadLetters; connected only during each call."""

    def __init__(self, queue: KafkaQueue) -> None:
        self._open = queue._open_dead_letters

    def list(self, limit: int = 100) -> Sequence[KafkaDeadLetter]:
        """See DeadLetters.list."""
        with self._open() as letters:
            return letters.list(limit)

    def peek(self, limit: int = 100) -> Sequence[KafkaDeadLetter]:
        """See DeadLetters.peek."""
        with self._open() as letters:
            return letters.peek(limit)

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """See DeadLetters.redrive."""
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


def _is_delayed(message: Message, now_ms: int) -> bool:
    try:
        deliver_at = int_header(message.headers, DELIVER_AT)
    except DecodeError:
        return False
    return deliver_at is not None and deliver_at > now_ms
