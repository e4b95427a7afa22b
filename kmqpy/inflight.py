"""The in-flight state of one queue partition, computed from its markers. Pure: no I/O, no clock.

The state is a function of the markers in log order, nothing else: an entry is opened by a take and
leaves when its end marker is read, so whoever reads the same markers has the same state.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from kmqpy.markers import INT64_MAX, Marker, Op

_SLACK = 1024
"""Stale items that a lazily cleaned structure may hold beside as many live ones."""


class Hold(StrEnum):
    """Why a message is in flight."""

    HELD = "held"
    """A client has it, until its lease ends."""
    DELAYED = "delayed"
    """It is not yet time to deliver it."""
    RELEASED = "released"
    """Given back by a nack; waits for its redelivery."""
    DEAD = "dead"
    """To be dead-lettered now. Sticky: no later marker but the end marker changes it."""


_HOLDS = {
    Op.TAKE: Hold.HELD,
    Op.DELAY: Hold.DELAYED,
    Op.EXTEND: Hold.HELD,
    Op.NACK: Hold.RELEASED,
    Op.DEAD_LETTER: Hold.DEAD,
}


class Entry(NamedTuple):
    """One message in flight.

    offset      its offset in the queue topic
    taken_at    offset of its take in the markers topic
    since_ms    the partition's now when it was taken
    due_ms      when it is to be redelivered, in the partition's time
    counts      whether that redelivery counts as an attempt
    """

    offset: int
    taken_at: int
    since_ms: int
    due_ms: int
    hold: Hold
    counts: bool = True
    reason: str | None = None
    holder: str | None = None


class InFlight:
    """The messages of one partition that were taken and not ended.

    `now_ms` is the largest timestamp read so far: the partition's clock, which never goes back.
    `missed_markers`: reading began above the stored safe offset, so the take of an operation may be
    among what was missed; then any operation opens an entry (rule R2). A successor that begins at
    the safe offset of such a state needs `missed_markers` too, or it drops those entries.
    `position`: the markers offset at which reading begins.
    """

    def __init__(self, *, now_ms: int = 0, position: int = 0, missed_markers: bool = False) -> None:
        self.now_ms = now_ms
        self.missed_markers = missed_markers
        self._position = position
        self._pinned: int | None = None
        self._entries: dict[int, Entry] = {}
        # Both are cleaned lazily, and compacted when stale items outnumber live ones: amortised O(1),
        # and memory follows what is in flight even behind one message that is held for hours.
        self._takes: deque[tuple[int, int]] = deque()
        self._due: list[tuple[int, int]] = []
        self._in_redelivery: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, offset: int) -> bool:
        return offset in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, offset: int) -> Entry | None:
        """The entry of a queue offset, or None when it is not in flight."""
        return self._entries.get(offset)

    def observe(self, at: int, timestamp_ms: int) -> bool:
        """Note that the record at markers offset `at` was read; False when it was read before."""
        if at < self._position:
            return False
        self._position = at + 1
        if timestamp_ms > self.now_ms:
            self.now_ms = timestamp_ms
        return True

    def pin(self, at: int) -> None:
        """Keep the safe offset from passing a marker that only a newer version understands (R3)."""
        if self._pinned is None:
            self._pinned = at

    @property
    def pinned(self) -> bool:
        """Whether a marker was seen that only a newer version understands."""
        return self._pinned is not None

    def apply(self, marker: Marker, at: int, timestamp_ms: int) -> bool:
        """Take in the marker read at markers offset `at`.

        Returns False when it changed nothing: it was read before, or it came too late, for a
        message that is not in flight any more or is to be dead-lettered.
        """
        if not self.observe(at, timestamp_ms):
            return False
        offset = marker.offset
        entry = self._entries.get(offset)
        if marker.op is Op.END:
            if entry is None:
                return False
            del self._entries[offset]
            self._in_redelivery.discard(offset)
            self._compact()
            return True
        if entry is not None and entry.hold is Hold.DEAD:
            return False
        opens = marker.op in (Op.TAKE, Op.DELAY)
        if entry is None and not (opens or self.missed_markers):
            return False
        if marker.op is Op.EXTEND and entry is not None and entry.hold is not Hold.HELD:
            return False  # nobody holds it any more, so there is no lease to extend
        due_ms = self._deadline(marker)
        if entry is None or opens:
            self._entries[offset] = Entry(
                offset,
                at,
                self.now_ms,
                due_ms,
                _HOLDS[marker.op],
                marker.counts,
                marker.reason,
                marker.holder,
            )
            self._takes.append((at, offset))
        else:
            self._entries[offset] = entry._replace(
                due_ms=due_ms, hold=_HOLDS[marker.op], counts=marker.counts, reason=marker.reason
            )
        heapq.heappush(self._due, (due_ms, offset))
        self._compact()
        return True

    def take_due(self, limit: int) -> list[Entry]:
        """Up to `limit` entries whose time is up, the longest overdue first.

        They count as in redelivery until their end marker is read, or until `retry` or `retry_all`
        gives them back; they are not returned again before that.
        """
        taken: list[Entry] = []
        while len(taken) < limit:
            due_ms = self.next_due_ms()
            if due_ms is None or due_ms > self.now_ms:
                break
            offset = heapq.heappop(self._due)[1]
            self._in_redelivery.add(offset)
            taken.append(self._entries[offset])
        return taken

    def retry(self, offset: int, delay_ms: int) -> None:
        """Redelivery of `offset` failed: it is due again `delay_ms` from now.

        Later where a marker that was read meanwhile asked for that.
        """
        if offset not in self._in_redelivery:
            return
        self._in_redelivery.discard(offset)
        entry = self._entries[offset]
        due_ms = max(entry.due_ms, min(self.now_ms + delay_ms, INT64_MAX))
        self._entries[offset] = entry._replace(due_ms=due_ms)
        heapq.heappush(self._due, (due_ms, offset))

    def retry_all(self) -> None:
        """Whatever is in redelivery is due again now."""
        for offset in list(self._in_redelivery):
            self.retry(offset, 0)

    @property
    def in_redelivery(self) -> int:
        """How many entries `take_due` has handed out that are neither ended nor given back."""
        return len(self._in_redelivery)

    def next_due_ms(self) -> int | None:
        """When the next entry is due, in the partition's time; None when nothing is waiting."""
        while self._due:
            due_ms, offset = self._due[0]
            if self._is_waiting(due_ms, offset):
                return due_ms
            heapq.heappop(self._due)
        return None

    def safe_offset(self) -> int:
        """The markers offset from which a successor must read to have this same state."""
        while self._takes and not self._is_open(*self._takes[0]):
            self._takes.popleft()
        safe = self._takes[0][0] if self._takes else self._position
        return safe if self._pinned is None else min(safe, self._pinned)

    def safe_now_ms(self) -> int:
        """The partition's now when the oldest entry was taken.

        A successor that begins at the safe offset with this `now_ms` has the same deadlines too.
        With today's `now_ms` every restart would prolong the leases, and a tracker that restarts
        often enough would redeliver nothing; with none, out-of-order timestamps could shorten them.
        """
        oldest = self.oldest()
        return self.now_ms if oldest is None else oldest.since_ms

    def oldest(self) -> Entry | None:
        """The entry whose take is the oldest, or None."""
        self.safe_offset()
        return self._entries[self._takes[0][1]] if self._takes else None

    def _deadline(self, marker: Marker) -> int:
        # now_ms is already at least this marker's timestamp, so a lease is never shorter than asked.
        after_ms = 0 if marker.op is Op.DEAD_LETTER else max(0, marker.redeliver_after_ms)
        return min(self.now_ms + after_ms, INT64_MAX)

    def _compact(self) -> None:
        bound = 2 * len(self._entries) + _SLACK
        if len(self._takes) > bound:
            self._takes = deque(take for take in self._takes if self._is_open(*take))
        if len(self._due) > bound:
            self._due = [
                (entry.due_ms, entry.offset)
                for entry in self._entries.values()
                if entry.offset not in self._in_redelivery
            ]
            heapq.heapify(self._due)

    def _is_open(self, at: int, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.taken_at == at

    def _is_waiting(self, due_ms: int, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.due_ms == due_ms and offset not in self._in_redelivery


def replay(markers: Iterable[tuple[Marker, int, int]], *, state: InFlight | None = None) -> InFlight:
    """The state after these (marker, markers offset, timestamp in ms), in log order."""
    state = InFlight() if state is None else state
    for marker, at, timestamp_ms in markers:
        state.apply(marker, at, timestamp_ms)
    return state
