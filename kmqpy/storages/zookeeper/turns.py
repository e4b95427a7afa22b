"""Lets a process go first that others have overtaken again and again.

A process that has just changed a queue knows the queue's directory and can change it again at once, while the
others have to read it first. So one process might go on for ever. A process that others have overtaken for
too long asks for its turn: it writes a znode, which each process watches once its own commit was refused. The
others then wait for a moment before their next change of the queue.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError
from kmqpy.storages.zookeeper.znodes import Znodes

_GIVE_WAY_S = 0.03
"""A process that gives way waits for this many seconds, times a random number from 0.7 to 1.3."""


class Turns:
    """Asks for turns and gives way, in all queues of a storage. Thread-safe.

    Only the duration of changes depends on turns. So errors are ignored; the next request meets them again.
    """

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        self._is_watched = False
        self._last_asked: bytes | None = None

    def ask(self, generation: str) -> None:
        """Ask all other processes to wait for a moment before their next change of a queue."""
        asked = generation.encode() + os.urandom(8)
        with suppress(KmqError):
            self._znodes.ask_for_turn(asked)
            self._last_asked = asked

    def give_way(self, generation: str) -> None:
        """Wait for a moment if another process has asked for its turn in this queue since the last look."""
        if self._is_watched:
            return
        self._is_watched = True
        asked = None
        with suppress(KmqError):
            asked = self._znodes.turn(self._on_change)
        seen, self._last_asked = self._last_asked, asked
        if asked is None:
            self._is_watched = False
        elif seen is not None and asked != seen and asked.startswith(generation.encode()):
            SYSTEM_CLOCK.sleep(_GIVE_WAY_S * random.uniform(0.7, 1.3))

    def _on_change(self, _event: Any) -> None:
        self._is_watched = False
