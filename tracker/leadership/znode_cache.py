"""Caches znodes: reads each znode once, and again when a ZooKeeper watch has reported a change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError


class ZnodeCache:
    """Holds values of znodes until they change. Sends the requests of one call together.

    One thread reads. A thread of kazoo marks the path of each watch event as changed and calls `on_change`.
    The reading thread removes the mark before it reads the path again, so that it loses no change.
    """

    def __init__(self, zk: KazooClient, on_change: Callable[[], None], timeout: float) -> None:
        self._zk = zk
        self._on_change = on_change
        self._timeout = timeout
        self._values: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._expired = False
        self.refused: set[str] = set()
        """Paths whose last read ZooKeeper refused; these znodes count as absent."""

    def children(self, paths: Iterable[str]) -> dict[str, list[str] | None]:
        """The child names of each path; None where there is no znode."""
        return self._read(paths, self._zk.get_children_async)

    def data(self, paths: Iterable[str]) -> dict[str, tuple[bytes, Any] | None]:
        """The (data, stat) of each path; None where there is no znode."""
        return self._read(paths, self._zk.get_async)

    def stats(self, paths: Iterable[str]) -> dict[str, Any]:
        """The stat of each path; None where there is no znode. Watches report its creation, too."""
        return self._read(paths, self._zk.exists_async)

    def seen(self, path: str) -> Any:
        """The cached value of `path`; None if no value is cached, or it may be old. For any thread."""
        return None if self._expired or path in self._changed else self._values.get(path)

    @property
    def clean(self) -> bool:
        return not self._expired and not self._changed

    def forget(self, path: str) -> None:
        self._changed.add(path)

    def expire(self) -> None:
        self._expired = True

    def __len__(self) -> int:
        return len(self._values)

    def _read(self, paths: Iterable[str], call: Callable[..., Any]) -> dict[str, Any]:
        paths = list(paths)
        if self._expired:
            self._expired = False
            self._values.clear()
            self._changed.clear()  # even the marks of paths that nobody will read again
            self.refused.clear()
        stale = [path for path in paths if path in self._changed or path not in self._values]
        for path in stale:  # seen() must not return a value that is being read again
            self._values.pop(path, None)
        self._changed.difference_update(stale)
        read = functools.partial(call, watch=self._watch)
        try:
            asked = [(path, read(path)) for path in stale]  # send all requests, then wait for each
            values = [self._value(path, result) for path, result in asked]
        except BaseException:
            self._expired = True
            raise
        self._values.update(zip(stale, values, strict=True))
        if call != self._zk.exists_async:  # ZooKeeper sets no such watch on a missing znode
            self._changed.update(path for path in stale if self._values[path] is None)
        return {path: self._values[path] for path in paths}

    def _value(self, path: str, result: Any) -> Any:
        self.refused.discard(path)
        try:
            return result.get(timeout=self._timeout)
        except NoNodeError:
            return None
        except NoAuthError:
            self.refused.add(path)
            return None

    def _watch(self, event: Any) -> None:
        if event.path is None:  # the connection is lost, and with it all watches
            self._expired = True
        else:
            self._changed.add(event.path)
        self._on_change()
