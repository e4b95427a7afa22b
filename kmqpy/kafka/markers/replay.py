"""Computes the in-flight state of a partition from the records of its markers. Pure: no I/O.

The hot path of a tracker. Clients write their markers in batches, so most records say the same of the
next message as the one before; such a series is applied at once, with nothing decoded twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight, MarkerRun
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_marker

_TOUCHING = (Op.TAKE, Op.DELAY, Op.END)
_KEY = struct.Struct(">iq")
_START_SIZE = 9
_SOME_KEY = codec.encode_key(0, 0)
_END = codec.encode_end()
_END_BY_TRACKER = codec.encode(codec.tick(0))[2]
_HOLDER = codec.encode(Marker(0, 0, Op.TAKE, holder=""))[2][0][0]


@dataclass(frozen=True, slots=True)
class QueueEnd:
    """The end offset of the queue partition, at the moment when it was asked for (rule R22).

    Markers at markers offsets below `decides_below` were written before that moment: the messages that they
    name are below `offset`, or never existed. Later markers may name newer messages.
    """

    offset: int
    decides_below: int


ALL_EXIST = QueueEnd(INT64_MAX + 1, INT64_MAX + 1)
"""Every message that a marker names counts as existing; for callers that do not check."""


@dataclass(slots=True)
class Applied:
    """The outcome of applying a batch of records.

    records         how many of them were applied; the next one, if any, needs a newer QueueEnd
    late_acks       acknowledged messages that were not in flight (any more)
    in_ranges       of how many messages range markers spoke
    newer           markers offsets of what only a newer kmqpy understands; the state is pinned there
    undecodable     markers offsets of what was skipped
    failed          markers offsets of what could not be applied by a bug of kmqpy; pinned there, too
    touched         if the caller asks for it: all messages that were taken, delayed or ended, even if that
                    did not change the state
    """

    records: int = 0
    late_acks: int = 0
    in_ranges: int = 0
    newer: list[tuple[int, UnsupportedMarker]] = field(default_factory=list)
    undecodable: list[tuple[int, DecodeError]] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    touched: OffsetRuns | None = None


def replay_markers(
    state: InFlight,
    partition: int,
    records: Sequence[Any],
    queue_end: QueueEnd = ALL_EXIST,
    touched: OffsetRuns | None = None,
    most: int | None = None,
) -> Applied:
    """Take in `records` (confluent_kafka.Message, in log order, no errors) of one markers partition.

    Stops at the first marker for which `queue_end` can't tell whether its message exists; end markers pass.
    Stops, too, where the range markers among them have spoken of more than `most` messages.
    """
    applied = Applied(touched=touched)
    for group in _grouped(partition, records, queue_end):
        if isinstance(group, _MarkerSeries):
            _apply_series(state, applied, group, queue_end)
        elif (most is not None and applied.in_ranges > most) or not _apply_one(
            state, applied, group, queue_end
        ):
            break
    return applied


class _MarkerSeries(NamedTuple):
    """Markers that follow each other without a gap and say the same, each of one message.

    start           the markers offset of the first
    length          how many they are
    value           that of each record
    headers         those of each record; of a tracker's end markers without what names the copy
    runs            the messages that they name, with the timestamps of the markers
    """

    start: int
    length: int
    value: bytes
    headers: Any
    runs: list[MarkerRun]


def _grouped(partition: int, records: Sequence[Any], queue_end: QueueEnd) -> Iterator[_MarkerSeries | Any]:
    """The records in their order: as series where they are alike, else one by one."""
    # The open series: records with `value` and the headers `alike`, at markers offsets from `start` to before
    # `end` (-1: none is open). Its last run is not in `runs` yet: `count` messages from `first` on.
    start, end, value, alike = -1, -1, _END, None
    runs: list[MarkerRun] = []
    first = count = stamp = -1
    limit = 0  # messages of the series stand below this queue offset
    for record, headers in zip(records, headers_of_each(records), strict=True):
        key, found = record.key(), record.value()
        at, timestamp_ms = record.offset(), record.timestamp()[1]
        if key is not None and found is not None and len(key) == _KEY.size:
            number, offset = _KEY.unpack(key)
            if number == partition:
                if (
                    found == value
                    and at == end
                    and 0 <= offset < limit
                    and (headers == alike or (alike is _END_BY_TRACKER and _is_by_tracker(headers)))
                ):
                    end += 1
                    if offset == first + count and timestamp_ms == stamp:
                        count += 1
                    else:
                        runs.append((first, count, stamp))
                        first, count, stamp = offset, 1, timestamp_ms
                    continue
                # The end marker of a message that does not exist changes no state.
                below = INT64_MAX + 1 if found == _END else queue_end.offset
                if offset < below and _can_be_in_series(offset, found, headers):
                    if end >= 0:
                        runs.append((first, count, stamp))
                        yield _MarkerSeries(start, end - start, value, alike, runs)
                    start, end, value, limit = at, at + 1, found, below
                    alike = _END_BY_TRACKER if found == _END and headers else headers
                    runs, first, count, stamp = [], offset, 1, timestamp_ms
                    continue
        if end >= 0:
            runs.append((first, count, stamp))
            yield _MarkerSeries(start, end - start, value, alike, runs)
            end = -1
        yield record
    if end >= 0:
        runs.append((first, count, stamp))
        yield _MarkerSeries(start, end - start, value, alike, runs)


def _can_be_in_series(offset: int, value: bytes, headers: Any) -> bool:
    """Return True for an end marker, and for a take whose only header names the holder."""
    if headers is UNREADABLE:
        return False
    if value == _END:
        return headers is None or _is_by_tracker(headers)
    is_take = headers is None or (len(headers) == 1 and headers[0][0] == _HOLDER)
    return is_take and offset >= 0 and len(value) == _START_SIZE and value[0] == 1


def _is_by_tracker(headers: Any) -> bool:
    """Return True if the only headers of an end marker say that a tracker wrote it, and where the copy is."""
    return (
        bool(headers)
        and headers is not UNREADABLE
        and headers[0] == _END_BY_TRACKER[0]
        and (len(headers) == 1 or (len(headers) == 2 and headers[1][0] == COPY))
    )


def _apply_series(state: InFlight, applied: Applied, series: _MarkerSeries, queue_end: QueueEnd) -> None:
    if applied.touched is not None:
        runs = ((first, count) for first, count, _ in series.runs)
        applied.touched.add_runs(_below(queue_end.offset, runs))
    after_ms = codec.decode_value(series.value)
    if after_ms is not None:
        holder = codec.decode(_SOME_KEY, series.value, series.headers).holder if series.headers else None
        state.apply_takes(series.runs, after_ms, series.start, holder)
    else:
        ended = state.apply_ends(series.runs, series.start)
        if series.headers is None:
            applied.late_acks += series.length - ended
    applied.records += series.length


def _below(end: int, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The runs as far as they are below `end`."""
    return ((first, min(count, end - first)) for first, count in runs if first < end)


