"""What tests of the trackers' leadership share."""

import time
from collections.abc import Callable

from kmqpy.core.clock import wait_until
from tracker.leadership.leadership import Leadership

SESSION_MS = 1_500
PARTITIONS = 8
ALL = {("q", p) for p in range(PARTITIONS)}


def owned(leadership: Leadership) -> set:
    return set(leadership.snapshot().owned)


def epochs(leadership: Leadership) -> dict:
    return dict(leadership.snapshot().owned)


def until(condition: Callable[[], object], *drained: Leadership, timeout: float = 60.0) -> float:
    """Wait for `condition`, letting go of what `drained` are asked for; s it took."""

    def holds() -> bool:
        if condition():
            return True
        for leadership in drained:
            for partition in leadership.snapshot().releasing:
                leadership.release(*partition)
        return False

    started = time.monotonic()
    assert wait_until(holds, timeout, every_s=0.005), [leadership.snapshot() for leadership in drained]
    return time.monotonic() - started


def stop_thread(leadership: Leadership) -> None:
    """Its session goes on, but nothing is done any more."""
    leadership._closing.set()
    leadership._wake_up.set()
    leadership._thread.join()
