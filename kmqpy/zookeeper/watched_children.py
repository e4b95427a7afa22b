"""Lists the children of a znode, and lists them again only when they have changed."""

from __future__ import annotations

import threading
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

_TIMEOUT_OF_OTHER_CLIENTS_S = 10.0
"""With a kazoo client that session.py did not make, whose session time-out is unknown, names() waits for a
listing for at most this many seconds; then it raises KazooTimeoutError."""


class WatchedChildren:
    """Lists the children of `path`; a watch tells when the list is out of date. Thread-safe.

    `changed` is set when names() will list the children again: at first, when a child came or went, and when
    the connection was lost (kazoo calls all watches then, so none is missed after the loss of the session).
    While the znode is missing, `stale` stays true, but `changed` is not set when somebody makes the znode.
    """

    def __init__(self, zk: KazooClient, path: str, changed: threading.Event | None = None) -> None:
        self._zk = zk
        self._path = path
        self._timeout_s: float = getattr(zk, "granted_s", _TIMEOUT_OF_OTHER_CLIENTS_S)
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._stale = True
        self.changed = changed or threading.Event()
        self.changed.set()

    def names(self) -> list[str]:
        """Return the names of the children, in no order; none if the znode is missing.

        Raises kazoo's errors, KazooTimeoutError after a session time-out without an answer.
        """
        with self._lock:
            if self._stale:
                self._stale = False
                self.changed.clear()
                try:
                    listing = self._zk.get_children_async(self._path, self._on_change)
                    self._names = listing.get(timeout=self._timeout_s)
                except NoNodeError:
                    self._names = []
                    self._stale = True  # no watch was set, so the caller has to ask again
                except BaseException:
                    self._on_change()
                    raise
            return list(self._names)

    @property
    def stale(self) -> bool:
        return self._stale

    def expire(self) -> None:
        """Make names() list again: the caller changed the children, and the watch may tell a moment later."""
        self._on_change()

    def _on_change(self, _event: Any = None) -> None:
        self._stale = True
        self.changed.set()
