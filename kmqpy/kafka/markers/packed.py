"""Entries of one partition, packed: by queue offset, by the offset of their take, by when they are due.

Pure: no I/O, no clock. What markers mean is not known here; see `kmqpy.kafka.markers.inflight`.

Entries are kept in groups (see `kmqpy.kafka.markers.entry_groups`), in the order in which they came. That is
nearly the order of their takes and, for each length of lease, of their deadlines; so a heap of groups serves
instead of a heap of entries.
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
"""Messages taken together that are worth a run."""

_ROWS = 64
"""Rows in a group: few enough to be searched one by one."""

_FEW = 8
"""A group of no more rows is not worth its overhead; they move to another."""

_KNOWN_RESTS = 1024
"""How many combinations of state, counts, reason and holder are interned, so that equal ones are one."""

Group = Run | EntryArray


class PackedEntries:
    """The entries of one partition, one for each queue offset.

    An entry waits until it is due. Once handed out for redelivery it is still there, but no longer due;
    entries that are handed out are not packed, since they are few at a time and soon gone.

    Invariants: an offset is in at most one of `handed_out`, a run of its block, and the index of its block.
    Every group that is not empty is in both heaps. `_count` is the number of entries in groups. Each group
    but `_open`, to which rows are added, has more than `_FEW` rows.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs: dict[int, list[Run]] = {}  # by block
        self._indexes: dict[int, BlockIndex] = {}
        self._open = EntryArray()  # the group that new rows go to
        self._by_take = LazyMinHeap[Group](lambda group: group.taken_at())
        self._by_due = LazyMinHeap[Group](lambda group: group.due_ms())
        self._rests: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._leased: tuple[Any, ...] = (EntryState.LEASED, True, None, None)
        self.handed_out: dict[int, Entry] = {}
        """The entries that hand_out() returned and that are still there, by offset; only to be read."""

    def __len__(self) -> int:
        return self._count + len(self.handed_out)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.handed_out.values()
        for group in self._by_take.groups():
            yield from group

    def in_order(self) -> Iterator[Entry]:
        """Yield all entries in the order of their takes; the first few cost little."""
        return self._in_order(iter)

    def first_rows(self, limit: int) -> list[SnapshotRow]:
        """The `limit` rows whose takes came first, for a snapshot; costs no more than those."""
        rows = self._in_order(lambda group: (group.row(),) if isinstance(group, Run) else group)
        return list(itertools.islice(rows, limit))

    def _in_order(self, rows_of: Callable[[Group], Iterable[Any]]) -> Iterator[Any]:
        # A heap of what was read of the groups so far; offsets break ties between those of one take.
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
        """Move all deadlines and times of taking back by so many ms."""
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
        """How many entries there are in each state, and how many are due at `until_ms`."""
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
        """The entry of `offset`, or None."""
        if offset in self.handed_out:
            return self.handed_out[offset]
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            return index.groups[index.rank(bit)].get(offset)
        run = self._run(block, bit)
        return None if run is None else run.entry(bit)

    def has_any(self, runs: Runs) -> bool:
        """Return True if any of the ranges holds an entry."""
        return bool(self._handed_out_in(runs)) or any(
            (block in self._indexes and self._indexes[block].mask & mask)
            or any(run.alive & mask for run in self._runs.get(block, ()))
            for block, mask in _masks(runs)
        )

    def rows_in(self, runs: Runs) -> list[Entry]:
        """Return the entries of `runs` that are stored as rows, not as runs."""
        there = ((block, mask, self._indexes.get(block)) for block, mask in _masks(runs))
        return [self.handed_out[offset] for offset in self._handed_out_in(runs)] + [
            index.groups[index.rank(bit)].get(block * entry_groups.BLOCK + bit)
            for block, mask, index in there
            if index is not None
            for bit in bits_of(index.mask & mask)
        ]

    def put_leased(self, offset: int, taken_at: int, since_ms: int, due_ms: int, holder: str | None) -> bool:
        """Add the entry of a leased message; False when there is one already."""
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            return False
        if offset in self.handed_out or self._run(block, bit) is not None:
            return False
        if holder is not self._leased[3]:
            self._leased = self._interned((EntryState.LEASED, True, None, holder))
        self._append(offset, taken_at, since_ms, due_ms, self._leased)
        self._count += 1
        return True

    def put(self, entry: Entry, *, waiting: bool = True) -> None:
        """Add an entry of an offset that has none."""
        if not waiting:
            self.handed_out[entry.offset] = entry
            return
        offset, taken_at, since_ms, due_ms, *_ = entry
        self._append(offset, taken_at, since_ms, due_ms, self._interned(entry[4:]))
        self._count += 1

    def replace(self, entry: Entry) -> None:
        """Put an entry in the place of what there may be; it waits unless that was handed out."""
        waiting = entry.offset not in self.handed_out
        self.discard(entry.offset)
        self.put(entry, waiting=waiting)

    def put_together(self, taken: TakenRun, min_run: int | None = None) -> None:
        """Add entries of offsets that have none; fewer than `min_run` of a block become rows."""
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
        """Add a range of offsets that have none, all taken by the marker at `taken_at`."""
        for block, mask in _masks(runs):
            self.put_together(
                TakenRun(block * entry_groups.BLOCK, mask, taken_at, 0, since_ms, due_ms, holder)
            )

    def discard(self, offset: int) -> bool:
        """Remove an entry; returns whether there was one."""
        if self.handed_out.pop(offset, None) is not None:
            return True
        block, bit = divmod(offset, entry_groups.BLOCK)
        index = self._indexes.get(block)
        if index is not None and index.mask >> bit & 1:
            self._discard_row(index, block, bit)
            return True
        run = self._run(block, bit)
        if run is None:
            return False
        self._clear(run, 1 << bit)
        return True

    def discard_range(self, runs: Runs, removed: OffsetRuns | None = None) -> int:
        """Remove the entries of a range of offsets; returns how many, and adds their offsets to `removed`."""
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
        """When the first of the waiting entries is due; None when none waits."""
        due_ms, group = self._by_due.first()
        return None if group is None else due_ms

    def hand_out(self, now_ms: int, limit: int) -> list[Entry]:
        """Return up to `limit` entries that are due, the longest overdue first; they are handed out then."""
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

    def _run(self, block: int, bit: int) -> Run | None:
        for run in self._runs.get(block, ()):
            if run.alive >> bit & 1:
                return run
        return None

    def _clear(self, run: Run, bits: int) -> None:
        """Remove messages from a run that has all of them."""
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
        """An equal tuple that was seen before, if there is one, so that equal ones are kept once."""
        if len(self._rests) >= _KNOWN_RESTS:
            self._rests.clear()
        return self._rests.setdefault(rest, rest)

    def _append(self, offset: int, taken_at: int, since_ms: int, due_ms: int, rest: tuple[Any, ...]) -> None:
        """Add a row to the open group and to the index, in place of the group that had the offset before."""
        group = self._open
        if len(group.rests) >= _ROWS:
            group = self._open = EntryArray()
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
        group = index.groups.pop(index.rank(bit))
        index.mask ^= 1 << bit
        if not index.mask:
            del self._indexes[block]
        group.remove(block * entry_groups.BLOCK + bit)
        self._count -= 1
        if len(group) > (0 if group is self._open else _FEW):
            return
        for row, rest in enumerate(group.rests):
            offset, taken_at, since_ms, due_ms = group.values[4 * row : 4 * row + 4]
            self._append(offset, taken_at, since_ms, due_ms, rest)
        self._by_take.remove(group)
        self._by_due.remove(group)


def _masks(runs: Runs) -> Iterator[tuple[int, int]]:
    """The blocks of a range of offsets, each with its bits that are in the range."""
    return block_masks(runs, entry_groups.BLOCK)


def _covers(runs: Runs, offset: int) -> bool:
    index = bisect.bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < sum(runs[index])
