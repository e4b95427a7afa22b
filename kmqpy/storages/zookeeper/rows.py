"""Encodes messages for znodes: pages of states, and packs of bodies. Pure.

A *page* holds the states of up to PAGE_ROWS messages of neighbouring ids. Each change of a state rewrites it.
A *pack* holds keys, headers and bodies of messages of one page that one put() has stored. It is written once,
and deleted with the last of its messages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from kmqpy.errors import ConfigError
from kmqpy.message import Headers
from kmqpy.storages.engine import MessageRow, NewRow

T = TypeVar("T", NewRow, MessageRow)

PAGE_ROWS = 100
"""The most messages of a page. With larger pages, each change of a message writes more bytes. With smaller
pages, the directory is larger, because it lists more pages."""


class Status(IntEnum):
    """The state of a message."""

    READY = 0
    DELAYED = 1
    TAKEN = 2
    DEAD = 3


class Row(NamedTuple):
    """The state of a message. Times are in ms since 1970, by the server's clock.

    pack, nth          where its body is: in the pack whose first message has the id `pack`, at index `nth`
    take               the number of its last take, which grows with each take; 0: it was never taken
    requeues           its counted redeliveries since it was sent or redriven
    place              the order among messages of one priority
    enqueued_ms        when it was sent, redriven or last requeued and counted
    first_enqueued_ms  when it was sent
    since_ms           of a taken message, when it was taken; of a dead one, when it was buried
    until_ms           of a taken message, when its lease ends; of a delayed one, when it is due
    reason             why it was last given back or buried; None: it never was, or without a reason

    In other states, since_ms and until_ms mean nothing.
    """

    id: int
    pack: int
    nth: int
    priority: int
    status: Status
    take: int
    requeues: int
    place: int
    enqueued_ms: int
    first_enqueued_ms: int
    since_ms: int = 0
    until_ms: int = 0
    reason: str | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The key by which rows are taken, the smallest first."""
        return (-self.priority, self.place)

    def shown(self, content: Content) -> MessageRow:
        """The row as callers of the engine see it."""
        return MessageRow(
            id=self.id,
            take=self.take,
            body=content.body,
            key=content.key,
            headers=content.headers,
            priority=self.priority,
            requeues=self.requeues,
            enqueued_ms=self.enqueued_ms,
            first_enqueued_ms=self.first_enqueued_ms,
            since_ms=self.since_ms if self.status in (Status.TAKEN, Status.DEAD) else 0,
            until_ms=self.until_ms if self.status in (Status.TAKEN, Status.DELAYED) else 0,
            reason=self.reason,
            place=self.place,
        )


class Content(NamedTuple):
    """The part of a message that never changes."""

    body: bytes = b""
    key: bytes | None = None
    headers: Headers = ()


Page = Mapping[int, Row]
"""Rows by id."""

_ROW = struct.Struct(">QQHBBIIQQQQQh")
_NO_REASON = -1
_COUNT_LIMIT = 2**31
"""A page counts as damaged if it says that a message was taken or requeued this many times or more."""
MOST_REASON_BYTES = 1_000
"""The most bytes of a reason; a longer one is cut."""
_LARGE_PAGE_BYTES = 64 * 1024
_SHORT_REASON_BYTES = 250
"""The most bytes of a reason in a page above _LARGE_PAGE_BYTES: a request has to hold a body, too."""
PACK_BYTES = 32 * 1024
"""The most bytes of bodies in a pack of several messages. A pack stays until its last message is finished."""
_CONTENT = struct.Struct(">qII")
_NO_KEY = -1


def page_bytes(page: Page) -> bytes:
    """A page as it is stored; reasons above MOST_REASON_BYTES or _SHORT_REASON_BYTES are cut."""
    data = b"".join(_row_bytes(row, MOST_REASON_BYTES) for row in page.values())
    if len(data) <= _LARGE_PAGE_BYTES:
        return data
    return b"".join(_row_bytes(row, _SHORT_REASON_BYTES) for row in page.values())


