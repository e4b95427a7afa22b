"""The groups of a queue in memory: which of the messages of a group may be taken."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kmqpy.storages.memory_row import MemoryRow


@dataclass(slots=True, eq=False)
class Group:
    """The rows of one group, by id; `head` is the one that is ready or delayed, the others wait behind.

    rank  heads of groups with smaller ones are taken first
    """

    head: MemoryRow | None = None
    rank: int = 0
    taken: dict[int, MemoryRow] = field(default_factory=dict)
    dead: dict[int, MemoryRow] = field(default_factory=dict)
    behind: dict[int, MemoryRow] = field(default_factory=dict)
    _order: list[tuple[int, int]] = field(default_factory=list)

    def wait(self, row: MemoryRow) -> None:
        """Add a row to those that wait."""
        self.behind[row.id] = row
        heapq.heappush(self._order, (row.place, row.id))

    def first_behind(self) -> MemoryRow | None:
        """The row with the smallest place among those that wait."""
        while self._order:
            place, row_id = self._order[0]
            row = self.behind.get(row_id)
            if row is not None and row.place == place:
                return row
            heapq.heappop(self._order)
        return None

    def forget(self, row: MemoryRow) -> None:
        """Remove a row, in whatever state it was."""
        for rows in (self.taken, self.dead, self.behind):
            rows.pop(row.id, None)
        if self.head is row:
            self.head = None

    @property
    def is_empty(self) -> bool:
        """True if nothing of the group is left."""
        return not (self.head or self.taken or self.dead or self.behind)

    def settle(
        self, *, is_free: bool, show: Callable[[MemoryRow], None], hide: Callable[[MemoryRow], None]
    ) -> None:
        """Let the first row be the head if one of the group may be taken, and no other.

        `show` and `hide` change the state of a row; they tell the group nothing.
        """
        first = self.first_behind()
        head = self.head
        if head is not None and (not is_free or (first is not None and first.place < head.place)):
            self.head = None
            self.wait(head)
            hide(head)
        if is_free and self.head is None and (first := self.first_behind()) is not None:
            del self.behind[first.id]
            self.head = first
            show(first)
