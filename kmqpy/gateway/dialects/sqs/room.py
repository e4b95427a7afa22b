"""For how many more messages in flight a queue has room. The storage, which counts them, is asked seldom."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kmqpy.core.clock import SYSTEM_CLOCK

_MOST = 120_000
_SHARE = 4
"""A gateway hands out this part of the room before it counts again, since others hand out, too."""
_LEAST = 10
_FULL_FOR_S = 1.0
"""So long, in seconds, a full queue is full without another count."""
_KEPT = 10_000


class _Found(NamedTuple):
    left: int
    was_full: bool
    at_s: float


class Room:
    """Knows how many more messages may be received.

    most  messages in flight that a queue may have
    """

    def __init__(self) -> None:
        self.most = _MOST
        self._found: OrderedDict[str, _Found] = OrderedDict()

    async def left(self, unique_id: str, count: Callable[[], Awaitable[int]]) -> int:
        """How many more of a queue may be received now; 0: it is full. `count` counts those in flight."""
        found, now_s = self._found.get(unique_id), SYSTEM_CLOCK.monotonic()
        if found is not None and (found.left or (found.was_full and now_s - found.at_s < _FULL_FOR_S)):
            return found.left
        room = max(0, self.most - await count())
        left = min(room, max(_LEAST, room // _SHARE))
        self._found[unique_id] = _Found(left, not room, now_s)
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return left

    def use(self, unique_id: str, count: int) -> None:
        """So many were received."""
        found = self._found.get(unique_id)
        if found is not None:
            self._found[unique_id] = found._replace(left=max(0, found.left - count))
