"""A message as its taker sees it, and the receipt that names it. Pure: no I/O."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from kmqpy import markers
from kmqpy.errors import DecodeError, MessageError, ReceiptError

Headers = tuple[tuple[str, bytes | None], ...]
"""Message headers: names may repeat, order is kept."""

HeadersLike = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes | None]]
"""What send() takes as headers."""

ORIGINAL_PARTITION = "kmq-original-partition"
ORIGINAL_OFFSET = "kmq-original-offset"
ORIGINAL_TIMESTAMP = "kmq-original-timestamp"
DELIVER_AT = "kmq-deliver-at"
DEAD_LETTER_TOPIC = "kmq-dead-letter-topic"
DEAD_LETTER_PARTITION = "kmq-dead-letter-partition"
DEAD_LETTER_OFFSET = "kmq-dead-letter-offset"
DEAD_LETTER_ATTEMPTS = "kmq-dead-letter-attempts"
DEAD_LETTER_REASON = "kmq-dead-letter-reason"

MessagesLike = Union["Message", str, Iterable[Union["Message", str]]]
"""What ack() and the like take, several of them or one: messages, receipts as text, a list of these."""

_HEADER_BYTES = 10
"""Bytes of the two lengths that frame a header, at most."""
_RECEIPT_VERSION = "1."
_DECIMAL = re.compile(rb"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Receipt:
    """Names one taken message; good in any process and in later versions.

    As text: `1.` + base64url of the JSON list [queue, topic id, partition, offset].
    """

    queue: str
    topic_id: str
    partition: int
    offset: int

    def __str__(self) -> str:
        fields = json.dumps([self.queue, self.topic_id, self.partition, self.offset], separators=(",", ":"))
        return _RECEIPT_VERSION + base64.urlsafe_b64encode(fields.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """The receipt in `text`; raises ReceiptError, whatever the text."""
        if not isinstance(text, str) or not text.startswith(_RECEIPT_VERSION):
            raise ReceiptError(f"receipt: {_shown(text)} is not a receipt of kmqpy")
        encoded = text[len(_RECEIPT_VERSION) :]
        try:
            padded = encoded.encode("ascii") + b"=" * (-len(encoded) % 4)
            fields = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        except (ValueError, binascii.Error, RecursionError):
            raise ReceiptError(f"receipt: {_shown(text)} can't be decoded") from None
        match fields:
            # A JSON true is an int to Python.
            case [str() as queue, str() as topic_id, int() as partition, int() as offset] if (
                not isinstance(partition, bool)
                and not isinstance(offset, bool)
                and 0 <= partition < 2**31
                and 0 <= offset < 2**63
            ):
                return cls(queue, topic_id, partition, offset)
        raise ReceiptError(f"receipt: {_shown(text)} has other fields than a receipt's")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One delivery of a message.

    id                  names this copy within its queue
    body                the payload; a null Kafka value reads as empty
    attempts            deliveries so far, this one included; starts at 1
    enqueued_ms         when this copy was appended to the queue (ms since 1970)
    first_enqueued_ms   when the message was first sent
    lease_until_ms      when the lease ends, by this machine's clock; an estimate, since the
                        broker's clock decides
    receipt             what acknowledges it, in any process
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
    partition: int = 0
    offset: int = 0

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
    """What a user gave as headers, in our form: text is UTF-8; `kmq-*` names are left out (R20).

    Raises MessageError for anything else, and for text that UTF-8 has no form for.
    """
    if headers is None:
        return ()
    found = []
    try:
        for name, value in headers.items() if isinstance(headers, Mapping) else headers:
            if not isinstance(name, str):
                raise MessageError(f"headers: the name {_shown_value(name)} is not text")
            as_bytes(name, "headers: the name")
            if not name.startswith("kmq-"):
                found.append((name, None if value is None else as_bytes(value, f"headers: {name!r}")))
    except (TypeError, ValueError):
        shown = _shown_value(headers)
        raise MessageError(f"headers: {shown} is neither a mapping nor pairs of name and value") from None
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


def last_header(headers: Headers, name: str) -> bytes | None:
    """The last header of that name (Kafka's own convention), or None."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


def size_of(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Bytes of a Kafka record, about and rather too many: key, value, headers and the framing of each."""
    size = len(key or b"") + len(value or b"")
    for name, data in headers:
        size += len(name if name.isascii() else name.encode()) + len(data or b"") + _HEADER_BYTES
    return size


def without(headers: Headers, *names: str) -> Headers:
    """The headers but for those of these names."""
    return tuple((key, value) for key, value in headers if key not in names)


def int_header(headers: Headers, name: str) -> int | None:
    """A decimal header of at most 64 bits; None when it is absent. Raises DecodeError."""
    data = last_header(headers, name)
    if data is None:
        return None
    if not _DECIMAL.fullmatch(data) or not -(2**63) <= (number := int(data)) < 2**63:
        raise DecodeError(f"header {name}: not a decimal number of 64 bits", data)
    return number


def redelivery_count(headers: Headers, name: str) -> int:
    """How often the message was redelivered; raises DecodeError. A negative count reads as 0."""
    return max(0, markers.decode_count(last_header(headers, name)))


def _shown_value(value: object) -> str:
    """A value of a wrong type, for errors: its type, and numbers as they are; others may be a payload."""
    shown = f" {value!r}" if value is None or isinstance(value, int | float) else ""
    return f"{type(value).__name__}{shown}"


def _shown(text: object) -> str:
    if not isinstance(text, str):
        return f"an object of type {type(text).__name__}"
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
