"""Makes queues in memory for tests of applications; the test moves the clock of the queues.

    from kmqpy.testing import ManualClock, memory_storage

    clock = ManualClock()
    with memory_storage(clock) as storage:
        storage.create("orders", lease_ms=30_000)
        queue = storage.open("orders")
        queue.send("x")
        queue.receive()
        clock.advance(30)  # now the lease is over, and the test has not waited
        assert queue.receive()[0].attempts == 2

`pytest --kmq-storage=URL` runs the contract suite, which every storage must pass (kmqpy.pytest_plugin).
"""

from __future__ import annotations

import threading

from kmqpy.core.clock import Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.queue import Storage

__all__ = ["ManualClock", "memory_storage"]

_MAX_WAIT_S = 0.02
"""receive() in a queue of memory_storage() waits at most this time, in seconds of real time."""
_START_MS = 1_700_000_000_000
"""A ManualClock starts at this time by default, in ms since 1970: 2023-11-14."""


class ManualClock:
    """A clock that stands still until a test moves it; safe to use from any thread.

    Args:
        start_ms: The time at which it stands, in ms since 1970.
    """

    def __init__(self, start_ms: int = _START_MS) -> None:
        self._lock = threading.Lock()
        self._start_ms = start_ms
        self._passed_ms = 0

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._start_ms + self._passed_ms

    def monotonic(self) -> float:
        """Seconds by which the clock was moved."""
        return self._passed_ms / 1000

    def sleep(self, seconds: float) -> None:
        """Move the clock, and return at once.

        Args:
            seconds: How far to move it.
        """
        self.advance(seconds)

    def advance(self, duration: Duration) -> None:
        """Move the clock.

        Args:
            duration: Seconds or timedelta.
        """
        with self._lock:
            self._passed_ms += duration_ms(duration, "duration")


def memory_storage(clock: Clock | None = None) -> Storage:
    """Make a storage in memory, without queues.

    receive() waits at most 20 ms for a message, even if its `wait` is longer: a clock that stands still would
    never end it.

    Args:
        clock: Leases and delays follow it; default: a ManualClock that nobody moves.
    """
    from kmqpy.storages.memory import MemoryEngine
    from kmqpy.storages.stored_storage import StoredStorage

    clock = ManualClock() if clock is None else clock
    return StoredStorage(MemoryEngine(clock, patience=_MAX_WAIT_S), clock=clock)
