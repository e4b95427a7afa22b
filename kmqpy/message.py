"""A message as its taker sees it, and the receipt that names it. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Union

from kmqpy.core.durations import Duration
from kmqpy.errors import DecodeError, MessageError, ReceiptError, shown

Headers = tuple[tuple[str, bytes | None], ...]
"""Message headers: names may repeat, order is kept."""

HeadersLike = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes | None]]
"""The headers that send() accepts."""


MessagesLike = Union["Message", str, Iterable[Union["Message", str]]]
"""The argument of ack() and the like: a message, a receipt as text, or several of either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One delivery of a message.

    id                  names this copy within its queue
    body                the payload; a null Kafka value reads as empty
    attempts            deliveries so far, this one included; starts at 1
    enqueued_ms         when this copy was appended to the queue (ms since 1970)
    first_enqueued_ms   when the message was first sent
    lease_until_ms      when the lease ends, by this machine's clock; an estimate, since the storage's
                        clock decides
    receipt             what acknowledges it, in any process; opaque, only its storage reads it

    A storage may hand out messages of its own with more fields: kmqpy.kafka's have a partition and an offset.
    """

    queue: str
    id: str
    body: bytes
    headers: Headers
    attempts: int
    enqueued_ms: int
    first_enqueued_ms: int
    lease_until_ms: int
    receipt: str
    key: bytes | None = None

    def header(self, name: str) -> bytes | None:
        """The last header of that name, or None."""
        return last_header(self.headers, name)

    def json(self) -> Any:
        """The body, parsed as JSON; raises DecodeError, which names the message and holds the body."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            problem = f"message {self.id} of queue {self.queue!r}: its body is not JSON ({reason})"
            raise DecodeError(problem, self.body) from None

    def ack(self, *, wait: bool = False) -> None:  # noqa: ARG002 - messages of a client use it
        """Have the client that received this message acknowledge it, as by client.ack(message).

        Raises ReceiptError for a message that no client of this process received: one that was unpickled,
        copied or only looked at.
        """
        raise ReceiptError(
            f"message {self.id} of queue {self.queue!r}: no client of this process received it; "
            "acknowledge it with client.ack(message)"
        )


class LazyMessage(Message):
    """A Message that works out a field when it is read: each field is a property of the subclass.

    Most consumers read a few fields of a message, and taking one must cost less than reading it. Copies of
    it, and what is unpickled, are a plain Message.
    """

    __slots__ = ()

    # The fields are properties, which nobody can assign to, and a frozen class would make __init__ three
    # times as slow.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    # A copy with other fields, by dataclasses.replace(), is a plain Message, and equal to one it can be.
    __class__ = property(lambda _: Message)

    def __reduce__(self) -> tuple[Callable[..., Message], tuple[dict[str, Any]]]:
        return _plain, ({field.name: getattr(self, field.name) for field in fields(Message)},)


def _plain(values: dict[str, Any]) -> Message:
    return Message(**values)


MAX_PRIORITY = 9


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message for send_many(), with a key, headers, delay and priority of its own.

    body      bytes or text; with a codec, an object
    delay     seconds or timedelta; the message is not handed out before
    priority  0 to MAX_PRIORITY; a higher one is handed out first
    """

    body: Any
    _: KW_ONLY
    key: bytes | str | None = None
    headers: HeadersLike | None = None
    delay: Duration = 0
    priority: int = 0


def each_of(given: tuple[MessagesLike, ...]) -> Sequence[Message | str]:
    """The messages and receipts that ack() and the like were called with: as arguments, or in one list."""
    if len(given) == 1 and not isinstance(given[0], Message | str) and isinstance(given[0], Iterable):
        return tuple(given[0])
    return given  # type: ignore[return-value]  # what else is no receipt is refused as one


def headers_of(raw: Iterable[tuple[str, bytes | str | None]] | None) -> Headers:
    """A Kafka record's headers in our form."""
    if not raw:
        return ()
    return tuple((name, v.encode() if isinstance(v, str) else v) for name, v in raw)


def headers_from(headers: HeadersLike | None) -> Headers:
    """Convert a user's headers to names and bytes: text becomes UTF-8; `kmq-*` names are left out (R20).

    Raises MessageError for anything else, and for text that UTF-8 has no form for.
    """
    if headers is None:
        return ()
    found = []
    try:
        for pair in headers.items() if isinstance(headers, Mapping) else headers:
            if isinstance(pair, str | bytes):  # one of two characters would pass for a pair of them
                raise TypeError
            name, value = pair
            if not isinstance(name, str):
                raise MessageError(f"headers: the name {_shown_value(name)} is not text")
            as_bytes(name, "headers: the name")
            if not name.startswith("kmq-"):
                found.append((name, None if value is None else as_bytes(value, f"headers: {name!r}")))
    except (TypeError, ValueError):
        raise MessageError(
            f"headers: {_shown_value(headers)} is neither a mapping nor pairs of name and value"
        ) from None
    return tuple(found)


def as_bytes(value: object, field: str) -> bytes:
    """Bytes, or text as UTF-8; raises MessageError naming `field` for anything else."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise MessageError(f"{field}: {_shown_value(value)} is neither bytes nor text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise MessageError(f"{field}: {error.reason}") from None


def check_bodies(bodies: object) -> None:
    """Raises MessageError for one body where several are expected, and for what is no iterable."""
    if isinstance(bodies, str | bytes | Mapping | OutgoingMessage):
        kind = type(bodies).__name__
        raise MessageError(f"bodies: {kind} is one body, not several; use send(), or a list of bodies")
    if not isinstance(bodies, Iterable):
        raise MessageError(f"bodies: {shown(bodies)} is no list of bodies")


def last_header(headers: Headers, name: str) -> bytes | None:
    """The last header of that name (Kafka's own convention), or None."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


def without(headers: Headers, *names: str) -> Headers:
    """Return the headers without those of these names."""
    return tuple((key, value) for key, value in headers if key not in names)


def _shown_value(value: object) -> str:
    """A value of a wrong type, for errors: its type, and numbers as they are; others may be a payload."""
    number = f" {shown(value)}" if value is None or isinstance(value, int | float) else ""
    return f"{type(value).__name__}{number}"
