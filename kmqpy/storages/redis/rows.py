"""Rows as bytes, the same as in functions.lua. Pure: no I/O.

A row in Redis is the time at which it was put, which Lua adds, and what row_bytes() makes: length of the
key + 1 (0: no key), length of the headers, key, headers, body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct

from kmqpy.message import Headers
from kmqpy.storages.damage import no_headers
from kmqpy.storages.engine import MessageRow, NewRow, TakeRef

_LENGTHS = Struct(">II")
_BARE = _LENGTHS.pack(0, 0)
_SHOWN = Struct(">QQIIxBIIQQQ8xB")
"""Before a row in a reply: its id, bytes of the body if that is left out, lengths of state and row; then of
the state priority, take, requeues, times, whether there is a reason."""
_BEFORE_STATE = 24
_ROW = Struct(">QII")
_NAME = Struct(">I")
_NO_VALUE = 2**32 - 1


def row_bytes(row: NewRow) -> bytes:
    """A message as it is stored."""
    if row.key is None and not row.headers:
        return _BARE + row.body
    headers = b"".join(chain.from_iterable(map(_header_bytes, row.headers)))
    key = row.key or b""
    lengths = _LENGTHS.pack(0 if row.key is None else len(key) + 1, len(headers))
    return b"".join((lengths, key, headers, row.body))


def put_options(rows: Sequence[NewRow]) -> bytes:
    """`delay priority` of each row; empty if there are none."""
    if not any(row.delay_ms or row.priority for row in rows):
        return b""
    return b",".join(b"%d %d" % (row.delay_ms, row.priority) for row in rows)


def take_refs(takes: Iterable[TakeRef]) -> bytes:
    """Takes as an argument."""
    return ",".join([f"{message_id} {take}" for message_id, take in takes]).encode()


def read_rows(data: bytes) -> list[MessageRow]:
    """The rows in a reply."""
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
            has_reason,
        ) = _SHOWN.unpack_from(data, at)
        row_at = at + _BEFORE_STATE + state_length
        reason = data[at + _SHOWN.size : row_at].decode(errors="replace") if has_reason else None
        first, key_length, headers_length = _ROW.unpack_from(data, row_at)
        body_at = row_at + _ROW.size
        at = row_at + row_length
        key: bytes | None = None
        headers: Headers = ()
        if key_length:
            key = data[body_at : (body_at := body_at + key_length - 1)]
        if headers_length:
            headers = _headers(data[body_at : (body_at := body_at + headers_length)])
        if body_at > at:  # another program wrote the lengths; behind them are bytes of the next message
            key, headers = None, no_headers(ValueError("key and headers longer than the row"))
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
            )
        )
    return rows


def _header_bytes(header: tuple[str, bytes | None]) -> tuple[bytes, ...]:
    name, value = header[0].encode(), header[1]
    length = _NO_VALUE if value is None else len(value)
    return _NAME.pack(len(name)), name, _NAME.pack(length), value or b""


def _headers(data: bytes) -> Headers:
    try:
        return tuple(_each_header(data))
    except (struct.error, UnicodeDecodeError, AttributeError) as error:  # another program wrote them
        return no_headers(error)


def _each_header(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    at = 0
    while at < len(data):
        name, at = _counted(data, at)
        value, at = _counted(data, at)
        yield name.decode(), value  # type: ignore[union-attr] # of None: AttributeError


def _counted(data: bytes, at: int) -> tuple[bytes | None, int]:
    (length,) = _NAME.unpack_from(data, at)
    at += _NAME.size
    return (None, at) if length == _NO_VALUE else (data[at : at + length], at + length)
