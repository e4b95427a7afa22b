"""Finds acknowledgements and other operations of earlier consumers that concern copies of a message.

A copy here is the record with which a tracker redelivers a message. The lease of a message may end while its
consumer is still at work. A tracker copies the message then, and the consumer acknowledges the original when
the copy waits already. The client that takes the copy finds this late acknowledgement in the markers and
does not hand the copy out (rules R32 and R33 of docs/rules.md). A client that has handed out the copy already
finds a late acknowledgement when it extends the lease. A tracker looks for late acknowledgements before a
copy becomes a dead letter. Late nacks, extensions and dead-letter requests apply to a copy as well, but only
before a client hands it out.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.codec import Op, topic_tag
from kmqpy.kafka.markers.late_operations import CopyHeaders, LateOperations, read_copy_headers
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics

_log = logging.getLogger(__name__)

_MAX_READ_S = 2.0
"""LateAckCheck stops reading markers in one call after this many seconds, even if Kafka sends nothing. Copies
whose markers it has not read to the end count as unread. LateAckCheck keeps what it has read for the next
call."""
_MIN_BATCH_S = 0.1
"""examine() processes each batch of markers from Kafka for at least this many seconds, even if the caller's
time limit has passed, so that repeated calls make progress."""
_MAX_GAP_MARKERS = 50_000
"""If a copy's markers begin more than this many markers after the end of the known stretch, LateAckCheck
does not read the markers between: it begins a new stretch where the copy's markers begin."""
_MAX_KNOWN_MARKERS = 1_000_000
"""If the known stretch has more markers than this, and a copy needs only markers of its newer half,
LateAckCheck begins a new stretch where the copy's markers begin, so that its memory stays bounded."""

_IDS_KNOWN_S = 1.0
"""For so many seconds the topics of a queue's other lanes count as the same. A lane that is removed and added
again is empty for longer than that."""

_Part = tuple[str, int]
"""A lane, by the name of its topic, and a partition."""
Copies = Mapping[int, Mapping[int, CopyHeaders]]
"""By partition, for the number of each copy: what its headers say."""


@dataclass(slots=True)
class CheckedCopies:
    """The copies that LateAckCheck.examine() tells its caller not to hand out, each in one field.

    acknowledged  consumers have acknowledged these copies, or messages of which they are copies
    rejected      copies that an earlier consumer wants to have dead-lettered, and the reason that it gave
    postponed     copies that must wait, and for how many ms: what remains of the longest lease or delay that
                  an earlier consumer asked for
    unread        copies whose markers could not be read to the end in time, so nobody knows
    """

    acknowledged: list[Place] = field(default_factory=list)
    rejected: dict[Place, str | None] = field(default_factory=dict)
    postponed: dict[Place, int] = field(default_factory=dict)
    unread: list[Place] = field(default_factory=list)

    def places(self) -> set[Place]:
        """The places of the copies in all four fields."""
        return {*self.acknowledged, *self.rejected, *self.postponed, *self.unread}


