"""Curator's SimpleDistributedQueue: the queue of ZooKeeper's own recipe, on the same znodes."""

from __future__ import annotations

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES, check_create
from kmqpy.zookeeper.session import unavailable
from kmqpy.zookeeper.watched_children import WatchedChildren

_PREFIX = "qn-"
_LOOK_AGAIN_AFTER_S = 1.0
"""take() looks again after this many seconds, even without a watch event: the queue may have been removed."""


class SimpleDistributedQueue:
    """A queue without a consumer: who calls gets the first item. Thread-safe.

    At most once: an item is deleted before it is returned. Methods raise Unavailable; after one of poll() or
    take(), an item may be lost.

    Args:
        zk: A started kazoo client; the queue never stops it.
        path: The znode of the queue.
        max_packet_bytes: The jute.maxbuffer of the servers.
    """

    def __init__(self, zk: KazooClient, path: str, *, max_packet_bytes: int = MAX_PACKET_BYTES) -> None:
        if not path.startswith("/") or path.endswith("/") or "//" in path:
            raise ConfigError(f"path: {path!r} must be the path of a znode, like /app/queue")
        self._zk = zk
        self._path = path
        self._max_packet_bytes = max_packet_bytes
        self._children = WatchedChildren(zk, path)

    def offer(self, item: bytes) -> None:
        """Put an item at the end.

        Args:
            item: Bytes.

        Raises:
            MessageError: The item is not bytes, or too large.
        """
        if not isinstance(item, bytes):
            raise MessageError(f"item: {type(item).__name__} is not bytes")
        path = f"{self._path}/{_PREFIX}"
        check_create(self._zk, path, item, self._max_packet_bytes, f"offer to {self._path}")
        with unavailable(self._zk):
            try:
                self._zk.create(path, item, sequence=True)
            except NoNodeError:
                ensure_path(self._zk, self._path)
                self._zk.create(path, item, sequence=True)

    def peek(self) -> bytes | None:
        """Return the first item, which stays; None if there is none. Curator's element() as well."""
        return self._first(remove=False)

    def poll(self, timeout: float = 0.0) -> bytes | None:
        """Remove and return the first item; None if there is none.

        Args:
            timeout: Seconds to wait for one.
        """
        return self.take(timeout)

    def take(self, timeout: float | None = None) -> bytes | None:
        """Remove and return the first item; wait for one.

        Args:
            timeout: Seconds to wait for one, then None; default: without limit.
        """
        deadline = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        while (found := self._first(remove=True)) is None:
            left = _LOOK_AGAIN_AFTER_S if deadline is None else deadline - SYSTEM_CLOCK.monotonic()
            if left <= 0:
                return None
            self._children.changed.wait(min(left, _LOOK_AGAIN_AFTER_S))
        return found

    def _first(self, *, remove: bool) -> bytes | None:
        self._children.expire()  # the watch event of an item that this process has just put may come later
        with unavailable(self._zk):
            for name in sorted(self._children.names()):
                if not name.startswith(_PREFIX):
                    continue
                path = f"{self._path}/{name}"
                try:
                    data, stat = self._zk.get(path)
                    if remove:
                        self._zk.delete(path, version=stat.version)
                except NoNodeError:
                    continue  # another has taken it
                return bytes(data)
        return None
