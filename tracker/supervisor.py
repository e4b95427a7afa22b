"""Keeps an unexpected exception in one partition or step from stopping the rest of a tracker.

This is rule R21 of docs/rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import Clock
from tracker.health.problems import Problems
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase

_STEP_PAUSE = Backoff(0.1, 2, 10, jitter=0)
"""The pause after a failed step of the main loop: 0.1 s, doubled by each failure in a row, up to 10 s."""


class Supervisor:
    """Logs, counts and shows an exception, and pauses only the step or the partition that raised it.

    stop_reading  is called to stop reading the markers of a partition that failed
    """

    def __init__(
        self, stop_reading: Callable[[OwnedPartition], None], problems: Problems, clock: Clock
    ) -> None:
        self._stop_reading = stop_reading
        self._problems = problems
        self._clock = clock
        self._failed_steps: dict[str, tuple[int, float]] = {}
        """For each step that failed: the number of failures in a row, and the time of its next try."""

    def step(self, name: str, now: float, do: Callable[[], None]) -> bool:
        """Run one step of the main loop; False if the step failed, or still pauses after a failure."""
        failures, paused_until = self._failed_steps.get(name, (0, 0.0))
        if now < paused_until:
            return False
        try:
            do()
        except Exception as error:
            failures += 1
            self._failed_steps[name] = failures, now + _STEP_PAUSE.delay(failures)
            self._problems.show(name, f"{name}: {type(error).__name__}: {error}")
            self._problems.survived(name, error)
            return False
        if failures:
            del self._failed_steps[name]
            self._problems.clear(name)
        return True

    @contextmanager
    def surviving(self, part: OwnedPartition) -> Iterator[None]:
        """Catch any exception of the block; then the partition is taken over again, after a pause."""
        try:
            yield
        except Exception as error:
            part.problems.takeover = f"{type(error).__name__}: {error}; taking over again"
            self._problems.survived("partition", error, part.key)
            with suppress(Exception):
                self._stop_reading(part)
            if part.phase is not TrackingPhase.DROPPED:
                part.back_off(self._clock.monotonic())