class LateAckCheck:
    """Reads the markers of one queue that decide whether copies may be handed out; for use by any thread.

    For each partition, a LateAckCheck caches the late operations of one stretch of the markers, the *known*
    stretch, so that each call of examine() reads on where the call before it stopped. When reading on would
    cost too much (see `_should_continue`), it begins a new stretch. It keeps the stretch before, the *former*
    one, for copies that need that one, and drops older stretches to save memory.

    A copy of a message of another lane of the queue needs the markers of that lane, too. Positions in the
    logs of two lanes don't compare, so each is read to the end that it has when the copy's start marker is
    written (rule R46).

    `topic_id` returns the id of the queue topic; forget() is to be called when that has changed.
    """

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, clock: Clock, topic_id: Callable[[], str]
    ) -> None:
        self._queue = queue
        self._topic_id = topic_id
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._known: dict[_Part, LateOperations] = {}
        self._former: dict[_Part, LateOperations] = {}
        """Former stretches; one changes places with the known one when copies need it."""
        self._unfinished: frozenset[_Part] = frozenset()
        """Partitions whose last reading stopped before the end of the log."""
        # Uncommitted: the transaction that made a copy is committed, and an open one must not hold us up.
        self._readers = {
            lane: partition_reader.RepeatedReader(
                connection, markers, uncommitted=True, timeout_s=_MAX_READ_S, clock=clock
            )
            for lane, markers in queue.lane_markers.items()
        }
        self._connection = connection
        self._topics: Topics | None = None
        self._lane_ids: dict[str, str] = {}
        self._ids_until = -math.inf

    def copies_among(self, records: Sequence[Any], place_of: Callable[[Any], Place]) -> Copies:
        """Return which of these records of the queue topic are copies by trackers, going by their headers.

        `place_of` returns partition and number of a record.
        """
        found: dict[int, dict[int, CopyHeaders]] = {}
        for record, headers in zip(records, headers_of_each(records), strict=True):
            if not headers:
                continue
            readable = read_headers(record)[0] if headers is UNREADABLE else headers
            copy = self.copy_headers(readable, record.partition())
            if copy is not None:
                partition, number = place_of(record)
                found.setdefault(partition, {})[number] = copy
        return found

    def copy_headers(self, headers: Sequence[tuple[str, bytes | None]], partition: int) -> CopyHeaders | None:
        """Return what the headers of a copy say; None for a message that is no copy."""
        return read_copy_headers(headers, self._queue.name, partition, self._readers.keys())

    def examine(self, copies: Copies, within_s: float) -> CheckedCopies:
        """Find the copies that must not be handed out; called when their start markers are written.

        within_s  after this time, or 2 s if that is less, copies whose markers are not read to the end count
                  as unread. examine() takes longer while Kafka does not answer

        If retention has deleted some of the markers, the markers that are left decide.
        """
        checked = CheckedCopies()
        until = self._clock.monotonic() + min(within_s, _MAX_READ_S)
        if not self._acquire_lock(until):
            checked.unread += [
                (partition, offset) for partition, wanted in copies.items() for offset in wanted
            ]
            return checked
        try:
            starts = _starts(copies, self._queue.name)
            unknown = self._ask_lane_ids(starts)
            known = {
                part: self._known_from(part, planned_at)
                for part, planned_at in starts.items()
                if self._is_there(part[0])
            }
            # Always to the end of the log: the start markers of all these copies are written.
            unread = self._read(known, until)
            for partition, wanted in copies.items():
                for offset, headers in wanted.items():
                    lanes = self._lanes_of(known, partition, headers)
                    if lanes[0].acknowledged(offset, headers, lanes[1:]):
                        checked.acknowledged.append((partition, offset))
                    elif any(
                        lane in unknown or (lane, partition) in unread
                        for lane in headers.starts(self._queue.name)
                    ):
                        checked.unread.append((partition, offset))
                    else:
                        self._apply_operations(lanes, (partition, offset), headers, checked)
        finally:
            self._lock.release()
        return checked

    def find_acknowledged(self, copies: Copies, within_s: float) -> list[Place]:
        """Return which of these copies, handed out before, an earlier consumer has acknowledged by now.

        Stops reading as examine() does; the markers that are read by then decide. If a partition has a known
        stretch, this call reads on there, even if the stretch begins after the markers that a copy needs.
        """
        until = self._clock.monotonic() + min(within_s, _MAX_READ_S)
        if not self._acquire_lock(until):
            return []
        try:
            starts = _starts(copies, self._queue.name)
            self._ask_lane_ids(starts)
            known = {
                part: self._known.get(part) or self._known_from(part, planned_at)
                for part, planned_at in starts.items()
                if self._is_there(part[0])
            }
            self._read(known, until)
            found: list[Place] = []
            for partition, wanted in copies.items():
                for offset, headers in wanted.items():
                    lanes = self._lanes_of(known, partition, headers)
                    if lanes[0].acknowledged(offset, headers, lanes[1:]):
                        found.append((partition, offset))
            return found
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Forget all markers; to be called when the client goes on with recreated topics."""
        with self._lock:
            self._known.clear()
            self._former.clear()
            self._unfinished = frozenset()

    def close(self) -> None:
        """Release the connection. Later calls read nothing, and all copies count as unread."""
        with self._lock:
            self._closed = True
            for reader in self._readers.values():
                reader.close()

    def _acquire_lock(self, until: float) -> bool:
        """Acquire the lock; False if it is not free before the monotonic time `until`, or after close()."""
        if not self._lock.acquire(timeout=max(0.0, until - self._clock.monotonic())):
            return False
        if self._closed:
            self._lock.release()
        return not self._closed

    def _lanes_of(
        self, known: Mapping[_Part, LateOperations], partition: int, headers: CopyHeaders
    ) -> list[LateOperations]:
        """What is known of the lanes that a copy names, its own first."""
        name = self._queue.name
        own = known.get((name, partition)) or self._new(name, partition, 0)
        return [own, *(known[lane, partition] for lane, _ in headers.elsewhere if (lane, partition) in known)]

    def _is_there(self, lane: str) -> bool:
        """True unless this is another lane, and its topic is gone: then nothing can be read of it."""
        return lane == self._queue.name or lane in self._lane_ids

    def _ask_lane_ids(self, starts: Iterable[_Part]) -> frozenset[str]:
        """Ask Kafka for the topic ids of the other lanes among these; returns those of which it is silent.

        Markers that were read of a lane whose topic was recreated are forgotten (rule R24).
        """
        others = frozenset(lane for lane, _ in starts) - {self._queue.name}
        if not others or self._clock.monotonic() < self._ids_until:
            return frozenset()
        if self._topics is None:
            self._topics = Topics(self._connection, _MAX_READ_S)
        try:
            found = self._topics.describe([lane for lane in self._readers if lane != self._queue.name])
        except KmqError as error:
            _log.warning(
                "late acknowledgements can't be looked for in other lanes now",
                extra={"queue": self._queue.name, "error": str(error)},
            )
            return others
        ids = {lane: topic.topic_id for lane, topic in found.items() if lane in self._readers}
        anew = {lane for lane, topic_id in self._lane_ids.items() if ids.get(lane) != topic_id}
        for stretches in (self._known, self._former):
            for part in [part for part in stretches if part[0] in anew]:
                del stretches[part]
        self._lane_ids = ids
        self._ids_until = self._clock.monotonic() + _IDS_KNOWN_S
        return frozenset()

    def _apply_operations(
        self, lanes: Sequence[LateOperations], place: Place, headers: CopyHeaders, checked: CheckedCopies
    ) -> None:
        """Note in `checked` whether late dead-letter requests, extensions or nacks apply to this copy."""
        left_ms = 0
        now_ms = max(known.now_ms for known in lanes)
        for operation in lanes[0].operations(place[1], headers, lanes[1:]):
            if operation.op is Op.DEAD_LETTER:
                checked.rejected[place] = operation.reason
                return
            limit_ms = self._queue.max_lease_ms if operation.op is Op.EXTEND else self._queue.max_delay_ms
            left_ms = max(left_ms, operation.left_ms(now_ms, limit_ms))
        if left_ms:
            checked.postponed[place] = left_ms

    def _known_from(self, part: _Part, planned_at: int) -> LateOperations:
        """Choose the stretch of markers to read on, for copies that need markers from `planned_at` on."""
        known = self._known.get(part)
        if known is not None and known.begin <= planned_at and part in self._unfinished:
            return known  # beginning anew would lose what was read for older copies
        for found in (known, self._former.get(part)):
            if found is not None and _should_continue(found, planned_at):
                break
        else:
            found = self._new(*part, planned_at)
        if found is not known:
            if known is not None:
                self._former[part] = known
            self._known[part] = found
        return found

    def _new(self, lane: str, partition: int, begin: int) -> LateOperations:
        topic_id = self._topic_id() if lane == self._queue.name else self._lane_ids[lane]
        return LateOperations(lane, partition, begin, topic_tag(topic_id), self._readers.keys())

    def _read(self, known: Mapping[_Part, LateOperations], until: float) -> frozenset[_Part]:
        """Read the markers of these partitions to the end; returns the partitions that are not read to it."""
        left: set[_Part] = set()
        for lane, reader in self._readers.items():
            here = {partition: one for (name, partition), one in known.items() if name == lane}
            if not here:
                continue
            starts = {partition: one.end for partition, one in here.items()}
            stopped: set[int] = set()
            try:
                reached = reader.scan(starts, partial(self._visit, here, until, stopped))
                stopped.update(partition for partition, place in reached.items() if not place.done)
            except KmqError as error:
                _log.warning(
                    "late acknowledgements can't be looked for now",
                    extra={"queue": self._queue.name, "error": str(error)},
                )
                stopped.update(starts)
            left.update((lane, partition) for partition in stopped)
        self._unfinished = self._unfinished - known.keys() | left
        return frozenset(left)

    def _visit(
        self,
        known: Mapping[int, LateOperations],
        until: float,
        stopped: set[int],
        partition: int,
        records: list[Any],
    ) -> bool:
        """Take in records of a partition; returns True when the time is over.

        Checks the time between markers, too, because a forged claim (the record that names the messages of a
        tracker's transaction) of a megabyte takes a second.
        """
        stop_at = max(until, self._clock.monotonic() + _MIN_BATCH_S)
        if not known[partition].read(records, lambda: self._clock.monotonic() > stop_at):
            stopped.add(partition)
        return self._clock.monotonic() > until


def _starts(copies: Copies, queue: str) -> dict[_Part, int]:
    """By lane and partition, the markers offset from which to look for late operations on these copies."""
    starts: dict[_Part, int] = {}
    for partition, wanted in copies.items():
        for copy in wanted.values():
            for lane, planned_at in copy.starts(queue).items():
                before = starts.get((lane, partition), planned_at)
                starts[lane, partition] = min(before, planned_at)
    return starts


def _should_continue(known: LateOperations, planned_at: int) -> bool:
    """Return True if this stretch can be read on, and that costs less than to begin a new one.

    The caller needs the markers from `planned_at` on.
    """
    if not known.begin <= planned_at <= known.end + _MAX_GAP_MARKERS:
        return False
    middle = (known.begin + known.end) // 2
    return known.end - known.begin <= _MAX_KNOWN_MARKERS or planned_at <= middle
