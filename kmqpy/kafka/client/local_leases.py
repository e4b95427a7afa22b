"""Remembers the leases of the messages that a client has received. Pure: no I/O, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from kmqpy.kafka.places import Place

_SPARE_DEADLINES = 1024
"""The heap of deadlines may have this many entries more than twice the number of messages. When it has more,
the entries of finished messages are removed."""

_MIN_RUN_LENGTH = 64
"""A batch of at least this many offsets in a row is stored as one range, until some of its messages are
finished or extended."""


class LocalLeases:
    """The places of messages that were handed out, each until the message is finished or its lease ends.

    Times are seconds of one monotonic clock. Many offsets in a row that are added together are stored as one
    range.
    """

    def __init__(self) -> None:
        self._runs: dict[Place, range] = {}  # by the place of their first offset; none is in two
        self._single: dict[int, set[int]] = {}  # by partition: offsets that are in none of _runs
        self._deadlines: list[tuple[float, int, int, Sequence[int]]] = []
        """A heap: when leases end, a number that tells entries apart, the partition and the offsets."""
        self._extended: dict[Place, float] = {}  # when leases that were extended end
        self._sequence = 0

    def __len__(self) -> int:
        return sum(map(len, self._single.values())) + sum(map(len, self._runs.values()))

    def add(self, partition: int, offsets: Sequence[int], until: float) -> None:
        """Note that messages with these ascending offsets are leased until `until`."""
        leased = self._single.setdefault(partition, set())
        self._split_runs(partition, offsets)
        if offsets[-1] - offsets[0] + 1 == len(offsets):
            offsets = range(offsets[0], offsets[-1] + 1)  # a range takes little memory
        overlaps_none = not leased or leased.isdisjoint(offsets)
        if isinstance(offsets, range) and len(offsets) >= _MIN_RUN_LENGTH and overlaps_none:
            self._runs[partition, offsets[0]] = offsets
        else:
            leased.update(offsets)
        self._push_deadline(until, partition, offsets)

    def extend(self, places: Iterable[Place], until: float) -> None:
        """Let the leases of these messages end at `until`, where they have not ended."""
        for partition, offset in places:
            self._split_runs(partition, (offset,))
            if offset in self._single.get(partition, ()):
                self._extended[partition, offset] = until
                self._push_deadline(until, partition, (offset,))

    def discard(self, partition: int, offsets: Sequence[int]) -> None:
        """Forget the leases of these messages."""
        leased = self._single.get(partition)
        if leased is None or not offsets:
            return
        if isinstance(offsets, range) and self._runs.get((partition, offsets[0])) == offsets:
            del self._runs[partition, offsets[0]]
        else:
            self._split_runs(partition, offsets)
            leased.difference_update(offsets)
        if self._extended:
            for offset in offsets:
                self._extended.pop((partition, offset), None)

    def expire(self, now: float) -> None:
        """Forget the leases that have ended."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, partition, offsets = heapq.heappop(self._deadlines)
            if self._extended:
                offsets = [o for o in offsets if self._extended.get((partition, o), now) <= now]
            self.discard(partition, offsets)

    def _split_runs(self, partition: int, offsets: Sequence[int]) -> None:
        """Store the offsets of the runs that overlap the span of these offsets one by one from now on."""
        if not self._runs:
            return
        low, high = min(offsets), max(offsets)
        for place, run in list(self._runs.items()):
            if place[0] == partition and run[0] <= high and low <= run[-1]:
                self._single[partition].update(self._runs.pop(place))

    def _push_deadline(self, until: float, partition: int, offsets: Sequence[int]) -> None:
        self._sequence += 1
        heapq.heappush(self._deadlines, (until, self._sequence, partition, offsets))
        if len(self._deadlines) > 2 * len(self) + _SPARE_DEADLINES:
            self._deadlines = [
                deadline for deadline in self._deadlines if self._is_leased(deadline[2], deadline[3])
            ]
            heapq.heapify(self._deadlines)

    def _is_leased(self, partition: int, offsets: Sequence[int]) -> bool:
        """Return True if one of these messages is neither finished nor expired."""
        if self._runs.get((partition, offsets[0])) == offsets:
            return True
        return not self._single.get(partition, set()).isdisjoint(offsets)
