"""Finds messages whose last copies were cut away with the end of a queue's log (rule R39 of docs/rules.md).

A tracker has ended such a message, because its copy would be delivered. The copy is gone, and the message
still stands below the cut: it is to be redelivered once more. The markers say so: the last one of the message
is the end marker of a tracker, which names the copy; and none says that somebody acknowledged the copy.

Copies right before the cut may be gone, too: if the record that committed them was cut away, the next
transaction of their producer there decides, and may be aborted. If the cut is not told, since nothing stands
behind it yet, several of the last transactions may be gone, and the one whose commit was cut away with them.

The tracker of a retry lane looks through the markers of the queue's other lanes, too, whose copies stand
there (rule R46): behind a cut, and after each election, since it knows nothing of copies that nobody has
taken. Those lanes name copies by offsets, and know no epochs of the retry lane. So it reads what is there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
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
name for 15 s when that was removed."""
_ENDS_WITHIN_S = 10.0
"""For so long the transactions that are open in another lane may last."""
_LOOK_AGAIN_S = 0.1


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

    def copied_to(self, topic: str) -> dict[int, int]:
        """By number of each message whose last copy went to `topic`: the offset of the copy."""
        last = self._copies.items()
        return {n: copy.offset for n, copy in last if copy[:2] == (topic, self._partition)}

    def is_of(self, number: int, record: Any) -> bool:
        """True if this record is a copy of the message with this number."""
        if record is None:
            return False
        try:
            named = read_ancestors(dict(read_headers(record)[0]).get(ANCESTORS), RecordPlace("", -1, 0))
        except DecodeError:
            return False
        return named[-1:] == (RecordPlace(self._topic, self._partition, number),)

    def was_finished(self, offset: int, present: Any) -> bool:
        """True if the former message at this offset was acknowledged or copied; `present` is there now."""
        numbers = self._cuts.former_numbers(offset)[-1:]
        if present is None or not numbers:
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
    start, last, of_lanes = search
    clock.sleep(pause_s)
    if of_lanes:
        lost = lost_of_lanes(connection, queue, partition, cuts, _AFTER_AN_ELECTION, clock)
        return write_lost(tick_writer, partition, lost, connection.timeout_s)
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
    lost = {queue.markers_topic: found.found(aborted)}
    if queue.is_retry_lane:
        lost |= lost_of_lanes(connection, queue, partition, cuts, _BEHIND_A_CUT, clock)
    return write_lost(tick_writer, partition, lost, connection.timeout_s)


def write_lost(
    tick_writer: TickWriter, partition: int, lost: Mapping[str, Sequence[int]], timeout_s: float
) -> int:
    """Write the markers which say that messages are to be redelivered, by markers topic; returns how many."""
    for topic, numbers in lost.items():
        markers = [
            Marker(partition, number, Op.DELAY, 0, counts=False, reason=REASON, by_tracker=True)
            for number in numbers
        ]
        if markers:
            tick_writer.send_markers(topic, markers, timeout_s)
    return sum(map(len, lost.values()))


def lost_of_lanes(
    connection: KafkaConnection, queue: QueueSettings, partition: int, cuts: LogCuts, most: int, clock: Clock
) -> dict[str, list[int]]:
    """By markers topic of other lanes: the messages whose copies here are gone, and were not finished.

    Reads the last `most` markers of each. Those before the first one of this lane may name copies in a former
    lane of this name, which was removed. Raises KmqError.
    """
    begun = time_of(connection, queue.markers_topic, partition, 0, clock) - _BEFORE_ITS_MARKERS_MS
    lanes: dict[str, LostCopies] = {}
    times: list[int] = []
    for lane, topic in queue.lane_markers.items():
        if lane == queue.name:
            continue
        end = partition_reader.bounds(connection, topic, [partition], uncommitted=True)[partition][1]
        deadline = clock.monotonic() + _ENDS_WITHIN_S
        # A transaction that is open there may have had copies here before the cut, and commit their ends.
        while partition_reader.bounds(connection, topic, [partition])[partition][1] < end:
            if clock.monotonic() >= deadline:
                raise Unavailable(f"a transaction in {topic} is open; try again")
            clock.sleep(_LOOK_AGAIN_S)
        lanes[topic] = LostCopies(lane, partition, NO_CUTS, 0)
        times.append(max(begun, time_of(connection, topic, partition, max(0, end - most), clock)))
        partition_reader.scan_since(
            connection, topic, {partition: times[-1]}, partial(_read_all, lanes[topic]), clock=clock
        )
    here = LostCopies(queue.name, partition, cuts, 0)
    partition_reader.scan_since(
        connection, queue.markers_topic, {partition: min(times)}, partial(_read_all, here), clock=clock
    )
    low, stable = partition_reader.bounds(connection, queue.name, [partition])[partition]
    end = partition_reader.bounds(connection, queue.name, [partition], uncommitted=True)[partition][1]
    lost: dict[str, list[int]] = {}
    for topic, there in lanes.items():
        copied = {number: at for number, at in there.copied_to(queue.name).items() if at >= low}
        if any(stable <= at < end for at in copied.values()):
            raise Unavailable("a transaction of another lane is open; try again")
        places = {(partition, at) for at in copied.values()}
        records = partition_reader.read_at(connection, queue.name, places, clock=clock) if places else {}
        present = {number: records.get((partition, at)) for number, at in copied.items()}
        gone = [number for number, record in present.items() if not there.is_of(number, record)]
        last = {copied[number]: number for number in gone}  # of those that stood at one offset, by two cuts
        finished = {n for at, n in last.items() if here.was_finished(at, present[n])}
        lost[topic] = sorted(set(gone) - finished)
    return lost


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


def _read_all(found: LostCopies, _partition: int, records: list[Any]) -> bool:
    for record in records:
        found.read(record)
    return False
