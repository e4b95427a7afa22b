"""Finds messages whose last copies were cut away with the end of a queue's log (rule R39 of docs/rules.md).

A tracker has ended such a message, because its copy would be delivered. The copy is gone, and the message
still stands below the cut: it is to be redelivered once more. The markers say so: the last one of the message
is the end marker of a tracker, which names the copy; and none says that somebody acknowledged the copy.

Copies right before the cut may be gone, too: if the record that committed them was cut away, the next
transaction of their producer there decides, and may be aborted. If the cut is not told, since nothing stands
behind it yet, several of the last transactions may be gone, and the one whose commit was cut away with them.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.claim_headers import CLAIM
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import COPY, RecordPlace, read_copies
from kmqpy.kafka.markers.log_cuts import LogCuts, offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_headers, read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery.known_log import CopySearch
from tracker.redelivery.tick_writer import TickWriter

REASON = "copy cut away"
"""The reason in the marker with which a tracker has such a message redelivered."""

_CLOCKS_APART_MS = 300_000
"""The clock of whoever sent a message may be this far from the broker's."""
_OFFSETS_BEFORE = 50
"""The time of a record up to so many offsets before the cut tells since when copies behind it were made: at
the cut itself there may be a record that ends a transaction, which readers don't see."""


class LostCopies:
    """Reads the markers of one queue partition, in the order of their log. Pure: no I/O."""

    def __init__(self, topic: str, partition: int, cuts: LogCuts, start: int) -> None:
        self._topic = topic
        self._partition = partition
        self._cuts = cuts
        self._start = start
        self.before: dict[int, set[int]] = {}
        """By transaction, the last one last: the numbers of its copies before offset `start`."""
        self._claims = 0
        self._copies: dict[int, RecordPlace] = {}
        """By number of each message whose last marker so far says that it was copied: its copy."""
        self._epoch: int | None = None
        """That of the copies which the next end markers name, as the claim before these says."""
        self._acknowledged = OffsetRuns()

    def read(self, record: Any) -> None:
        """Read the next marker."""
        try:
            marker = read_marker(record)
            headers = dict(read_headers(record)[0])
            places = self._named(marker, headers.get(COPY))
        except DecodeError:
            return
        if CLAIM in headers:
            self._epoch = marker.epoch
            self._claims += 1
        if marker.op not in (Op.TAKE, Op.DELAY, Op.END):
            return
        if marker.op is Op.END and not marker.by_tracker:
            self._acknowledged.add_runs(marker.offset_runs)
        if marker.count <= len(self._copies):
            for number in marker.offsets():
                self._copies.pop(number, None)
        else:
            for number in [one for one in self._copies if _names(marker, one)]:
                del self._copies[number]
        self._copies.update(places)
        if before := {copy.offset for copy in places.values() if self._is_before(copy)}:
            self.before.setdefault(self._claims, set()).update(before)

    def found(self, aborted: Container[int] = ()) -> list[int]:
        """The numbers of the messages that are to be redelivered once more.

        aborted  those of `before` that nobody can read any more
        """
        return sorted(number for number in self._copies if self._is_lost(number, aborted))

    def _named(self, marker: Marker, data: bytes | None) -> dict[int, RecordPlace]:
        if marker.op is not Op.END or not marker.by_tracker or data is None:
            return {}
        copies = [
            copy._replace(offset=self._cuts.number_in(self._epoch, copy.offset))
            for copy in read_copies(data, self._topic, marker.count)
        ]
        return dict(zip(marker.offsets(), copies, strict=True))

    def _is_before(self, copy: RecordPlace) -> bool:
        is_here = (copy.topic, copy.partition) == (self._topic, self._partition)
        return is_here and offset_of(copy.offset) < self._start and self._cuts.is_current(copy.offset)

    def _is_lost(self, number: int, aborted: Container[int]) -> bool:
        if not self._cuts.is_current(number):
            return False  # the message itself was cut away
        while (copy := self._copies.get(number)) is not None:
            if (copy.topic, copy.partition) != (self._topic, self._partition) or copy.offset <= number:
                return False
            number = copy.offset
            if number in self._acknowledged:
                return False
            if self._cuts.is_current(number) and number not in aborted:
                return False
        return True


def _names(marker: Marker, number: int) -> bool:
    return any(first <= number < first + count for first, count in marker.offset_runs)


def redeliver_lost_copies(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    cuts: LogCuts,
    search: CopySearch,
    tick_writer: TickWriter,
    clock: Clock,
    pause_s: float = 0.0,
) -> int:
    """Have messages redelivered whose copies were cut away; returns how many.

    Begins after `pause_s` seconds, and ends when the markers are written that say so: nobody looks a second
    time. Raises KmqError; Unavailable also as long as the copies before `search.start` are neither committed
    nor aborted.
    """
    start, last = search
    clock.sleep(pause_s)
    low, stable = partition_reader.bounds(connection, queue.name, [partition])[partition]
    if stable < start:
        end = partition_reader.bounds(connection, queue.name, [partition], uncommitted=True)[partition][1]
        if stable < end:
            raise Unavailable("a transaction before the cut is open; try again")
        if last is not None:  # the log ends before it: a cut that is known, or that others will tell
            return 0
    if last is not None and partition_reader.read_at(
        connection, queue.name, [(partition, last)], clock=clock
    ):
        return 0
    times: list[int] = []
    timeout_s = connection.timeout_s
    partition_reader.scan(
        connection,
        queue.name,
        {partition: max(0, start - _OFFSETS_BEFORE)},
        lambda record: times.append(record.timestamp()[1]),
        limit=1,
        uncommitted=True,
        timeout_s=timeout_s,
        clock=clock,
    )
    found = LostCopies(queue.name, partition, cuts, start)
    since_ms = max(0, min(times, default=0) - _CLOCKS_APART_MS)
    partition_reader.scan_since(
        connection, queue.markers_topic, {partition: since_ms}, partial(_read_all, found), clock=clock
    )
    aborted = set[int]()
    for copies in reversed(found.before.values()):
        places = {(partition, offset_of(number)): number for number in copies}
        there = partition_reader.read_at(connection, queue.name, places, clock=clock)
        gone = {number for place, number in places.items() if place[1] >= low and place not in there}
        aborted |= gone
        if len(gone) < len(copies):  # those before them were committed before
            break
    markers = [
        Marker(partition, number, Op.DELAY, 0, counts=False, reason=REASON, by_tracker=True)
        for number in found.found(aborted)
    ]
    if markers:
        tick_writer.send_markers(queue.markers_topic, markers, timeout_s)
    return len(markers)


def _read_all(found: LostCopies, _partition: int, records: list[Any]) -> bool:
    for record in records:
        found.read(record)
    return False
