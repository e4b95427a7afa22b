"""Lets threads wait until a queue changes, by a watch on its directory."""

from __future__ import annotations

import threading
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.zookeeper.znodes import Znodes

_VERSION = 0xFFFFFFFF
"""The bits of `seen` that are the directory's version; the higher ones count the calls of wake()."""
UNKNOWN_VERSION = _VERSION
"""A version that no directory has: a thread that has seen this one does not wait."""


class DirectoryWatch:
    """Wakes threads of this process that wait for changes of a queue; all share one watch. Thread-safe."""

    def __init__(self, znodes: Znodes, generation: str) -> None:
        self._znodes = znodes
        self._generation = generation
        self._changed = threading.Condition()
        self._is_watched = False
        self._watched_version: int | None = None
        self._wakes = 0

    def seen(self, version: int) -> int:
        """For wait(): the version of the directory, and how often wake() was called."""
        return self._wakes << 32 | version & _VERSION

    def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the directory has another version than the one seen; False: not within `seconds`."""
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        if self._is_changed(seen):
            return True
        if not self._is_watched:
            self._is_watched, self._watched_version = True, None
            try:
                found = self._znodes.read_directory(self._generation, self._on_change)
            except BaseException:
                self._is_watched = False
                raise
            self._watched_version = None if found is None else found[1] & _VERSION
        if self._watched_version != seen & _VERSION:
            return True
        with self._changed:
            left_s = deadline - SYSTEM_CLOCK.monotonic()
            return self._changed.wait_for(lambda: self._is_changed(seen), max(0.0, left_s))

    def wake(self) -> None:
        """Let every wait() return."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _is_changed(self, seen: int) -> bool:
        return self._wakes != seen >> 32

    def _on_change(self, _event: Any) -> None:
        self._watched_version = None
        self._is_watched = False
        self.wake()
