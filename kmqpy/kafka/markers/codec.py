"""Encodes and decodes markers: the records that clients and trackers write to the markers topic.

The bytes are those of the JVM library kmq (com.softwaremill.kmq, MarkerKey and MarkerValue), big-endian:

    key      int32 queue partition, int64 queue offset                   12 bytes
    start    01, int64 redeliver_after (a duration in ms)                 9 bytes
    end      00                                                           1 byte

A range marker, which only kmqpy has, names many messages; the offset in its key is the lowest:

    starts   02, int64 redeliver_after, runs
    ends     03, runs
    ends     04, bitmap: bit i of byte j (bit 0 is the lowest) names the message 8 j + i after the lowest

Runs are the count of the first run, then pairs of a gap and a count. Each number is at least 1 and is
written as unsigned LEB128. A range marker names exactly the messages that were taken or ended (rule R15 of
docs/rules.md), and means what single markers of these messages would mean. It spans at most MAX_SPAN offsets.
Runs have their maximal length. A bitmap begins with a set bit, and its last byte is not 0.

Fields that the JVM format has no room for are record headers, which JVM readers ignore. The JVM decoder
takes any unknown type byte for an end marker and ignores trailing bytes; this decoder raises `DecodeError`.
Pure: no I/O.
"""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts

Headers = list[tuple[str, bytes | None]]
"""Record headers: names may repeat, order is kept."""

Encoded = tuple[bytes, bytes, Headers | None]
"""Key, value and headers of a marker's record."""

TICK_OFFSET = -1
"""The queue offset in the key of a tick: an end marker of no message, written for its time or headers."""

MAX_REASON = 1_000
"""A client's reason is cut to this many characters. It is written with the marker and with the dead letter; a
dead letter that is too large for its topic could never be written."""

MAX_COUNT = 2**31 - 1
"""The highest redelivery count that its header can hold."""

_KEY = struct.Struct(">iq")
_START = struct.Struct(">bq")
_COUNT_BYTE = struct.Struct(">b")
_COUNT_INT = struct.Struct(">i")
_END = b"\x00"
_START_TYPE = 0x01
_START_RUNS_TYPE = 0x02
_END_RUNS_TYPE = 0x03
_END_BITMAP_TYPE = 0x04
_RANGE_TYPES = (_START_RUNS_TYPE, _END_RUNS_TYPE, _END_BITMAP_TYPE)
_RESERVED_TYPES = range(0x05, 0x10)

MAX_SPAN = 1 << 16
"""From the lowest to the highest offset of a range marker there are at most this many, both included."""

TAKEN_LATE = "taken late"
"""The reason in a tracker's end marker of a message that a client took after its end (rule R30)."""

ACKNOWLEDGED = "acknowledged"
"""The reason in a tracker's end marker of a copy that would have become a dead letter, but that an earlier
consumer has acknowledged (rule R32)."""

AT_ONCE_MS = -1
"""The delay of a nack to which the queue's `retry_delays` don't apply; to one with the delay 0 they do."""

_BITMAP_PIECE_BYTES = 32

Runs = tuple[tuple[int, int], ...]
"""Runs of offsets: (first, count), ascending, neither overlapping nor touching."""

_OP = "kmq-op"
_REASON = "kmq-reason"
_COUNT = "kmq-count"
_HOLDER = "kmq-holder"
_BY = "kmq-by"
_BY_TRACKER = b"tracker"
_TAKES_FROM = "kmq-takes-from"
_TAKES_AGAIN = "kmq-takes-again"
_CUTS = "kmq-cuts"
_EPOCH = "kmq-epoch"
_TOPIC = ""
"""The name of the header `topic`: each byte of it would be written with each acknowledgement by receipt."""
_TOPIC_TAG_BYTES = 2
_ABOUT_THE_LOG = frozenset((_TAKES_FROM, _CUTS, _EPOCH))
_DECIMAL = re.compile(rb"[0-9]{1,19}")


class Op(StrEnum):
    """The operation that a marker records for its message."""

    TAKE = "take"
    """A client took the message, which is in flight from now on. A start marker without `kmq-op`."""
    DELAY = "delay"
    """A client met the message before its delay was over. The message is in flight, without a lease."""
    EXTEND = "extend"
    """The client wants its lease to end `redeliver_after_ms` from now, later or earlier than before."""
    NACK = "nack"
    """The client gives the message back, for redelivery after `redeliver_after_ms`."""
    DEAD_LETTER = "dead-letter"
    """The client wants the message moved to the dead-letter topic now."""
    END = "end"
    """The message is finished: acknowledged, copied, or ended without a copy. Also the operation of ticks."""


