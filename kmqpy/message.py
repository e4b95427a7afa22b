"""A message as its taker sees it, and the receipt that names it. Pure: no I/O."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def headers_of(raw: Iterable[tuple[str, bytes | str | None]] | None) -> Headers:
    """A Kafka record's headers in our form."""
    if not raw:
        return ()
    return tuple((name, v.encode() if isinstance(v, str) else v) for name, v in raw)


def headers_from(headers: HeadersLike | None) -> Headers:
    """What a user gave as headers, in our form: text is UTF-8; `kmq-*` names are left out (R20).

    Raises MessageError for text that UTF-8 has no form for.
    """
    if headers is None:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        return headers_of([(name, value) for name, value in pairs if not name.startswith("kmq-")])
    except UnicodeEncodeError as error:
        raise MessageError(f"headers: {error.reason}") from None


def last_header(headers: Headers, name: str) -> bytes | None:
    """The last header of that name (Kafka's own convention), or None."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


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


def _shown(text: object) -> str:
    if not isinstance(text, str):
        return f"an object of type {type(text).__name__}"
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
