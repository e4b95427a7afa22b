"""Entries of one partition, packed: by queue offset, by the place of their take, by when they are due.

Pure: no I/O, no clock. What markers mean is not known here; see `kmqpy.kafka.markers.inflight`.

Messages that were taken together are runs: a bit for each. All others are rows of numbers, some dozens
to an array, in the order in which they came. That is nearly the order of their takes and, for each
length of lease, of their deadlines; so a heap of such groups serves instead of one of entries.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from kmqpy.kafka.markers.codec import INT64_MAX, Runs
from kmqpy.kafka.markers.offset_runs import block_masks

_BLOCK = 1024
"""Queue offsets that are looked up together: what the bits of one run can stand for."""

_MIN_RUN = 16
"""Messages taken together that are worth a run."""

_ROWS = 64
"""Rows in a group: few enough to be searched one by one."""

_FEW = 8
"""A group of no more rows is not worth its overhead; they move to another."""

_SLACK = 64
"""Stale groups that a heap may hold beside as many live ones."""

_KNOWN_RESTS = 1024
"""Values of what most rows share that are remembered, so that equal ones are kept once."""


class EntryState(StrEnum):
    """Why a message is in flight."""

    HELD = "held"
    """A client has it, until its lease ends."""
    DELAYED = "delayed"
    """It is not yet time to deliver it."""
    RELEASED = "released"
    """Given back by a nack; waits for its redelivery."""
    DEAD = "dead"
    """To be dead-lettered now. Sticky: no later marker but the end marker changes it."""


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
    hold: EntryState
    counts: bool = True
    reason: str | None = None
    holder: str | None = None


class TakenRun(NamedTuple):
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


SnapshotRow = Entry | TakenRun
"""A row of a snapshot."""


class _Run:
    """Messages of one block that were taken together: a bit for each, no object.

    alive     bit i: the message at block * _BLOCK + i is in flight
    taken     markers offset of the take of bit `base`; the takes of the following bits stand
              `stride` apart, 0 where one range marker took them all
    """

    __slots__ = ("alive", "base", "block", "due", "holder", "since_ms", "stride", "taken")

    def __init__(self, block: int, alive: int, base: int, taken: int, like: TakenRun) -> None:
        self.block = block
        self.alive = alive
        self.base = base
        self.taken = taken
        self.stride = like.stride
        self.since_ms = like.since_ms
        self.due = like.due_ms
        self.holder = like.holder

    def __iter__(self) -> Iterator[Entry]:
        return map(self.entry, _bits(self.alive))

    def entry(self, bit: int) -> Entry:
        """The message of `bit` as an entry."""
        return Entry(
            self.block * _BLOCK + bit,
            self.taken + self.stride * (bit - self.base),
            self.since_ms,
            self.due,
            EntryState.HELD,
            holder=self.holder,
        )

    def oldest(self) -> Entry:
        return self.entry(_lowest_bit(self.alive))

    def taken_at(self) -> int:
        return self.taken + self.stride * (_lowest_bit(self.alive) - self.base)

    def due_ms(self) -> int:
        return self.due

    def due_until(self, _until_ms: int, limit: int) -> list[Entry]:
        first, taken, stride = self.block * _BLOCK, self.taken - self.stride * self.base, self.stride
        same = self.since_ms, self.due, EntryState.HELD, True, None, self.holder
        bits = itertools.islice(_bits(self.alive), limit)
        return [Entry._make((first + bit, taken + stride * bit, *same)) for bit in bits]

    def set_back(self, by_ms: int) -> None:
        self.since_ms = max(0, self.since_ms - by_ms)
        self.due = max(0, self.due - by_ms)

    def row(self) -> TakenRun:
        """The same for a snapshot."""
        offset, taken_at = self.oldest()[:2]
        bits = self.alive >> offset % _BLOCK
        return TakenRun(offset, bits, taken_at, self.stride, self.since_ms, self.due, self.holder)


class _EntryArray:
    """Some entries: in `values` the four numbers of each, in `rests` what most of them share."""

    __slots__ = ("rests", "values")

    def __init__(self) -> None:
        self.values = array("q")
        self.rests: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self.rests)

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, range(len(self.rests)))

    def _entry(self, index: int) -> Entry:
        return Entry._make((*self.values[4 * index : 4 * index + 4], *self.rests[index]))

    def get(self, offset: int) -> Entry:
        """The entry of an offset that is in it."""
        return self._entry(self.values[::4].index(offset))

    def remove(self, offset: int) -> None:
        """Forget an offset that is in it."""
        index = self.values[::4].index(offset)
        del self.values[4 * index : 4 * index + 4]
        del self.rests[index]
        if not len(self.rests) & (len(self.rests) - 1):
            self.values = self.values[:]  # gives the memory back; deleting does not

    def oldest(self) -> Entry:
        taken = self.values[1::4]
        return self._entry(taken.index(min(taken)))

    def taken_at(self) -> int:
        return min(self.values[1::4])

    def due_ms(self) -> int:
        return min(self.values[3::4])

    def set_back(self, by_ms: int) -> None:
        for column in (2, 3):
            self.values[column::4] = array("q", [max(0, ms - by_ms) for ms in self.values[column::4]])

    def due_until(self, until_ms: int, limit: int) -> list[Entry]:
        due = sorted((ms, i) for i, ms in enumerate(self.values[3::4]) if ms <= until_ms)
        return [self._entry(i) for _, i in due[:limit]]


_Group = _Run | _EntryArray


class _BlockIndex:
    """Where the rows of one block are: bit i of `mask` has one, in the group of the same rank."""

    __slots__ = ("groups", "mask")

    def __init__(self) -> None:
        self.mask = 0
        self.groups: list[_EntryArray] = []

    def rank(self, bit: int) -> int:
        """How many come before `bit`."""
        return (self.mask & ((1 << bit) - 1)).bit_count()


class _LazyMinHeap:
    """Groups in the order of the lowest of a value of their entries.

    What is removed from a group can only raise that, so it is worked out again when the group is first.
    Stale items are compacted when they outnumber the live ones: amortised O(1), and memory follows what
    is in flight even behind one message that is held for hours.
    """

    def __init__(self, value: Callable[[_Group], int]) -> None:
        self._value = value
        self._at_least: dict[_Group, int] = {}
        self._heap: list[tuple[int, int, _Group]] = []
        self._numbers = itertools.count()  # groups can't be compared

    def add(self, group: _Group, value: int) -> None:
        """There is an entry with `value` in the group."""
        if value < self._at_least.get(group, INT64_MAX + 1):
            self._at_least[group] = value
            heapq.heappush(self._heap, (value, next(self._numbers), group))
            self._compact()

    def remove(self, group: _Group) -> None:
        """The group is empty."""
        if self._at_least.pop(group, None) is not None:
            self._compact()

    def first(self) -> tuple[int, _Group | None]:
        """The lowest value and its group."""
        while self._heap:
            at_least, number, group = self._heap[0]
            if self._at_least.get(group) != at_least:
                heapq.heappop(self._heap)
                continue
            value = self._value(group)
            if value == at_least:
                return value, group
            self._at_least[group] = value
            heapq.heapreplace(self._heap, (value, number, group))
        return INT64_MAX + 1, None

    def second(self) -> int:
        """No group but the first has a lower value than this."""
        return min((item[0] for item in self._heap[1:3]), default=INT64_MAX)

    def groups(self) -> Iterator[_Group]:
        """All that are not empty."""
        return iter(self._at_least)

    def ascending(self) -> Iterator[tuple[int, _Group]]:
        """All that are not empty, lazily, ascending by a lower bound of their lowest.

        An item of a heap is not higher than its children, at 2 i + 1 and 2 i + 2.
        """
        seen: set[_Group] = set()  # a group can stand in the heap twice
        frontier = [(self._heap[0][0], 0)] if self._heap else []
        while frontier:
            at_least, index = heapq.heappop(frontier)
            group = self._heap[index][2]
            if self._at_least.get(group) == at_least and group not in seen:
                seen.add(group)
                yield at_least, group
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child][0], child))

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._at_least) + _SLACK:
            self._heap = [(at_least, next(self._numbers), g) for g, at_least in self._at_least.items()]
            heapq.heapify(self._heap)


class PackedEntries:
    """The entries of one partition, one for each queue offset.

    An entry waits until it is due; handed out, it is still there but no more due. What is handed out is
    not packed: it is little at a time, and soon gone.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs: dict[int, list[_Run]] = {}  # by block
        self._slots: dict[int, _BlockIndex] = {}
        self._open = _EntryArray()  # the group that new rows go to
        self._by_take = _LazyMinHeap(lambda group: group.taken_at())
        self._by_due = _LazyMinHeap(lambda group: group.due_ms())
        self._rests: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._held: tuple[Any, ...] = (EntryState.HELD, True, None, None)
        self.handed_out: dict[int, Entry] = {}
        """The entries that hand_out() returned and that are still there, by offset; only to be read."""

    def __len__(self) -> int:
        return self._count + len(self.handed_out)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.handed_out.values()
        for group in self._by_take.groups():
            yield from group

    def in_order(self) -> Iterator[Entry]:
        """All of them in the order of their takes; the first few cost little."""
        return self._in_order(iter)

    def first_rows(self, limit: int) -> list[SnapshotRow]:
        """The `limit` rows whose takes came first, for a snapshot; costs no more than those."""
        rows = self._in_order(lambda group: (group.row(),) if isinstance(group, _Run) else group)
        return list(itertools.islice(rows, limit))

    def _in_order(self, rows_of: Callable[[_Group], Iterable[Any]]) -> Iterator[Any]:
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
        self._by_due = _LazyMinHeap(lambda group: group.due_ms())
        for group in self._by_take.groups():
            group.set_back(by_ms)
            self._by_due.add(group, group.due_ms())

    def count(self, until_ms: int) -> tuple[Counter[EntryState], int]:
        """How many entries there are of each hold, and how many are due at `until_ms`."""
        holds = Counter(entry.hold for entry in self.handed_out.values())
        due = sum(entry.due_ms <= until_ms for entry in self.handed_out.values())
        for group in self._by_take.groups():
            if isinstance(group, _Run):
                alive = group.alive.bit_count()
                holds[EntryState.HELD] += alive
                due += alive if group.due <= until_ms else 0
            else:
                holds.update(rest[0] for rest in group.rests)
                due += sum(due_ms <= until_ms for due_ms in group.values[3::4])
        return holds, due

    def get(self, offset: int) -> Entry | None:
        """The entry of `offset`, or None."""
        if offset in self.handed_out:
            return self.handed_out[offset]
        block, bit = divmod(offset, _BLOCK)
        slots = self._slots.get(block)
        if slots is not None and slots.mask >> bit & 1:
            return slots.groups[slots.rank(bit)].get(offset)
        run = self._run(block, bit)
        return None if run is None else run.entry(bit)

    def has_any(self, runs: Runs) -> bool:
        """Whether there is an entry in a range."""
        return bool(self._handed_out_in(runs)) or any(
            (block in self._slots and self._slots[block].mask & mask)
            or any(run.alive & mask for run in self._runs.get(block, ()))
            for block, mask in _masks(runs)
        )

    def rows_in(self, runs: Runs) -> list[Entry]:
        """Those of a range that are not in a run."""
        there = ((block, mask, self._slots.get(block)) for block, mask in _masks(runs))
        return [self.handed_out[offset] for offset in self._handed_out_in(runs)] + [
            slots.groups[slots.rank(bit)].get(block * _BLOCK + bit)
            for block, mask, slots in there
            if slots is not None
            for bit in _bits(slots.mask & mask)
        ]

    def put_held(self, offset: int, taken_at: int, since_ms: int, due_ms: int, holder: str | None) -> bool:
        """Add the entry of a message that a client holds; False when there is one already."""
        block, bit = divmod(offset, _BLOCK)
        slots = self._slots.get(block)
        if slots is not None and slots.mask >> bit & 1:
            return False
        if offset in self.handed_out or self._run(block, bit) is not None:
            return False
        if holder is not self._held[3]:
            self._held = self._once((EntryState.HELD, True, None, holder))
        self._append(offset, taken_at, since_ms, due_ms, self._held)
        self._count += 1
        return True

    def put(self, entry: Entry, *, waiting: bool = True) -> None:
        """Add an entry of an offset that has none."""
        if not waiting:
            self.handed_out[entry.offset] = entry
            return
        offset, taken_at, since_ms, due_ms, *_ = entry
        self._append(offset, taken_at, since_ms, due_ms, self._once(entry[4:]))
        self._count += 1

    def replace(self, entry: Entry) -> None:
        """Put an entry in the place of what there may be; it waits unless that was handed out."""
        waiting = entry.offset not in self.handed_out
        self.discard(entry.offset)
        self.put(entry, waiting=waiting)

    def put_together(self, taken: TakenRun, min_run: int | None = None) -> None:
        """Add entries of offsets that have none; fewer than `min_run` of a block become rows."""
        min_run = _MIN_RUN if min_run is None else min_run
        first, bits, taken_at = taken[:3]
        while bits:
            block, low = divmod(first, _BLOCK)
            run = _Run(block, (bits << low) & ((1 << _BLOCK) - 1), low, taken_at, taken)
            count = run.alive.bit_count()
            if count >= min_run:
                self._runs.setdefault(block, []).append(run)
                self._count += count
                self._by_take.add(run, run.taken_at())
                self._by_due.add(run, run.due)
            else:
                for bit in _bits(run.alive):
                    self.put(run.entry(bit))
            bits >>= _BLOCK - low
            first, taken_at = first + _BLOCK - low, taken_at + taken.stride * (_BLOCK - low)

    def put_range(self, runs: Runs, taken_at: int, since_ms: int, due_ms: int, holder: str | None) -> None:
        """Add a range of offsets that have none, all taken by the marker at `taken_at`."""
        for block, mask in _masks(runs):
            self.put_together(TakenRun(block * _BLOCK, mask, taken_at, 0, since_ms, due_ms, holder))

    def discard(self, offset: int) -> bool:
        """Remove an entry; whether there was one."""
        if self.handed_out.pop(offset, None) is not None:
            return True
        block, bit = divmod(offset, _BLOCK)
        slots = self._slots.get(block)
        if slots is not None and slots.mask >> bit & 1:
            self._discard_row(slots, block, bit)
            return True
        run = self._run(block, bit)
        if run is None:
            return False
        self._clear(run, 1 << bit)
        return True

    def discard_range(self, runs: Runs) -> int:
        """Remove those of a range; returns how many."""
        before = len(self)
        for offset in self._handed_out_in(runs):
            del self.handed_out[offset]
        for block, mask in _masks(runs) if self._count else ():
            slots = self._slots.get(block)
            if slots is not None:
                for bit in _bits(slots.mask & mask):
                    self._discard_row(slots, block, bit)
            for run in list(self._runs.get(block, ())):
                if run.alive & mask:
                    self._clear(run, run.alive & mask)
        return before - len(self)

    def oldest(self) -> Entry | None:
        """The one whose take came first."""
        _, group = self._by_take.first()
        candidates = list(self.handed_out.values())
        if group is not None:
            candidates.append(group.oldest())
        return min(candidates, key=lambda entry: entry.taken_at, default=None)

    def next_due_ms(self) -> int | None:
        """When the first of those that wait is due; None when none waits."""
        due_ms, group = self._by_due.first()
        return None if group is None else due_ms

    def hand_out(self, now_ms: int, limit: int) -> list[Entry]:
        """Up to `limit` that are due, the longest overdue first; they wait no more."""
        taken: list[Entry] = []
        while len(taken) < limit:
            due_ms, group = self._by_due.first()
            if group is None or due_ms > now_ms:
                break
            entries = group.due_until(min(now_ms, self._by_due.second()), limit - len(taken))
            if isinstance(group, _Run):
                self._clear(group, sum(1 << entry.offset % _BLOCK for entry in entries))
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

    def _run(self, block: int, bit: int) -> _Run | None:
        for run in self._runs.get(block, ()):
            if run.alive >> bit & 1:
                return run
        return None

    def _clear(self, run: _Run, bits: int) -> None:
        """Take messages out of a run, which has them all."""
        run.alive ^= bits
        self._count -= bits.bit_count()
        if not run.alive:
            runs = self._runs[run.block]
            runs.remove(run)
            if not runs:
                del self._runs[run.block]
            self._by_take.remove(run)
            self._by_due.remove(run)

    def _once(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for all that are equal, so that it is kept once."""
        if len(self._rests) >= _KNOWN_RESTS:
            self._rests.clear()
        return self._rests.setdefault(rest, rest)

    def _append(self, offset: int, taken_at: int, since_ms: int, due_ms: int, rest: tuple[Any, ...]) -> None:
        """Put a row into the open group; if it is in another already, that one is to forget it."""
        group = self._open
        if len(group.rests) >= _ROWS:
            group = self._open = _EntryArray()
        group.values.extend((offset, taken_at, since_ms, due_ms))
        group.rests.append(rest)
        self._by_take.add(group, taken_at)
        self._by_due.add(group, due_ms)
        block, bit = divmod(offset, _BLOCK)
        slots = self._slots.get(block)
        if slots is None:
            slots = self._slots[block] = _BlockIndex()
        mask = slots.mask
        rank = (mask & ((1 << bit) - 1)).bit_count()
        if mask >> bit & 1:
            slots.groups[rank] = group
        else:
            slots.mask = mask | 1 << bit
            slots.groups.insert(rank, group)

    def _discard_row(self, slots: _BlockIndex, block: int, bit: int) -> None:
        group = slots.groups.pop(slots.rank(bit))
        slots.mask ^= 1 << bit
        if not slots.mask:
            del self._slots[block]
        group.remove(block * _BLOCK + bit)
        self._count -= 1
        if len(group) > (0 if group is self._open else _FEW):
            return
        for index, rest in enumerate(group.rests):
            offset, taken_at, since_ms, due_ms = group.values[4 * index : 4 * index + 4]
            self._append(offset, taken_at, since_ms, due_ms, rest)
        self._by_take.remove(group)
        self._by_due.remove(group)


def _masks(runs: Runs) -> Iterator[tuple[int, int]]:
    """The blocks of a range of offsets, each with its bits that are in the range."""
    return block_masks(runs, _BLOCK)


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
