"""The `Queue` protocol: what every storage does with the messages of one queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from kmqpy.core.durations import Duration
from kmqpy.message import Headers, HeadersLike, Message, MessagesLike
from kmqpy.queue.capabilities import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A message that was taken long ago and not finished.

    receipt         what acknowledges or releases it, in any process
    holder          who has it, where the taker gave a name
    since_ms        when it was taken (ms since 1970, the storage's clock)
    lease_until_ms  when it is redelivered, by the same clock; with manual redelivery, when its lease ends
    message         the message with its body, its lease by the storage's clock; None if the storage does
                    not have it any more (Kafka, after its retention)
    """

    receipt: str
    holder: str | None
    since_ms: int
    lease_until_ms: int
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that is not delivered any more.

    id                 names it for redrive()
    attempts           its deliveries
    first_enqueued_ms  when it was first sent (ms since 1970, the storage's clock)
    dead_since_ms      when it became a dead letter
    reason             `expired`, `nack` or `rejected`, these with `: ` and a reason if one was given
    size               bytes of its body
    body, headers      empty in list(), complete in peek()

    `attempts`, `first_enqueued_ms` and `reason` are None where they are not known: in Kafka, anybody can
    write to the topic of the dead letters.
    """

    id: str
    key: bytes | None
    attempts: int | None
    first_enqueued_ms: int | None
    dead_since_ms: int
    reason: str | None
    size: int
    body: bytes = b""
    headers: Headers = ()


Listed = Sequence[DeadLetter]


class DeadLetters(Protocol):
    """The dead letters of one queue."""

    def list(self, limit: int = 100) -> Listed:
        """Dead letters without their bodies and headers, the oldest first."""
        ...

    def peek(self, limit: int = 100) -> Listed:
        """Dead letters with their bodies and headers, the oldest first."""
        ...

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """Put dead letters back in the queue, with no attempts yet; returns how many.

        Takes those of these ids, or the oldest `limit`, or all. An id that names no dead letter of the queue
        is left out.
        """
        ...

    def purge(self) -> int:
        """Remove all dead letters; returns how many there were."""
        ...


class Queue(Protocol):
    """A queue of messages, each acknowledged by itself; safe to use from any thread.

    At-least-once: a message that is not acknowledged before its lease ends is redelivered. Operations
    take messages, or receipts as text, which are good in any process: several of them, or one list.
    Durations are seconds or `timedelta`. What a storage can't do it says in `capabilities`; asking for it
    raises NotSupported. Every call may raise Unavailable when the storage does not answer, and Closed after
    close().

    A receipt whose lease has ended still acknowledges or dead-letters its message, as long as nobody else
    has taken it since and it is no dead letter; extend() and nack() do nothing then. (Where the capability
    `late_ack` is missing, all four do nothing.) Once the message is taken by another, the receipt does
    nothing, and never anything to the new taker's message. A receipt of another storage, of another queue,
    or of a queue that was deleted and recreated is a ReceiptError, and so is that of a message which was
    only looked at.
    """

    @property
    def name(self) -> str:
        """The queue's name."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""
        ...

    @property
    def default_lease(self) -> float:
        """Seconds that a message is its taker's where receive() names no lease."""
        ...

    @property
    def max_lease(self) -> float:
        """The longest lease that receive() and extend() take, in seconds."""
        ...

    @property
    def at_most_once(self) -> bool:
        """True if a message is forgotten when it is taken, so that it can't be extended or given back."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """The messages that failed too often or were rejected."""
        ...

    def send(
        self,
        body: Any,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        connection: Any = None,
    ) -> str:
        """Send one message, safe once this returns; returns its id.

        body        bytes or text; with a codec, an object
        delay       the message is not handed out before; its place in the queue is that of the send
        priority    0 to 9; a higher one is handed out first
        connection  a connection of the application to the same database: the message is sent if the
                    application commits its transaction, and only then safe

        Raises MessageError for a message that the storage can't take.
        """
        ...

    def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        connection: Any = None,
    ) -> list[str]:
        """Send bodies, or OutgoingMessages with a key, headers, delay and priority each; returns their ids.

        The other arguments apply to the bodies that are no OutgoingMessage. All messages are checked before
        the first is sent. Raises MessageError, and then none was sent; where it raises Unavailable or
        Unfinished, some may have been sent.
        """
        ...

    def decode(self, message: Message | DeadLetter) -> Any:
        """The object in the body, by the queue's codec; without one the body. Raises DecodeError."""
        ...

    def flush(self, timeout: Duration = 30) -> None:
        """Wait until all that was sent and finished is confirmed; raises Unavailable after `timeout`."""
        ...

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[Message]:
        """Take up to `max_messages`; returns as soon as there are some, [] after `wait`.

        They are the caller's for `lease` (default: the queue's; at least 100 ms) and are redelivered unless
        finished before. At least half of the lease is left on return. Raises ConfigError for bad numbers.
        """
        ...

    def ack(self, *messages: MessagesLike, wait: bool = False, connection: Any = None) -> None:
        """Acknowledge: the messages are not redelivered. Harmless when it comes too late.

        Returns at once unless `wait`, which returns when it is certain. Raises ReceiptError.

        `connection`: as of send(), the acknowledgement is part of a transaction. In a transaction it must
        not be late: if the message was taken by somebody else or finished before, it raises ReceiptError, so
        that what the transaction did for the message is rolled back.
        """
        ...

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration = 0,
        count: bool = True,
        reason: str | None = None,
        wait: bool = False,
    ) -> None:
        """Give messages back; they are redelivered after `delay`. `count=False`: not an attempt."""
        ...

    def extend(self, *messages: MessagesLike, lease: Duration, wait: bool = False) -> list[str]:
        """Let the leases end `lease` from now; does nothing to messages that are finished.

        Returns the receipts of those that are no longer the caller's, as far as that is known: finished,
        given back, or their leases were over (see the capability `tells_lost`). Empty as a rule.

        `lease=0` means `nack(count=False)`. Raises ConfigError for another one below 100 ms.
        """
        ...

    def dead_letter(self, *messages: MessagesLike, reason: str | None = None, wait: bool = False) -> None:
        """Move messages to the dead letters, without another try."""
        ...

    def peek(self, limit: int = 10) -> list[Message]:
        """Messages that can be taken, without taking them, the oldest first; they acknowledge nothing."""
        ...

    def size(self, limit: int | None = None) -> int:
        """How many messages are neither in flight nor dead, delayed ones included.

        `limit`: count no further, since counting may cost; the result is then at most `limit`.
        """
        ...

    def in_flight(self) -> int:
        """How many messages are taken and not finished."""
        ...

    def orphans(
        self, older_than: Duration | None = None, *, queued_before_ms: int | None = None
    ) -> list[Orphan]:
        """All messages, with bodies, that are taken and not finished, the oldest take first.

        older_than        those that were taken longer ago
        queued_before_ms  those that were last queued (sent, or redelivered) before this time, in ms since
                          1970 by the storage's clock

        Each is acknowledged, extended or given back by its receipt. At most one argument may be given;
        without one, all that is in flight is listed.
        """
        ...

    def purge(self) -> int:
        """Remove every message but dead letters; returns about how many there were."""
        ...

    def redrive(self, limit: int | None = None) -> int:
        """Put dead letters back in the queue, with no attempts yet; returns how many."""
        ...

    def release_all(self) -> int:
        """Give back what anybody has taken and not finished, not as attempts; returns how many."""
        ...

    def close(self) -> None:
        """Wait until what was sent and finished is confirmed, and disconnect; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
