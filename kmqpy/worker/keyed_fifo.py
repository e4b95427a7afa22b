"""Decides which of the messages at hand may be started next. Pure: no threads, no clock."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyedFifo(Generic[T]):
    """Items in the order they came; those of one key one at a time.

    An item without key (None) waits for nobody.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[bytes | None, T]] = deque()
        # A key stands here while one of its items is ready or started; its value waits after that.
        self._lanes: dict[bytes, deque[T]] = {}

    def __bool__(self) -> bool:
        """True when an item is ready or waits for an earlier item of its key."""
        return bool(self._ready) or any(self._lanes.values())

    def add(self, key: bytes | None, item: T) -> None:
        """Queue an item."""
        if key is None:
            self._ready.append((None, item))
        elif key in self._lanes:
            self._lanes[key].append(item)
        else:
            self._lanes[key] = deque()
            self._ready.append((key, item))

    def start(self) -> T | None:
        """The next item that may start, or None; `done` must follow."""
        return self._ready.popleft()[1] if self._ready else None

    def done(self, key: bytes | None) -> None:
        """An item of `key` that was started is done: the next of its key may start."""
        if key is None:
            return
        lane = self._lanes[key]
        if lane:
            self._ready.append((key, lane.popleft()))
        else:
            del self._lanes[key]

    def clear(self) -> list[T]:
        """Forget the items that were not started; returns them."""
        waiting = [item for _, item in self._ready]
        for key, _ in self._ready:
            if key is not None:
                waiting.extend(self._lanes.pop(key))
        for lane in self._lanes.values():
            waiting.extend(lane)
            lane.clear()
        self._ready.clear()
        return waiting
