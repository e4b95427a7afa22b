"""Keeps repeated warnings from filling the log."""

from __future__ import annotations

import math
from collections.abc import Hashable

from kmqpy.core.clock import SYSTEM_CLOCK, Clock

_KEPT_KEYS = 1_000
"""The number of kinds that are remembered; above it, kinds that may be logged again are forgotten."""


class Throttle:
    """Lets each kind of event through at most once in `every_s` seconds; for any thread."""

    def __init__(self, every_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every = every_s
        self._clock = clock
        self._last: dict[Hashable, float] = {}

    def allows(self, kind: Hashable = None) -> bool:
        """Return True if an event of this kind is to be logged now."""
        now = self._clock.monotonic()
        if now - self._last.get(kind, -math.inf) < self._every:
            return False
        if len(self._last) >= _KEPT_KEYS:
            self._last = {one: at for one, at in self._last.copy().items() if now - at < self._every}
        self._last[kind] = now
        return True
