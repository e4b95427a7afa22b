"""Finds late operations: markers of clients for a message that was claimed or copied before. Pure: no I/O.

A copy here is the record with which a tracker redelivers a message. A claim is the first record of the
tracker's transaction, and names the messages that the tracker is about to copy. A late acknowledgement
finishes the copies of the message, too. A late nack, extension or dead-letter request applies to the copy
that no client has taken yet. See rules R32 and R33 of docs/rules.md. A copy has a header that says from where
to look for late operations:

    kmq-planned-at   `queue:partition:markers offset`: the tracker that planned the first copy of the message
                     knew all markers before that offset. Copies of copies keep this header

A queue may have several lanes: topics with markers of their own. A message that was copied from one lane to
another, and there once more, has such a header for each of both; its ancestors are looked for in the markers
of each lane, and an operation on one counts that stands in the markers of the lane where this one is.

Only markers decide: claims, the end markers of trackers, which name the copies, and the markers of clients.
The headers of messages prove nothing: anybody can forward them with another message. An acknowledgement
of the message that had these headers first would then finish the other message. But markers of an aborted
transaction are read, too, and if its copies were cut away (see log_cuts), others stand at their offsets. So
what the markers name as an ancestor of a copy is one only if the copy names it, too (see lineage).
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Headers, Marker, Op, Runs
from kmqpy.kafka.markers.lineage import (
    ANCESTORS,
    COPY,
    MAX_ANCESTORS_BYTES,
    RecordPlace,
    read_ancestors,
    read_copies,
)
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers, read_marker
from kmqpy.message import last_header

PLANNED_AT = "kmq-planned-at"

_PLANNED_AT = re.compile(rb"([a-zA-Z0-9._-]{1,249}):([0-9]{1,10}):([0-9]{1,19})")
_END_VALUE = codec.encode_end()
_START_TYPE = codec.encode_start(0)[:1]
_BY_TRACKER_HEADER = codec.encode(codec.tick(0))[2][0]
_OP_HEADER = codec.encode(Marker(0, 0, Op.EXTEND))[2][0][0]
_OPERATIONS = (Op.EXTEND, Op.NACK, Op.DEAD_LETTER)
_SINGLE_COPY = re.compile(rb"([0-9]{1,10}):([0-9]{1,19})")
_MAX_ANCESTORS = 10_000
"""Of a copy, at most this many ancestors are looked at, more than any message has. Forged markers can make
longer chains, which would take long to follow."""
_MAX_OPERATIONS = 100_000
"""Of more operations in a partition, the oldest are forgotten, and clients hand out the copies of their
messages."""
_MAX_WATCHED_BLOCKS = 1 << 18
"""When the watched messages lie in this many blocks of 1,024 offsets, no more messages are watched: late
operations on others do not count. Forged markers can name many offsets in few bytes."""


def planned_at_header(queue: str, partition: int, position: int) -> tuple[str, bytes]:
    """The header for a copy whose first plan was made from the markers before `position`."""
    return PLANNED_AT, b"%s:%d:%d" % (queue.encode(), partition, position)


def read_planned_at(
    headers: Iterable[tuple[str, bytes | None]], partition: int, lanes: Collection[str]
) -> dict[str, int]:
    """By topic, for those of `lanes`: the markers offset that the headers of a message there name."""
    found: dict[str, int] = {}
    for name, data in headers:
        if name != PLANNED_AT:
            continue
        named = _PLANNED_AT.fullmatch(data or b"")
        if named is None or int(named[2]) != partition or int(named[3]) > INT64_MAX:
            continue
        if (topic := named[1].decode()) in lanes:
            found[topic] = int(named[3])
    return found


class CopyHeaders(NamedTuple):
    """What a copy says of itself.

    planned_at  the markers offset from which to look for late operations; -1: nowhere in the copy's own lane
    ancestors   the header `kmq-ancestors`; None without one
    elsewhere   other lanes of the queue, each with the markers offset from which to look there
    """

    planned_at: int
    ancestors: bytes | None = None
    elsewhere: tuple[tuple[str, int], ...] = ()

    def starts(self, queue: str) -> dict[str, int]:
        """By lane, from which markers offset to look; `queue` is the topic of the copy."""
        own = {queue: self.planned_at} if self.planned_at >= 0 else {}
        return own | dict(self.elsewhere)

    def names(self, queue: str, partition: int, offset: int, lane: str = "") -> bool:
        """Return True if this message is an ancestor, or perhaps one that is left out.

        `queue` is the topic of the copy, `lane` that of the message, if it is another one.
        """
        if self.ancestors is not None and len(self.ancestors) > MAX_ANCESTORS_BYTES // 2:
            return True
        try:
            named = read_ancestors(self.ancestors, RecordPlace(queue, -1, 0))
        except DecodeError:
            return False
        return RecordPlace(lane or queue, partition, offset) in named


def read_copy_headers(
    headers: Sequence[tuple[str, bytes | None]], queue: str, partition: int, lanes: Collection[str] = ()
) -> CopyHeaders | None:
    """What the headers of a message in this partition say if it is a copy; None for another message.

    `queue` is the topic of the message, `lanes` are all of the queue, if it has others.
    """
    planned_at = read_planned_at(headers, partition, lanes or (queue,))
    if not planned_at:
        return None
    own = planned_at.pop(queue, -1)
    return CopyHeaders(own, last_header(tuple(headers), ANCESTORS), tuple(planned_at.items()))


class LateOperation(NamedTuple):
    """A nack, an extension or a dead-letter request for a message that was claimed or copied before.

    at_ms   the timestamp of the marker
    for_ms  the lease or the delay that the client asked for
    reason  of a dead-letter request: the reason that the client gave, at most MAX_REASON characters
    """

    op: Op
    at_ms: int
    for_ms: int
    reason: str | None

    def left_ms(self, now_ms: int, limit_ms: int) -> int:
        """Return how much of the lease or delay, cut to `limit_ms`, remains at `now_ms`; 0 after its end."""
        for_ms = min(self.for_ms, limit_ms)
        return max(0, min(self.at_ms + for_ms - now_ms, for_ms))


class LateOperations:
    """Reads the markers of one partition, from markers offset `begin` to before `end`, for late operations.

    Memory: two bits for each message that was claimed, was copied or is a copy; 24 bytes for each run of
    messages that were copied to a run of offsets, and more for a copy that is named after a higher one; some
    200 bytes for each message with an operation other than an acknowledgement, of the latest 100,000; and the
    reasons of dead-letter requests.

    `topic` is the topic_tag() of the queue topic, see codec.decode(). Of copies in other topics, those in
    `lanes` are noted.
    """

    def __init__(
        self, queue: str, partition: int, begin: int, topic: bytes | None = None, lanes: Collection[str] = ()
    ) -> None:
        self.begin = self.end = begin
        self.now_ms = 0
        """The timestamp of the last record that read() has taken in."""
        self._queue = queue
        self._partition = partition
        self._topic = topic
        self._watched = OffsetRuns()
        """Messages that were claimed or copied, and copies. Acknowledgements of other messages are not late:
        the tracker knows one that stands before its claim, and does not copy the message."""
        self._acknowledged = OffsetRuns()
        self._operations: dict[int, LateOperation] = {}
        """By watched message, the operation that applies of those since its last claim; the latest is last.
        An operation on a copy that was never claimed applies to no other copy, because there is none yet."""
        self._copies = _CopyRuns()
        self._elsewhere = {lane: _CopyRuns(last_counts=True) for lane in lanes if lane != queue}

    def read(self, records: Sequence[Any], enough: Callable[[], bool] = lambda: False) -> bool:
        """Take in the next records of the markers partition, with those of open and aborted transactions.

        `enough` is called after each marker that may take long, as forged markers can. If it returns True,
        the records after that marker are left out. Returns True if none was left out.
        """
        if not records:
            return True
        end = self.end
        for record, headers in zip(records, headers_of_each(records), strict=True):
            at = record.offset()
            if at < end:
                continue
            end = at + 1
            value = record.value()
            if value is None or (value[:1] == _START_TYPE and not (headers and _names_operation(headers))):
                continue  # no marker, or a plain take
            if value == _END_VALUE and (not headers or _names_copy(headers)):
                self._read_single(record.key(), headers)  # most records
            else:
                self._read_other(record, headers)
                if enough():
                    break
        self.end = end
        self.now_ms = record.timestamp()[1]
        return record is records[-1]

    def acknowledged(self, copy: int, headers: CopyHeaders, others: Sequence[LateOperations] = ()) -> bool:
        """Return True if a client acknowledged this copy, or late a message of which it is a copy.

        Returns False for a message that no tracker's end marker names as a copy. `others` are those of the
        other lanes that the copy names.
        """
        return any(known._acknowledged for known in (self, *others)) and any(
            one in known._acknowledged
            and ((known is self and one == copy) or self._is_ancestor(known, one, headers))
            for known, one in self._lineage(copy, others)
        )

    def operations(
        self, copy: int, headers: CopyHeaders, others: Sequence[LateOperations] = ()
    ) -> list[LateOperation]:
        """The late operations on the messages of which this is a copy, at most one for each message."""
        if not any(known._operations for known in (self, *others)):
            return []
        return [
            known._operations[one]
            for known, one in islice(self._lineage(copy, others), 1, None)
            if one in known._operations and self._is_ancestor(known, one, headers)
        ]

    def _is_ancestor(self, known: LateOperations, number: int, headers: CopyHeaders) -> bool:
        return headers.names(self._queue, self._partition, number, known._queue)

    def _lineage(self, copy: int, others: Sequence[LateOperations]) -> Iterator[tuple[LateOperations, int]]:
        """Yield the copy, its original, the original of the original and so on; nothing if it is no copy."""
        lanes = (self, *others)
        known, number = self, copy
        for _ in range(_MAX_ANCESTORS):
            for lane in lanes:
                original = lane._original_of(known._queue, number)
                if original is not None:
                    break
            else:
                return
            if known is self and number == copy:
                yield self, copy
            known, number = lane, original
            yield known, number

    def _original_of(self, topic: str, copy: int) -> int | None:
        """The original, in this lane, of the copy with this number in `topic`; None if none is known.

        Who has copied it to another lane knew its offset there, and not the cuts of that log.
        """
        if topic == self._queue:
            return self._copies.original_of(copy)
        runs = self._elsewhere.get(topic)
        return None if runs is None else runs.original_of(offset_of(copy))

    def _read_single(self, key: bytes | None, headers: Headers | None) -> None:
        """Read a single end marker: of a client, or, with `headers`, of a tracker."""
        try:
            partition, offset = codec.decode_key(key)
            if partition != self._partition:
                return
            if headers:
                self._read_copies(((offset, 1),), 1, headers[1][1])
            elif offset in self._watched:
                self._acknowledged.add(offset)
        except DecodeError:
            return  # each record is judged alone (rule R21)

    def _read_other(self, record: Any, headers: object) -> None:
        """Read a record that may be a claim, a range end marker, or another operation of a client."""
        try:
            marker = read_marker(record, self._topic)
            if marker.op in _OPERATIONS and not marker.by_tracker:
                self._read_operation(marker, record.timestamp()[1])
            if marker.op is not Op.END:
                return
            readable = [] if not headers or headers is UNREADABLE else read_headers(record)[0]
            if marker.offset < 0:
                self._read_claim(named_offsets(readable, CLAIM, self._partition))
            elif marker.by_tracker:
                self._read_copies(marker.offset_runs, marker.count, dict(readable).get(COPY))
            else:
                self._acknowledged.update(OffsetRuns(marker.offset_runs) & self._watched)
        except DecodeError:
            return

    def _read_claim(self, claimed: OffsetRuns) -> None:
        if self._watched.block_count < _MAX_WATCHED_BLOCKS:
            self._watched.update(claimed)
        # The tracker knows the operations that stand before its claim, and has applied them.
        if len(self._operations) < len(claimed):
            known = [offset for offset in self._operations if offset in claimed]
        else:
            known = [offset for offset in claimed if offset in self._operations]
        for offset in known:
            del self._operations[offset]

    def _watch(self, runs: Iterable[tuple[int, int]]) -> None:
        if self._watched.block_count < _MAX_WATCHED_BLOCKS:
            self._watched.add_runs(runs)

    def _read_operation(self, marker: Marker, at_ms: int) -> None:
        """Note a nack, extension or dead-letter request. Which one applies is decided as in InFlight."""
        reason = None
        if marker.op is Op.DEAD_LETTER and marker.reason is not None:
            reason = marker.reason[: codec.MAX_REASON]
        operation = LateOperation(marker.op, at_ms, max(0, marker.redeliver_after_ms), reason)
        for offset in OffsetRuns(marker.offset_runs) & self._watched:
            before = self._operations.pop(offset, operation)
            stays = before.op is Op.DEAD_LETTER or (before.op is Op.NACK and marker.op is Op.EXTEND)
            self._operations[offset] = before if stays else operation
        while len(self._operations) > _MAX_OPERATIONS:
            del self._operations[next(iter(self._operations))]

    def _read_copies(self, runs: Runs, count: int, named: bytes | None) -> None:
        """Note the copies that a tracker's end marker of `count` messages names in its header `named`."""
        if named is None:
            return
        single = _SINGLE_COPY.fullmatch(named) if count == 1 else None
        if single is not None:  # the usual case, and several times as fast
            copies = [RecordPlace(self._queue, int(single[1]), int(single[2]))]
        else:
            copies = read_copies(named, self._queue, count)
        runs_there = self._copies if copies[0].topic == self._queue else self._elsewhere.get(copies[0].topic)
        if runs_there is None or copies[0].partition != self._partition:
            return
        originals = (first + passed for first, many in runs for passed in range(many))
        pairs = [
            (one, copy.offset)
            for one, copy in zip(originals, copies, strict=True)
            if (one < copy.offset or runs_there is not self._copies) and copy.offset <= INT64_MAX
        ]
        if count > 1 or runs[0][0] not in self._watched:  # retention may have deleted the claim
            self._watch(runs)
        if runs_there is self._copies:
            self._watch((copy, 1) for _, copy in pairs)
        runs_there.add(pairs)


