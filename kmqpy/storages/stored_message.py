"""A message of a StoredQueue."""

from __future__ import annotations

from typing import Protocol, Self

from kmqpy.message import Message, MessagesLike
from kmqpy.storages.engine import MessageRow, TakeRef


class Acknowledges(Protocol):
    """A queue, as a message needs it."""

    def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """See Queue.ack."""
        ...


class StoredMessage(Message):
    """A message that acknowledges itself by the queue that handed it out; see Message."""

    __slots__ = ("_origin", "_take")
    _origin: Acknowledges
    _take: TakeRef

    def ack(self, *, wait: bool = False) -> None:
        """See Message.ack."""
        origin = getattr(self, "_origin", None)  # a copy, or one that was unpickled, has none
        if origin is None:
            super().ack(wait=wait)
        else:
            origin.ack(self, wait=wait)

    def take_of(self, origin: Acknowledges) -> TakeRef | None:
        """The take that the receipt names, or None if another origin handed out the message."""
        return self._take if getattr(self, "_origin", None) is origin else None

    @classmethod
    def of(cls, row: MessageRow, queue: str, origin: Acknowledges, receipt: str, lease_until_ms: int) -> Self:
        """The message in a row."""
        message = cls(
            queue=queue,
            id=str(row.id),
            body=row.body,
            headers=row.headers,
            attempts=row.requeues + 1,
            enqueued_ms=row.enqueued_ms,
            first_enqueued_ms=row.first_enqueued_ms,
            lease_until_ms=lease_until_ms,
            receipt=receipt,
            key=row.key,
        )
        object.__setattr__(message, "_take", TakeRef(row.id, row.take))
        object.__setattr__(message, "_origin", origin)
        return message
