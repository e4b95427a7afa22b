"""Logs the problems of a tracker, counts them in its metrics, and keeps those that /readyz shows."""

from __future__ import annotations

import logging
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.core.throttle import Throttle
from tracker.health.metrics import TrackerMetrics
from tracker.leadership.assignment import Partition

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
"""A problem of the same kind and partition is logged again only after this time."""
_NO_PARTITION: Partition = ("", -1)
"""Stands for the partition in problems of the whole tracker."""


class Problems:
    """Logs each kind of problem at most once per partition and minute.

    A problem given to `show` keeps /readyz red until `clear` is called. Safe to use from any thread.
    """

    def __init__(self, metrics: TrackerMetrics, tracker_id: str, clock: Clock) -> None:
        self._metrics = metrics
        self._tracker_id = tracker_id
        self._throttle = Throttle(_WARN_EVERY_S, clock)
        self._shown: dict[str, str] = {}

    def about(self, key: Partition) -> dict[str, Any]:
        return {"queue": key[0], "partition": key[1], "tracker": self._tracker_id}

    def is_news(self, kind: str, key: Partition = _NO_PARTITION) -> bool:
        """True at most once a minute for a kind of problem and a partition: the caller logs it then."""
        return self._throttle.allows((kind, key))

    def warn(self, kind: str, key: Partition, text: str, **more: Any) -> None:
        """Log a warning about a partition, unless one of this kind was logged within the last minute."""
        if self.is_news(kind, key):
            _log.warning(text, extra={"queue": key[0], "partition": key[1], **more})

    def survived(self, what: str, error: Exception, key: Partition = _NO_PARTITION) -> None:
        """Count and log an unexpected exception; the tracker goes on (rule R21 of docs/rules.md)."""
        self._metrics.internal_errors.labels(key[0]).inc()
        if self.is_news(f"fault in {what}", key):
            extra = None if key == _NO_PARTITION else self.about(key)
            _log.error("%s failed; trying again", what, exc_info=error, extra=extra)

    def clock_ahead(self, key: Partition, ahead_s: float) -> None:
        """Count and log that timestamps were ahead of the broker's clock by more than allowed (rule R23)."""
        self._metrics.clock_leads.labels(key[0]).inc()
        self.warn("clock", key, "a clock is ahead of the broker's", ahead_s=ahead_s)

    def show(self, name: str, text: str) -> None:
        """Show a problem until it is cleared; replaces the shown problem of the same name."""
        self._shown[name] = text

    def clear(self, name: str) -> None:
        self._shown.pop(name, None)

    def shown(self) -> list[str]:
        return list(self._shown.copy().values())
