"""For tests: queues in memory whose clock the test moves, and the contract suite that every storage passes.

    from kmqpy.testing import ManualClock, memory_storage

    clock = ManualClock()
    with memory_storage(clock) as storage:
        storage.create("orders", redeliver_after_ms=30_000)
        queue = storage.open("orders")
        queue.send("x")
        queue.receive()
        clock.advance(30)  # its lease is over, and no time has passed
        assert queue.receive()[0].attempts == 2

The suite is run by `pytest --kmq-storage=URL` (kmqpy.pytest_plugin).
"""

from __future__ import annotations

import threading

from kmqpy.core.clock import Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.queue import Storage

__all__ = ["ManualClock", "memory_storage"]

_PATIENCE_S = 0.02
_START_MS = 1_700_000_000_000


class ManualClock:
    """A clock that stands still until a test moves it; safe to use from any thread."""

    def __init__(self, start_ms: int = _START_MS) -> None:
        self._lock = threading.Lock()
        self._start_ms = start_ms
        self._passed_ms = 0

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._start_ms + self._passed_ms

    def monotonic(self) -> float:
        """Seconds since it was made."""
        return self._passed_ms / 1000

    def sleep(self, seconds: float) -> None:
        """Move the clock, and return at once."""
        self.advance(seconds)

    def advance(self, duration: Duration) -> None:
        """Move the clock by seconds or a timedelta."""
        with self._lock:
            self._passed_ms += duration_ms(duration, "duration")


def memory_storage(clock: Clock | None = None) -> Storage:
    """A storage of its own in memory, without queues.

    Its leases and delays follow `clock` (default: a ManualClock that nobody moves). While nothing is there,
    receive() with a `wait` waits 20 ms at most, since a clock that stands still would never end the wait.
    """
    from kmqpy.storages.memory import MemoryEngine
    from kmqpy.storages.stored_storage import StoredStorage

    clock = ManualClock() if clock is None else clock
    return StoredStorage(MemoryEngine(clock, patience=_PATIENCE_S), clock=clock)
