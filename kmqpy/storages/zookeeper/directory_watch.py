"""Lets threads wait until a queue changes.

All of them share one watch on the queue's directory, a znode that each change of the queue writes
(see znodes.py).
"""

from __future__ import annotations

import threading
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.zookeeper.znodes import Znodes

_VERSION_MASK = 0xFFFFFFFF
"""The bits of a ticket that hold the directory's version; the higher bits count calls of wake()."""
UNKNOWN_VERSION = _VERSION_MASK
"""LiveQueue.change() returns this version if the directory may hold changes that its caller has not seen. No
directory has it, so wait() returns at once for a ticket of it."""


class DirectoryWatch:
    """Wakes threads of this process that wait for changes of one queue. Thread-safe.

    generation  the queue's id, by which its directory is named
    """

    def __init__(self, znodes: Znodes, generation: str) -> None:
        self._znodes = znodes
        self._generation = generation
        self._changed = threading.Condition()
        self._is_watched = False
        self._watched_version: int | None = None
        self._wakes = 0

    def ticket(self, version: int) -> int:
        """The argument of wait() for a thread that has read this version of the directory.

        A ticket is a number: the version, and how often wake() was called until now.
        """
        return self._wakes << 32 | version & _VERSION_MASK

    def wait(self, ticket: int, seconds: float) -> bool:
        """Wait until the directory's version is not the ticket's, or wake() was called after the ticket.

        Returns False if neither happens within `seconds`.
        """
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        if self._is_woken(ticket):
            return True
        if not self._is_watched:
            self._is_watched, self._watched_version = True, None
            try:
                found = self._znodes.read_directory(self._generation, self._on_change)
            except BaseException:
                self._is_watched = False
                raise
            self._watched_version = None if found is None else found[1] & _VERSION_MASK
        if self._watched_version != ticket & _VERSION_MASK:
            return True
        with self._changed:
            left_s = deadline - SYSTEM_CLOCK.monotonic()
            return self._changed.wait_for(lambda: self._is_woken(ticket), max(0.0, left_s))

    def wake(self) -> None:
        """Let every wait() return."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _is_woken(self, ticket: int) -> bool:
        return self._wakes != ticket >> 32

    def _on_change(self, _event: Any) -> None:
        self._watched_version = None
        self._is_watched = False
        self.wake()
