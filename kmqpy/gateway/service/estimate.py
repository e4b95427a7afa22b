"""Answers with a number in time: the number itself, or the last one, with what was changed by us since."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kmqpy.gateway.service.patience import is_away

_FRESH_S = 0.15
"""So long, in seconds, a request waits for the number if an earlier one is known."""
_FIRST_S = 0.3
"""The same if none is known; EmoDB's clients give up after 500 ms."""

_MAX_COUNTS = 3
"""Counts of one number that run at a time."""


class Estimate:
    """A number that is counted again for each request; requests at one time share a count.

    count  counts; may take long where it reads much, as on Kafka
    """

    def __init__(self, count: Callable[[int | None], Awaitable[int]]) -> None:
        self._count = count
        self._counting: dict[int | None, asyncio.Future[int]] = {}
        self._last = 0
        self._was_counted = False

    def change(self, by: int) -> None:
        """We have changed the number."""
        self._last = max(0, self._last + by)

    def become(self, number: int) -> None:
        self._last = number

    async def get(self, limit: int | None = None) -> int:
        """The number; `limit` as for Queue.size()."""
        counting = self._shared(limit)
        if counting is None:
            counting = self._counting[limit] = asyncio.ensure_future(self._count(limit))
            counting.add_done_callback(lambda done: self._keep(limit, done))
        # Of a storage that is away nobody wants to hear the last number: another gateway may reach it.
        timeout_s = None if is_away() else _FRESH_S if self._was_counted else _FIRST_S
        await asyncio.wait([counting], timeout=timeout_s)
        return counting.result() if counting.done() else self._last

    def _shared(self, limit: int | None) -> asyncio.Future[int] | None:
        """A count that runs: one with this limit, or any if many do, since limits are what clients like."""
        if limit in self._counting or len(self._counting) < _MAX_COUNTS:
            return self._counting.get(limit)
        return next(iter(self._counting.values()))

    def _keep(self, limit: int | None, counting: asyncio.Future[int]) -> None:
        del self._counting[limit]
        if not counting.cancelled() and counting.exception() is None:
            self._last, self._was_counted = counting.result(), True
