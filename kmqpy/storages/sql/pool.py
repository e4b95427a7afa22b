"""The connections of a storage: at most so many, used again.

SQLAlchemy makes them. Its own pool costs a fifth of the client's CPU time of a message that is put, or taken
and acknowledged, so connections are kept here.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import sqlalchemy


class NoneFree(Exception):
    """All connections were in use for too long."""


class PooledConnection:
    """A connection, in use by one thread.

    driver   as the driver has it
    cursor   that of its last statement, if the next one is to use it
    used_at  when it was used last, in monotonic seconds
    """

    __slots__ = ("_fairy", "cursor", "driver", "generation", "used_at")

    def __init__(self, engine: sqlalchemy.Engine, generation: int) -> None:
        self._fairy = engine.raw_connection()
        self.driver: Any = self._fairy.driver_connection
        self.cursor: Any = None
        self.used_at = 0.0
        self.generation = generation

    def close(self) -> None:
        """Close it, whether it works or not."""
        with suppress(Exception):
            self._fairy.invalidate()


class Pool:
    """Lends connections, the one that was used last first: most is in its caches. Safe from any thread.

    engine     makes them, and keeps none
    timeout_s  for how long lend() waits for one to be given back
    """

    def __init__(self, engine: sqlalchemy.Engine, size: int, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._size = size
        self._generation = 0
        self._idle: list[PooledConnection] = []  # its append() and pop() are atomic
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self._permits.put(None)

    def lend(self) -> PooledConnection:
        """A connection for this thread, until it gives it back. Raises NoneFree, and errors of the driver."""
        try:
            self._permits.get(timeout=self._timeout_s)
        except Empty:
            raise NoneFree(
                f"each of the {self._size} connections was in use for {self._timeout_s:g} s; "
                "a larger pool_size helps where the database can do more"
            ) from None
        try:
            return self._kept() or PooledConnection(self._engine, self._generation)
        except BaseException:
            self._permits.put(None)
            raise

    def give_back(self, connection: PooledConnection, *, broken: bool = False) -> None:
        """Let others have it. If it broke, those that were made before then did, too, and all are closed."""
        if broken and connection.generation == self._generation:
            self.close()
        if broken or connection.generation != self._generation:
            connection.close()
        else:
            self._idle.append(connection)
        self._permits.put(None)

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are given back."""
        self._generation += 1
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _kept(self) -> PooledConnection | None:
        with suppress(IndexError):
            while True:
                found = self._idle.pop()
                if found.generation == self._generation:
                    return found
                found.close()
        return None
