"""Finds messages whose last copies were cut away with the end of a queue's log (rule R39 of docs/rules.md).

A tracker has ended such a message, because its copy would be delivered. The copy is gone, and the message
still stands below the cut: it is to be redelivered once more. The markers say so: the last one of the message
is the end marker of a tracker, which names the copy; and none says that somebody acknowledged the copy.

Copies right before the cut may be gone, too: if the record that committed them was cut away, the next
transaction of their producer there decides, and may be aborted. If the cut is not told, since nothing stands
behind it yet, several of the last transactions may be gone, and the one whose commit was cut away with them.

The tracker of a retry lane looks through the markers of the queue's other lanes, too, whose copies stand
there (rule R46): behind a cut, and after each election, since it knows nothing of copies that nobody has
taken. Those lanes name copies by offsets, and know no epochs of the retry lane. So it reads what stands where
leaders may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.cut_search import end_of_epoch
from kmqpy.kafka.markers.claim_headers import CLAIM
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY, RecordPlace, read_ancestors, read_copies
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts, offset_of
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
_BEHIND_A_CUT = 1_000_000
_AFTER_AN_ELECTION = 10_000
"""So many of the last markers of each other lane are read."""
_BEFORE_ITS_MARKERS_MS = 10_000
"""Copies may come into a new lane so long before its first marker; nothing had come into a former lane of its
name for 15 s when that was removed. Brokers stamp both, where topics are as kmqpy makes them."""
_MOST_COPIES = 200_000
"""So many copies of each other lane are looked at: the first ones that may be gone."""


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
        current = filter(self._cuts.is_current, self._copies)  # else the message itself was cut away
        return sorted(number for number in current if not self._goes_on(number, aborted))

    def was_finished(self, offset: int, *, is_used: bool) -> bool:
        """True if the message that stood at this offset was acknowledged or copied.

        It was the last one before the cut there; `is_used`: another stands there now, whose number does not
        count. Those of former cuts were looked for then.
        """
        numbers = self._cuts.former_numbers(offset)[-1:]
        if not is_used or not numbers:
            numbers.append(self._cuts.number_of(offset))
        return any(number in self._acknowledged or self._goes_on(number) for number in numbers)

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

    def _goes_on(self, number: int, aborted: Container[int] = ()) -> bool:
        """True if the message has a copy that can be read, or had one that was acknowledged."""
        while (copy := self._copies.get(number)) is not None:
            if (copy.topic, copy.partition) != (self._topic, self._partition) or copy.offset <= number:
                return True
            number = copy.offset
            if number in self._acknowledged:
                return True
            if self._cuts.is_current(number) and number not in aborted:
                return True
        return False


def _names(marker: Marker, number: int) -> bool:
    return any(first <= number < first + count for first, count in marker.offset_runs)


class CopiesInLane(LostCopies):
    """Reads the markers of another lane: which of its copies in the retry lane may be gone.

    Those from offset `start` on, where the log was perhaps written anew. Before it, those of the lane's last
    transaction, whose commit perhaps stood behind; former ones were committed before that. Markers of before
    `begun_ms` may name copies in a former lane of the same name, which was removed.
    """

    def __init__(self, lane: str, partition: int, retry_lane: str, start: int, begun_ms: int) -> None:
        super().__init__(lane, partition, NO_CUTS, start)
        self.since_ms = 0
        """When the first of these copies was named."""
        self._retry_lane = retry_lane
        self._begun_ms = begun_ms
        self._last_before = -1
        self._ms = 0

    def read(self, record: Any) -> None:
        """Read the next marker."""
        self._ms = record.timestamp()[1]
        super().read(record)

    def offsets(self) -> dict[RecordPlace, int]:
        """By originals: where their last copies stand, or stood, in the order of the markers."""
        originals = self._copies.items()
        return {RecordPlace(self._topic, self._partition, n): copy.offset for n, copy in originals}

    def _named(self, marker: Marker, data: bytes | None) -> dict[int, RecordPlace]:
        if self._ms < self._begun_ms or len(self._copies) >= _MOST_COPIES:
            return {}
        named = super()._named(marker, data).items()
        here = {n: copy for n, copy in named if copy[:2] == (self._retry_lane, self._partition)}
        if self._claims > self._last_before and any(copy.offset < self._start for copy in here.values()):
            self._last_before = self._claims
            self._copies = {n: copy for n, copy in self._copies.items() if copy.offset >= self._start}
        if here:
            self.since_ms = min(self.since_ms, self._ms) if self._copies else self._ms
        return here


def redeliver_lost_copies(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    cuts: LogCuts,
    search: CopySearch,
    tick_writer: TickWriter,
    may_write: Callable[[], bool],
    clock: Clock,
) -> int:
    """Have messages redelivered whose copies were cut away; returns how many.

    Ends when the markers are written that say so, if this tracker still may: nobody looks a second time.
    Raises KmqError; Unavailable also as long as copies are neither committed nor aborted.
    """
    if search.of_lanes:
        lost = lost_of_lanes(connection, queue, partition, cuts, search, clock)
    else:
        lost = lost_of_own(connection, queue, partition, cuts, search, clock)
    if any(lost.values()) and not may_write():
        raise Unavailable("another tracker may own the partition")
    for topic, numbers in lost.items():
        markers = [
            Marker(partition, number, Op.DELAY, 0, counts=False, reason=REASON, by_tracker=True)
            for number in numbers
        ]
        if markers:
            tick_writer.send_markers(topic, markers, connection.timeout_s)
    return sum(map(len, lost.values()))


def lost_of_own(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    cuts: LogCuts,
    search: CopySearch,
    clock: Clock,
) -> Mapping[str, Sequence[int]]:
    """By markers topic, that of this lane: the messages whose copies in it are gone. Raises KmqError."""
    start, last = search.start, search.last
    low, stable = partition_reader.bounds(connection, queue.name, [partition])[partition]
    _check_stable(connection, queue.name, partition, start, stable)
    if last is not None:
        if stable < start:  # the log ends before it: a cut that is known, or that others will tell
            return {}
        if partition_reader.read_at(connection, queue.name, [(partition, last)], clock=clock):
            return {}
    before_ms = time_of(connection, queue.name, partition, max(0, start - _OFFSETS_BEFORE), clock)
    found = LostCopies(queue.name, partition, cuts, start)
    since_ms = max(0, before_ms - _CLOCKS_APART_MS)
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
    return {queue.markers_topic: found.found(aborted)}


def lost_of_lanes(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    cuts: LogCuts,
    search: CopySearch,
    clock: Clock,
) -> Mapping[str, Sequence[int]]:
    """By markers topic of other lanes: the messages whose copies here are gone, and were not finished.

    Reads the last markers of each, then what stands at the offsets of copies that may be gone (see
    CopiesInLane), and only if some are, the markers of this lane. Raises KmqError.
    """
    for topic in (*queue.lane_markers.values(), queue.name):  # copies are written before their markers
        if topic not in search.ends:
            ends = partition_reader.bounds(connection, topic, [partition], uncommitted=True)
            search.ends[topic] = ends[partition][1]
    begun_ms = time_of(connection, queue.markers_topic, partition, 0, clock) - _BEFORE_ITS_MARKERS_MS
    if begun_ms < 0:
        return {}
    start, most = search.start, _BEHIND_A_CUT
    if search.former is not None:
        start = end_of_epoch(connection, queue.name, partition, search.former, clock=clock)
        most = _AFTER_AN_ELECTION
    lanes: dict[str, CopiesInLane] = {}
    for lane, topic in queue.lane_markers.items():
        if lane != queue.name:
            lanes[topic] = CopiesInLane(lane, partition, queue.name, start, begun_ms)
            end = search.ends[topic]
            reached = partition_reader.scan(
                connection,
                topic,
                {partition: max(0, end - most)},
                partial(_read_before, lanes[topic], end),
                uncommitted=False,
                timeout_s=connection.timeout_s,
                clock=clock,
            )
            _check_stable(connection, topic, partition, end, reached[partition].end)
    copied = {topic: copies.offsets() for topic, copies in lanes.items()}
    places = {(partition, at) for offsets in copied.values() for at in offsets.values()}
    if not places:
        return {}
    low, stable = partition_reader.bounds(connection, queue.name, [partition])[partition]
    _check_stable(connection, queue.name, partition, search.ends[queue.name], stable)
    there = partition_reader.read_at(connection, queue.name, places, keep=original_of, clock=clock)
    gone = {
        topic: {
            original.offset: at
            for original, at in offsets.items()
            if at >= low and there.get((partition, at)) != original
        }
        for topic, offsets in copied.items()
    }
    if not any(gone.values()):
        return {}
    stable = partition_reader.bounds(connection, queue.markers_topic, [partition])[partition][1]
    _check_stable(connection, queue.markers_topic, partition, search.ends[queue.markers_topic], stable)
    here = LostCopies(queue.name, partition, cuts, 0)
    since_ms = max(0, min(lanes[topic].since_ms for topic in lanes if gone[topic]) - _CLOCKS_APART_MS)
    partition_reader.scan_since(
        connection, queue.markers_topic, {partition: since_ms}, partial(_read_all, here), clock=clock
    )
    lost: dict[str, list[int]] = {}
    for topic, numbers in gone.items():
        last = {at: number for number, at in numbers.items()}  # of those at one offset, by two cuts
        finished = {n for at, n in last.items() if here.was_finished(at, is_used=(partition, at) in there)}
        lost[topic] = sorted(numbers.keys() - finished)
    return lost


def original_of(record: Any) -> RecordPlace | None:
    """Of which message this record is a copy; None: of none."""
    try:
        named = read_ancestors(dict(read_headers(record)[0]).get(ANCESTORS), RecordPlace("", -1, 0))
    except DecodeError:
        return None
    return named[-1] if named else None


def _check_stable(connection: KafkaConnection, topic: str, partition: int, end: int, stable: int) -> None:
    """Raise Unavailable if a transaction hides what stands before `end`, unless that was cut away."""
    if stable >= end:
        return
    if stable < partition_reader.bounds(connection, topic, [partition], uncommitted=True)[partition][1]:
        raise Unavailable(f"a transaction in {topic} is open; try again")


def time_of(connection: KafkaConnection, topic: str, partition: int, offset: int, clock: Clock) -> int:
    """When the first record from this offset on was written, in ms since 1970; 0: there is none."""
    times: list[int] = []
    partition_reader.scan(
        connection,
        topic,
        {partition: offset},
        lambda record: times.append(record.timestamp()[1]),
        limit=1,
        uncommitted=True,
        timeout_s=connection.timeout_s,
        clock=clock,
    )
    return min(times, default=0)


def _read_before(found: LostCopies, end: int, record: Any) -> None:
    if record.offset() < end:
        found.read(record)


def _read_all(found: LostCopies, _partition: int, records: list[Any]) -> bool:
    for record in records:
        found.read(record)
    return False
