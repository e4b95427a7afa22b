"""The messages that a StoredQueue hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kmqpy.message import Headers, LazyMessage, MessagesLike
from kmqpy.storages.engine import MessageRow, TakeRef
from kmqpy.storages.receipts import Receipts


class Acknowledges(Protocol):
    """The part of a queue that its messages use."""

    @property
    def name(self) -> str:
        """The queue's name."""
        ...

    def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """See Queue.ack."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TakeContext:
    """The objects that all messages of one receive(), peek() or orphans() share.

    queue     handed the messages out, and acknowledges them
    receipts  makes their receipts
    ahead_ms  how many ms this machine's clock is ahead of the storage's, to which the ends of leases in rows
              refer; lease_until_ms adds it
    """

    queue: Acknowledges
    receipts: Receipts
    ahead_ms: int = 0


class StoredMessage(LazyMessage):
    """A message of an engine. It acknowledges itself by the queue that handed it out; see Message."""

    __slots__ = ("_context", "_row")
    _context: TakeContext
    _row: MessageRow

    def __init__(self, row: MessageRow, context: TakeContext) -> None:
        self._row = row
        self._context = context

    def ack(self, *, wait: bool = False) -> None:
        """See Message.ack."""
        self._context.queue.ack(self, wait=wait)

    def take_of(self, queue: Acknowledges) -> TakeRef | None:
        """The take that the receipt names, or None if another queue handed out the message."""
        return TakeRef(self._row.id, self._row.take) if self._context.queue is queue else None

    @property
    def queue(self) -> str:
        return self._context.queue.name

    @property
    def id(self) -> str:
        return str(self._row.id)

    @property
    def body(self) -> bytes:
        return self._row.body

    @property
    def headers(self) -> Headers:
        return self._row.headers

    @property
    def attempts(self) -> int:
        return self._row.requeues + 1

    @property
    def enqueued_ms(self) -> int:
        return self._row.enqueued_ms

    @property
    def first_enqueued_ms(self) -> int:
        return self._row.first_enqueued_ms

    @property
    def lease_until_ms(self) -> int:
        return self._row.until_ms + self._context.ahead_ms

    @property
    def receipt(self) -> str:
        return self._context.receipts.make(self._row.id, self._row.take)

    @property
    def key(self) -> bytes | None:
        return self._row.key
