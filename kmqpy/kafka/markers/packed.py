"""Stores the messages in flight of one partition in little memory. Pure: no I/O, no clock.

PackedEntries finds entries (messages in flight) by queue offset, by the markers offset of their take, and by
deadline. It does not know what markers mean; `kmqpy.kafka.markers.inflight` does.

Entries are stored in groups (see `kmqpy.kafka.markers.entry_groups`), in the order in which they were added.
This is nearly the order of their takes and, among entries with the same length of lease, of their deadlines.
So a heap of groups does the work of a much larger heap of entries.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kmqpy.kafka.markers import entry_groups
from kmqpy.kafka.markers.codec import Runs
from kmqpy.kafka.markers.entry import Entry, EntryState, SnapshotRow, TakenRun
from kmqpy.kafka.markers.entry_groups import BlockIndex, EntryArray, Run, bits_of
from kmqpy.kafka.markers.lazy_min_heap import LazyMinHeap
from kmqpy.kafka.markers.offset_runs import OffsetRuns, block_masks

MIN_RUN = 16
"""If at least this many messages of a block were taken together, they become a Run; fewer become rows."""

_MAX_ROWS = 64
"""When an EntryArray has this many rows, further rows go to a new array. More would be slow to search."""

_TOO_FEW_ROWS = 8
"""When an EntryArray has shrunk to this many rows, they move to the open one, which saves its overhead."""

_MAX_KNOWN_RESTS = 1024
"""When this many combinations of state, counts, reason and holder are interned, all are forgotten, and later
entries share new ones."""

Group = Run | EntryArray


class PackedEntries:
    """Stores the entries of one partition, at most one for each queue offset, and hands out due entries.

    An entry waits until it is due. An entry that was handed out for redelivery stays here, but counts as due
    no longer. Such entries are in no group, because they are few at a time and soon removed.

    Invariants: an offset is in at most one of `handed_out`, a Run of its block, and the index of its block.
    Every group that is not empty is in both heaps. `_count` is the number of entries in groups. Each
    EntryArray but `_open_array`, to which rows are added, has more than `_TOO_FEW_ROWS` rows.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs: dict[int, list[Run]] = {}  # by block
        self._indexes: dict[int, BlockIndex] = {}
        self._open_array = EntryArray()  # new rows are added to it
        self._by_take = LazyMinHeap[Group](lambda group: group.taken_at())
        self._by_due = LazyMinHeap[Group](lambda group: group.due_ms())
        self._rests: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # interned, see _interned()
        self._last_leased: tuple[Any, ...] = (EntryState.LEASED, True, None, None)
        self.handed_out: dict[int, Entry] = {}
        """By offset, the entries that hand_out() returned and nobody has removed; read-only for others."""

    def __len__(self) -> int:
        return self._count + len(self.handed_out)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.handed_out.values()
        for group in self._by_take.groups():
            yield from group

    def in_order(self) -> Iterator[Entry]:
        """Yield all entries in the order of their takes; reading only the first few costs little."""
        return self._merged_by_take(iter)

    def first_rows(self, limit: int) -> list[SnapshotRow]:
        """The first `limit` rows of a snapshot, by their oldest take; the other rows cost nothing."""
        rows = self._merged_by_take(lambda group: (group.row(),) if isinstance(group, Run) else group)
        return list(itertools.islice(rows, limit))

    def _merged_by_take(self, rows_of: Callable[[Group], Iterable[Any]]) -> Iterator[Any]:
        # A heap of the rows read from groups so far; offsets break ties between rows of one take.
        found: list[Any] = [(entry.taken_at, entry.offset, entry) for entry in self.handed_out.values()]
        heapq.heapify(found)
        for at_least, group in self._by_take.ascending():
            while found and found[0][0] < at_least:
                yield heapq.heappop(found)[2]
            for row in rows_of(group):
                heapq.heappush(found, (row.taken_at, row[0], row))
        while found:
            yield heapq.heappop(found)[2]

    def set_back(self, by_ms: int) -> None:
        """Move the deadlines and the times of the takes back by `by_ms`, but not below 0."""
        self.handed_out = {
            offset: entry._replace(
                since_ms=max(0, entry.since_ms - by_ms), due_ms=max(0, entry.due_ms - by_ms)
            )
            for offset, entry in self.handed_out.items()
        }
        self._by_due = LazyMinHeap[Group](lambda group: group.due_ms())
        for group in self._by_take.groups():
            group.set_back(by_ms)
            self._by_due.add(group, group.due_ms())

    def count(self, until_ms: int) -> tuple[Counter[EntryState], int]:
        """The number of entries in each state, and of entries whose deadline is at or before `until_ms`."""
        states = Counter(entry.state for entry in self.handed_out.values())
        due = sum(entry.due_ms <= until_ms for entry in self.handed_out.values())
        for group in self._by_take.groups():
            if isinstance(group, Run):
                alive = group.alive.bit_count()
                states[EntryState.LEASED] += alive
                due += alive if group.due <= until_ms else 0
            else:
                states.update(rest[0] for rest in group.rests)
                due += sum(due_ms <= until_ms for due_ms in group.values[3::4])
        return states, due

    def get(self, offset: int) -> Entry | None:
        if offset in self.handed_out:
            return self.handed_out[offset]
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            return index.groups[index.rank(bit)].get(offset)
        run = self._run_with(block, bit)
        return None if run is None else run.entry(bit)

    def has_any(self, runs: Runs) -> bool:
        """Return True if any of these offsets has an entry."""
        return bool(self._handed_out_in(runs)) or any(
            (block in self._indexes and self._indexes[block].mask & mask)
            or any(run.alive & mask for run in self._runs.get(block, ()))
            for block, mask in _masks(runs)
        )

    def single_entries_in(self, runs: Runs) -> list[Entry]:
        """Return the entries of these offsets that are in no Run: rows, and entries that were handed out."""
        there = ((block, mask, self._indexes.get(block)) for block, mask in _masks(runs))
        return [self.handed_out[offset] for offset in self._handed_out_in(runs)] + [
            index.groups[index.rank(bit)].get(block * entry_groups.BLOCK + bit)
            for block, mask, index in there
            if index is not None
            for bit in bits_of(index.mask & mask)
        ]

    def put_leased(self, offset: int, taken_at: int, since_ms: int, due_ms: int, holder: str | None) -> bool:
        """Add the entry of a leased message; returns False if the offset has an entry already."""
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            return False
        if offset in self.handed_out or self._run_with(block, bit) is not None:
            return False
        if holder is not self._last_leased[3]:
            self._last_leased = self._interned((EntryState.LEASED, True, None, holder))
        self._append(offset, taken_at, since_ms, due_ms, self._last_leased)
        self._count += 1
        return True

    def put(self, entry: Entry, *, waiting: bool = True) -> None:
        """Add the entry of an offset that has none; `waiting` False: the entry counts as handed out."""
        if not waiting:
            self.handed_out[entry.offset] = entry
            return
        offset, taken_at, since_ms, due_ms, *_ = entry
        self._append(offset, taken_at, since_ms, due_ms, self._interned(entry[4:]))
        self._count += 1

    def replace(self, entry: Entry) -> None:
        """Replace the entry of an offset, or add one. It waits unless the replaced entry was handed out."""
        waiting = entry.offset not in self.handed_out
        self.discard(entry.offset)
        self.put(entry, waiting=waiting)

    def put_together(self, taken: TakenRun, min_run: int | None = None) -> None:
        """Add messages that were taken together, whose offsets have no entries: as Runs, or as rows.

        Fewer messages of a block than `min_run` (MIN_RUN if it is None) become rows.
        """
        min_run = MIN_RUN if min_run is None else min_run
        first, bits, taken_at = taken[:3]
        while bits:
            block, low = divmod(first, entry_groups.BLOCK)
            run = Run(block, (bits << low) & ((1 << entry_groups.BLOCK) - 1), low, taken_at, taken)
            count = run.alive.bit_count()
            if count >= min_run:
                self._runs.setdefault(block, []).append(run)
                self._count += count
                self._by_take.add(run, run.taken_at())
                self._by_due.add(run, run.due)
            else:
                for bit in bits_of(run.alive):
                    self.put(run.entry(bit))
            bits >>= entry_groups.BLOCK - low
            first, taken_at = (
                first + entry_groups.BLOCK - low,
                taken_at + taken.stride * (entry_groups.BLOCK - low),
            )

    def put_range(self, runs: Runs, taken_at: int, since_ms: int, due_ms: int, holder: str | None) -> None:
        """Add messages whose offsets have no entries, all taken by the range marker at `taken_at`."""
        for block, mask in _masks(runs):
            self.put_together(
                TakenRun(block * entry_groups.BLOCK, mask, taken_at, 0, since_ms, due_ms, holder)
            )

    def discard(self, offset: int) -> bool:
        """Remove the entry of an offset; returns False if there was none."""
        if self.handed_out.pop(offset, None) is not None:
            return True
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            self._discard_row(index, block, bit)
            return True
        run = self._run_with(block, bit)
        if run is None:
            return False
        self._clear(run, 1 << bit)
        return True

    def discard_range(self, runs: Runs, removed: OffsetRuns | None = None) -> int:
        """Remove the entries of these offsets; returns their number, and adds their offsets to `removed`."""
        before = len(self)
        for offset in self._handed_out_in(runs):
            del self.handed_out[offset]
            if removed is not None:
                removed.add(offset)
        for block, mask in _masks(runs) if self._count else ():
            index = self._indexes.get(block)
            if index is not None:
                found = index.mask & mask
                if removed is not None and found:
                    removed.add_bits(block * entry_groups.BLOCK, found)
                for bit in bits_of(found):
                    self._discard_row(index, block, bit)
            for run in list(self._runs.get(block, ())):
                if found := run.alive & mask:
                    if removed is not None:
                        removed.add_bits(block * entry_groups.BLOCK, found)
                    self._clear(run, found)
        return before - len(self)

    def oldest(self) -> Entry | None:
        """The entry whose take came first."""
        _, group = self._by_take.first()
        candidates = list(self.handed_out.values())
        if group is not None:
            candidates.append(group.oldest())
        return min(candidates, key=lambda entry: entry.taken_at, default=None)

    def next_due_ms(self) -> int | None:
        """When the waiting entry with the earliest deadline is due, in ms; None if no entry waits."""
        due_ms, group = self._by_due.first()
        return None if group is None else due_ms

    def hand_out(self, now_ms: int, limit: int) -> list[Entry]:
        """Hand out up to `limit` entries that are due, the longest overdue first; returns these entries."""
        taken: list[Entry] = []
        while len(taken) < limit:
            due_ms, group = self._by_due.first()
            if group is None or due_ms > now_ms:
                break
            entries = group.due_until(min(now_ms, self._by_due.second()), limit - len(taken))
            if isinstance(group, Run):
                self._clear(group, sum(1 << entry.offset % entry_groups.BLOCK for entry in entries))
            else:
                for entry in entries:
                    self.discard(entry.offset)
            self.handed_out.update((entry.offset, entry) for entry in entries)
            taken += entries
        return taken

    def _handed_out_in(self, runs: Runs) -> list[int]:
        if len(self.handed_out) < sum(count for _, count in runs):
            return [offset for offset in self.handed_out if _covers(runs, offset)]
        everything = itertools.chain.from_iterable(range(first, first + count) for first, count in runs)
        return [offset for offset in everything if offset in self.handed_out]

    def _run_with(self, block: int, bit: int) -> Run | None:
        for run in self._runs.get(block, ()):
            if run.alive >> bit & 1:
                return run
        return None

    def _clear(self, run: Run, bits: int) -> None:
        """Remove the messages of these bits from a run, which must have them all."""
        run.alive ^= bits
        self._count -= bits.bit_count()
        if not run.alive:
            runs = self._runs[run.block]
            runs.remove(run)
            if not runs:
                del self._runs[run.block]
            self._by_take.remove(run)
            self._by_due.remove(run)

    def _interned(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return an equal tuple from an earlier call, if one is known, so that entries share it."""
        if len(self._rests) >= _MAX_KNOWN_RESTS:
            self._rests.clear()
        return self._rests.setdefault(rest, rest)

    def _append(self, offset: int, taken_at: int, since_ms: int, due_ms: int, rest: tuple[Any, ...]) -> None:
        """Add a row to the open array. The index of the block names this array for the offset from now on."""
        group = self._open_array
        if len(group.rests) >= _MAX_ROWS:
            group = self._open_array = EntryArray()
        group.values.extend((offset, taken_at, since_ms, due_ms))
        group.rests.append(rest)
        self._by_take.add(group, taken_at)
        self._by_due.add(group, due_ms)
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is None:
            index = self._indexes[block] = BlockIndex()
        mask = index.mask
        rank = (mask & ((1 << bit) - 1)).bit_count()
        if mask >> bit & 1:
            index.groups[rank] = group
        else:
            index.mask = mask | 1 << bit
            index.groups.insert(rank, group)

    def _discard_row(self, index: BlockIndex, block: int, bit: int) -> None:
        """Remove a row. If its array then has too few rows, move these to the open array."""
        group = index.groups.pop(index.rank(bit))
        index.mask ^= 1 << bit
        if not index.mask:
            del self._indexes[block]
        group.remove(block * entry_groups.BLOCK + bit)
        self._count -= 1
        if len(group) > (0 if group is self._open_array else _TOO_FEW_ROWS):
            return
        for row, rest in enumerate(group.rests):
            offset, taken_at, since_ms, due_ms = group.values[4 * row : 4 * row + 4]
            self._append(offset, taken_at, since_ms, due_ms, rest)
        self._by_take.remove(group)
        self._by_due.remove(group)


def _masks(runs: Runs) -> Iterator[tuple[int, int]]:
    """The blocks in which these offsets lie, each with a bit for each of the offsets."""
    return block_masks(runs, entry_groups.BLOCK)


def _covers(runs: Runs, offset: int) -> bool:
    index = bisect.bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < sum(runs[index])