def _names_copy(headers: object) -> bool:
    """Return True for the headers of a tracker's end marker that names copies, as trackers write them."""
    return (
        isinstance(headers, list)
        and len(headers) == 2
        and headers[0] == _BY_TRACKER_HEADER
        and headers[1][0] == COPY
    )


def _names_operation(headers: object) -> bool:
    """Return True if the headers of a start marker name another operation than a take."""
    return isinstance(headers, list) and any(header[0] == _OP_HEADER for header in headers)


class _CopyRuns:
    """Finds the original of a copy; stores runs of originals that were copied to runs of offsets.

    last_counts  copies are named by offsets of a log that may have been cut back, where one message stood
                 after the other: the last naming counts; else the first
    """

    def __init__(self, *, last_counts: bool = False) -> None:
        self._last_counts = last_counts
        self._copies = array("q")  # the first offset of each run, ascending
        self._originals = array("q")
        self._counts = array("q")
        # Copies that were named after higher copies, which is rare unless a log is cut back, or somebody
        # forges markers. Inserting them as runs would take the longer the more runs there are.
        self._others: dict[int, int] = {}

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note pairs of an original and its copy, in any order."""
        for original, copy in pairs:
            passed = copy - self._copies[-1] if self._copies else 0
            if not self._copies or passed > self._counts[-1]:
                self._append(original, copy)
            elif passed == self._counts[-1]:
                if original == self._originals[-1] + passed:
                    self._counts[-1] += 1
                else:
                    self._append(original, copy)
            elif self._last_counts or self.original_of(copy) is None:
                self._others[copy] = original

    def original_of(self, copy: int) -> int | None:
        """The offset of the original of this copy; None if no copy at this offset is known."""
        if copy in self._others:
            return self._others[copy]
        at = bisect_right(self._copies, copy) - 1
        if at >= 0:
            passed = copy - self._copies[at]
            if passed < self._counts[at]:
                return self._originals[at] + passed
        return None

    def _append(self, original: int, copy: int) -> None:
        self._copies.append(copy)
        self._originals.append(original)
        self._counts.append(1)
