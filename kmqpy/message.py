"""Messages as consumers receive them and producers send them, and conversions of headers. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Union

from kmqpy.core.durations import Duration
from kmqpy.errors import DecodeError, MessageError, ReceiptError, shown

Headers = tuple[tuple[str, bytes | None], ...]
"""Headers of a message, as pairs of name and value. Names may repeat; the order is kept."""

HeadersLike = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes | None]]
"""Headers as send() accepts them: a mapping, or pairs of name and value. Text is sent as UTF-8."""


MessagesLike = Union["Message", str, Iterable[Union["Message", str]]]
"""An argument of ack(), nack() and so on: a message, a receipt as text, or several messages and receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One delivery of a message.

    Messages of a storage may have more fields: those of kmqpy.kafka have a topic, a partition and an offset.

    Attributes:
        queue: The name of its queue.
        id: Names the message within its queue for its whole life: send() returns it, redelivered messages and
            dead letters keep it.
        body: The payload; a null Kafka value reads as empty.
        headers: Pairs of name and value; names may repeat.
        attempts: Deliveries so far, this one included; starts at 1.
        enqueued_ms: When it was appended to the queue, by send() or by a redelivery (ms since 1970).
        first_enqueued_ms: When the message was first sent.
        lease_until_ms: When the lease ends, by this machine's clock; an estimate, because the storage's clock
            decides.
        receipt: Text with which any process can acknowledge the message; only its storage can read it.
        key: The key with which it was sent; None: without one.
        group: The group with which it was sent; None: without one.
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
    group: str | None = None

    def header(self, name: str) -> bytes | None:
        """The value of the last header `name`; None if there is none.

        Args:
            name: The header's name.
        """
        return last_header(self.headers, name)

    def json(self) -> Any:
        """The body, parsed as JSON.

        Raises:
            DecodeError: The body is not JSON; the error names the message and holds the body.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            problem = f"message {self.id} of queue {self.queue!r}: its body is not JSON ({reason})"
            raise DecodeError(problem, self.body) from None

    def ack(self, *, confirmed: bool = False) -> None:  # noqa: ARG002 - subclasses use it
        """Acknowledge this message by the client or queue that returned it, like client.ack(message).

        Args:
            confirmed: As for Queue.ack().

        Raises:
            ReceiptError: For a message that was unpickled or copied, or that peek() returned.
        """
        raise ReceiptError(
            f"message {self.id} of queue {self.queue!r}: no client of this process received it; "
            "acknowledge it with client.ack(message)"
        )


class LazyMessage(Message):
    """A Message whose fields are properties of a subclass, computed when a program reads them.

    Most consumers read few fields of a message, so receiving a message must cost less than reading all of its
    fields. A copy of a LazyMessage is a plain Message, and so is an unpickled one.
    """

    __slots__ = ()

    # The fields can't be assigned to anyway, because they are properties. The __setattr__ of a frozen class
    # would make __init__ three times as slow.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    group = property(lambda _: None)  # of storages without groups

    # So dataclasses.replace() makes a plain Message, and a LazyMessage can be equal to a plain Message.
    __class__ = property(lambda _: Message)

    def __reduce__(self) -> tuple[Callable[..., Message], tuple[dict[str, Any]]]:
        return _plain_message, ({field.name: getattr(self, field.name) for field in fields(Message)},)


def _plain_message(values: dict[str, Any]) -> Message:
    return Message(**values)


MAX_PRIORITY = 9
"""The highest priority; 0 is the lowest."""


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message for send_many() that has its own key, headers, delay and so on.

    Args:
        body: Bytes or text; if the queue has a codec, an object.
        key: As for Queue.send().
        headers: As for Queue.send().
        delay: Seconds or timedelta from the send until the message may be handed out.
        priority: 0 to MAX_PRIORITY; messages of higher priority are handed out first.
        group: Its group, as for send(); None: without one.
        dedup_id: As for send().
    """

    body: Any
    _: KW_ONLY
    key: bytes | str | None = None
    headers: HeadersLike | None = None
    delay: Duration = 0
    priority: int = 0
    group: str | None = None
    dedup_id: str | None = None


def each_of(given: tuple[MessagesLike, ...]) -> Sequence[Message | str]:
    """The messages and receipts that ack(), nack() and so on were given: as arguments, or as one list."""
    if len(given) == 1 and not isinstance(given[0], Message | str) and isinstance(given[0], Iterable):
        return tuple(given[0])
    return given  # type: ignore[return-value]  # the storage refuses anything else as a receipt


def headers_of(raw: Iterable[tuple[str, bytes | str | None]] | None) -> Headers:
    """The headers of a Kafka record, as confluent-kafka returns them, as Headers."""
    if not raw:
        return ()
    return tuple((name, v.encode() if isinstance(v, str) else v) for name, v in raw)


def headers_from(headers: HeadersLike | None) -> Headers:
    """The headers that a user gives to send(), as Headers: text becomes UTF-8, `kmq-*` headers are left out.

    Names `kmq-*` are reserved for kmqpy (rule R20 of docs/rules.md). Raises MessageError for headers of
    other types, and for text that has no UTF-8 form.
    """
    if headers is None:
        return ()
    found = []
    try:
        for pair in headers.items() if isinstance(headers, Mapping) else headers:
            if isinstance(pair, str | bytes):  # a text of two characters could be unpacked as a pair
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
    """Return bytes unchanged and text as UTF-8; raise MessageError that names `field` for anything else."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise MessageError(f"{field}: {_shown_value(value)} is neither bytes nor text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise MessageError(f"{field}: {error.reason}") from None


def check_bodies(bodies: object) -> None:
    """Raise MessageError if `bodies`, the argument of send_many(), is a single body or not iterable."""
    if isinstance(bodies, str | bytes | Mapping | OutgoingMessage):
        kind = type(bodies).__name__
        raise MessageError(f"bodies: {kind} is one body, not several; use send(), or a list of bodies")
    if not isinstance(bodies, Iterable):
        raise MessageError(f"bodies: {shown(bodies)} is not a list of bodies")


def last_header(headers: Headers, name: str) -> bytes | None:
    """The value of the last header `name` (Kafka's convention for repeated names); None if there is none."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


def without(headers: Headers, *names: str) -> Headers:
    """Return the headers whose names are not in `names`."""
    return tuple((key, value) for key, value in headers if key not in names)


def _shown_value(value: object) -> str:
    """A value of a wrong type, for errors: its type, and a number itself; other values may be secret."""
    number = f" {shown(value)}" if value is None or isinstance(value, int | float) else ""
    return f"{type(value).__name__}{number}"
