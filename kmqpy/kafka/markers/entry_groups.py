"""Stores entries (messages in flight) in groups that need little memory. Pure: no I/O, no clock.

There are two kinds of groups. A Run holds messages that were taken together, with one bit for each. An
EntryArray holds all other messages as rows, up to 64, in the order in which they were added.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun

BLOCK = 1024
"""The number of queue offsets in a block, which begins at a multiple of this number. A Run lies within one
block, and each block has one BlockIndex."""


class Run:
    """The messages of one block that were taken together and are in flight, with one bit for each.

    The start marker of a set bit i is at markers offset taken + stride * (i - base).

    alive     bit i is set if the message at queue offset block * BLOCK + i is in flight
    base      a bit, set or not; if it is set, its start marker is at `taken`
    taken     a markers offset
    stride    the distance between the start markers of neighbouring bits; 0: one range marker took all
    since_ms  the partition's now when the messages were taken
    due       when all messages are due, in ms
    holder    the name of the client that took the messages, if it gave one
    """

    __slots__ = ("alive", "base", "block", "due", "holder", "since_ms", "stride", "taken")

    def __init__(self, block: int, alive: int, base: int, taken: int, template: TakenRun) -> None:
        self.block = block
        self.alive = alive
        self.base = base
        self.taken = taken
        self.stride = template.stride
        self.since_ms = template.since_ms
        self.due = template.due_ms
        self.holder = template.holder

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
        """When the entries are due, in ms."""
        return self.due

    def due_until(self, _until_ms: int, limit: int) -> list[Entry]:
        """The lowest `limit` entries of this run; all its entries are due, because they are due together."""
        first, taken, stride = self.block * BLOCK, self.taken - self.stride * self.base, self.stride
        shared = self.since_ms, self.due, EntryState.LEASED, True, None, self.holder
        bits = itertools.islice(bits_of(self.alive), limit)
        return [Entry._make((first + bit, taken + stride * bit, *shared)) for bit in bits]

    def set_back(self, by_ms: int) -> None:
        """Move the deadline and the time of the takes back by `by_ms`, but not below 0."""
        self.since_ms = max(0, self.since_ms - by_ms)
        self.due = max(0, self.due - by_ms)

    def row(self) -> TakenRun:
        """This run as a row of a snapshot."""
        offset, taken_at = self.oldest()[:2]
        bits = self.alive >> offset % BLOCK
        return TakenRun(offset, bits, taken_at, self.stride, self.since_ms, self.due, self.holder)


class EntryArray:
    """Up to 64 entries, as columns.

    Invariant: entry i has its offset, taken_at, since_ms and due_ms in `values[4 i : 4 i + 4]`, and its other
    fields as a tuple in `rests[i]`. Equal tuples are one object (see PackedEntries).
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
        """The entry of an offset, which must be in this array."""
        return self._entry(self.values[::4].index(offset))

    def remove(self, offset: int) -> None:
        """Remove the entry of an offset, which must be in this array."""
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
        """When the entry with the earliest deadline is due, in ms."""
        return min(self.values[3::4])

    def set_back(self, by_ms: int) -> None:
        """Move the deadlines and the times of the takes back by `by_ms`, but not below 0."""
        for column in (2, 3):
            self.values[column::4] = array("q", [max(0, ms - by_ms) for ms in self.values[column::4]])

    def due_until(self, until_ms: int, limit: int) -> list[Entry]:
        """Up to `limit` entries that are due at `until_ms`, the longest overdue first."""
        due = sorted((ms, i) for i, ms in enumerate(self.values[3::4]) if ms <= until_ms)
        return [self._entry(i) for _, i in due[:limit]]


class BlockIndex:
    """Finds the EntryArray with the entry of a queue offset, for the offsets of one block.

    Invariant: bit i of `mask` is set if an EntryArray has an entry of offset block * BLOCK + i. That array is
    `groups[rank(i)]`.
    """

    __slots__ = ("groups", "mask")

    def __init__(self) -> None:
        self.mask = 0
        self.groups: list[EntryArray] = []

    def rank(self, bit: int) -> int:
        """How many bits of `mask` below `bit` are set."""
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
