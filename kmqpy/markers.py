"""The markers codec: what clients and trackers write to the markers topic.

Byte-compatible with the JVM library kmq (com.softwaremill.kmq, MarkerKey and MarkerValue), all
integers big-endian:

    key      int32 queue partition, int64 queue offset                   12 bytes
    start    01, int64 redeliver_after (a duration in ms)                 9 bytes
    end      00                                                           1 byte

What that format has no room for stands in record headers, which JVM readers ignore. Where the JVM
decoder is lax (any unknown type byte is an end marker to it, trailing bytes are ignored) this one
raises `DecodeError`. Pure: no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kmqpy.errors import DecodeError, UnsupportedMarker

Headers = list[tuple[str, bytes | None]]
"""Record headers: names may repeat, order is kept."""

TICK_OFFSET = -1
"""The queue offset of a tick: an end marker that only asks the broker for its time."""

INT64_MAX = 2**63 - 1

_KEY = struct.Struct(">iq")
_START = struct.Struct(">bq")
_COUNT_BYTE = struct.Struct(">b")
_COUNT_INT = struct.Struct(">i")
_END = b"\x00"
_START_TYPE = 0x01
_RESERVED_TYPES = range(0x02, 0x10)

_OP = "kmq-op"
_REASON = "kmq-reason"
_COUNT = "kmq-count"
_HOLDER = "kmq-holder"
_BY = "kmq-by"
_BY_TRACKER = b"tracker"


class Op(StrEnum):
    """What a marker says of its message."""

    TAKE = "take"
    """A client took the message; opens an entry. A start marker without `kmq-op`."""
    DELAY = "delay"
    """Not yet due for delivery; opens an entry that nobody holds."""
    EXTEND = "extend"
    """The lease ends later (or earlier) than said before."""
    NACK = "nack"
    """Given back: redeliver after `redeliver_after_ms`."""
    DEAD_LETTER = "dead-letter"
    """Move to the dead-letter topic now."""
    END = "end"
    """Acknowledged, or redelivered by a tracker."""


_OPS_WITH_HEADER = {op.value.encode(): op for op in (Op.DELAY, Op.EXTEND, Op.NACK, Op.DEAD_LETTER)}


@dataclass(frozen=True, slots=True)
class Marker:
    """One marker.

    `redeliver_after_ms` is a duration in ms, counted from the marker's log-append time; negative
    means due now. `counts` is False where the redelivery is not to count as an attempt.
    """

    partition: int
    offset: int
    op: Op
    redeliver_after_ms: int = 0
    counts: bool = True
    reason: str | None = None
    holder: str | None = None
    by_tracker: bool = False


def encode_key(partition: int, offset: int) -> bytes:
    """The marker key of a queue record (12 bytes)."""
    return _KEY.pack(partition, offset)


def decode_key(key: bytes | None) -> tuple[int, int]:
    """Queue partition and queue offset; raises DecodeError unless exactly 12 bytes."""
    if key is None or len(key) != _KEY.size:
        raise DecodeError(f"marker key: {_size(key)}, expected {_KEY.size} bytes", key)
    partition, offset = _KEY.unpack(key)
    return partition, offset


def encode_start(redeliver_after_ms: int) -> bytes:
    """The value of a start marker (9 bytes)."""
    return _START.pack(_START_TYPE, redeliver_after_ms)


def encode_end() -> bytes:
    """The value of an end marker (1 byte)."""
    return _END


def decode_value(value: bytes | None) -> int | None:
    """The `redeliver_after_ms` of a start marker, or None for an end marker.

    Raises UnsupportedMarker for type bytes 02-0f, DecodeError for everything else that is neither.
    """
    if value is None or not value:
        raise DecodeError(f"marker value: {_size(value)}", value)
    if value == _END:
        return None
    kind = value[0]
    if kind in _RESERVED_TYPES:
        raise UnsupportedMarker(f"marker value: type byte {kind:#04x} is of a newer kmqpy", value)
    if kind == _START_TYPE and len(value) == _START.size:
        redeliver_after_ms: int = _START.unpack(value)[1]
        return redeliver_after_ms
    raise DecodeError(f"marker value: type byte {kind:#04x} with {_size(value)}", value)


def encode(marker: Marker) -> tuple[bytes, bytes, Headers]:
    """Key, value and headers of the record for `marker`."""
    headers: Headers = []
    if marker.op not in (Op.TAKE, Op.END):
        headers.append((_OP, marker.op.value.encode()))
    if not marker.counts:
        headers.append((_COUNT, b"0"))
    if marker.reason is not None:
        headers.append((_REASON, marker.reason.encode("utf-8", "replace")))
    if marker.holder is not None:
        headers.append((_HOLDER, marker.holder.encode("utf-8", "replace")))
    if marker.by_tracker:
        headers.append((_BY, _BY_TRACKER))
    is_end = marker.op is Op.END
    value = encode_end() if is_end else encode_start(marker.redeliver_after_ms)
    return encode_key(marker.partition, marker.offset), value, headers


def decode(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | str | None]] | None = None,
) -> Marker:
    """The marker in a record; raises DecodeError (UnsupportedMarker: a newer version's marker).

    Unknown headers are ignored; a header that can't be read counts as absent, since the marker
    itself is good.
    """
    partition, offset = decode_key(key)
    redeliver_after_ms = decode_value(value)
    if not headers:
        if redeliver_after_ms is None:
            return Marker(partition, offset, Op.END)
        _check_offset(offset, key)
        return Marker(partition, offset, Op.TAKE, redeliver_after_ms)
    named = {name: _as_bytes(content) for name, content in headers}
    if redeliver_after_ms is None:
        return Marker(partition, offset, Op.END, by_tracker=named.get(_BY) == _BY_TRACKER)
    _check_offset(offset, key)
    return Marker(
        partition,
        offset,
        _op(named.get(_OP), value),
        redeliver_after_ms,
        counts=named.get(_COUNT) != b"0",
        reason=_text(named.get(_REASON)),
        holder=_text(named.get(_HOLDER)),
        by_tracker=named.get(_BY) == _BY_TRACKER,
    )


def tick(partition: int) -> Marker:
    """The marker with which a tracker asks the broker for its time and for the end of the log."""
    return Marker(partition, TICK_OFFSET, Op.END, by_tracker=True)


def encode_count(count: int) -> bytes:
    """The redelivery-count header: one signed byte where it fits, else int32."""
    codec = _COUNT_BYTE if -128 <= count <= 127 else _COUNT_INT
    return codec.pack(count)


def decode_count(data: bytes | None) -> int:
    """The redelivery count; an absent header (None) is 0. Raises DecodeError."""
    if data is None:
        return 0
    if len(data) == _COUNT_BYTE.size:
        return int(_COUNT_BYTE.unpack(data)[0])
    if len(data) == _COUNT_INT.size:
        return int(_COUNT_INT.unpack(data)[0])
    raise DecodeError(f"redelivery count: {_size(data)}, expected 1 or 4 bytes", data)


def _op(data: bytes | None, value: bytes | None) -> Op:
    if data is None:
        return Op.TAKE
    try:
        return _OPS_WITH_HEADER[data]
    except KeyError:
        # Guessing would be wrong either way: as a take it could reopen what is already finished.
        raise UnsupportedMarker("marker header kmq-op: an operation of a newer kmqpy", value) from None


def _check_offset(offset: int, key: bytes | None) -> None:
    if offset < 0:
        raise DecodeError(f"start marker for the negative offset {offset}", key)


def _as_bytes(content: bytes | str | None) -> bytes | None:
    return content.encode("utf-8", "replace") if isinstance(content, str) else content


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


def _size(data: bytes | None) -> str:
    return "null" if data is None else f"{len(data)} bytes"
