"""Finds the group of entries with the lowest value, by a heap that is corrected when it is read. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kmqpy.core.int64 import INT64_MAX

G = TypeVar("G")

_STALE_ALLOWANCE = 64
"""When a heap has more items than twice the number of groups plus this many, its stale items are removed."""


class LazyMinHeap(Generic[G]):
    """Orders groups of entries by the lowest value of a group, which `value` computes from its entries.

    Invariants: `_at_least` has every group that is not empty, with a lower bound of its lowest value. `_heap`
    has an item for each of these bounds. It also has stale items, whose bound is not in `_at_least` any more:
    at most as many as there are groups, plus `_STALE_ALLOWANCE`.

    Removing entries from a group can only raise its lowest value, so the heap computes the value again when
    the group comes first. Removing stale items in bulk costs amortised O(1). The memory depends on the number
    of groups, even if one old message stays leased for hours.
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
        """Forget a group that has become empty."""
        if self._at_least.pop(group, None) is not None:
            self._compact()

    def first(self) -> tuple[int, G | None]:
        """The lowest value and its group; INT64_MAX + 1 and None if there is no group."""
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
        """A lower bound of the values of all groups but that of first(), which must be called just before."""
        return min((item[0] for item in self._heap[1:3]), default=INT64_MAX)

    def groups(self) -> Iterator[G]:
        """All groups that are not empty."""
        return iter(self._at_least)

    def ascending(self) -> Iterator[tuple[int, G]]:
        """Yield all groups that are not empty, by a lower bound of their lowest value, with this bound.

        The items at 2 i + 1 and 2 i + 2 of a heap are not lower than the item at i.
        """
        seen: set[G] = set()  # the heap may have two items of a group with the same bound
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
        if len(self._heap) > 2 * len(self._at_least) + _STALE_ALLOWANCE:
            self._heap = [(at_least, next(self._numbers), g) for g, at_least in self._at_least.items()]
            heapq.heapify(self._heap)
