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


def wait_until(
    condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.05, clock: Clock = SYSTEM_CLOCK
) -> bool:
    """Ask `condition` again and again; True as soon as it holds, False if it does not in time."""
    deadline = clock.monotonic() + timeout_s
    while not condition():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(every_s)
    return True
