"""Groups of entries that need little memory. Pure: no I/O, no clock.

Messages that were taken together are a Run: one bit each. All others are rows of an EntryArray, some dozens
to an array, in the order in which they came.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun

BLOCK = 1024
"""Queue offsets that are looked up together: what the bits of one run can stand for."""


class Run:
    """Messages of one block that were taken together: one bit each.

    alive     bit i is set: the message at block * BLOCK + i is in flight
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
        return map(self.entry, bits_of(self.alive))

    def entry(self, bit: int) -> Entry:
        """The message of `bit` as an entry."""
        return Entry(
            self.block * BLOCK + bit,
            self.taken + self.stride * (bit - self.base),
            self.since_ms,
            self.due,
            EntryState.LEASED,
            holder=self.holder,
        )

    def oldest(self) -> Entry:
        """The entry whose take came first."""
        return self.entry(lowest_bit(self.alive))

    def taken_at(self) -> int:
        """The markers offset of the take that came first."""
        return self.taken + self.stride * (lowest_bit(self.alive) - self.base)

    def due_ms(self) -> int:
        """When the first of the entries is due, in ms."""
        return self.due

    def due_until(self, _until_ms: int, limit: int) -> list[Entry]:
        """Up to `limit` entries of this run, all of which are due at the same time."""
        first, taken, stride = self.block * BLOCK, self.taken - self.stride * self.base, self.stride
        same = self.since_ms, self.due, EntryState.LEASED, True, None, self.holder
        bits = itertools.islice(bits_of(self.alive), limit)
        return [Entry._make((first + bit, taken + stride * bit, *same)) for bit in bits]

    def set_back(self, by_ms: int) -> None:
        """Move all deadlines and times of taking back by so many ms."""
        self.since_ms = max(0, self.since_ms - by_ms)
        self.due = max(0, self.due - by_ms)

    def row(self) -> TakenRun:
        """This run as a row of a snapshot."""
        offset, taken_at = self.oldest()[:2]
        bits = self.alive >> offset % BLOCK
        return TakenRun(offset, bits, taken_at, self.stride, self.since_ms, self.due, self.holder)


class EntryArray:
    """Up to 64 entries as columns.

    Invariant: entry i has `values[4 i : 4 i + 4]`, its offset, taken_at, since_ms and due_ms, and `rests[i]`,
    the remaining fields, of which equal ones are kept once.
    """

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
        """Remove the entry of an offset that is in it."""
        index = self.values[::4].index(offset)
        del self.values[4 * index : 4 * index + 4]
        del self.rests[index]
        if not len(self.rests) & (len(self.rests) - 1):
            self.values = self.values[:]  # gives the memory back; deleting does not

    def oldest(self) -> Entry:
        """The entry whose take came first."""
        taken = self.values[1::4]
        return self._entry(taken.index(min(taken)))

    def taken_at(self) -> int:
        """The markers offset of the take that came first."""
        return min(self.values[1::4])

    def due_ms(self) -> int:
        """When the first of the entries is due, in ms."""
        return min(self.values[3::4])

    def set_back(self, by_ms: int) -> None:
        """Move all deadlines and times of taking back by so many ms."""
        for column in (2, 3):
            self.values[column::4] = array("q", [max(0, ms - by_ms) for ms in self.values[column::4]])

    def due_until(self, until_ms: int, limit: int) -> list[Entry]:
        """Up to `limit` entries that are due at `until_ms`, the longest overdue first."""
        due = sorted((ms, i) for i, ms in enumerate(self.values[3::4]) if ms <= until_ms)
        return [self._entry(i) for _, i in due[:limit]]


class BlockIndex:
    """Which group has the entry of each offset of one block.

    Invariant: bit i of `mask` is set where offset block * BLOCK + i has an entry in an EntryArray; that is
    `groups[rank(i)]`.
    """

    __slots__ = ("groups", "mask")

    def __init__(self) -> None:
        self.mask = 0
        self.groups: list[EntryArray] = []

    def rank(self, bit: int) -> int:
        """How many bits below `bit` are set."""
        return (self.mask & ((1 << bit) - 1)).bit_count()


def lowest_bit(mask: int) -> int:
    """The number of the lowest set bit of a mask that is not 0."""
    return (mask & -mask).bit_length() - 1


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the set bits of a mask, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
