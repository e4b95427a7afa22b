"""Answers with a number in time: the number itself, or the last one, with what was changed by us since.

While none is known, the number is waited for: a late answer is better than a wrong one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from kmqpy.gateway.service.patience import is_away

_FRESH_S = 0.15
"""So long, in seconds, a request waits for the number if an earlier one is known; EmoDB's clients give up
after 500 ms."""
_MAX_COUNTS = 3
"""If so many counts of one number run, further ones are shared, whatever their limits."""


class Estimate:
    """A number that is counted again for each request; requests at one time share a count.

    count  counts; may take long where it reads much, as on Kafka
    """

    def __init__(self, count: Callable[[int | None], Awaitable[int]]) -> None:
        self._count = count
        self._counting: dict[int | None, asyncio.Future[int]] = {}
        self._last = 0
        self._known_up_to: float = -1  # the highest limit for which the last number is an answer

    def follow(self, former: Estimate) -> None:
        """Know what a former estimate of this number knows."""
        self._last, self._known_up_to = former._last, former._known_up_to

    def change(self, by: int) -> None:
        """We have changed the number."""
        self._last = max(0, self._last + by)
        if by < 0:  # of a number that was counted up to a limit, more may be left
            self._known_up_to = max(-1, self._known_up_to + by)

    def become(self, number: int) -> None:
        self._last = number

    async def get(self, limit: int | None = None) -> int:
        """The number; `limit` as for Queue.size()."""
        counted = self._to_count(limit)
        counting = self._counting.get(counted)
        if counting is None:
            counting = self._counting[counted] = asyncio.ensure_future(self._count(counted))
            counting.add_done_callback(lambda done: self._keep(counted, done))
        # Of a storage that is away nobody wants to hear the last number: another gateway may reach it.
        is_known = _bound(limit) <= self._known_up_to and not is_away()
        await asyncio.wait([counting], timeout=_FRESH_S if is_known else None)
        return counting.result() if counting.done() else self._last

    def _to_count(self, limit: int | None) -> int | None:
        """Up to what limit to count; if many counts run, share one that goes as far, or count all."""
        if limit in self._counting or len(self._counting) < _MAX_COUNTS:
            return limit
        return next((one for one in self._counting if _bound(one) >= _bound(limit)), None)

    def _keep(self, limit: int | None, counting: asyncio.Future[int]) -> None:
        del self._counting[limit]
        if counting.cancelled() or counting.exception() is not None:
            self._known_up_to = -1
            return
        number = counting.result()
        known_up_to = math.inf if number < _bound(limit) else _bound(limit)
        if known_up_to >= self._known_up_to or number > self._last:
            self._last, self._known_up_to = number, known_up_to


def _bound(limit: int | None) -> float:
    return math.inf if limit is None else limit
