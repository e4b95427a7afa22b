"""The in-flight state of one queue partition, computed from its markers. Pure: no I/O, no clock.

The state is a function of the markers in log order, nothing else: an entry is opened by a take and
leaves when its end marker is read, so whoever reads the same markers has the same state.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from kmqpy.markers import INT64_MAX, Marker, Op, Runs

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


class TakenTogether(NamedTuple):
    """Messages in flight that were taken together, as a snapshot has them.

    Bit i of `bits` stands for the message at queue offset `first` + i, bit 0 is set. `taken_at` is the
    markers offset of its take, those of the next offsets stand `stride` apart.
    """

    first: int
    bits: int
    taken_at: int
    stride: int
    since_ms: int
    due_ms: int
    holder: str | None


Row = Entry | TakenTogether
"""A row of a snapshot."""


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

    def row(self) -> TakenTogether:
        """The same for a snapshot; it must not be empty."""
        offset, taken_at = self.first()[:2]
        bits = self.alive >> offset % _BLOCK
        return TakenTogether(offset, bits, taken_at, self.stride, self.since_ms, self.due_ms, self.holder)


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
        self._pinned: tuple[int, int] | None = None  # markers offset, now in ms
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
            self._pinned = (at, self.now_ms)

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
                return self._end_range(marker.runs)
            return self._end(marker.offset)
        if marker.op is Op.TAKE and marker.counts and marker.reason is None:
            due_ms = self._deadline(marker)
            if marker.runs:
                return self._take_range(marker.runs, due_ms, marker.holder, at)
            return self._take(marker.offset, due_ms, marker.holder, at)
        return sum(self._operate_on(offset, marker, at) for offset in marker.offsets())

    def apply_takes(
        self, first: int, count: int, redeliver_after_ms: int, at: int, timestamp_ms: int
    ) -> None:
        """Take in plain start markers of `count` messages that follow each other.

        The markers do so too, from markers offset `at` on, with the same lease and timestamp.
        """
        read_before = min(max(0, self._position - at), count)
        first, at, count = first + read_before, at + read_before, count - read_before
        if not count or not self.observe(at + count - 1, timestamp_ms):
            return
        due_ms = min(self.now_ms + max(0, redeliver_after_ms), INT64_MAX)
        if count < _MIN_RUN or self._has_any(((first, count),)):
            for index in range(count):
                self._take(first + index, due_ms, None, at + index)
            return
        like = Entry(first, at, self.now_ms, due_ms, Hold.HELD)
        for block, mask in _masks(((first, count),)):
            low = _lowest_bit(mask)
            offset = block * _BLOCK + low
            if mask.bit_count() >= _MIN_RUN:
                self._add_run(block, mask, low, at + offset - first, 1, like)
            else:
                for index in range(offset - first, offset - first + mask.bit_count()):
                    self._add(like._replace(offset=first + index, taken_at=at + index))
        self._compact()

    def apply_ends(self, first: int, count: int, at: int, timestamp_ms: int) -> int:
        """Take in end markers, as `apply_takes` takes in starts; returns how many changed the state."""
        read_before = min(max(0, self._position - at), count)
        first, at, count = first + read_before, at + read_before, count - read_before
        if not count or not self.observe(at + count - 1, timestamp_ms):
            return 0
        return self._end(first) if count == 1 else self._end_range(((first, count),))

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
                taken += self._single_out(run, limit - len(taken))
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
        return self._safe()[0]

    def safe_now_ms(self) -> int:
        """The partition's now at the safe offset.

        A successor that begins at the safe offset with this `now_ms` has the same deadlines too.
        With today's `now_ms` every restart would prolong the leases, and a tracker that restarts
        often enough would redeliver nothing; with none, out-of-order timestamps could shorten them.
        """
        return self._safe()[1]

    def _safe(self) -> tuple[int, int]:
        oldest = self.oldest()
        safe = (self._position, self.now_ms) if oldest is None else (oldest.taken_at, oldest.since_ms)
        return safe if self._pinned is None else min(safe, self._pinned)

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

    @property
    def position(self) -> int:
        """The markers offset that is read next."""
        return self._position

    def snapshot(self, max_rows: int) -> tuple[int, int, list[Row]]:
        """What a successor needs to have this same state: markers offset, now in ms, rows to `restore`.

        The rows are what was taken first, at most `max_rows`; the markers offset is that of the first
        take that is not among them. Reading from there repeats markers that the rows know already,
        and that changes nothing: the last operation on a message decides, as it did before.
        """
        everything: Iterable[Row] = itertools.chain(
            self._entries.values(), (run.row() for run in self._runs if run.alive)
        )
        rows = heapq.nsmallest(max_rows + 1, everything, key=lambda row: row.taken_at)
        safe = (self._position, self.now_ms)
        if len(rows) > max_rows:
            left_out = rows.pop()
            safe = (left_out.taken_at, left_out.since_ms)
        if self._pinned is not None:
            safe = min(safe, self._pinned)
        return *safe, rows

    def restore(self, rows: Iterable[Row]) -> None:
        """Begin with the rows of a snapshot; to be called before the first marker is read.

        What was taken from this reader's position on is left out: it is read, and an operation that
        came before its take must not find it.
        """
        for row in sorted(rows, key=lambda row: row.taken_at):
            if row.taken_at >= self._position:
                return
            if isinstance(row, Entry):
                self._add(row)
                continue
            first, bits, taken_at, stride = row.first, row.bits, row.taken_at, row.stride
            if stride:
                bits &= (1 << -((taken_at - self._position) // stride)) - 1
            like = Entry(first, taken_at, row.since_ms, row.due_ms, Hold.HELD, holder=row.holder)
            while bits:
                low = first % _BLOCK
                alive = (bits << low) & ((1 << _BLOCK) - 1)
                if alive:
                    self._add_run(first // _BLOCK, alive, low, taken_at, stride, like)
                first, taken_at = first + _BLOCK - low, taken_at + stride * (_BLOCK - low)
                bits >>= _BLOCK - low

    # --- single messages --------------------------------------------------------------------------

    def _take(self, offset: int, due_ms: int, holder: str | None, at: int) -> int:
        existing = self._forget(offset)
        if existing is not None and existing.hold is Hold.DEAD:
            self._entries[offset] = existing
            return 0
        self._add(Entry(offset, at, self.now_ms, due_ms, Hold.HELD, holder=holder))
        return 1

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

    def _take_range(self, runs: Runs, due_ms: int, holder: str | None, at: int) -> int:
        like = Entry(0, at, self.now_ms, due_ms, Hold.HELD, holder=holder)
        apart: dict[int, int] = {}
        taken = sum(count for _, count in runs)
        for offset in self._singles(runs):
            dead = self._entries[offset].hold is Hold.DEAD
            if dead or offset in self._in_redelivery:
                apart[offset // _BLOCK] = apart.get(offset // _BLOCK, 0) | 1 << offset % _BLOCK
            if dead:
                taken -= 1
            elif offset in self._in_redelivery:
                self._add(like._replace(offset=offset))
            else:
                del self._entries[offset]
        for block, mask in _masks(runs):
            mask &= ~apart.get(block, 0)
            self._end_block(block, mask)
            if mask.bit_count() >= _MIN_RUN:
                self._add_run(block, mask, _lowest_bit(mask), at, 0, like)
            else:
                for bit in _bits(mask):
                    self._add(like._replace(offset=block * _BLOCK + bit))
        self._compact()
        return taken

    def _end_range(self, runs: Runs) -> int:
        singles = self._singles(runs)
        for offset in singles:
            del self._entries[offset]
            self._in_redelivery.discard(offset)
        ended = len(singles)
        if self._in_runs:
            ended += sum(self._end_block(block, mask) for block, mask in _masks(runs))
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

    def _singles(self, runs: Runs) -> list[int]:
        """The offsets of a range that have entries of their own."""
        if len(self._entries) < sum(count for _, count in runs):
            return [offset for offset in self._entries if _covers(runs, offset)]
        everything = itertools.chain.from_iterable(range(first, first + count) for first, count in runs)
        return [offset for offset in everything if offset in self._entries]

    def _has_any(self, runs: Runs) -> bool:
        return bool(self._singles(runs)) or any(
            run.alive & mask for block, mask in _masks(runs) for run in self._blocks.get(block, ())
        )

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

    def _single_out(self, run: _Run, limit: int) -> list[Entry]:
        """Give the first messages of a run entries of their own, which are in redelivery."""
        bits = list(itertools.islice(_bits(run.alive), limit))
        entries = [run.entry(bit) for bit in bits]
        self._clear(run, sum(1 << bit for bit in bits))
        for entry in entries:
            self._entries[entry.offset] = entry
            self._in_redelivery.add(entry.offset)
            heapq.heappush(self._takes, (entry.taken_at, entry.offset))
        return entries

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


def _masks(runs: Runs) -> Iterator[tuple[int, int]]:
    """The blocks of a range of offsets, each with its bits that are in the range."""
    current = bits = 0
    for first, count in runs:
        end = first + count
        while first < end:
            block, low = divmod(first, _BLOCK)
            if block != current:
                if bits:
                    yield current, bits
                current, bits = block, 0
            size = min(_BLOCK - low, end - first)
            bits |= ((1 << size) - 1) << low
            first += size
    if bits:
        yield current, bits


def _covers(runs: Runs, offset: int) -> bool:
    index = bisect.bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < sum(runs[index])


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
