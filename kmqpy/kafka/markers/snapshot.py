"""Converts snapshots, the messages in flight of a partition, to text and back. Pure: no I/O.

A tracker stores the text together with the markers offset from which another tracker reads on. The text has
all messages in flight that were taken before that offset. Both are written to one znode at once, so that
nobody joins the text of one state with the offset of another (rule R17 of docs/rules.md).

The text is Base64 of deflated JSON: a list of rows, each of which is a list. A row of 7 values is a
`TakenRun` (messages that were taken together), with its bits in hexadecimal; a row of 8 values is an `Entry`
(one message).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable
from typing import Any

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.entry import Entry, EntryState, SnapshotRow, TakenRun

_MAX_JSON_BYTES = 16_000_000
"""unpack() refuses a text whose JSON is longer than this."""
_MAX_BITS = 1 << 16
"""unpack() refuses a TakenRun whose bits span more offsets than this."""
_BLOCK = 1024
"""The number of offsets that _check_once() looks at together."""


def pack(rows: Iterable[SnapshotRow]) -> str:
    """The rows as text, which is empty if there are no rows."""
    values: list[tuple[Any, ...]] = [
        row._replace(bits=f"{row.bits:x}") if isinstance(row, TakenRun) else row  # type: ignore[arg-type]
        for row in rows
    ]
    if not values:
        return ""
    return base64.b64encode(zlib.compress(json.dumps(values).encode(), 1)).decode()


def unpack(text: str) -> list[SnapshotRow]:
    """The rows in a text; raises ValueError for any other text, and if a message is in two rows."""
    if not text:
        return []
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), _MAX_JSON_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("snapshot: too long, or cut short")
        rows = [_row(values) for values in json.loads(data)]
    except (zlib.error, binascii.Error, RecursionError, TypeError, IndexError) as error:
        raise ValueError(f"snapshot: {error}") from error
    _check_once(rows)
    return rows


def _row(values: Any) -> SnapshotRow:
    if type(values) is not list or len(values) not in (7, 8):
        raise ValueError("snapshot: a row must be a list of 7 or 8 values")
    if len(values) == len(TakenRun._fields):
        first, bits, taken_at, stride, since_ms, due_ms, holder = values
        _check(first, taken_at, stride, since_ms, due_ms)
        number = int(bits, 16)
        if not number & 1 or number < 0 or number.bit_length() > _MAX_BITS:
            raise ValueError("snapshot: bits without the first, or too many")
        more = number.bit_length() - 1
        _check(first + more, taken_at + stride * more)
        return TakenRun(first, number, taken_at, stride, since_ms, due_ms, _text(holder))
    offset, taken_at, since_ms, due_ms, state, counts, reason, holder = values
    _check(offset, taken_at, since_ms, due_ms)
    if type(counts) is not bool:
        raise ValueError("snapshot: counts must be true or false")
    return Entry(offset, taken_at, since_ms, due_ms, EntryState(state), counts, _text(reason), _text(holder))


def _check_once(rows: Iterable[SnapshotRow]) -> None:
    """Raise ValueError if a message is in two rows: trackers would redeliver it for each row, repeatedly."""
    seen: dict[int, int] = {}
    for row in rows:
        first, bits = row[0], row.bits if isinstance(row, TakenRun) else 1
        while bits:
            block, low = divmod(first, _BLOCK)
            here = (bits << low) & ((1 << _BLOCK) - 1)
            if here & seen.get(block, 0):
                raise ValueError("snapshot: a message is named twice")
            seen[block] = here | seen.get(block, 0)
            bits >>= _BLOCK - low
            first += _BLOCK - low


def _check(*numbers: Any) -> None:
    if not all(type(number) is int and 0 <= number <= INT64_MAX for number in numbers):
        raise ValueError("snapshot: a number out of its range")


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError("snapshot: a name or reason must be text")