_OPS_WITH_HEADER = {op.value.encode(): op for op in (Op.DELAY, Op.EXTEND, Op.NACK, Op.DEAD_LETTER)}


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker: an operation on the message at queue offset `offset`, or on the messages of `runs`.

    What is called an offset here is the number of the message, see log_cuts: another one behind a cut.
    `redeliver_after_ms` is a duration in ms from the marker's timestamp; a negative one means now.
    `counts` is False if the redelivery must not count as an attempt. `holder` is the name of the client, if
    it gave one. `by_tracker` is True on ticks, and on markers of trackers, redrives and purges. `takes_from`
    and `takes_again` are those of an assignment_tick().
    """

    partition: int
    offset: int
    op: Op
    redeliver_after_ms: int = 0
    counts: bool = True
    reason: str | None = None
    holder: str | None = None
    by_tracker: bool = False
    runs: Runs = ()
    """The messages of a range marker, `offset` being the lowest; empty: `offset` alone."""
    takes_from: int | None = None
    takes_again: bool = False
    cuts: LogCuts = NO_CUTS
    """On ticks: the cuts of the queue partition's log. They stand before all takes of messages behind the
    cuts."""
    epoch: int | None = None
    """On assignment ticks: the highest leader epoch that the messages have which the client takes. Before it
    takes one of a higher epoch, it writes another tick. On other ticks of trackers: the highest leader epoch
    that the copies have which the end markers behind the tick name, up to the next such tick."""
    topic: bytes | None = None
    """The topic_tag() of the queue topic, if its writer went by a receipt; see decode()."""

    @property
    def count(self) -> int:
        """The number of messages that the marker names."""
        return sum(count for _, count in self.runs) if self.runs else 1

    @property
    def offset_runs(self) -> Runs:
        """The queue offsets that the marker names, as runs; a single marker has one run of one offset."""
        return self.runs or ((self.offset, 1),)

    @property
    def highest(self) -> int:
        """The highest queue offset that the marker names."""
        return sum(self.runs[-1]) - 1 if self.runs else self.offset

    def offsets(self) -> Iterable[int]:
        """The queue offsets that the marker names, ascending."""
        if not self.runs:
            return (self.offset,)
        return itertools.chain.from_iterable(range(first, first + count) for first, count in self.runs)


def runs_of(offsets: Iterable[int]) -> Runs:
    """Ascending, distinct offsets as runs."""
    # Usually no offset is missing, which the first and the last one show.
    if isinstance(offsets, Sequence) and offsets and offsets[-1] - offsets[0] + 1 == len(offsets):
        return ((offsets[0], len(offsets)),)
    runs: list[tuple[int, int]] = []
    first = count = 0
    for offset in offsets:
        if count and offset == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = offset, 1
    if count:
        runs.append((first, count))
    return tuple(runs)


def ranges(partition: int, op: Op, offsets: Iterable[int], **fields: Any) -> list[Marker]:
    """Return the fewest range markers that hold these ascending, distinct offsets."""
    return ranges_of_runs(partition, op, runs_of(offsets), **fields)


def ranges_of_runs(partition: int, op: Op, runs: Iterable[tuple[int, int]], **fields: Any) -> list[Marker]:
    """Return the fewest range markers that hold these ascending runs (first, count)."""
    found: list[Marker] = []
    current: list[tuple[int, int]] = []

    def close() -> None:
        if current:
            found.append(Marker(partition, current[0][0], op, runs=tuple(current), **fields))
            current.clear()

    for first, count in runs:
        while count:
            if current and first - current[0][0] >= MAX_SPAN:
                close()
            size = min(count, MAX_SPAN - (first - current[0][0] if current else 0))
            current.append((first, size))
            first, count = first + size, count - size
    close()
    return found


def topic_tag(topic_id: str) -> bytes:
    """Two bytes that tell a topic from others that have had its name, except one in 65,536."""
    return zlib.crc32(topic_id.encode()).to_bytes(4)[:_TOPIC_TAG_BYTES]


def encode_key(partition: int, offset: int) -> bytes:
    """The marker key of a queue record (12 bytes)."""
    return _KEY.pack(partition, offset)


def encode_keys(partition: int, offsets: Iterable[int]) -> list[bytes]:
    """The marker keys of many queue records."""
    return list(map(_KEY.pack, itertools.repeat(partition), offsets))


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


def is_range(value: bytes) -> bool:
    """Return True if this value, which is not empty, is that of a range marker, valid or not."""
    return value[0] in _RANGE_TYPES


def decode_value(value: bytes | None) -> int | None:
    """The `redeliver_after_ms` of a single start marker, or None for a single end marker.

    Raises UnsupportedMarker for type bytes 05 to 0f, DecodeError for all other values.
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
    if marker.takes_from is not None:
        headers.append((_TAKES_FROM, b"%d" % marker.takes_from))
        if marker.takes_again:
            headers.append((_TAKES_AGAIN, b"1"))
    if marker.cuts:
        headers.append((_CUTS, str(marker.cuts).encode()))
    if marker.epoch is not None:
        headers.append((_EPOCH, b"%d" % marker.epoch))
    if marker.topic is not None:
        headers.append((_TOPIC, marker.topic))
    if marker.runs:
        value = _encode_range(marker)
    elif marker.op is Op.END:
        value = encode_end()
    else:
        value = encode_start(marker.redeliver_after_ms)
    return encode_key(marker.partition, marker.offset), value, headers


