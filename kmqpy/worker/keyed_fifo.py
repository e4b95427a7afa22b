"""Decides which of its received messages a worker handles next. Pure: no threads, no clock."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyedFifo(Generic[T]):
    """Gives out items in the order in which they were added, but only one item of each key at a time.

    The next item of a key is ready after done() for the item before. Items without a key (None) do not wait.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[bytes | None, T]] = deque()
        # Has a key while one item of the key is ready or started; the value holds the later items of the key.
        self._waiting_by_key: dict[bytes, deque[T]] = {}

    def __bool__(self) -> bool:
        """True if any item is not started: it is ready, or waits for an earlier item of its key."""
        return bool(self._ready) or any(self._waiting_by_key.values())

    def add(self, key: bytes | None, item: T) -> None:
        """Add an item behind the others."""
        if key is None:
            self._ready.append((None, item))
        elif key in self._waiting_by_key:
            self._waiting_by_key[key].append(item)
        else:
            self._waiting_by_key[key] = deque()
            self._ready.append((key, item))

    def start(self) -> T | None:
        """Remove and return the next item that may start, or None. When the item ends, call done()."""
        return self._ready.popleft()[1] if self._ready else None

    def count(self) -> int:
        """The number of items that may start; any thread may ask at any time."""
        return len(self._ready)

    def first(self) -> T | None:
        """The item that start() would return."""
        return self._ready[0][1] if self._ready else None

    def cut(self, keep: int) -> list[T]:
        """Remove and return all items without a key but the first `keep` of those that may start."""
        return [self._ready.pop()[1] for _ in range(len(self._ready) - keep)]

    def done(self, key: bytes | None) -> None:
        """Note that a started item of `key` has ended, so that the next item of the key may start."""
        if key is None:
            return
        waiting_of_key = self._waiting_by_key[key]
        if waiting_of_key:
            self._ready.append((key, waiting_of_key.popleft()))
        else:
            del self._waiting_by_key[key]

    def clear(self) -> list[T]:
        """Remove and return all items that were not started."""
        waiting = [item for _, item in self._ready]
        for key, _ in self._ready:
            if key is not None:
                waiting.extend(self._waiting_by_key.pop(key))
        for waiting_of_key in self._waiting_by_key.values():
            waiting.extend(waiting_of_key)
            waiting_of_key.clear()
        self._ready.clear()
        return waiting
