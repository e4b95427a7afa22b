"""The in-flight state of one queue partition, computed from its markers. Pure: no I/O, no clock.

The state is a function of the markers in log order, nothing else: an entry is opened by a take and
leaves when its end marker is read, so whoever reads the same markers has the same state.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from kmqpy.markers import INT64_MAX, Marker, Op

_BLOCK = 1024
"""Messages in a block: what the bits of one run can stand for."""

_MIN_RUN = 16
"""Messages taken together that are worth a run."""

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


class _Run:
    """Messages of one block that were taken together: a bit for each, no object.

    alive     bit i: the message at block * _BLOCK + i is in flight
    taken_at  markers offset of the take of bit `base`; the takes of the following bits stand
              `stride` apart, 0 where one range marker took them all
    """

    __slots__ = ("alive", "base", "block", "due_ms", "holder", "since_ms", "stride", "taken_at")

    def __init__(
        self,
        block: int,
        alive: int,
        base: int,
        taken_at: int,
        stride: int,
        since_ms: int,
        due_ms: int,
        holder: str | None,
    ) -> None:
        self.block = block
        self.alive = alive
        self.base = base
        self.taken_at = taken_at
        self.stride = stride
        self.since_ms = since_ms
        self.due_ms = due_ms
        self.holder = holder

    def entry(self, bit: int) -> Entry:
        """The message of `bit` as an entry of its own."""
        return Entry(
            self.block * _BLOCK + bit,
            self.taken_at + self.stride * (bit - self.base),
            self.since_ms,
            self.due_ms,
            Hold.HELD,
            holder=self.holder,
        )

    def first(self) -> Entry:
        """The entry with the lowest offset; there must be one."""
        return self.entry(_lowest_bit(self.alive))


class InFlight:
    """The messages of one partition that were taken and not ended.

    Messages that were taken together are kept as runs of bits, so that a million of them take some
    hundred kB; what differs from its neighbours has an entry of its own.

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
        self._blocks: dict[int, list[_Run]] = {}
        self._in_runs = 0
        # All four are cleaned lazily, and compacted when stale items outnumber live ones: amortised
        # O(1), and memory follows what is in flight even behind one message that is held for hours.
        self._takes: list[tuple[int, int]] = []
        self._due: list[tuple[int, int]] = []
        self._runs: deque[_Run] = deque()
        self._runs_due: list[tuple[int, int, _Run]] = []
        self._runs_made = 0
        self._live_runs = 0
        self._in_redelivery: set[int] = set()
        # Single takes that follow each other densely become a run once there are enough of them.
        self._streak = 0
        self._growing: _Run | None = None
        self._next_offset = self._next_at = 0
        self._last_take: Entry | None = None

    def __len__(self) -> int:
        return len(self._entries) + self._in_runs

    def __contains__(self, offset: int) -> bool:
        return offset in self._entries or self._run_of(offset) is not None

    def __iter__(self) -> Iterator[Entry]:
        yield from self._entries.values()
        for runs in self._blocks.values():
            for run in runs:
                for bit in _bits(run.alive):
                    yield run.entry(bit)

    def get(self, offset: int) -> Entry | None:
        """The entry of a queue offset, or None when it is not in flight."""
        entry = self._entries.get(offset)
        if entry is None and (run := self._run_of(offset)) is not None:
            entry = run.entry(offset % _BLOCK)
        return entry

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

    def apply(self, marker: Marker, at: int, timestamp_ms: int) -> int:
        """Take in the marker read at markers offset `at`.

        Returns of how many messages it changed the state: 0 when it was read before, or came too
        late, for messages that are not in flight any more or are to be dead-lettered.
        """
        if not self.observe(at, timestamp_ms):
            return 0
        if marker.op is Op.END:
            if marker.runs:
                return sum(self._end_range(first, count) for first, count in marker.runs)
            return self._end(marker.offset)
        if marker.op is Op.TAKE and marker.counts and marker.reason is None:
            due_ms = self._deadline(marker)
            if marker.runs:
                return sum(
                    self._take_range(first, count, due_ms, marker.holder, at) for first, count in marker.runs
                )
            return self._take(marker.offset, due_ms, marker.holder, at)
        return sum(self._operate_on(offset, marker, at) for offset in marker.offsets())

    def take_due(self, limit: int) -> list[Entry]:
        """Up to `limit` entries whose time is up, the longest overdue first.

        They count as in redelivery until their end marker is read, or until `retry` or `retry_all`
        gives them back; they are not returned again before that.
        """
        taken: list[Entry] = []
        while len(taken) < limit:
            single, run = self._next_single(), self._next_run()
            if single is not None and (run is None or single[0] <= run.due_ms):
                if single[0] > self.now_ms:
                    break
                offset = heapq.heappop(self._due)[1]
                self._in_redelivery.add(offset)
                taken.append(self._entries[offset])
            elif run is not None and run.due_ms <= self.now_ms:
                for bit in itertools.islice(_bits(run.alive), limit - len(taken)):
                    entry = self._single_out(run, bit)
                    self._in_redelivery.add(entry.offset)
                    taken.append(entry)
            else:
                break
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
        single, run = self._next_single(), self._next_run()
        if run is None:
            return None if single is None else single[0]
        return run.due_ms if single is None else min(single[0], run.due_ms)

    def safe_offset(self) -> int:
        """The markers offset from which a successor must read to have this same state."""
        oldest = self.oldest()
        safe = self._position if oldest is None else oldest.taken_at
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
        while self._takes and not self._is_open(*self._takes[0]):
            heapq.heappop(self._takes)
        while self._runs and not self._runs[0].alive:
            self._runs.popleft()
        single = self._entries[self._takes[0][1]] if self._takes else None
        if not self._runs:
            return single
        first = self._runs[0].first()
        return first if single is None or first.taken_at < single.taken_at else single

    # --- single messages --------------------------------------------------------------------------

    def _take(self, offset: int, due_ms: int, holder: str | None, at: int) -> int:
        # The hot path: the next of a batch of takes, in the same ms, of messages that follow each other.
        run = self._growing
        if (
            run is not None
            and offset == self._next_offset
            and at == self._next_at
            and due_ms == run.due_ms
            and self.now_ms == run.since_ms
            and holder == run.holder
            and run.alive
            and offset // _BLOCK == run.block
            and offset not in self._entries
            and (len(self._blocks[run.block]) == 1 or self._run_of(offset) is None)
        ):
            run.alive |= 1 << offset % _BLOCK
            self._in_runs += 1
            self._next_offset, self._next_at = offset + 1, at + 1
            return 1
        self._growing = None
        existing = self._forget(offset)
        if existing is not None and existing.hold is Hold.DEAD:
            self._entries[offset] = existing
            return 0
        entry = Entry(offset, at, self.now_ms, due_ms, Hold.HELD, holder=holder)
        last, self._last_take = self._last_take, entry
        follows = last is not None and existing is None and _follows(entry, last)
        self._streak = self._streak + 1 if follows else 1
        self._add(entry)
        if self._streak == _MIN_RUN:
            self._gather(entry)
            self._streak = 0
        return 1

    def _gather(self, last: Entry) -> None:
        """Make a run of the last takes, if they are all still as they were taken."""
        offsets = range(last.offset - _MIN_RUN + 1, last.offset + 1)
        if offsets[0] // _BLOCK != last.offset // _BLOCK:
            return
        base = last.taken_at - _MIN_RUN + 1
        for index, offset in enumerate(offsets):
            expected = last._replace(offset=offset, taken_at=base + index)
            if self._entries.get(offset) != expected or offset in self._in_redelivery:
                return
        for offset in offsets:
            del self._entries[offset]
        low = offsets[0] % _BLOCK
        alive = ((1 << _MIN_RUN) - 1) << low
        self._growing = self._add_run(last.offset // _BLOCK, alive, low, base, 1, last)
        self._next_offset, self._next_at = last.offset + 1, last.taken_at + 1
        self._compact()

    def _operate_on(self, offset: int, marker: Marker, at: int) -> int:
        entry = self.get(offset)
        if entry is not None and entry.hold is Hold.DEAD:
            return 0
        opens = marker.op in (Op.TAKE, Op.DELAY)
        if entry is None and not (opens or self.missed_markers):
            return 0
        if marker.op is Op.EXTEND and entry is not None and entry.hold is not Hold.HELD:
            return 0  # nobody holds it any more, so there is no lease to extend
        hold, due_ms = _HOLDS[marker.op], self._deadline(marker)
        has_own = offset in self._entries
        self._forget(offset)
        if entry is None or opens:
            entry = Entry(offset, at, self.now_ms, due_ms, hold, marker.counts, marker.reason, marker.holder)
        else:
            entry = entry._replace(due_ms=due_ms, hold=hold, counts=marker.counts, reason=marker.reason)
        self._add(entry, is_new=opens or not has_own)
        return 1

    def _add(self, entry: Entry, *, is_new: bool = True) -> None:
        self._entries[entry.offset] = entry
        if is_new:
            heapq.heappush(self._takes, (entry.taken_at, entry.offset))
        heapq.heappush(self._due, (entry.due_ms, entry.offset))
        self._compact()

    def _forget(self, offset: int) -> Entry | None:
        """Take a message out of the state; it stays in redelivery if it was."""
        entry = self._entries.pop(offset, None)
        if entry is None and (run := self._run_of(offset)) is not None:
            entry = run.entry(offset % _BLOCK)
            self._clear(run, 1 << offset % _BLOCK)
        return entry

    def _end(self, offset: int) -> int:
        if offset in self._entries:
            del self._entries[offset]
            self._in_redelivery.discard(offset)
            self._compact()
            return 1
        run = self._run_of(offset)
        if run is None:
            return 0
        self._clear(run, 1 << offset % _BLOCK)
        return 1

    # --- runs -------------------------------------------------------------------------------------

    def _take_range(self, first: int, count: int, due_ms: int, holder: str | None, at: int) -> int:
        self._growing = self._last_take = None
        like = Entry(first, at, self.now_ms, due_ms, Hold.HELD, holder=holder)
        apart: dict[int, int] = {}
        taken = count
        for offset in self._singles(first, count):
            dead = self._entries[offset].hold is Hold.DEAD
            if dead or offset in self._in_redelivery:
                apart[offset // _BLOCK] = apart.get(offset // _BLOCK, 0) | 1 << offset % _BLOCK
            if dead:
                taken -= 1
            elif offset in self._in_redelivery:
                self._add(like._replace(offset=offset))
            else:
                del self._entries[offset]
        for block, mask in _masks(first, count):
            mask &= ~apart.get(block, 0)
            self._end_block(block, mask)
            if mask.bit_count() >= _MIN_RUN:
                self._add_run(block, mask, _lowest_bit(mask), at, 0, like)
            else:
                for bit in _bits(mask):
                    self._add(like._replace(offset=block * _BLOCK + bit))
        self._compact()
        return taken

    def _end_range(self, first: int, count: int) -> int:
        ended = 0
        for offset in self._singles(first, count):
            del self._entries[offset]
            self._in_redelivery.discard(offset)
            ended += 1
        if self._in_runs:
            for block, mask in _masks(first, count):
                ended += self._end_block(block, mask)
        self._compact()
        return ended

    def _end_block(self, block: int, mask: int) -> int:
        ended = 0
        for run in list(self._blocks.get(block, ())):
            hit = run.alive & mask
            if hit:
                ended += hit.bit_count()
                self._clear(run, hit)
        return ended

    def _singles(self, first: int, count: int) -> list[int]:
        """The offsets of a range that have entries of their own."""
        if not self._entries:
            return []
        if len(self._entries) < count:
            return [offset for offset in self._entries if first <= offset < first + count]
        return [offset for offset in range(first, first + count) if offset in self._entries]

    def _run_of(self, offset: int) -> _Run | None:
        bit = offset % _BLOCK
        for run in self._blocks.get(offset // _BLOCK, ()):
            if run.alive >> bit & 1:
                return run
        return None

    def _add_run(self, block: int, alive: int, base: int, taken_at: int, stride: int, like: Entry) -> _Run:
        run = _Run(block, alive, base, taken_at, stride, like.since_ms, like.due_ms, like.holder)
        self._blocks.setdefault(block, []).append(run)
        self._in_runs += alive.bit_count()
        self._live_runs += 1
        self._runs_made += 1
        self._runs.append(run)
        heapq.heappush(self._runs_due, (run.due_ms, self._runs_made, run))
        return run

    def _clear(self, run: _Run, bits: int) -> None:
        """Take messages out of a run, which has them all."""
        run.alive ^= bits
        self._in_runs -= bits.bit_count()
        if not run.alive:
            self._live_runs -= 1
            runs = self._blocks[run.block]
            runs.remove(run)
            if not runs:
                del self._blocks[run.block]
            self._compact()

    def _single_out(self, run: _Run, bit: int) -> Entry:
        """Give a message of a run an entry of its own, which does not wait for its time."""
        entry = run.entry(bit)
        self._clear(run, 1 << bit)
        self._entries[entry.offset] = entry
        heapq.heappush(self._takes, (entry.taken_at, entry.offset))
        return entry

    # --- the lazily cleaned structures --------------------------------------------------------------

    def _next_single(self) -> tuple[int, int] | None:
        while self._due:
            if self._is_waiting(*self._due[0]):
                return self._due[0]
            heapq.heappop(self._due)
        return None

    def _next_run(self) -> _Run | None:
        while self._runs_due:
            run = self._runs_due[0][2]
            if run.alive:
                return run
            heapq.heappop(self._runs_due)
        return None

    def _deadline(self, marker: Marker) -> int:
        # now_ms is already at least this marker's timestamp, so a lease is never shorter than asked.
        after_ms = 0 if marker.op is Op.DEAD_LETTER else max(0, marker.redeliver_after_ms)
        return min(self.now_ms + after_ms, INT64_MAX)

    def _compact(self) -> None:
        bound = 2 * len(self._entries) + _SLACK
        if len(self._takes) > bound:
            self._takes = [take for take in self._takes if self._is_open(*take)]
            heapq.heapify(self._takes)
        if len(self._due) > bound:
            self._due = [
                (entry.due_ms, entry.offset)
                for entry in self._entries.values()
                if entry.offset not in self._in_redelivery
            ]
            heapq.heapify(self._due)
        bound = 2 * self._live_runs + _SLACK
        if len(self._runs) > bound:
            self._runs = deque(run for run in self._runs if run.alive)
        if len(self._runs_due) > bound:
            self._runs_due = [item for item in self._runs_due if item[2].alive]
            heapq.heapify(self._runs_due)

    def _is_open(self, at: int, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.taken_at == at

    def _is_waiting(self, due_ms: int, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.due_ms == due_ms and offset not in self._in_redelivery


def _follows(entry: Entry, last: Entry) -> bool:
    """Whether two takes could stand in one run."""
    return (
        entry.offset == last.offset + 1
        and entry.taken_at == last.taken_at + 1
        and entry.due_ms == last.due_ms
        and entry.since_ms == last.since_ms
        and entry.holder == last.holder
    )


def _masks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """The blocks of a range of offsets, each with the bits that are in the range."""
    end = first + count
    while first < end:
        block, low = divmod(first, _BLOCK)
        size = min(_BLOCK - low, end - first)
        yield block, ((1 << size) - 1) << low
        first += size


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def replay(markers: Iterable[tuple[Marker, int, int]], *, state: InFlight | None = None) -> InFlight:
    """The state after these (marker, markers offset, timestamp in ms), in log order."""
    state = InFlight() if state is None else state
    for marker, at, timestamp_ms in markers:
        state.apply(marker, at, timestamp_ms)
    return state