def decode(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | str | None]] | None = None,
    *,
    partition: int | None = None,
    topic: bytes | None = None,
) -> Marker:
    """The marker in a record; raises DecodeError, or UnsupportedMarker for a marker of a newer version.

    `topic` is the topic_tag() of the queue topic. A marker with another one was written by receipt for a
    message of a former topic, by a client that could not know (rule R24): a tick is returned for it.

    `partition` is that of the record; if the key names another one, decode() raises DecodeError, whatever
    the value is. Unknown headers are ignored. A `kmq-op` that is unknown raises UnsupportedMarker; any other
    header whose value can't be read counts as absent.
    """
    named, offset = decode_key(key)
    if partition is not None and named != partition:
        raise DecodeError(f"marker key: it names partition {named}, and stands in partition {partition}", key)
    partition = named
    runs: Runs = ()
    if value and _START_RUNS_TYPE <= value[0] <= _END_BITMAP_TYPE:
        redeliver_after_ms, runs = _decode_range(value, offset)
    else:
        redeliver_after_ms = decode_value(value)
    if not headers:
        if redeliver_after_ms is None:
            return Marker(partition, offset, Op.END, runs=runs)
        _check_offset(offset, key)
        return Marker(partition, offset, Op.TAKE, redeliver_after_ms, runs=runs)
    values = {name: _as_bytes(content) for name, content in headers}
    named_topic = values.get(_TOPIC)
    if named_topic is not None and len(named_topic) != _TOPIC_TAG_BYTES:
        named_topic = None
    if topic is not None and named_topic is not None and named_topic != topic:
        return tick(partition)
    if redeliver_after_ms is None:
        by_tracker = values.get(_BY) == _BY_TRACKER
        if offset == TICK_OFFSET and not _ABOUT_THE_LOG.isdisjoint(values):
            takes_from, again = _assignment_of(values)
            return Marker(
                partition,
                offset,
                Op.END,
                by_tracker=by_tracker,
                takes_from=takes_from,
                takes_again=again,
                cuts=_cuts_of(values),
                epoch=_number(values.get(_EPOCH)),
            )
        reason = _text(values.get(_REASON))
        return Marker(
            partition, offset, Op.END, reason=reason, by_tracker=by_tracker, runs=runs, topic=named_topic
        )
    _check_offset(offset, key)
    return Marker(
        partition,
        offset,
        _op(values.get(_OP), value),
        redeliver_after_ms,
        counts=values.get(_COUNT) != b"0",
        reason=_text(values.get(_REASON)),
        holder=_text(values.get(_HOLDER)),
        by_tracker=values.get(_BY) == _BY_TRACKER,
        runs=runs,
        topic=named_topic,
    )


def tick(partition: int, cuts: LogCuts = NO_CUTS, *, epoch: int | None = None) -> Marker:
    """A marker of no message, from which its writer learns the broker's time and where the log ends.

    `cuts` are those of the queue partition's log; readers drop what they know of the messages cut away.
    `epoch`: see Marker.
    """
    return Marker(partition, TICK_OFFSET, Op.END, by_tracker=True, cuts=cuts, epoch=epoch)


def assignment_tick(
    partition: int, takes_from: int, *, again: bool = False, cuts: LogCuts = NO_CUTS, epoch: int | None = None
) -> Marker:
    """The tick of a client to which a partition was assigned: it takes messages from `takes_from` on.

    `again`: the client does not know all earlier takes, so it may take some of these messages again. `cuts`
    and `epoch`: see Marker.
    """
    return replace(tick(partition, cuts, epoch=epoch), takes_from=takes_from, takes_again=again)


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


