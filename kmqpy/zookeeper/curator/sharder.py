"""Curator's QueueSharder: spreads items over several queues, and adds a queue when one grows too large."""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.recipe.lock import Lock

from kmqpy.core.closeable import Closeable
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, ConfigError, KmqError
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.curator.distributed_queue import DistributedQueue
from kmqpy.zookeeper.session import unavailable

log = logging.getLogger(__name__)
Q = TypeVar("Q", bound=DistributedQueue)  # type: ignore[type-arg]  # of any items


class _CuratorLatch(Lock):  # type: ignore[misc]  # kazoo ships no types
    """kazoo's lock with znodes named as Curator's LeaderLatch names them."""

    _NODE_NAME = "-latch-"
    _EXCLUDE_NAMES = ["-latch-"]  # noqa: RUF012 - as kazoo has it


class QueueSharder(Closeable, Generic[Q]):
    """Manages queues in the znodes `queue-<uuid>` below `path`; other processes, in Java too, share them.

    The order of items is kept within each queue only.

    Args:
        zk: A started kazoo client; never stopped here.
        build: Makes the queue of a path, say `lambda path: replace(builder, path=path).build_queue()`.
        path: The parent of the queues.
        leader_path: The znode of a lock: who adds a queue holds it.
        threshold: A queue with so many items gets a sibling, and no more puts until it has half as many.
        check_every_s: How often the sizes are looked at, in seconds.
        max_queues: No more queues than these are made.
    """

    def __init__(
        self,
        zk: KazooClient,
        build: Callable[[str], Q],
        path: str,
        leader_path: str,
        *,
        threshold: int = 10_000,
        check_every_s: float = 30.0,
        max_queues: int = 10,
    ) -> None:
        if path == leader_path:
            raise ConfigError(f"leader_path: {leader_path!r} must not be the path of the queues")
        self._zk = zk
        self._build = build
        self._path = path
        self._leader_path = leader_path
        self._threshold = check_limit(threshold, "threshold")
        self._check_every_s = check_every_s
        self._max_queues = check_limit(max_queues, "max_queues")
        self._queues: dict[str, Q] = {}
        self._preferred: set[str] = set()
        self._mutex = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curator-sharder", daemon=True)

    def start(self) -> None:
        """Start the queues that there are, or a first one.

        Raises:
            Unavailable: The storage does not answer.
        """
        with unavailable(self._zk):
            ensure_path(self._zk, self._path)
            self._adopt()
        if not self._queues:
            self._add_new()
        self._thread.start()

    def close(self) -> None:
        """Close all queues; the connection stays open."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for queue in self._queues.values():
            queue.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def queue(self) -> Q:
        """Return one of the queues, at random, to put to. Raises Closed before start() and after close()."""
        with self._mutex:
            if self._closed.is_set() or not self._queues:
                raise Closed("the sharder is not started, or closed")
            return self._queues[random.choice(sorted(self._preferred or self._queues))]

    @property
    def paths(self) -> list[str]:
        """The paths of the queues that this process knows."""
        with self._mutex:
            return sorted(self._queues)

    def check(self) -> None:
        """Look at the sizes, and add a queue if one is too large; done every `check_every_s`, too."""
        full = False
        with unavailable(self._zk):
            self._adopt()
            for path in self.paths:
                stat = self._zk.exists(path)
                count = 0 if stat is None else stat.numChildren
                with self._mutex:
                    if count >= self._threshold:
                        full = True
                        self._preferred.discard(path)
                    elif count <= self._threshold // 2:
                        self._preferred.add(path)
            if not full:
                return
            known = self.paths
            latch = _CuratorLatch(self._zk, self._leader_path)
            if not latch.acquire(blocking=False):
                return  # another adds a queue; the next check finds it
            try:
                self._adopt()
                if self.paths != known:
                    return  # another has added one meanwhile
                if len(known) < self._max_queues:
                    self._add_new()
                else:
                    text = "queue %s: %d queues are full; max_queues allows no more"
                    log.warning(text, self._path, len(known))
            finally:
                latch.release()

    def _adopt(self) -> None:
        for name in self._zk.get_children(self._path):
            self._add(f"{self._path}/{name}")

    def _add_new(self) -> None:
        self._add(f"{self._path}/queue-{uuid.uuid4()}")

    def _add(self, path: str) -> None:
        with self._mutex:
            if path in self._queues or self._closed.is_set():
                return
            queue = self._build(path)
            queue.start()
            self._queues[path] = queue
            self._preferred.add(path)

    def _run(self) -> None:
        while not self._closed.wait(self._check_every_s):
            try:
                self.check()
            except (KmqError, KazooException) as error:
                log.warning("queue %s: looking at its queues failed: %s; it tries again", self._path, error)
            except Exception:
                log.exception("queue %s: looking at its queues failed; it tries again", self._path)
