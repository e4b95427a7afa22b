"""Applies the records of a markers partition to the in-flight state of the partition. Pure: no I/O.

This is the hot path of a tracker. Clients write their markers in batches, so most records differ from the
record before only in the message that their key names. replay_markers() applies a series of such records at
once, and decodes their common value and headers only once. A range marker (one record that is the marker of
many messages) is in no series. A take is the operation of a start marker: a client took the message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import CutAway, InFlight, MarkerRun
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers, read_marker

_TOUCHING_OPS = (Op.TAKE, Op.DELAY, Op.END)
_KEY = struct.Struct(">iq")
_START_SIZE = 9
_ANY_KEY = codec.encode_key(0, 0)
_END_VALUE = codec.encode_end()
_TRACKER_HEADERS = codec.encode(codec.tick(0))[2]
_HOLDER_HEADER = codec.encode(Marker(0, 0, Op.TAKE, holder=""))[2][0][0]


@dataclass(frozen=True, slots=True)
class QueueEnd:
    """The end offset of the queue partition, as Kafka told it (rule R22 of docs/rules.md).

    offset                 the end offset
    decides_markers_below  a markers offset. A marker before it was written before Kafka told the end: if such
                           a marker names a message at or after `offset`, that message did not exist. A later
                           marker may name a message that was sent later, so nothing follows from `offset`
    epoch                  the latest leader epoch of the partition in the same answer; -1: not known. A cut
                           of a later epoch (rule R39) had not happened
    """

    offset: int
    decides_markers_below: int
    epoch: int = -1

    def is_beyond(self, marker: Marker, cuts: LogCuts) -> bool:
        """Return True if the marker tells of what did not exist when Kafka told this end: a message, a cut.

        An end marker of messages is never beyond. `cuts` are those that are known.
        """
        if marker.op is Op.END:
            return bool(marker.cuts) and 0 <= self.epoch < marker.cuts.cuts[-1].epoch
        if marker.highest < self.offset:
            return False
        cut = cuts.cut_of(marker.offset)
        return cut is None or marker.highest >= cut.base + self.offset

    def existing(self, marker: Marker, cuts: LogCuts) -> Marker:
        """Return a marker that is_beyond() without what did not exist; raises DecodeError if nothing did.

        Once a leader was elected, the log may have been cut back within the messages of a range marker: those
        below the cut are there. Before, the marker is a lie as a whole.
        """
        runs: tuple[tuple[int, int], ...] = ()
        if marker.op is not Op.END and self.epoch > 0:
            runs = tuple(cuts.existing(marker.offset_runs, self.offset))
        if not runs:
            what = f"cuts {marker.cuts}" if marker.cuts else f"message {marker.highest}"
            key = codec.encode_key(marker.partition, marker.offset)
            raise DecodeError(f"marker of {what}, which did not exist", key)
        return replace(marker, offset=runs[0][0], runs=runs)


ALL_EXIST = QueueEnd(INT64_MAX + 1, INT64_MAX + 1)
"""With this end, every message that a marker names counts as existing; for callers that do not check."""


@dataclass(slots=True)
class Applied:
    """What replay_markers() has done with a batch of records.

    records         how many records it has processed, with those in the three lists below; if others are
                    left, it has stopped before them
    late_acks       the number of messages that clients acknowledged and that were not in flight
    in_ranges       the number of messages that range markers named
    newer           markers offset and error of each marker that only a newer kmqpy can read
    skipped         markers offset and error of each record that was skipped: the record can't be decoded, or
                    it is a marker other than an end marker, and none of its messages existed
    failed          markers offset and error of each marker that a bug of kmqpy kept from being applied
    touched         the set that the caller gave, to which all existing messages were added that markers
                    took, delayed or ended, even if that did not change the state; else None
    cut_away        what was dropped because the log of the queue partition was cut back (rule R39)

    Records in `newer` and `failed` pin the state: the safe offset stays at or before the first of them.
    """

    records: int = 0
    late_acks: int = 0
    in_ranges: int = 0
    newer: list[tuple[int, UnsupportedMarker]] = field(default_factory=list)
    skipped: list[tuple[int, DecodeError]] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    touched: OffsetRuns | None = None
    cut_away: list[CutAway] = field(default_factory=list)


def replay_markers(
    state: InFlight,
    partition: int,
    records: Sequence[Any],
    queue_end: QueueEnd = ALL_EXIST,
    touched: OffsetRuns | None = None,
    most: int | None = None,
) -> Applied:
    """Apply `records` (confluent_kafka.Message, in log order, without errors) of one markers partition.

    Stops before the first marker of which `queue_end` can't tell whether its messages exist; end markers are
    not checked. Stops also before the next marker that is in no series, when range markers have named more
    than `most` messages. `touched`: see Applied.
    """
    applied = Applied(touched=touched)
    for group in _grouped(partition, records, queue_end, state):
        if isinstance(group, _MarkerSeries):
            _apply_series(state, applied, group, queue_end, partition)
        elif (most is not None and applied.in_ranges > most) or not _apply_one(
            state, applied, group, queue_end
        ):
            break
    applied.cut_away, state.cut_away = state.cut_away, []
    return applied


class _MarkerSeries(NamedTuple):
    """Markers at consecutive markers offsets that differ only in the message that each of them names.

    start           the markers offset of the first marker
    length          the number of markers
    value           the value of each record
    headers         the headers of each record; for end markers of a tracker, without the header that names
                    the copy: that header may differ from record to record
    runs            the messages that the markers name, with the timestamps of the markers
    copies          the last header that names a copy; None: none of the markers has one
    """

    start: int
    length: int
    value: bytes
    headers: Any
    runs: list[MarkerRun]
    copies: bytes | None


def _grouped(
    partition: int, records: Sequence[Any], queue_end: QueueEnd, state: InFlight
) -> Iterator[_MarkerSeries | Any]:
    """Yield the records in their order: as a _MarkerSeries where markers are alike, else one by one.

    What was yielded must be applied to `state` before the next is asked for.
    """
    # The open series: records with `value` and the headers `alike`, at markers offsets from `start` to before
    # `end` (-1: none is open). Its last run is not in `runs` yet: `count` messages from `first` on.
    start, end, value, alike = -1, -1, _END_VALUE, None
    runs: list[MarkerRun] = []
    first = count = stamp = -1
    copies: bytes | None = None
    low = limit = 0  # the series names messages from `low` to before `limit`
    for record, headers in zip(records, headers_of_each(records), strict=True):
        key, found = record.key(), record.value()
        at, timestamp_ms = record.offset(), record.timestamp()[1]
        if key is not None and found is not None and len(key) == _KEY.size:
            named_partition, offset = _KEY.unpack(key)
            if named_partition == partition:
                if (
                    found == value
                    and at == end
                    and low <= offset < limit
                    and (headers == alike or (alike is _TRACKER_HEADERS and _is_by_tracker(headers)))
                ):
                    end += 1
                    if alike is _TRACKER_HEADERS and len(headers) > 1:
                        copies = headers[1][1]
                    # The end marker of message 0 does not go on from a tick, which has the number -1.
                    if offset == first + count and timestamp_ms == stamp and first >= 0:
                        count += 1
                    else:
                        runs.append((first, count, stamp))
                        first, count, stamp = offset, 1, timestamp_ms
                    continue
                # The end marker of a message that does not exist changes no state.
                above = 0
                below = INT64_MAX + 1 if found == _END_VALUE else queue_end.offset
                if offset >= below:  # never, unless the log was cut
                    above, below = _bounds(state, queue_end, offset)
                if offset < below and _can_be_in_series(offset, found, headers):
                    if end >= 0:
                        runs.append((first, count, stamp))
                        yield _MarkerSeries(start, end - start, value, alike, runs, copies)
                    start, end, value, low, limit = at, at + 1, found, above, below
                    alike = _TRACKER_HEADERS if found == _END_VALUE and headers else headers
                    copies = headers[1][1] if alike is _TRACKER_HEADERS and len(headers) > 1 else None
                    runs, first, count, stamp = [], offset, 1, timestamp_ms
                    continue
        if end >= 0:
            runs.append((first, count, stamp))
            yield _MarkerSeries(start, end - start, value, alike, runs, copies)
            end = -1
        yield record
    if end >= 0:
        runs.append((first, count, stamp))
        yield _MarkerSeries(start, end - start, value, alike, runs, copies)


def _can_be_in_series(offset: int, value: bytes, headers: Any) -> bool:
    """Return True if the record is a take or an end marker, without headers that a series can't have.

    A take may have the header that names its holder, the client. For an end marker see _is_by_tracker().
    """
    if headers is UNREADABLE:
        return False
    if value == _END_VALUE:
        return headers is None or _is_by_tracker(headers)
    is_take = headers is None or (len(headers) == 1 and headers[0][0] == _HOLDER_HEADER)
    return is_take and offset >= 0 and len(value) == _START_SIZE and value[0] == 1


def _is_by_tracker(headers: Any) -> bool:
    """Return True if an end marker has the header of trackers, perhaps one that names copies, no other."""
    return (
        bool(headers)
        and headers is not UNREADABLE
        and headers[0] == _TRACKER_HEADERS[0]
        and (len(headers) == 1 or (len(headers) == 2 and headers[1][0] == COPY))
    )


def _apply_series(
    state: InFlight, applied: Applied, series: _MarkerSeries, queue_end: QueueEnd, partition: int
) -> None:
    if applied.touched is not None:
        runs = ((first, count) for first, count, _ in series.runs)
        applied.touched.add_runs(state.cuts.existing(runs, queue_end.offset))
    after_ms = codec.decode_value(series.value)
    is_new = series.start + series.length > state.position  # else what a cut has dropped would come back
    if after_ms is not None:
        holder = codec.decode(_ANY_KEY, series.value, series.headers).holder if series.headers else None
        state.apply_takes(series.runs, after_ms, series.start, holder)
    else:
        ended = state.apply_ends(series.runs, series.start)
        if series.headers is not None and is_new:
            state.claims.account_for((first, count) for first, count, _ in series.runs if first >= 0)
            if series.copies is not None:
                state.copies.add(series.copies, partition)
        if series.headers is None:
            applied.late_acks += series.length - ended
    applied.records += series.length


def _bounds(state: InFlight, queue_end: QueueEnd, number: int) -> tuple[int, int]:
    """From and below which numbers exist for certain that stand behind the same cut; (0, 0): none do."""
    cut = state.cuts.cut_of(number)
    if cut is None:
        return 0, 0
    return cut.base + cut.start, cut.base + queue_end.offset


def _apply_one(state: InFlight, applied: Applied, record: Any, queue_end: QueueEnd) -> bool:
    """Apply one record; returns False instead if `queue_end` can't tell whether its messages exist."""
    at, timestamp_ms = record.offset(), record.timestamp()[1]
    try:
        marker = read_marker(record, state.topic)
        if queue_end.is_beyond(marker, state.cuts):
            if at >= queue_end.decides_markers_below:
                return False
            marker = queue_end.existing(marker, state.cuts)
        is_new = at >= state.position
        changed = state.apply(marker, at, timestamp_ms)
        if marker.op is Op.END and marker.by_tracker and is_new:
            state.claims.read(marker, record, state.now_ms)
            state.copies.read(marker, read_headers(record)[0])
    except UnsupportedMarker as error:
        state.observe(at, timestamp_ms)
        state.pin(at)
        applied.newer.append((at, error))
    except DecodeError as error:
        state.observe(at, timestamp_ms)
        bare = error.with_traceback(None)  # a traceback would keep what was decoded
        applied.skipped.append((at, bare))
    except Exception as error:  # a bug of kmqpy: pinned, so that a fixed version reads it again
        state.observe(at, timestamp_ms)
        state.pin(at)
        applied.failed.append((at, error))
    else:
        applied.in_ranges += marker.count if marker.runs else 0
        if applied.touched is not None and marker.op in _TOUCHING_OPS:
            applied.touched.add_runs(state.cuts.existing(marker.offset_runs, queue_end.offset))
        if marker.op is Op.END and not marker.by_tracker:
            applied.late_acks += marker.count - changed
    applied.records += 1
    return True