def _encode_range(marker: Marker) -> bytes:
    first, last = marker.offset, sum(marker.runs[-1]) - 1
    runs = _encode_runs(marker.runs)
    if marker.op is not Op.END:
        return _START.pack(_START_RUNS_TYPE, marker.redeliver_after_ms) + runs
    if len(runs) <= (last - first) // 8 + 1:
        return bytes((_END_RUNS_TYPE,)) + runs
    bitmap = 0
    for start, count in marker.runs:
        bitmap |= ((1 << count) - 1) << (start - first)
    return bytes((_END_BITMAP_TYPE,)) + bitmap.to_bytes((last - first) // 8 + 1, "little")


def _encode_runs(runs: Runs) -> bytes:
    data = bytearray()
    end = runs[0][0]
    for index, (first, count) in enumerate(runs):
        for number in (first - end, count) if index else (count,):
            while number >= 0x80:
                data.append(number & 0x7F | 0x80)
                number >>= 7
            data.append(number)
        end = first + count
    return bytes(data)


def _decode_range(value: bytes, first: int) -> tuple[int | None, Runs]:
    """The `redeliver_after_ms` (None for ends) and the runs of a range marker with lowest offset `first`."""
    redeliver_after_ms: int | None = None
    if value[0] == _END_BITMAP_TYPE:
        runs = _decode_bitmap(value, first)
    elif value[0] == _END_RUNS_TYPE:
        runs = _decode_runs(value, 1, first)
    elif len(value) > _START.size:
        redeliver_after_ms = _START.unpack_from(value)[1]
        runs = _decode_runs(value, _START.size, first)
    else:
        raise DecodeError(f"range marker: {_size(value)}, too short", value)
    if first < 0 or sum(runs[-1]) - 1 > INT64_MAX:
        raise DecodeError(f"range marker: from offset {first} on, beyond what there can be", value)
    if sum(runs[-1]) - first > MAX_SPAN:
        raise DecodeError(f"range marker: spans more than {MAX_SPAN} offsets", value)
    return redeliver_after_ms, runs


def _decode_runs(value: bytes, index: int, first: int) -> Runs:
    if len(value) - index > MAX_SPAN:  # each byte stands for an offset at least
        raise DecodeError(f"range marker: spans more than {MAX_SPAN} offsets", value)
    runs: list[tuple[int, int]] = []
    number = shift = 0
    gap: int | None = 0  # None while a gap is to be read
    for byte in memoryview(value)[index:]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift > 21:
                raise DecodeError("range marker: a number that is too large", value)
            continue
        if number == 0 or (byte == 0 and shift > 7):
            raise DecodeError("range marker: a run or gap of 0, or a number not in its shortest form", value)
        if gap is None:
            gap = number
        else:
            start = first if not runs else sum(runs[-1]) + gap
            runs.append((start, number))
            gap = None
        number = shift = 0
    if shift or gap is not None or not runs:
        raise DecodeError("range marker: it ends in the middle", value)
    return tuple(runs)


def _decode_bitmap(value: bytes, first: int) -> Runs:
    if len(value) - 1 > MAX_SPAN // 8:
        raise DecodeError(f"range marker: spans more than {MAX_SPAN} offsets", value)
    if len(value) < 2 or not value[-1] or not value[1] & 1:
        raise DecodeError("range marker: a bitmap that is empty, or has zeros at an end", value)
    runs: list[tuple[int, int]] = []
    # Piece by piece, because each step copies the number that it works on.
    for index in range(1, len(value), _BITMAP_PIECE_BYTES):
        piece = int.from_bytes(value[index : index + _BITMAP_PIECE_BYTES], "little")
        at = first + 8 * (index - 1)
        while piece:
            zeros = (piece & -piece).bit_length() - 1
            piece >>= zeros
            ones = (~piece & (piece + 1)).bit_length() - 1
            piece >>= ones
            at += zeros
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + ones)
            else:
                runs.append((at, ones))
            at += ones
    return tuple(runs)


def _assignment_of(values: Mapping[str, bytes | None]) -> tuple[int | None, bool]:
    takes_from = _number(values.get(_TAKES_FROM))
    return (None, False) if takes_from is None else (takes_from, values.get(_TAKES_AGAIN) == b"1")


def _number(data: bytes | None) -> int | None:
    number = int(data) if data and _DECIMAL.fullmatch(data) else INT64_MAX + 1
    return None if number > INT64_MAX else number


def _cuts_of(values: Mapping[str, bytes | None]) -> LogCuts:
    try:
        return LogCuts.parse((values.get(_CUTS) or b"").decode())
    except ValueError:
        return NO_CUTS


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