def _apply_one(state: InFlight, applied: Applied, record: Any, queue_end: QueueEnd) -> bool:
    """Apply one record; False if that needs a newer end of the queue."""
    at, timestamp_ms = record.offset(), record.timestamp()[1]
    try:
        marker = read_marker(record)
        if marker.op is not Op.END and marker.highest >= queue_end.offset:
            if at >= queue_end.decides_below:
                return False
            raise DecodeError(f"marker of message {marker.highest}, which did not exist", record.key())
        changed = state.apply(marker, at, timestamp_ms)
    except UnsupportedMarker as error:
        state.observe(at, timestamp_ms)
        state.pin(at)
        applied.newer.append((at, error))
    except DecodeError as error:
        state.observe(at, timestamp_ms)
        bare = error.with_traceback(None)  # a traceback would keep what was decoded
        applied.undecodable.append((at, bare))
    except Exception as error:  # a bug of kmqpy: pinned, so that a fixed version reads it again
        state.observe(at, timestamp_ms)
        state.pin(at)
        applied.failed.append((at, error))
    else:
        applied.in_ranges += marker.count if marker.runs else 0
        if applied.touched is not None and marker.op in _TOUCHING:
            applied.touched.add_runs(_below(queue_end.offset, marker.offset_runs))
        if marker.op is Op.END and not marker.by_tracker:
            applied.late_acks += marker.count - changed
    applied.records += 1
    return True
