"""The leases of the messages that a client has received. Pure: no I/O, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from kmqpy.kafka.places import Place

_SLACK = 1024
"""How many leases of finished messages are kept, beside twice as many as still run."""

_WHOLE = 64
"""A batch of at least this many leases is stored as one until some of its messages are finished."""


class LocalLeases:
    """The places of messages that were handed out, until they are finished or their lease ends.

    Times are seconds of one monotonic clock. What was taken together is kept together.
    """

    def __init__(self) -> None:
        self._whole: dict[Place, range] = {}  # by the first of them; none is in _offsets, none in two
        self._offsets: dict[int, set[int]] = {}
        self._leases: list[tuple[float, int, int, Sequence[int]]] = []
        self._extended: dict[Place, float] = {}
        self._added = 0

    def __len__(self) -> int:
        return sum(map(len, self._offsets.values())) + sum(map(len, self._whole.values()))

    def add(self, partition: int, offsets: Sequence[int], until: float) -> None:
        """Note that messages with these ascending offsets are leased until `until`."""
        leased = self._offsets.setdefault(partition, set())
        self._break(partition, offsets)
        if offsets[-1] - offsets[0] + 1 == len(offsets):
            offsets = range(offsets[0], offsets[-1] + 1)  # which takes no memory to remember
        alone = not leased or leased.isdisjoint(offsets)
        if isinstance(offsets, range) and len(offsets) >= _WHOLE and alone:
            self._whole[partition, offsets[0]] = offsets
        else:
            leased.update(offsets)
        self._push(until, partition, offsets)

    def extend(self, places: Iterable[Place], until: float) -> None:
        """Let those of these leases that have not ended end at `until`."""
        for partition, offset in places:
            self._break(partition, (offset,))
            if offset in self._offsets.get(partition, ()):
                self._extended[partition, offset] = until
                self._push(until, partition, (offset,))

    def discard(self, partition: int, offsets: Sequence[int]) -> None:
        """Forget the leases of these messages."""
        leased = self._offsets.get(partition)
        if leased is None or not offsets:
            return
        if isinstance(offsets, range) and self._whole.get((partition, offsets[0])) == offsets:
            del self._whole[partition, offsets[0]]
        else:
            self._break(partition, offsets)
            leased.difference_update(offsets)
        if self._extended:
            for offset in offsets:
                self._extended.pop((partition, offset), None)

    def expire(self, now: float) -> None:
        """Forget the leases that have ended."""
        while self._leases and self._leases[0][0] <= now:
            _, _, partition, offsets = heapq.heappop(self._leases)
            if self._extended:
                offsets = [o for o in offsets if self._extended.get((partition, o), now) <= now]
            self.discard(partition, offsets)

    def _break(self, partition: int, offsets: Sequence[int]) -> None:
        """Split each group that has one of these messages: from now on its messages are kept one by one."""
        if not self._whole:
            return
        low, high = min(offsets), max(offsets)
        for place, whole in list(self._whole.items()):
            if place[0] == partition and whole[0] <= high and low <= whole[-1]:
                self._offsets[partition].update(self._whole.pop(place))

    def _push(self, until: float, partition: int, offsets: Sequence[int]) -> None:
        self._added += 1
        heapq.heappush(self._leases, (until, self._added, partition, offsets))
        if len(self._leases) > 2 * len(self) + _SLACK:
            self._leases = [lease for lease in self._leases if self._is_live(lease[2], lease[3])]
            heapq.heapify(self._leases)

    def _is_live(self, partition: int, offsets: Sequence[int]) -> bool:
        if self._whole.get((partition, offsets[0])) == offsets:
            return True
        return not self._offsets.get(partition, set()).isdisjoint(offsets)
