"""The clock of ZooKeeper's leader, as far as it can be known: by the times of znodes that we write."""

from __future__ import annotations

import threading

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.zookeeper.draft import Now

_GOOD_FOR_S = 5.0
"""How long an answer is good for: the clocks of two machines run at the same speed for that long."""


class ServerClock:
    """Bounds of the server's clock. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server_ms = 0
        self._sent_s = self._received_s = float("-inf")

    def note(self, server_ms: int, sent_s: float) -> None:
        """A request, sent at `sent_s` (monotonic) and answered now, was handled at `server_ms`."""
        received_s = SYSTEM_CLOCK.monotonic()
        with self._lock:
            self._server_ms, self._sent_s, self._received_s = server_ms, sent_s, received_s

    @property
    def is_known(self) -> bool:
        """True if a request was answered lately."""
        return SYSTEM_CLOCK.monotonic() - self._received_s < _GOOD_FOR_S

    def now(self) -> Now:
        """The earliest and the latest time that the server's clock may show."""
        now_s = SYSTEM_CLOCK.monotonic()
        with self._lock:
            low = self._server_ms + int((now_s - self._received_s) * 1000)
            high = self._server_ms + int((now_s - self._sent_s) * 1000) + 1
        return Now(low, high)
