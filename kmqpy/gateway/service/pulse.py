"""Tells whether a storage answers, so that requests to one that does not are refused soon. Pure: no I/O."""

from __future__ import annotations

_AWAY_S = 5.0
"""After a failure, a storage is taken to be away for so many seconds, unless a call succeeds."""
PATIENCE_S = 5.0
"""Seconds that a request waits for a storage that answered its last calls."""
PATIENCE_WHEN_AWAY_S = 0.35
"""The same for one that did not: EmoDB's clients go to another gateway only if we answer within 500 ms."""
_SLOW_S = 2.0
"""A call that runs longer, in seconds, is a sign, too."""


class Pulse:
    """The answers of one storage. Times are those of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._failed_s = float("-inf")
        self._running: dict[object, float] = {}

    def begin(self, call: object, now_s: float) -> None:
        """A call begins."""
        self._running[call] = now_s

    def end(self, call: object, now_s: float, *, failed: bool) -> None:
        """A call has ended; `failed` if the storage did not answer."""
        self._running.pop(call, None)
        self._failed_s = now_s if failed else float("-inf")

    def drop(self, call: object) -> None:
        """A call was given up for another reason."""
        self._running.pop(call, None)

    def is_away(self, now_s: float) -> bool:
        """True if the last call failed a moment ago, or the oldest one has run for a long time."""
        oldest_s = next(iter(self._running.values()), now_s)
        return now_s - self._failed_s < _AWAY_S or now_s - oldest_s > _SLOW_S
