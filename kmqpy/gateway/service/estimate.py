"""Answers with a number in time: the number itself, the last one that was found, or a guess."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_FRESH_S = 0.15
"""So long, in seconds, a request waits for the number if an earlier one is known."""
_FIRST_S = 0.3
"""The same if none is known; EmoDB's clients give up after 500 ms."""

_MAX_COUNTS = 3
"""Counts of one number that run at a time."""


class Estimate:
    """A number that is counted again for each request; requests at one time share a count.

    count  counts; may take long where it reads much, as on Kafka
    guess  what to answer as long as nothing was ever counted
    """

    def __init__(self, count: Callable[[int | None], Awaitable[int]], guess: Callable[[], int]) -> None:
        self._count = count
        self._guess = guess
        self._counting: dict[int | None, asyncio.Future[int]] = {}
        self._last: int | None = None

    async def get(self, limit: int | None = None) -> int:
        """The number; `limit` as for Queue.size()."""
        counting = self._shared(limit)
        if counting is None:
            counting = self._counting[limit] = asyncio.ensure_future(self._count(limit))
            counting.add_done_callback(lambda done: self._keep(limit, done))
        await asyncio.wait([counting], timeout=_FIRST_S if self._last is None else _FRESH_S)
        if counting.done():
            return counting.result()
        return self._guess() if self._last is None else self._last

    def _shared(self, limit: int | None) -> asyncio.Future[int] | None:
        """A count that runs: one with this limit, or any if many do, since limits are what clients like."""
        if limit in self._counting or len(self._counting) < _MAX_COUNTS:
            return self._counting.get(limit)
        return next(iter(self._counting.values()))

    def _keep(self, limit: int | None, counting: asyncio.Future[int]) -> None:
        del self._counting[limit]
        if not counting.cancelled() and counting.exception() is None:
            self._last = counting.result()
