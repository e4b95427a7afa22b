"""The `Queue` protocol: the operations that every storage has for the messages of one queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from kmqpy.core.durations import Duration
from kmqpy.message import Headers, HeadersLike, Message, MessagesLike
from kmqpy.queue.capabilities import Capabilities
from kmqpy.queue_policy import QueuePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """Describes a message that was taken and not finished, as Queue.orphans() returns it.

    Attributes:
        receipt: Text with which any process can acknowledge, extend or give back the message.
        holder: The name of the client that took the message, if the client gave one.
        since_ms: When the message was taken (ms since 1970, the storage's clock).
        lease_until_ms: When its lease ends, by the same clock, and so when it is redelivered (by the
            application, if redelivery is manual).
        message: The message with its body, its lease by the storage's clock; None if the storage does not
            have the message any more (Kafka, after its retention).
    """

    receipt: str
    holder: str | None
    since_ms: int
    lease_until_ms: int
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that failed too often or was rejected, and is not delivered any more.

    `attempts`, `first_enqueued_ms` and `reason` are None where the storage does not know them: in Kafka,
    programs other than kmqpy can write to the topic of the dead letters.

    Attributes:
        id: The message's id, as send() returned it.
        key: The message's key.
        attempts: How often the message was delivered.
        first_enqueued_ms: When the message was first sent (ms since 1970, the storage's clock).
        dead_since_ms: When it became a dead letter.
        reason: `expired` (its last lease ended), or `nack` or `rejected`, after which `: ` and the text
            follow that nack() or dead_letter() was given.
        size: Bytes of the body.
        body: Empty in list(), complete in peek().
        headers: Empty in list(), complete in peek().
        group: The message's group, as for send().
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
    group: str | None = None


Listed = Sequence[DeadLetter]
"""The type that DeadLetters.list() and peek() return; in that class the name `list` is a method."""


class DeadLetters(Protocol):
    """Lists, redrives and removes the dead letters of one queue."""

    def list(self, limit: int = 100) -> Listed:
        """Dead letters without their bodies and headers, the oldest first.

        Args:
            limit: The most to return.
        """
        ...

    def peek(self, limit: int = 100) -> Listed:
        """Dead letters with their bodies and headers, the oldest first.

        Args:
            limit: The most to return.
        """
        ...

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """Put dead letters back in the queue, with no attempts yet; returns how many.

        Args:
            ids: Those to put back; an id that names no dead letter of the queue is ignored.
            limit: Put back the oldest, so many at most; without both arguments all.
        """
        ...

    def purge(self) -> int:
        """Remove all dead letters; returns how many there were."""
        ...


class Queue(Protocol):
    """A queue of messages, each acknowledged by itself; safe to use from any thread.

    Delivery is at-least-once: a message is redelivered if it is not acknowledged before its lease ends.
    ack(), nack(), extend() and dead_letter() accept messages, or receipts as text, from any process: as
    arguments, or as one list. Durations are seconds or `timedelta`. `capabilities` says what the storage can
    do; operations that it can't do raise NotSupported. Every method may raise Unavailable when the storage
    does not answer, and Closed after close().

    After the end of a lease, its receipt still acknowledges or dead-letters the message, as long as nobody
    has taken the message since and it is no dead letter; extend() and nack() do nothing then. (In a storage
    without the capability `late_ack`, all four may do nothing.) Once another client has taken the message,
    the receipt never affects that client's take. A receipt of an id (receipt()) names no take, and affects
    whoever has the message.

    Receipts of another storage, of another queue, or of a queue that was deleted and recreated raise
    ReceiptError, and so do messages that peek() returned.
    """

    @property
    def name(self) -> str:
        """The queue's name."""
        ...

    @property
    def unique_id(self) -> str:
        """Text that names this queue and no other: none of another storage, none created later."""
        ...

    @property
    def settings(self) -> QueuePolicy:
        """The queue's settings when it was opened; those of a storage have more fields."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""
        ...

    @property
    def default_lease(self) -> float:
        """The lease, in seconds, of messages that receive() takes without the argument `lease`."""
        ...

    @property
    def max_lease(self) -> float:
        """The longest lease that receive() and extend() accept, in seconds."""
        ...

    @property
    def at_most_once(self) -> bool:
        """True if the queue forgets a message when it is taken (`delivery="at-most-once"`).

        nack() and dead_letter() of such a queue put the message back, and so need the message that receive()
        returned: for a receipt or a copy they raise ReceiptError. A call that raised Unavailable may have put
        it back; to call again could deliver it twice. extend() raises NotSupported.
        """
        ...

    @property
    def delays_retries(self) -> bool:
        """True if the queue has delays of its own before redeliveries (the setting `retry_delays`)."""
        ...

    @property
    def in_groups(self) -> bool:
        """True if the messages of a group are handed out in order (`order="group"`)."""
        ...

    @property
    def max_in_flight(self) -> int | None:
        """The most messages in flight of which this object takes no more; None: there is no such limit."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """Operations on the messages that failed too often or were rejected."""
        ...

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
    ) -> str:
        """Send one message.

        Args:
            body: Bytes or text; if the queue has a codec, an object.
            key: Kafka: decides the partition. For workers with `ordering="key"`: what is handled one at a
                time.
            headers: A mapping, or pairs of name and value; names `kmq-…` are left out.
            delay: How long the message is not handed out; its place in the queue is that of the send.
            priority: 0 to 9; messages of higher priority are handed out first. Not with order="group".
            group: Text of 1 to 200 characters: in a queue with order="group", messages of a group are handed
                out in the order they were sent, one at a time.
            dedup_id: Text of 1 to 200 characters: if a message was sent with it before (in the queue's
                `dedup_window_ms`), nothing is stored, and the id of that one is returned.
            transaction: The application's own connection to the same database: the message becomes part of
                the transaction on it, and is sent if the application commits that transaction.

        Returns:
            The message's id, when the storage has confirmed the message.

        Raises:
            MessageError: For a message that the storage can't take.
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
        group: str | None = None,
        transaction: Any = None,
    ) -> list[str]:
        """Send several messages; returns their ids, in order.

        All messages are checked before the first is sent.

        Args:
            bodies: Bodies, as for send(), or OutgoingMessages, which have their own key, headers, delay and
                so on.
            key: As for send(), of all bodies that are no OutgoingMessage; so are the others.
            headers: As for send().
            delay: As for send().
            priority: As for send().
            group: As for send().
            transaction: As for send().

        Raises:
            MessageError: The storage can't take one of the messages; none was sent.
            Unavailable: Some messages may have been sent; so with Unfinished.
            Unfinished: Some messages were sent, and the storage refused others.
        """
        ...

    def decode(self, message: Message | DeadLetter) -> Any:
        """The body, decoded by the queue's codec; unchanged without a codec.

        Args:
            message: A message, or a dead letter that peek() returned.

        Raises:
            DecodeError: The codec can't decode the body; the error holds it.
        """
        ...

    def flush(self, timeout: Duration = 30) -> None:
        """Wait until the storage has confirmed sends, acks and so on.

        Args:
            timeout: Seconds or timedelta.

        Raises:
            Unavailable: It was not confirmed within `timeout`.
        """
        ...

    def receive(
        self,
        max_messages: int = 100,
        *,
        wait: Duration = 1.0,
        lease: Duration | None = None,
        one_per_group: bool = False,
    ) -> Sequence[Message]:
        """Take up to `max_messages`; returns as soon as there are some, or [] after `wait`.

        In a queue with order="group" there may be several messages of a group, as many as there are before
        those of others, which are to be handled in this order.

        A message that the caller does not finish within its lease is redelivered. At least half of the lease
        is left when receive() returns.

        Args:
            max_messages: The most to take.
            wait: Seconds or timedelta to wait for a first message; 0: do not wait.
            lease: How long the messages are the caller's; default: `default_lease`; at least 100 ms.
            one_per_group: Take at most one message of each group, so that threads can handle all of them at a
                time.

        Raises:
            ConfigError: For numbers that are out of range.
        """
        ...

    def ack(self, *messages: MessagesLike, confirmed: bool = False, transaction: Any = None) -> None:
        """Acknowledge messages, so that they are not redelivered. A late acknowledgement does no harm.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            confirmed: Return when the storage has confirmed the acknowledgement; else ack() may return
                before.
            transaction: Makes the acknowledgement part of a transaction, as for send().

        Raises:
            ReceiptError: For a receipt of another queue; in a transaction even if another client took the
                message or the message is finished, so that the application rolls back its work for it.
        """
        ...

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,
    ) -> None:
        """Give messages back, to be redelivered.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            delay: Seconds or timedelta until they are redelivered; default: the queue's `retry_delays`, if it
                has any and the attempt counts, else at once.
            count: False: this was no attempt.
            reason: Text that a dead letter keeps as its reason.
            confirmed: Return when the storage has confirmed it, not before.

        Raises:
            ConfigError: For a delay above the queue's `max_delay_ms`.
        """
        ...

    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:
        """Let the leases of messages end `lease` from now; does nothing to messages that are finished.

        receipt() says what it does with a receipt of an id.

        nack(count=False) gives a message back at once.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            lease: Seconds or timedelta from now; at least 100 ms.
            confirmed: Return when the storage has confirmed it, not before.

        Returns:
            The receipts of lost messages: messages that are no longer the caller's, because they are finished
            or given back, or their leases were over. A storage without the capability `tells_lost` returns
            some of these receipts, or none.

        Raises:
            ConfigError: For a lease below 100 ms.
        """
        ...

    def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, confirmed: bool = False
    ) -> None:
        """Make messages dead letters at once: they are not delivered again, unless they are redriven.

        Args:
            messages: Messages or receipts, as arguments or as one list.
            reason: Text that a dead letter keeps as its reason.
            confirmed: Return when the storage has confirmed it, not before.
        """
        ...

    def receipt(self, message_id: str) -> str:
        """Return a receipt for the message with this id, whoever has it when the receipt is used, or nobody.

        It takes no request. With the receipt, ack() and dead_letter() act on the message in any state but
        dead, even if nobody has taken it yet, nack() if it is taken. extend() lets its lease end `lease` from
        now, unless it ends later already; a message that is not taken, because its lease is over or nobody
        has taken it yet, it takes: nobody gets it until `lease` from now. For a message that is finished or a
        dead letter, or was never there, all four do nothing, and extend() returns the receipt.

        Args:
            message_id: The id that send() returned.

        Raises:
            ReceiptError: For text that can't be an id of this storage.
            NotSupported: Without the capability `receipts_by_id`. docs/storages.md says how Kafka differs.
        """
        ...

    def peek(self, limit: int = 10) -> Sequence[Message]:
        """The oldest messages that can be taken, without taking them; they can't be acknowledged.

        In queues with groups or shares, those behind another one of their group may be left out.

        Args:
            limit: The most to return.
        """
        ...

    def size(self, limit: int | None = None) -> int:
        """The number of messages that are neither in flight nor dead letters; delayed messages count.

        Args:
            limit: Stop counting there, because counting may be slow.
        """
        ...

    def in_flight(self, limit: int | None = None) -> int:
        """The number of messages that are taken and not finished.

        Args:
            limit: As in size().
        """
        ...

    def orphans(
        self,
        older_than: Duration | None = None,
        *,
        queued_before_ms: int | None = None,
        limit: int | None = None,
    ) -> list[Orphan]:
        """Messages that are taken and not finished, with their bodies; the message taken first comes first.

        At most one of the first two may be given; without them, all messages in flight are returned. The
        receipt of an Orphan acknowledges, extends or gives back its message.

        Args:
            older_than: Only messages that were taken longer ago.
            queued_before_ms: Only messages that were sent, or last redelivered, before this time (ms since
                1970, the storage's clock).
            limit: At most as many messages, of those that were sent first.
        """
        ...

    def purge(self) -> int:
        """Remove all messages except dead letters; returns about how many there were."""
        ...

    def release_all(self) -> int:
        """Give back the messages in flight of all clients, without counting attempts; returns how many."""
        ...

    def close(self) -> None:
        """Wait like flush(), then disconnect; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
