"""Sends messages to the topic of a queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.poll_turns import Waiter
from kmqpy.errors import ConfigError, KmqError, MessageError, NotSupported, Unavailable, Unfinished, shown
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.client_options import DEFAULT_LIMITS, SendLimits
from kmqpy.kafka.cut_off import RenewedProducer
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.message_headers import DELIVER_AT, size_of
from kmqpy.kafka.places import message_id
from kmqpy.kafka.settings import KafkaConnection, KafkaSettings, QueueSettings
from kmqpy.kafka.topics import HEADROOM_BYTES
from kmqpy.queue.canonical import body_digest
from kmqpy.telemetry.base import Telemetry, sending

_COUNT_PARTITIONS_EVERY_S = 30.0
"""How soon the sender of a queue that collapses notices that the queue has more partitions."""


def new_producer(
    connection: KafkaConnection, limits: SendLimits = DEFAULT_LIMITS, *, lingers: bool = False
) -> RenewedProducer:
    """Return a producer for messages; an error that may have ended it replaces it.

    With `lingers`, it is for batches: without lingering, it would send one of 1,000 in more requests, and
    30 % slower.
    """
    settings: KafkaSettings = {
        "linger.ms": 1 if lingers else 0,
        "message.timeout.ms": max(limits.timeout_ms, 10),
        "message.max.bytes": limits.max_message_bytes + HEADROOM_BYTES,
    }
    return RenewedProducer(partial(librdkafka.new_producer, connection, settings, connects=True))


class _Record(NamedTuple):
    """The value, key and headers of a record to send, and its lane.

    And its partition; -1: that of its key, or any.
    """

    value: bytes
    key: bytes | None
    headers: m.Headers
    lane: QueueSettings
    partition: int = -1


class QueueSender:
    """Sends messages to one queue; safe to use from any thread.

    producers   returns the producer for a number of messages, made by new_producer() with the same `limits`;
                the caller closes it, and has checked that the queue exists: a broker that creates topics by
                itself would do so at the first send
    partitions  returns how many partitions the queue has; asked from time to time if the queue collapses
    settings    returns the queue's settings as of some seconds ago or later, asked before a message with a
                priority is sent: somebody may add lanes to the queue, or remove some
    keeps       False if what was sent to these lanes since that time may be gone with them; see
                CurrentSettings
    """

    def __init__(
        self,
        queue: QueueSettings,
        connection: KafkaConnection,
        producers: Callable[[int], RenewedProducer],
        limits: SendLimits = DEFAULT_LIMITS,
        *,
        partitions: Callable[[], int] = lambda: 1,
        settings: Callable[[], QueueSettings] | None = None,
        keeps: Callable[[Collection[str], float], bool] = lambda *_: True,
        telemetry: Telemetry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._limits = limits
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._producers = producers
        self._partitions = partitions
        self._settings = settings or (lambda: queue)
        self._keeps = keeps
        self._uses_lanes = False
        self._partition_count = 0
        self._count_at = 0.0

    def send_many(
        self,
        bodies: Iterable[bytes | str | m.OutgoingMessage],
        *,
        key: bytes | str | None = None,
        headers: m.HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        partition: int | None = None,
    ) -> list[str]:
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int)):
            raise ConfigError(f"partition: {partition!r} is not a whole number")
        m.check_bodies(bodies)
        began = self._clock.monotonic()
        # Arguments that are the same for many messages are checked once.
        common = self._record_of(
            m.OutgoingMessage("", key=key, headers=headers, delay=delay, priority=priority)
        )
        outgoing = [
            self._record_of(body)
            if isinstance(body, m.OutgoingMessage)
            else _Record(m.as_bytes(body, "body"), common.key, common.headers, common.lane)
            for body in bodies
        ]
        for one in outgoing:
            self._check_size(one)
        if self._queue.collapse and partition is None:
            count = self._count_partitions()
            outgoing = [one._replace(partition=partition_of(one.value, count)) for one in outgoing]
        timeout_s = self._limits.timeout_ms / 1000 + 1
        with ExitStack() as stack:  # until they are confirmed
            traced = []
            for one in outgoing:  # all are checked before the first is sent
                sent_headers = stack.enter_context(sending(self._telemetry, self._queue.name, one.headers))
                if sent_headers is one.headers:
                    traced.append(one)
                else:
                    traced.append(one._replace(headers=sent_headers))
                    self._check_size(traced[-1])
            producers, reports = self._producers(len(traced)), _DeliveryReports(partition)
            producer = producers.current()
            try:
                for one in traced:
                    self._produce(producers, producer, one, partition, reports)
                ids = reports.wait(producer, timeout_s, self._connection, self._queue.name)
            except KmqError:
                self._count_at = 0.0  # the queue may have been recreated, with fewer partitions
                raise
            finally:
                for error in reports.errors.values():
                    producers.note_failure(producer, error)
        lanes = {one.lane.name for one in traced} - {self._queue.name} if self._uses_lanes else ()
        if lanes and not self._keeps(lanes, began):
            raise Unavailable(
                f"send to {', '.join(sorted(lanes))}: Kafka was slow, and the lane is being removed or may "
                "be gone, perhaps with these messages; send them again"
            )
        self._telemetry.finished(self._queue.name, "send", len(ids))
        return ids

    def _record_of(self, message: m.OutgoingMessage) -> _Record:
        """Return the record of a message; raises MessageError, NotSupported."""
        priority = message.priority
        if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= m.MAX_PRIORITY:
            raise MessageError(
                f"priority: {shown(priority)} is not a whole number from 0 to {m.MAX_PRIORITY}"
            )
        lane = self._lane_of(priority) if priority else self._queue
        if message.group is not None:
            raise NotSupported("group: queues on Kafka have none; a key keeps messages in one partition")
        if message.dedup_id is not None:
            raise NotSupported("dedup_id: queues on Kafka have none; let the handler know what it has done")
        delay_ms = duration_ms(message.delay, "delay")
        if delay_ms > self._queue.max_delay_ms:
            raise MessageError(
                f"delay: {shown(message.delay)} is longer than max_delay_ms, {self._queue.max_delay_ms}"
            )
        headers = m.headers_from(message.headers)
        if delay_ms:
            headers += ((DELIVER_AT, str(self._clock.wall_ms() + delay_ms).encode()),)
        key = None if message.key is None else m.as_bytes(message.key, "key")
        return _Record(m.as_bytes(message.body, "body"), key, headers, lane)

    def _lane_of(self, priority: int) -> QueueSettings:
        """The lane of a priority above 0: its own, or the highest that the queue has."""
        queue = self._settings()
        if queue.priorities == 1:
            raise NotSupported(
                f"priority: queue {self._queue.name!r} has none; its messages have priority 0. "
                f"Add some with: kmq queue alter {self._queue.name} --priorities 3"
            )
        self._uses_lanes = True
        return queue.priority_lane(priority)

    def _count_partitions(self) -> int:
        """Return how many partitions the queue has, as of 30 s ago or later, or as far as Kafka answers."""
        now = self._clock.monotonic()
        if now >= self._count_at:
            self._count_at = now + _COUNT_PARTITIONS_EVERY_S
            try:
                self._partition_count = self._partitions()
            except Unavailable:
                if not self._partition_count:
                    raise
        return self._partition_count

    def _check_size(self, record: _Record) -> None:
        size = size_of(record.key, record.value, record.headers)
        most = self._limits.max_message_bytes
        if size > most:
            raise MessageError(f"message of {size} bytes (key, body and headers): the limit is {most} bytes")

    def _produce(
        self,
        producers: RenewedProducer,
        producer: Producer,
        record: _Record,
        partition: int | None,
        reports: _DeliveryReports,
    ) -> None:
        topic = record.lane.name
        report = reports.new_callback(topic, record.lane.lane_ending)
        wanted = record.partition if partition is None else partition
        while True:
            try:
                producer.produce(
                    topic, record.value, record.key, wanted, on_delivery=report, headers=list(record.headers)
                )
            except BufferError:
                producer.poll(0.1)
            except KafkaException as exception:
                if librdkafka.refresh_partition(producer, topic, max(wanted, 0), exception):
                    continue
                error = kafka_errors.error_of(exception)
                producers.note_failure(producer, error)
                if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    report(error, None)  # wait() raises it, and knows which messages before were sent
                    return
                if error is not None:
                    _check_partition(error.code(), partition, topic)
                doing = f"send to {topic}"
                raise kafka_errors.translated(_cause(error, producer), doing, self._connection) from exception
            else:
                return


class _DeliveryReports(Waiter):
    """Collects the delivery reports of the messages of one call; `errors` has one error of each code.

    topics     by code, the topic to which the message was sent that failed so: the queue's, or that of a lane
    partition  the partition that the call names; None: it leaves the choice to librdkafka
    """

    __slots__ = ("_ids", "_partition", "errors", "topics")

    def __init__(self, partition: int | None) -> None:
        super().__init__()
        self._partition = partition
        self.errors: dict[int, KafkaError] = {}
        self.topics: dict[int, str] = {}
        self._ids: list[str | None] = []

    def new_callback(self, topic: str, lane: str = "") -> Any:
        """Return the callback for the next message, which is sent to the lane with this topic and ending."""
        index = len(self._ids)
        self._ids.append(None)
        self.left.append(None)

        def report(error: KafkaError | None, record: Any) -> None:
            if error is None:
                self._ids[index] = message_id(record.partition(), record.offset(), lane)
            else:
                self.errors[error.code()], self.topics[error.code()] = error, topic
            self.left.pop()
            if not self.left:
                self.wake()

        return report

    def wait(
        self, producer: Producer, timeout_s: float, connection: KafkaConnection, queue: str
    ) -> list[str]:
        """Wait for all reports, and return the ids of all messages; raises the error if there is one.

        Other errors go before MessageError. It is raised only where it is certain that no message was sent;
        where some were, Unfinished is.
        """
        producer.turns.wait(producer.poll, self, timeout_s)
        if self.left:
            self.errors[KafkaError._TIMED_OUT] = KafkaError(KafkaError._TIMED_OUT)
            raise Unavailable(f"send to {queue}: Kafka at {connection.address} does not answer")
        sent = [one for one in self._ids if one is not None]
        for code, topic in self.topics.items():
            _check_partition(code, self._partition, topic)
        late = self.topics.get(KafkaError._MSG_TIMED_OUT)
        if late is not None and librdkafka.has_no_topic(producer, late):
            # librdkafka waits until the messages' time-out for a topic that was deleted.
            missing = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            raise kafka_errors.translated(missing, f"send to {late}", connection)
        problems = [
            kafka_errors.translated(_cause(error, producer), f"send to {self.topics[code]}", connection)
            for code, error in self.errors.items()
        ]
        for problem in sorted(problems, key=lambda one: isinstance(one, MessageError)):
            if sent and isinstance(problem, MessageError):
                text = f"{problem}; {len(sent)} of these {len(self._ids)} messages were sent"
                raise Unfinished(text, len(sent)) from problem
            raise problem
        return sent


def _check_partition(code: int, partition: int | None, queue: str) -> None:
    """Raise ConfigError if an error with this code says that the queue lacks the partition that a call names.

    Of a call that names no partition, the error says that the queue was deleted.
    """
    if partition is not None and code == KafkaError._UNKNOWN_PARTITION:
        raise ConfigError(f"partition: queue {queue} has no such partition: {partition}")


def _cause(error: KafkaError | None, producer: Producer) -> KafkaError | None:
    """Return the fatal error of the producer if `error` says only that the producer has dropped a message."""
    dropped = error is not None and error.code() in (KafkaError._FATAL, KafkaError._PURGE_QUEUE)
    return producer.fatal_error if dropped and producer.fatal_error is not None else error


def partition_of(body: bytes, count: int) -> int:
    """The partition of a message in a queue that collapses and has `count` partitions: the same for twins."""
    return int.from_bytes(body_digest(body)[:8]) % count
