"""The `Clock` from which kmqpy reads the time. Callers pass a Clock, so tests can pass one that they move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time, and sleeps."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class SystemClock:
    """Reads the clock of this machine."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


_MAX_SLOW_PAUSE_S = 0.2
"""The longest pause, in seconds, that wait_until() makes because a condition was slow to answer."""


def wait_until(condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.05) -> bool:
    """Call `condition` again and again; return True as soon as it is true, False after `timeout_s` seconds.

    Between two calls of `condition` it sleeps `every_s` seconds. After a slow `condition` it sleeps longer,
    so as not to keep a core busy: twice as long as `condition` took, at most _MAX_SLOW_PAUSE_S.
    """
    asked = SYSTEM_CLOCK.monotonic()
    deadline = asked + timeout_s
    while not condition():
        answered = SYSTEM_CLOCK.monotonic()
        if answered > deadline:
            return False
        SYSTEM_CLOCK.sleep(max(every_s, min(2 * (answered - asked), _MAX_SLOW_PAUSE_S)))
        asked = SYSTEM_CLOCK.monotonic()
    return True
