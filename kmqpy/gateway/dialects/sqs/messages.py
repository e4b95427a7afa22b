"""Messages as SQS's clients send and receive them: checks, ids, receipt handles, answers. Pure: no I/O."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kmqpy.gateway.dialects.sqs import celery, checksums, values
from kmqpy.gateway.dialects.sqs.attributes import NUMBERS, VISIBILITY, Sheet
from kmqpy.gateway.dialects.sqs.errors import (
    EMPTY_VALUE,
    INVALID_HANDLE,
    INVALID_VALUE,
    SqsError,
    invalid,
    missing,
)
from kmqpy.gateway.dialects.sqs.shapes import SendMessageBatchRequestEntry, SendMessageRequest
from kmqpy.gateway.service.served_queue import Taken
from kmqpy.message import OutgoingMessage, last_header

_HEAD = struct.Struct(">QI")
_REMEMBERED = 100_000
_ID = re.compile(r"[!-~]{1,128}")
_NOT_OF_THIS_TYPE = "The request include parameter that is not valid for this queue type."


class Prepared(NamedTuple):
    """A message that may be sent, and its checksums, as the answer has them."""

    message: OutgoingMessage
    answer: dict[str, str]


Given = SendMessageRequest | SendMessageBatchRequestEntry
"""A message as a client sends it."""


def size_of(given: Given) -> int:
    """The bytes of a message that count, whatever is wrong with it."""
    attributes = (given.MessageAttributes or {}).items()
    return len((given.MessageBody or "").encode()) + sum(
        len(name.encode())
        + len(f"{one.DataType or ''}{one.StringValue or ''}".encode())
        + len(one.BinaryValue or b"")
        for name, one in attributes
        if one is not None
    )


def prepared(given: Given, sheet: Sheet, now_ms: int, trace: str = "") -> Prepared:
    """Check a message; raises SqsError. `trace`: what the request itself says for AWSTraceHeader."""
    if not given.MessageBody:
        in_batch = isinstance(given, SendMessageBatchRequestEntry) and given.MessageBody is not None
        error = missing("MessageBody")
        raise SqsError(EMPTY_VALUE, str(error)) if in_batch else error
    values.check_contents(given.MessageBody)
    body = given.MessageBody.encode()
    attributes = values.checked(given.MessageAttributes or {})
    system = values.checked_trace(given.MessageSystemAttributes or {})
    size = size_of(given)
    most = sheet.number("MaximumMessageSize")
    if size > most:
        what = "cannot be validated" if isinstance(given, SendMessageBatchRequestEntry) else "are invalid"
        raise SqsError(
            INVALID_VALUE,
            f"One or more parameters {what}. Reason: Message must be shorter than {most} bytes.",
        )
    delay_s: float = _delay_s(given, sheet)
    group, dedup_id = _group(given, sheet), _dedup_id(given, sheet)
    answer = {"MD5OfMessageBody": checksums.of_body(body)}
    if attributes:
        answer["MD5OfMessageAttributes"] = checksums.of_attributes(attributes)
    if system:
        answer["MD5OfMessageSystemAttributes"] = checksums.of_attributes(system)
    if trace and not system:
        system = {values.TRACE_HEADER: values.Value("String", trace.encode())}
    headers = values.to_headers(attributes, system)
    if group is not None:
        headers.append((values.GROUP, group.encode()))
    if dedup_id is None:
        delay_s = max(delay_s, celery.wait_s(body, now_ms))
        shared = group if sheet.has_shares else None
        return Prepared(OutgoingMessage(body, headers=headers, delay=delay_s, group=shared), answer)
    headers.append((values.DEDUP, dedup_id.encode()))
    scope = group if sheet.scope(now_ms // 1000) == "messageGroup" else ""
    if scope or sheet.purged_ms:  # a purge lets duplicates be forgotten
        dedup_id = hashlib.sha256(f"{scope}\0{sheet.purged_ms}\0{dedup_id}".encode()).hexdigest()
    message = OutgoingMessage(body, headers=headers, delay=delay_s, group=group, dedup_id=dedup_id)
    return Prepared(message, answer)


def check_ids(given: Given, sheet: Sheet) -> None:
    """Raise SqsError if a message lacks what a FIFO queue needs: in a batch that fails the whole call."""
    _group(given, sheet)
    _dedup_id(given, sheet)


def _group(given: Given, sheet: Sheet) -> str | None:
    """The group of a message, which standard queues keep, too; raises SqsError."""
    if given.MessageGroupId is None and sheet.is_fifo:
        error = missing("MessageGroupId")
        in_batch = isinstance(given, SendMessageBatchRequestEntry)
        raise SqsError(INVALID_VALUE, str(error)) if in_batch else error
    check_id("MessageGroupId", given.MessageGroupId)
    return given.MessageGroupId


def _dedup_id(given: Given, sheet: Sheet) -> str | None:
    """The deduplication id of a message in a FIFO queue; raises SqsError."""
    check_id("MessageDeduplicationId", given.MessageDeduplicationId)
    if not sheet.is_fifo:
        if given.MessageDeduplicationId is not None:
            raise invalid(given.MessageDeduplicationId, "MessageDeduplicationId", _NOT_OF_THIS_TYPE)
        return None
    if given.MessageDeduplicationId is not None:
        return given.MessageDeduplicationId
    if sheet.value("ContentBasedDeduplication") != "true":
        raise SqsError(
            INVALID_VALUE,
            "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId "
            "provided explicitly",
        )
    return hashlib.sha256((given.MessageBody or "").encode()).hexdigest()


def check_id(name: str, value: str | None) -> None:
    """Raise SqsError for an id that is none."""
    if value is not None and not _ID.fullmatch(value):
        reason = f"{name} can only include alphanumeric and punctuation characters. 1 to 128 in length."
        raise invalid(value[:1024], name, reason)


def _delay_s(given: Given, sheet: Sheet) -> int:
    delay_s = given.DelaySeconds
    if delay_s is None:
        return sheet.number("DelaySeconds")
    if not 0 <= delay_s <= NUMBERS["DelaySeconds"].most:
        raise invalid(delay_s, "DelaySeconds", "DelaySeconds must be >= 0 and <= 900.")
    if sheet.is_fifo:
        if delay_s:
            raise invalid(delay_s, "DelaySeconds", _NOT_OF_THIS_TYPE)
        return sheet.number("DelaySeconds")
    return delay_s


def check_visibility(seconds: int, reason: str) -> int:
    """A visibility timeout that a client gives; raises SqsError."""
    if not 0 <= seconds <= NUMBERS[VISIBILITY].most:
        raise invalid(seconds, VISIBILITY, reason)
    return seconds


_KEPT = {
    values.TRACE_HEADER: values.TRACE,
    "MessageGroupId": values.GROUP,
    "MessageDeduplicationId": values.DEDUP,
}
"""System attributes that are headers."""


# --- ids and handles ----------------------------------------------------------------------------------


def message_id(unique_id: str, stored_id: str) -> str:
    """The id for clients of the message that the storage calls `stored_id`, in the queue of `unique_id`."""
    digest = hashlib.blake2b(f"{unique_id}\0{stored_id}".encode(), digest_size=16).hexdigest()
    variant = "89ab"[int(digest[16], 16) % 4]  # as UUIDs of version 4 have it
    return f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:]}"


def sequence_number(stored_id: str) -> str:
    """The number of a message in a FIFO queue: 20 digits, which grow."""
    return stored_id.zfill(20)


class Handle(NamedTuple):
    """What a receipt handle says.

    wire_id   names the message, see WireIds
    receipt   the storage's receipt of one take of it
    taken_ms  when that was (ms since 1970)
    """

    wire_id: str
    receipt: str
    taken_ms: int

    def text(self) -> str:
        """The handle for clients."""
        content = f"{self.wire_id} {self.receipt}".encode()
        head = _HEAD.pack(self.taken_ms, zlib.crc32(content, self.taken_ms & 0xFFFFFFFF))
        return base64.urlsafe_b64encode(head + content).decode()


def parse_handle(text: str) -> Handle:
    """The reverse of Handle.text(); raises SqsError."""
    if not text.strip():
        raise missing("ReceiptHandle")
    try:
        raw = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        taken_ms, checksum = _HEAD.unpack_from(raw)
        content = raw[_HEAD.size :]
        if zlib.crc32(content, taken_ms & 0xFFFFFFFF) == checksum:
            wire_id, _, receipt = content.decode().partition(" ")
            return Handle(wire_id, receipt, taken_ms)
    except (ValueError, struct.error):
        pass
    raise invalid_handle(text)


def invalid_handle(text: str) -> SqsError:
    return SqsError(
        INVALID_HANDLE, f'The input receipt handle "{text[:1024]}" is not a valid receipt handle.'
    )


def foreign_handle(text: str) -> SqsError:
    """The error for a receipt handle of another queue."""
    return SqsError(INVALID_HANDLE, f'The receipt handle "{text[:1024]}" is not valid for this queue.')


class FirstTakes:
    """Remembers when messages were received first, those that were taken lately; no storage does."""

    def __init__(self) -> None:
        self._ms: OrderedDict[str, int] = OrderedDict()

    def note(self, id_: str, *, is_first: bool, now_ms: int, else_ms: int) -> int:
        """When a message was received first, in ms since 1970; `else_ms` if nobody here knows."""
        if is_first:
            self._ms[id_] = now_ms
            if len(self._ms) > _REMEMBERED:
                self._ms.popitem(last=False)
        return self._ms.get(id_, else_ms)


# --- dead letters -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """What a message had been in the queue from which it came to its dead letter queue.

    id       its id there
    sent_ms  when it was sent (ms since 1970)
    count    how often it was received there
    arn      of that queue; empty if it came by no redrive policy
    """

    id: str
    sent_ms: int
    count: int
    arn: str

    def header(self) -> tuple[str, bytes]:
        return values.MOVED, json.dumps([self.id, self.sent_ms, self.count, self.arn]).encode()


def origin_of(taken: Taken) -> Origin | None:
    """From where a message came; None if it was sent to this queue."""
    header = last_header(taken.headers, values.MOVED)
    if header is None:
        return None
    try:
        id_, sent_ms, count, arn = json.loads(header)
        f"{id_}{arn}".encode()  # half a character can't be shown
        return Origin(str(id_), int(sent_ms), int(count), str(arn))
    except (ValueError, TypeError, OverflowError, RecursionError):  # of somebody else
        return None


# --- receiving ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message that was taken, with what answers say of it.

    id       for clients
    sent_ms  when it was sent; count: how often it was received (ms since 1970)
    """

    taken: Taken
    id: str
    sent_ms: int
    count: int
    origin: Origin | None

    @classmethod
    def of(cls, taken: Taken, unique_id: str) -> Received:
        """The message of a queue."""
        origin = origin_of(taken)
        if origin is None:
            return cls(taken, message_id(unique_id, taken.id), taken.sent_ms, taken.attempts, None)
        return cls(taken, origin.id, origin.sent_ms, origin.count + taken.attempts, origin)

    @property
    def size(self) -> int:
        """Bytes of its body and attributes."""
        headers = self.taken.headers
        return len(self.taken.body) + sum(len(name) + len(content or b"") for name, content in headers)

    def shown(
        self, handle: str, system: Sequence[str], names: Sequence[str], *, first_ms: int, sender: str
    ) -> dict[str, Any]:
        """Its form in an answer.

        system    the system attributes that are asked for
        names     the attributes that are asked for
        first_ms  when it was received first
        sender    for SenderId
        """
        body = self.taken.body
        try:
            text = body.decode()
        except UnicodeDecodeError:  # of a program with kmqpy
            text = base64.b64encode(body).decode()
            body = text.encode()
        found: dict[str, Any] = {
            "MessageId": self.id,
            "ReceiptHandle": handle,
            "MD5OfBody": checksums.of_body(body),
            "Body": text,
        }
        if system:
            known = self._system(first_ms, sender)
            wanted = known if "All" in system else system
            attributes = {name: known[name] for name in known if name in wanted}
            if attributes:
                found["Attributes"] = attributes
        if names:
            chosen = values.chosen(values.from_headers(self.taken.headers), names)
            if chosen:
                found["MD5OfMessageAttributes"] = checksums.of_attributes(chosen)
                found["MessageAttributes"] = {name: one.shown() for name, one in chosen.items()}
        return found

    def _system(self, first_ms: int, sender: str) -> Mapping[str, str]:
        found = {
            "SenderId": sender,
            "SentTimestamp": str(self.sent_ms),
            "ApproximateReceiveCount": str(self.count),
            "ApproximateFirstReceiveTimestamp": str(first_ms),
        }
        for name, header in _KEPT.items():
            if content := last_header(self.taken.headers, header):
                found[name] = content.decode(errors="replace")
        if "MessageDeduplicationId" in found:
            found["SequenceNumber"] = sequence_number(self.taken.id)
        if self.origin is not None and self.origin.arn:
            found["DeadLetterQueueSourceArn"] = self.origin.arn
        return found
