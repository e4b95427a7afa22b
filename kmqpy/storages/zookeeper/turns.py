"""Lets a process go first that others have overtaken again and again.

A process that has just changed a queue knows its directory and can change it again at once, while the others
have to read it before. So one of them may go on for ever. A process that was late for too long asks for its
turn, in a znode that all watch; the others wait for a moment.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError
from kmqpy.storages.zookeeper.znodes import Znodes

_PAUSE_S = 0.03


class Turns:
    """The turns of this process in all queues of a storage. Thread-safe.

    Nothing depends on it but how long a change takes. So errors are left to the next request.
    """

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        self._is_watched = False
        self._seen: bytes | None = None

    def ask(self, generation: str) -> None:
        """Ask all other processes to wait for a moment before they change a queue."""
        asked = generation.encode() + os.urandom(8)
        with suppress(KmqError):
            self._znodes.ask_for_turn(asked)
            self._seen = asked

    def give_way(self, generation: str) -> None:
        """Wait for a moment if another process has asked for its turn in this queue."""
        if self._is_watched:
            return
        self._is_watched = True
        asked = None
        with suppress(KmqError):
            asked = self._znodes.turn(self._on_change)
        seen, self._seen = self._seen, asked
        if asked is None:
            self._is_watched = False
        elif seen is not None and asked != seen and asked.startswith(generation.encode()):
            SYSTEM_CLOCK.sleep(_PAUSE_S * random.uniform(0.7, 1.3))

    def _on_change(self, _event: Any) -> None:
        self._is_watched = False
