"""Time, injected: nothing else in kmqpy reads a clock, so that tests can drive it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

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
    """The clock of this machine."""

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


_SLOW_CONDITION_S = 0.2
"""A condition that answers slowly is asked at least this often."""


def wait_until(
    condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.05, clock: Clock = SYSTEM_CLOCK
) -> bool:
    """Ask `condition` every `every_s` seconds; True as soon as it holds, False if it does not in time.

    A condition that takes long to answer is asked less often, so that asking does not keep a core busy.
    """
    asked = clock.monotonic()
    deadline = asked + timeout_s
    while not condition():
        answered = clock.monotonic()
        if answered > deadline:
            return False
        clock.sleep(max(every_s, min(2 * (answered - asked), _SLOW_CONDITION_S)))
        asked = clock.monotonic()
    return True
