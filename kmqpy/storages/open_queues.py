"""`OpenQueues`: the open queues of a storage, which are closed with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Generic, TypeVar
from weakref import WeakSet

from kmqpy.core.closeable import Closeable
from kmqpy.core.forks import ForkGuard
from kmqpy.errors import Closed, ConfigError
from kmqpy.storages.settings import StoredQueueSettings

Q = TypeVar("Q", bound=Closeable)


class OpenQueues(Closeable, Generic[Q]):
    """The queues that a storage has opened, as long as somebody has them.

    close_storage  closes what the queues share, after them
    """

    def __init__(self, close_storage: Callable[[], object]) -> None:
        self._close_storage = close_storage
        self._guard = ForkGuard("the storage")
        self._lock = threading.RLock()
        self._queues: WeakSet[Q] = WeakSet()
        self._closed = False

    def add(self, queue: Q) -> Q:
        """Add a queue; raises Closed."""
        with self._lock:
            self.check_open()
            self._queues.add(queue)
        return queue

    def check_open(self) -> None:
        """Raise Closed after close(), Forked in a child process."""
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed("the storage is closed")

    def close(self) -> None:
        """Close them, even if one of them raises; does nothing in a child process."""
        if self._guard.inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queues = list(self._queues)
        with ExitStack() as all_of_them:
            all_of_them.callback(self._close_storage)
            for queue in queues:
                all_of_them.callback(queue.close)


def check_given(given: Iterable[str], wanted: StoredQueueSettings, found: StoredQueueSettings) -> None:
    """Raise ConfigError if the queue has another value of a setting that its url gives."""
    for name in given:
        here, there = getattr(wanted, name), getattr(found, name)
        if here != there:
            differ = f"the url says {here!r}, the queue {found.name!r} has {there!r}"
            raise ConfigError(f"{name}: {differ}; leave it out, or alter the queue")
