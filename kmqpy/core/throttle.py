"""Limits how often a repeated warning is logged."""

from __future__ import annotations

import math
from collections.abc import Hashable

from kmqpy.core.clock import SYSTEM_CLOCK, Clock

_PRUNE_AT_KINDS = 1_000
"""A Throttle that remembers this number of kinds of events forgets those that may be logged again."""


class Throttle:
    """Allows each kind of event at most once in `every_s` seconds; safe to use from any thread."""

    def __init__(self, every_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every = every_s
        self._clock = clock
        self._last: dict[Hashable, float] = {}

    def allows(self, kind: Hashable = None) -> bool:
        """Return True if the caller may log an event of this kind now, and remember the time."""
        now = self._clock.monotonic()
        if now - self._last.get(kind, -math.inf) < self._every:
            return False
        if len(self._last) >= _PRUNE_AT_KINDS:
            self._last = {one: at for one, at in self._last.copy().items() if now - at < self._every}
        self._last[kind] = now
        return True
