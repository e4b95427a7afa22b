"""A message of a StoredQueue."""

from __future__ import annotations

from typing import Protocol, Self

from kmqpy.message import Message, MessagesLike
from kmqpy.storages.engine import MessageRow


class Acknowledges(Protocol):
    """A queue, as a message needs it."""

    @property
    def name(self) -> str:
        """The queue's name."""
        ...

    def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """See Queue.ack."""
        ...


class StoredMessage(Message):
    """A message that acknowledges itself by the queue that handed it out; see Message."""

    __slots__ = ("_origin",)
    _origin: Acknowledges

    def ack(self, *, wait: bool = False) -> None:
        """See Message.ack."""
        origin = getattr(self, "_origin", None)  # a copy, or one that was unpickled, has none
        if origin is None:
            super().ack(wait=wait)
        else:
            origin.ack(self, wait=wait)

    @classmethod
    def of(cls, row: MessageRow, origin: Acknowledges, receipt: str, lease_until_ms: int) -> Self:
        """The message in a row."""
        message = cls(
            queue=origin.name,
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
        object.__setattr__(message, "_origin", origin)
        return message
