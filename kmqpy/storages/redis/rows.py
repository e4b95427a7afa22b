"""Encodes messages for functions.lua, and decodes the rows in its replies. Pure: no I/O.

functions.lua stores a row as the time at which it was put, followed by the result of row_bytes(): length of
the key + 1 (0: no key), length of the headers, key, headers, body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct

from kmqpy.message import Headers
from kmqpy.storages.damage import replace_unreadable_headers
from kmqpy.storages.engine import MessageRow, NewRow, TakeRef
from kmqpy.storages.settings import StoredQueueSettings

_KEY_AND_HEADERS_LENGTHS = Struct(">II")
_NO_KEY_NO_HEADERS = _KEY_AND_HEADERS_LENGTHS.pack(0, 0)
_REPLY_ROW = Struct(">QQIIxBIIQQQQB")
"""The head of each message in a reply: what shown() in functions.lua puts in front of the message's state and
row, then the beginning of the state. The fields, in order:

id of the message; size of its body in bytes (of a dead message that the reply lists, else 0); length of the
state; length of the row. Of the state: status (skipped); priority; take; requeues; the times enqueued_ms,
since_ms and until_ms; place; whether the state ends with a reason (1, else 0).
"""
_STATE_AT = 24
"""The state begins this many bytes after the beginning of the head."""
_STORED_ROW = Struct(">QII")
_TIME = Struct(">Q")
_HEADER_LENGTH = Struct(">I")
_LENGTH_OF_NONE = 2**32 - 1
_GROUP = "kmq-group"
"""The name of a header, the first one, that holds the group; users have none of this name (rule R20)."""
_NO_KEY = " " * 22


def row_bytes(row: NewRow) -> bytes:
    """The bytes of a message, as an argument of the function `put`."""
    if row.key is None and not row.headers and row.group is None:
        return _NO_KEY_NO_HEADERS + row.body
    stored = row.headers if row.group is None else ((_GROUP, row.group.encode()), *row.headers)
    headers = b"".join(chain.from_iterable(map(_header_bytes, stored)))
    key = row.key or b""
    lengths = _KEY_AND_HEADERS_LENGTHS.pack(0 if row.key is None else len(key) + 1, len(headers))
    return b"".join((lengths, key, headers, row.body))


def put_options(rows: Sequence[NewRow]) -> bytes:
    """The argument `delay priority,…` of the function `put`; empty if all delays and priorities are 0."""
    if not any(row.delay_ms or row.priority for row in rows):
        return b""
    return b",".join(b"%d %d" % (row.delay_ms, row.priority) for row in rows)


def put_digests(rows: Iterable[NewRow]) -> bytes:
    """The digests of rows, an argument of the function `put`; empty if they have none."""
    return b"".join(row.digest or b"" for row in rows)


def put_groups(rows: Sequence[NewRow]) -> bytes:
    """The groups of rows, an argument of the function `put`; empty if they have none."""
    if not any(row.group for row in rows):
        return b""
    return b"".join((row.group or "").encode() + b"\0" for row in rows)


def put_keys(rows: Sequence[NewRow], settings: StoredQueueSettings) -> bytes:
    """The dedup keys of rows, an argument of the function `put`; empty if they have none."""
    if not any(row.dedup for row in rows):
        return b""
    keys = "".join(row.dedup or _NO_KEY for row in rows)
    return f"{settings.dedup_window_ms} {settings.until_acknowledged:d} {keys}".encode()


def gone_rows(gone: Iterable[MessageRow]) -> list[bytes]:
    """Rows that a take has deleted, as arguments of a function: for each, numbers as text, then the row."""
    found: list[bytes] = []
    for row in gone:
        numbers = (row.id, row.priority, row.take, row.requeues, row.enqueued_ms, row.place)
        stored = row_bytes(NewRow(row.body, row.key, row.headers, group=row.group))
        found += (b" ".join(b"%d" % one for one in numbers), _TIME.pack(row.first_enqueued_ms) + stored)
    return found


def take_refs(takes: Iterable[TakeRef]) -> bytes:
    """Takes as an argument of a function: `id take,…`."""
    return ",".join([f"{message_id} {take}" for message_id, take in takes]).encode()


def read_rows(data: bytes) -> list[MessageRow]:
    """The rows in a reply of functions.lua."""
    rows, at = [], 0
    while at < len(data):
        (
            row_id,
            size,
            state_length,
            row_length,
            priority,
            take,
            requeues,
            enqueued,
            since,
            until,
            place,
            has_reason,
        ) = _REPLY_ROW.unpack_from(data, at)
        row_at = at + _STATE_AT + state_length
        reason = data[at + _REPLY_ROW.size : row_at].decode(errors="replace") if has_reason else None
        first, key_length, headers_length = _STORED_ROW.unpack_from(data, row_at)
        body_at = row_at + _STORED_ROW.size
        at = row_at + row_length
        key: bytes | None = None
        headers: Headers = ()
        if key_length:
            key = data[body_at : (body_at := body_at + key_length - 1)]
        if headers_length:
            headers = _headers(data[body_at : (body_at := body_at + headers_length)])
        if body_at > at:  # another program wrote the lengths; behind them are bytes of the next message
            key, headers = None, replace_unreadable_headers(ValueError("key and headers longer than the row"))
        group = None
        if headers and headers[0][0] == _GROUP:
            group = (headers[0][1] or b"").decode(errors="replace")
            headers = headers[1:]
        rows.append(
            MessageRow(
                row_id,
                take,
                data[body_at:at],
                key,
                headers,
                priority,
                requeues,
                enqueued,
                first,
                since,
                until,
                reason,
                size,
                place,
                group,
            )
        )
    return rows


def _header_bytes(header: tuple[str, bytes | None]) -> tuple[bytes, ...]:
    name, value = header[0].encode(), header[1]
    length = _LENGTH_OF_NONE if value is None else len(value)
    return _HEADER_LENGTH.pack(len(name)), name, _HEADER_LENGTH.pack(length), value or b""


def _headers(data: bytes) -> Headers:
    try:
        return tuple(_each_header(data))
    except (struct.error, UnicodeDecodeError, AttributeError) as error:  # another program wrote them
        return replace_unreadable_headers(error)


def _each_header(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    at = 0
    while at < len(data):
        name, at = _length_prefixed(data, at)
        value, at = _length_prefixed(data, at)
        yield name.decode(), value  # type: ignore[union-attr] # of None: AttributeError


def _length_prefixed(data: bytes, at: int) -> tuple[bytes | None, int]:
    (length,) = _HEADER_LENGTH.unpack_from(data, at)
    at += _HEADER_LENGTH.size
    return (None, at) if length == _LENGTH_OF_NONE else (data[at : at + length], at + length)
