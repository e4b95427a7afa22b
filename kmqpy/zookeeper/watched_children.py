"""The children of a znode, listed again only when they have changed."""

from __future__ import annotations

import threading
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError


class WatchedChildren:
    """Lists the children of `path`; a watch tells when the list is out of date. Thread-safe.

    `changed` is set when a new list is due: at first, when a child came or went, and when the connection was
    lost (kazoo calls all watches then, so they survive the loss of the session).
    """

    def __init__(self, zk: KazooClient, path: str, changed: threading.Event | None = None) -> None:
        self._zk = zk
        self._path = path
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._stale = True
        self.changed = changed or threading.Event()
        self.changed.set()

    def names(self) -> list[str]:
        """The names of the children, in no order; none where the znode is missing. Raises kazoo's errors."""
        with self._lock:
            if self._stale:
                self._stale = False
                self.changed.clear()
                try:
                    self._names = self._zk.get_children(self._path, self._on_change)
                except NoNodeError:
                    self._names = []
                    self._on_change()  # no watch was set
                except BaseException:
                    self._on_change()
                    raise
            return list(self._names)

    @property
    def stale(self) -> bool:
        """Whether the children have changed since they were listed."""
        return self._stale

    def _on_change(self, _event: Any = None) -> None:
        self._stale = True
        self.changed.set()
