"""Caches bodies that this process has sent or read lately, so that a take need not read them. Pure.

The unit is the *pack*, a znode with the bodies of messages that one put() has stored (see rows.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kmqpy.storages.zookeeper.rows import Content

Key = tuple[str, int, int]
"""Generation of the queue, number of the page, first id of the pack."""


class BodyCache:
    """Keeps the most recently used packs, up to `most_bytes` in all. Thread-safe."""

    def __init__(self, most_bytes: int = 2**24) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._packs: OrderedDict[Key, tuple[Sequence[Content], int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Sequence[Content] | None:
        """A pack, if it is kept."""
        with self._lock:
            found = self._packs.get(key)
            if found is None:
                return None
            self._packs.move_to_end(key)
            return found[0]

    def keep(self, key: Key, contents: Sequence[Content], size: int) -> None:
        """Keep a pack of `size` bytes; remove the least recently used packs when there are too many bytes."""
        with self._lock:
            self._remove(key)
            self._packs[key] = contents, size
            self._bytes += size
            while self._bytes > self._most_bytes:
                self._bytes -= self._packs.popitem(last=False)[1][1]

    def remove(self, key: Key) -> None:
        """Remove a pack, if it is kept."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        found = self._packs.pop(key, None)
        if found is not None:
            self._bytes -= found[1]
