"""A heap of groups of entries that is corrected when it is read. Pure: no I/O, no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kmqpy.core.int64 import INT64_MAX

G = TypeVar("G")

_SLACK = 64
"""Stale items that a heap may have beside as many live ones."""


class LazyMinHeap(Generic[G]):
    """Groups of entries, ordered by the lowest value among the entries of each.

    Invariants: `_at_least` has every group that is not empty, with a lower bound of its lowest value; `_heap`
    has an item for each of these bounds, and stale items beside them, at most as many again plus `_SLACK`.

    Removing entries from a group can only raise its lowest value, so the value is computed again when the
    group comes first. Stale items are dropped when they outnumber the live ones: amortised O(1), and memory
    follows what is in flight even if one older message is leased for hours.

    value  the lowest value among the entries of a group
    """

    def __init__(self, value: Callable[[G], int]) -> None:
        self._value = value
        self._at_least: dict[G, int] = {}
        self._heap: list[tuple[int, int, G]] = []
        self._numbers = itertools.count()  # groups can't be compared

    def add(self, group: G, value: int) -> None:
        """Note that the group got an entry with `value`."""
        if value < self._at_least.get(group, INT64_MAX + 1):
            self._at_least[group] = value
            heapq.heappush(self._heap, (value, next(self._numbers), group))
            self._compact()

    def remove(self, group: G) -> None:
        """Forget a group, which is empty."""
        if self._at_least.pop(group, None) is not None:
            self._compact()

    def first(self) -> tuple[int, G | None]:
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
        """A lower bound of the lowest values of all groups but the first."""
        return min((item[0] for item in self._heap[1:3]), default=INT64_MAX)

    def groups(self) -> Iterator[G]:
        """All groups that are not empty."""
        return iter(self._at_least)

    def ascending(self) -> Iterator[tuple[int, G]]:
        """Yield all groups that are not empty, ascending by a lower bound of their lowest value.

        An item of a heap is not higher than its children, at 2 i + 1 and 2 i + 2.
        """
        seen: set[G] = set()  # a group can stand in the heap twice
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
