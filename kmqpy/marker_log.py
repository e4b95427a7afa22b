"""From the records of a markers partition to its in-flight state. Pure: no I/O.

The hot path of a tracker. Clients write their markers in batches, so most records say the same of the
next message as the one before; such a series is applied at once, with nothing decoded twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kmqpy import markers
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.inflight import InFlight, Series
from kmqpy.markers import Marker, Op

_KEY = struct.Struct(">iq")
_START_SIZE = 9
_SOME_KEY = markers.encode_key(0, 0)
_END = markers.encode_end()
_END_BY_TRACKER = markers.encode(markers.tick(0))[2]
_HOLDER = markers.encode(Marker(0, 0, Op.TAKE, holder=""))[2][0][0]


@dataclass(slots=True)
class Applied:
    """What a batch of records amounted to.

    late_acks       acknowledged messages that were not in flight (any more)
    ranges          whether there were range markers
    newer           markers offsets of what only a newer kmqpy understands; the state is pinned there
    undecodable     markers offsets of what was skipped
    """

    late_acks: int = 0
    ranges: bool = False
    newer: list[tuple[int, UnsupportedMarker]] = field(default_factory=list)
    undecodable: list[tuple[int, DecodeError]] = field(default_factory=list)


def apply_records(state: InFlight, partition: int, records: Iterable[Any]) -> Applied:
    """Take in `records` (confluent_kafka.Message, in log order, no errors) of one markers partition."""
    applied = Applied()
    # Markers alike that follow each other, from markers offset `start` to before `end`; the last `count` of
    # them are of the messages from `first` on, with one timestamp.
    series: list[Series] = []
    start = end = first = count = stamp = -1
    like, by = _END, None
    for record in records:
        key, value, headers = record.key(), record.value(), record.headers()
        at, timestamp_ms = record.offset(), record.timestamp()[1]
        if key is not None and value is not None and len(key) == _KEY.size:
            number, offset = _KEY.unpack(key)
            if number == partition:
                if value == like and at == end and offset >= 0 and headers == by:
                    end += 1
                    if offset == first + count and timestamp_ms == stamp:
                        count += 1
                    else:
                        series.append((first, count, stamp))
                        first, count, stamp = offset, 1, timestamp_ms
                    continue
                if _can_be_in_series(offset, value, headers):
                    if end >= 0:
                        _apply_series(state, applied, series, (first, count, stamp), start, like, by)
                    first, count, stamp, like, by = offset, 1, timestamp_ms, value, headers
                    start, end = at, at + 1
                    continue
        if end >= 0:
            _apply_series(state, applied, series, (first, count, stamp), start, like, by)
            end = -1
        _apply_one(state, applied, partition, key, value, headers, at, timestamp_ms)
    if end >= 0:
        _apply_series(state, applied, series, (first, count, stamp), start, like, by)
    return applied


def _can_be_in_series(offset: int, value: bytes, headers: Any) -> bool:
    """Whether a marker is an end marker, or a take that says no more than who holds the message."""
    if value == _END:
        return headers is None or bool(headers == _END_BY_TRACKER)
    is_take = headers is None or (len(headers) == 1 and headers[0][0] == _HOLDER)
    return is_take and offset >= 0 and len(value) == _START_SIZE and value[0] == 1


def _apply_series(
    state: InFlight, applied: Applied, series: list[Series], last: Series, start: int, like: bytes, by: Any
) -> None:
    """Take in `series` and `last`, markers like `like`; empties `series`."""
    series.append(last)
    after_ms = markers.decode_value(like)
    if after_ms is not None:
        holder = markers.decode(_SOME_KEY, like, by).holder if by else None
        state.apply_takes(series, after_ms, start, holder)
    else:
        ended = state.apply_ends(series, start)
        if by is None:
            applied.late_acks += sum(count for _, count, _ in series) - ended
    series.clear()


def _apply_one(
    state: InFlight,
    applied: Applied,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    headers: Any,
    at: int,
    timestamp_ms: int,
) -> None:
    try:
        marker = markers.decode(key, value, headers)
        if marker.partition != partition:
            raise DecodeError(f"marker of partition {marker.partition} in another's markers", key)
    except UnsupportedMarker as error:
        state.observe(at, timestamp_ms)
        state.pin(at)
        applied.newer.append((at, error))
    except DecodeError as error:
        state.observe(at, timestamp_ms)
        applied.undecodable.append((at, error))
    else:
        applied.ranges = applied.ranges or bool(marker.runs)
        changed = state.apply(marker, at, timestamp_ms)
        if marker.op is Op.END and not marker.by_tracker:
            applied.late_acks += marker.count - changed
