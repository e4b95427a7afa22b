"""The messages that a StoredQueue hands out.

A StoredQueue is a queue over an *engine*: a storage other than Kafka, which keeps each message as a row. A
*take* is one delivery of a row to a client; the row counts its takes. A *receipt* is a text that names one
take of one row, so that another process can acknowledge the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from kmqpy.message import LazyMessage
from kmqpy.queue.protocol import Queue
from kmqpy.storages.engine import MessageRow, TakeRef
from kmqpy.storages.receipts import Receipts


@dataclass(frozen=True, slots=True, eq=False)
class TakeContext:
    """The objects that all messages of one receive(), peek() or orphans() share.

    queue     the queue that handed the messages out, and acknowledges them
    receipts  makes their receipts
    ahead_ms  this machine's clock minus the storage's clock, in ms. Rows hold ends of leases by the storage's
              clock; lease_until_ms adds ahead_ms, to give them by this machine's clock
    """

    queue: Queue
    receipts: Receipts
    ahead_ms: int = 0


class StoredMessage(LazyMessage):
    """A Message whose fields are read from a row of an engine; ack() calls the queue that handed it out."""

    __slots__ = ("_context", "_row")
    _context: TakeContext
    _row: MessageRow

    def __init__(self, row: MessageRow, context: TakeContext) -> None:
        self._row = row
        self._context = context

    def ack(self, *, confirmed: bool = False) -> None:
        """See Message.ack."""
        self._context.queue.ack(self, confirmed=confirmed)

    def take_of(self, queue: Queue) -> TakeRef | None:
        """The take that the receipt names, or None if another queue handed out the message."""
        return TakeRef(self._row.id, self._row.take) if self._context.queue is queue else None

    @property
    def row(self) -> MessageRow:
        """The row as the take returned it."""
        return self._row

    queue = property(attrgetter("_context.queue.name"))
    id = property(lambda self: str(self._row.id))
    key = property(attrgetter("_row.key"))
    body = property(attrgetter("_row.body"))
    headers = property(attrgetter("_row.headers"))
    group = property(attrgetter("_row.group"))
    attempts = property(lambda self: self._row.requeues + 1)
    enqueued_ms = property(attrgetter("_row.enqueued_ms"))
    first_enqueued_ms = property(attrgetter("_row.first_enqueued_ms"))
    lease_until_ms = property(lambda self: self._row.until_ms + self._context.ahead_ms)
    receipt = property(lambda self: self._context.receipts.make(self._row.id, self._row.take))