def read_page(data: bytes, path: str) -> dict[int, Row]:
    """The reverse of page_bytes(); raises ConfigError naming the znode."""
    try:
        return {row.id: row for row in _rows(data)}
    except (struct.error, ValueError) as error:
        raise not_ours(path, error) from None


def packs(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """The messages of a page in groups, one for each pack."""
    begin = size = 0
    for at, row in enumerate(rows):
        size += len(row.body)
        if size > PACK_BYTES and at > begin:
            yield rows[begin:at]
            begin, size = at, len(row.body)
    yield rows[begin:]


def pack_bytes(rows: Iterable[NewRow | MessageRow]) -> bytes:
    """A pack as it is stored."""
    parts: list[bytes] = []
    for row in rows:
        headers = _headers_bytes(row.headers)
        key_length = _NO_KEY if row.key is None else len(row.key)
        parts += (_CONTENT.pack(key_length, len(headers), len(row.body)), row.key or b"", headers, row.body)
    return b"".join(parts)


def read_pack(data: bytes, path: str) -> Sequence[Content]:
    """The reverse of pack_bytes(); raises ConfigError naming the znode."""
    try:
        return [*_contents(data)]
    except (struct.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise not_ours(path, error) from None


def not_ours(path: str, error: Exception | str, delete: str = "the queue") -> ConfigError:
    """The error for a znode that kmqpy has not written, or damaged; `delete` says what may be deleted."""
    return ConfigError(
        f"znode {path}: it is not one of kmqpy, or damaged: {error}; restore it, or delete {delete}"
    )


def _row_bytes(row: Row, most_reason_bytes: int) -> bytes:
    reason = b"" if row.reason is None else row.reason.encode()[:most_reason_bytes]
    return (
        _ROW.pack(
            row.id,
            row.pack,
            row.nth,
            row.priority,
            row.status,
            row.take,
            row.requeues,
            row.place,
            row.enqueued_ms,
            row.first_enqueued_ms,
            row.since_ms,
            row.until_ms,
            _NO_REASON if row.reason is None else len(reason),
        )
        + reason
    )


def _rows(data: bytes) -> Iterator[Row]:
    at = 0
    while at < len(data):
        *numbers, length = _ROW.unpack_from(data, at)
        at += _ROW.size
        reason = None
        if length != _NO_REASON:
            if not 0 <= length <= len(data) - at:
                raise ValueError("a reason longer than the page")
            reason = data[at : at + length].decode(errors="ignore")
            at += length
        row = Row(*numbers, reason)  # type: ignore[call-arg]
        if max(row.take, row.requeues) >= _COUNT_LIMIT:
            raise ValueError("a message that was taken too often")
        yield row._replace(status=Status(row.status))


def _contents(data: bytes) -> Iterator[Content]:
    at = 0
    while at < len(data):
        key_length, headers_length, body_length = _CONTENT.unpack_from(data, at)
        key_at = at + _CONTENT.size
        headers_at = key_at + max(0, key_length)
        body_at = headers_at + headers_length
        at = body_at + body_length
        if not key_length >= -1 or at > len(data):
            raise ValueError("a message longer than the pack")
        yield Content(
            data[body_at:at],
            None if key_length == _NO_KEY else data[key_at:headers_at],
            _headers(data[headers_at:body_at]),
        )


def _headers_bytes(headers: Headers) -> bytes:
    """Headers as JSON, the values as Latin-1 text; no bytes if there are no headers."""
    if not headers:
        return b""
    pairs = [[name, None if value is None else value.decode("latin-1")] for name, value in headers]
    return json.dumps(pairs, separators=(",", ":")).encode()


def _headers(data: bytes) -> Headers:
    if not data:
        return ()
    pairs = json.loads(data)
    return tuple((str(name), None if value is None else value.encode("latin-1")) for name, value in pairs)
