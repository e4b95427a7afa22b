"""Estimates the clock of ZooKeeper's leader, by the times that it gives to znodes that we write."""

from __future__ import annotations

import threading

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.zookeeper.draft import Now

_ANSWER_VALID_S = 5.0
"""An answer is used for this many seconds, in which two machines' clocks run at almost the same speed."""


class ServerClock:
    """Knows the earliest and latest time that the server's clock may show. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server_ms = 0
        self._sent_s = self._received_s = float("-inf")

    def note(self, server_ms: int, sent_s: float) -> None:
        """Learn from a request: it was sent at `sent_s` (monotonic), handled at `server_ms`, answered now."""
        received_s = SYSTEM_CLOCK.monotonic()
        with self._lock:
            self._server_ms, self._sent_s, self._received_s = server_ms, sent_s, received_s

    @property
    def is_known(self) -> bool:
        """True if a request was answered lately."""
        return SYSTEM_CLOCK.monotonic() - self._received_s < _ANSWER_VALID_S

    def now(self) -> Now:
        """The earliest and the latest time that the server's clock may show."""
        now_s = SYSTEM_CLOCK.monotonic()
        with self._lock:
            low = self._server_ms + int((now_s - self._received_s) * 1000)
            high = self._server_ms + int((now_s - self._sent_s) * 1000) + 1
        return Now(low, high)
