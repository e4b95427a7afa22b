"""Tells whether a storage answers, so that requests to one that does not are refused soon. Pure: no I/O."""

from __future__ import annotations

_AWAY_S = 5.0
"""After a failure, a storage is taken to be away for so many seconds, unless a call succeeds."""
PATIENCE_S = 5.0
"""Seconds that a request waits for a storage that answers others."""
PATIENCE_WHEN_AWAY_S = 0.35
"""The same for one that did not answer its last calls."""
QUICK_S = 0.4
"""A storage that answers nobody for so many seconds is given up by those who wait: EmoDB's clients go to
another gateway only if we answer within 500 ms."""
_SLOW = 2.0
"""One that has taken longer may be silent for so many times as long as its slowest call lately."""
_HALF_LIFE_S = 300.0
"""After so many seconds, a slow call counts as one of half its length."""
_SILENT_S = 2.0
"""A storage that has answered nobody for so long, in seconds, while somebody waited, is away."""


class Pulse:
    """The answers of one storage. Times are those of a monotonic clock, in seconds.

    What waits for the storage are requests, and what it answers are calls: one for many requests, or many for
    one.

    Used on one event loop, but for answer() and fail(), which any thread calls.

    quick_s  see QUICK_S
    """

    def __init__(self, quick_s: float = QUICK_S) -> None:
        self._quick_s = quick_s
        self.least_s = min(PATIENCE_WHEN_AWAY_S, quick_s)
        """Seconds that each request waits, unless its own patience is less."""
        self._failed_s = self._answered_s = self._gave_up_s = float("-inf")
        self._waiting: dict[object, float] = {}
        self._unanswered_since_s = float("inf")
        self._slowest_s, self._slowest_at_s = 0.0, 0.0

    @property
    def has_answered(self) -> bool:
        """True if it ever has."""
        return self._answered_s > float("-inf")

    def begin(self, request: object, now_s: float) -> None:
        """A request begins to wait."""
        self._waiting[request] = now_s

    def end(self, request: object) -> None:
        """A request waits no longer."""
        self._waiting.pop(request, None)

    def give_up(self, request: object, now_s: float) -> None:
        """A request was given up."""
        self._unanswered_since_s = min(self._unanswered_since_s, self._waiting.pop(request, now_s))
        self._gave_up_s = now_s

    def fail(self, now_s: float) -> None:
        """A call has failed since the storage does not answer."""
        self._failed_s = now_s

    def answer(self, now_s: float, took_s: float | None = None) -> None:
        """A call was answered; `took_s` if that is no longer than such calls should take."""
        self._failed_s, self._unanswered_since_s = float("-inf"), float("inf")
        self._answered_s = now_s
        if took_s is not None and took_s >= self._slowest(now_s):
            self._slowest_s, self._slowest_at_s = min(took_s, PATIENCE_S), now_s

    def give_up_at(self, begun_s: float, now_s: float) -> float:
        """When to give up a request that began then, unless there are answers until that time."""
        if self.is_away(now_s):
            return begun_s + self.least_s
        silence_s = max(self._quick_s, _SLOW * self._slowest(now_s))
        return min(max(begun_s, self._answered_s) + silence_s, begun_s + PATIENCE_S)

    def is_away(self, now_s: float) -> bool:
        """True if the last call failed a moment ago, or nobody was answered for a long time."""
        oldest_s = next(iter(self._waiting.values()), now_s)
        if now_s - self._gave_up_s < _AWAY_S:
            oldest_s = min(oldest_s, self._unanswered_since_s)
        is_silent = now_s - max(oldest_s, self._answered_s) > _SILENT_S
        return is_silent or now_s - self._failed_s < _AWAY_S

    def _slowest(self, now_s: float) -> float:
        return float(self._slowest_s * 0.5 ** ((now_s - self._slowest_at_s) / _HALF_LIFE_S))
