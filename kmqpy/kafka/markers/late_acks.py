"""Acknowledgements that came after the message had been copied: late ones (rules R32, R33). Pure: no I/O.

A copy carries a header that says from where to look for them:

    kmq-planned-at   `queue:partition:markers offset`: the markers before that offset were known to the
                     tracker that planned the first copy of the message. Copies of copies keep it

All that decides stands in the markers from there on: the claims, the end markers of trackers, which name the
copies, and the acknowledgements. The headers of a message decide nothing, since anybody can forward them with
a message of their own, and then an acknowledgement of another message would end that one.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claims import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Headers, Marker, Op
from kmqpy.kafka.markers.lineage import COPY, read_copies
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers, read_marker

PLANNED_AT = "kmq-planned-at"

_PLANNED_AT = re.compile(rb"([a-zA-Z0-9._-]{1,249}):([0-9]{1,10}):([0-9]{1,19})")
_END = codec.encode_end()
_START = codec.encode_start(0)[:1]
_MOST_ANCESTORS = 10_000
"""No message has as many; markers that somebody made up could name a copy as its own ancestor."""


def planned_at_header(queue: str, partition: int, position: int) -> tuple[str, bytes]:
    """The header for a copy whose first plan was made from the markers before `position`."""
    return PLANNED_AT, b"%s:%d:%d" % (queue.encode(), partition, position)


def read_planned_at(data: bytes | None, queue: str, partition: int) -> int | None:
    """The markers offset that the header names; None where it is absent, bad, or of another partition."""
    found = _PLANNED_AT.fullmatch(data or b"")
    if found is None or (found[1].decode(), int(found[2])) != (queue, partition):
        return None
    position = int(found[3])
    return position if position <= INT64_MAX else None


class LateAcks:
    """The late acknowledgements of one partition, as far as its markers are read: from `begin` to `end`.

    Memory: two bits for each message that was claimed or copied, and 24 bytes for each run of messages that
    were copied to a run of offsets.
    """

    def __init__(self, queue: str, partition: int, begin: int) -> None:
        self.begin = self.end = begin
        self._queue = queue
        self._partition = partition
        self._claimed = OffsetRuns()
        self._acknowledged = OffsetRuns()
        self._copies = _CopyRuns()

    def read(self, records: Sequence[Any]) -> None:
        """Take in the next records of the markers partition, those of open and aborted transactions, too."""
        end = self.end
        for record, headers in zip(records, headers_of_each(records), strict=True):
            at = record.offset()
            if at < end:
                continue
            end = at + 1
            value = record.value()
            if not headers:
                if value == _END:  # most are, or start markers, which say nothing here
                    self._end_one(record.key())
                    continue
                if value is None or value[:1] == _START:
                    continue
            self._read_other(record, headers)
        self.end = end

    def acknowledged(self, copy: int) -> bool:
        """Return True if a client acknowledged this copy, or a message of which it is a copy."""
        if not self._acknowledged:
            return False
        offset: int | None = copy
        if self._copies.original_of(copy) is None:
            return False
        for _ in range(_MOST_ANCESTORS):
            if offset is None or offset in self._acknowledged:
                return offset is not None
            offset = self._copies.original_of(offset)
        return False

    def _end_one(self, key: bytes | None) -> None:
        try:
            partition, offset = codec.decode_key(key)
        except DecodeError:
            return
        if partition == self._partition:
            self._acknowledge(offset)

    def _acknowledge(self, offset: int) -> None:
        # An end that stands before the claim had the tracker drop the message, so it was not copied.
        if offset in self._claimed or self._copies.original_of(offset) is not None:
            self._acknowledged.add(offset)

    def _read_other(self, record: Any, headers: object) -> None:
        try:
            marker = read_marker(record)
            if marker.op is not Op.END:
                return
            readable = [] if not headers or headers is UNREADABLE else read_headers(record)[0]
            if marker.offset < 0:
                self._claimed.add_runs(codec.runs_of(sorted(named_offsets(readable, CLAIM, self._partition))))
            elif marker.by_tracker:
                self._read_copies(marker, readable)
            else:
                for offset in marker.offsets():
                    self._acknowledge(offset)
        except DecodeError:
            return  # a record is judged alone (rule R21)

    def _read_copies(self, marker: Marker, headers: Headers) -> None:
        for name, data in headers:
            if name == COPY and data is not None:
                copies = read_copies(data, self._queue, marker.count)
                if copies[0].topic == self._queue and copies[0].partition == self._partition:
                    self._claimed.add_runs(marker.offset_runs)  # retention may have deleted the claim
                    self._copies.add(marker.offsets(), [copy.offset for copy in copies])
                return


class _CopyRuns:
    """Which offset is a copy of which: runs of originals that were copied to runs of offsets."""

    def __init__(self) -> None:
        self._copies = array("q")  # the first offset of each run, ascending
        self._originals = array("q")
        self._counts = array("q")

    def add(self, originals: Iterable[int], copies: Iterable[int]) -> None:
        """Note pairs, but none whose copy does not stand behind its original."""
        for original, copy in zip(originals, copies, strict=True):
            if copy > original:
                self._add(original, copy)

    def _add(self, original: int, copy: int) -> None:
        at = bisect_right(self._copies, copy)
        if at:
            passed = copy - self._copies[at - 1]
            if passed < self._counts[at - 1]:
                return  # named before
            if passed == self._counts[at - 1] and original == self._originals[at - 1] + passed:
                self._counts[at - 1] += 1
                return
        self._copies.insert(at, copy)
        self._originals.insert(at, original)
        self._counts.insert(at, 1)

    def original_of(self, copy: int) -> int | None:
        """The offset of which this is a copy; None where it is none that is known."""
        at = bisect_right(self._copies, copy) - 1
        if at < 0:
            return None
        passed = copy - self._copies[at]
        return self._originals[at] + passed if passed < self._counts[at] else None
