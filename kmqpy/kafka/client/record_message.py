"""KafkaMessage: a Message whose fields are read from a record of Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.message_headers import ORIGINAL_TIMESTAMP, first_place, int_header, redelivery_count
from kmqpy.kafka.places import Place, message_id
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.message import Headers, LazyMessage, MessagesLike
from kmqpy.telemetry.base import Telemetry


class Acknowledges(Protocol):
    """The part of a client that a message calls."""

    def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        """See Queue.ack."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReceiveContext:
    """Values that all messages of one receive(), peek() or orphans() share."""

    queue: QueueSettings
    topic_id: str
    lease_until_ms: int
    telemetry: Telemetry
    client: Acknowledges | None = None
    """The object whose ack() the messages call. None: peek() returned the messages, so ack() raises an
    error."""
    cuts: Mapping[int, LogCuts] = field(default_factory=dict)
    """The cuts of the partitions whose logs were cut back, by partition."""

    def place_of(self, record: Any) -> Place:
        """The partition of a record, and the number that markers and receipts name it by; see log_cuts."""
        partition, offset = record.partition(), record.offset()
        return partition, self.cuts[partition].number_of(offset) if partition in self.cuts else offset


class KafkaMessage(LazyMessage):
    """A Message that knows its place in Kafka. It computes a field only when a program reads the field.

    Attributes:
        receipt: Names the message in calls like ack(); empty for a message that peek() returned.
        topic: Where this record lies; a redelivered message is another record.
        partition: Where in the topic.
        offset: Where in the partition.
    """

    __slots__ = ("_context", "_record")
    _context: ReceiveContext
    _record: Any

    def __init__(self, record: Any, context: ReceiveContext) -> None:
        self._record = record
        self._context = context

    def ack(self, *, confirmed: bool = False) -> None:
        """See Message.ack."""
        if self._context.client is None:
            super().ack(confirmed=confirmed)
        else:
            self._context.client.ack(self, confirmed=confirmed)

    @property
    def queue(self) -> str:
        return self._context.queue.queue_name

    @property
    def id(self) -> str:
        own = self.place
        queue = self._context.queue
        return message_id(*(first_place(self.headers, queue, own) or (*own, queue.lane_ending)))

    @property
    def key(self) -> bytes | None:
        return self._record.key()  # type: ignore[no-any-return]

    @property
    def body(self) -> bytes:
        return self._record.value() or b""

    @property
    def topic(self) -> str:
        return self._record.topic()  # type: ignore[no-any-return]

    @property
    def partition(self) -> int:
        return self._record.partition()  # type: ignore[no-any-return]

    @property
    def offset(self) -> int:
        return self._record.offset()  # type: ignore[no-any-return]

    @property
    def place(self) -> Place:
        """Its partition and its number, by which markers and receipts name it; see log_cuts."""
        return self._context.place_of(self._record)

    @property
    def headers(self) -> Headers:
        return message_headers(self._record)

    @property
    def attempts(self) -> int:
        try:
            return redelivery_count(self.headers, self._context.queue.redelivery_count_header) + 1
        except DecodeError:
            self._context.telemetry.failed(self.queue, "undecodable header")
            return 1

    @property
    def enqueued_ms(self) -> int:
        return self._record.timestamp()[1]  # type: ignore[no-any-return]

    @property
    def first_enqueued_ms(self) -> int:
        try:
            first = int_header(self.headers, ORIGINAL_TIMESTAMP)
        except DecodeError:
            self._context.telemetry.failed(self.queue, "undecodable header")
            first = None
        return self.enqueued_ms if first is None else first

    @property
    def lease_until_ms(self) -> int:
        return self._context.lease_until_ms

    @property
    def receipt(self) -> str:
        if self._context.client is None:
            return ""
        return str(Receipt(self._context.queue.name, self._context.topic_id, *self.place))
