"""Consumes a queue in strict order, in one process at a time: the holder of Curator's LeaderSelector lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import CancelledError
from kazoo.recipe.lock import Lock

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.curator.distributed_queue import DistributedQueue
from kmqpy.zookeeper.session import has_ended, unavailable

log = logging.getLogger(__name__)
_RETRY_PAUSE_S = 0.2
"""The pause, in seconds, before another attempt to become the leader, or to release the lock."""


class _CuratorLock(Lock):  # type: ignore[misc]  # kazoo ships no types
    """kazoo's lock with znodes named as Curator's mutexes name them, ordered by the text after `lock-`."""

    _NODE_NAME = "-lock-"
    _EXCLUDE_NAMES = ["-lock-"]  # noqa: RUF012 - as kazoo has it


class SingleConsumer:
    """Consumes a queue while this process is the leader; else waits to become the leader.

    When the connection is suspended, the process stops consuming: another may be the
    leader soon. Candidates become the leader in the order in which they came.

    Args:
        zk: A started kazoo client; never stopped here.
        leader_path: The znode of the candidates.
        build: Makes a new queue each time that this process becomes the leader: `builder.build_queue`, say,
            without an executor.
    """

    def __init__(self, zk: KazooClient, leader_path: str, build: Callable[[], DistributedQueue[Any]]) -> None:
        self._zk = zk
        self._path = leader_path
        self._build = build
        self._ended = threading.Event()
        self._resign = threading.Event()
        self._lock: Lock | None = None
        self._waiting = False
        """True while the thread waits for the lock."""
        self._thread = threading.Thread(target=self._run, name="curator-single-consumer", daemon=True)
        self.leading = threading.Event()
        """Set while this process consumes."""

    def start(self) -> None:
        """Take part in the election."""
        self._zk.add_listener(self._connection_changed)
        self._thread.start()

    def close(self) -> None:
        """Stop consuming and let another become the leader; the connection stays open."""
        self._ended.set()
        self._resign.set()
        if self._lock is not None:
            self._lock.cancel()
        self._zk.remove_listener(self._connection_changed)
        while self._thread.is_alive():
            self._thread.join(_RETRY_PAUSE_S)
            if self._waiting and not self._zk.connected:
                break  # the thread ends when kazoo has a connection again, or is stopped

    def _connection_changed(self, state: str) -> None:
        if state != "CONNECTED":
            self._resign.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._lock = lock = _CuratorLock(self._zk, self._path)
            self._resign.clear()
            try:
                if self._wait_for_lock(lock):
                    self._consume_as_leader()
            except CancelledError:
                log.debug("single consumer of %s: closed while it waited for the lock", self._path)
            except Exception as error:
                if has_ended(self._zk):
                    return  # the process ends
                log.warning("single consumer of %s: %r; it tries again", self._path, error)
            finally:
                self._release(lock)
            self._ended.wait(_RETRY_PAUSE_S)

    def _wait_for_lock(self, lock: Lock) -> bool:
        if not self._zk.connected or self._ended.is_set():
            return False
        self._waiting = True
        try:
            # Without a time limit: a candidate that gives up and tries again comes after all others.
            return bool(lock.acquire())
        finally:
            self._waiting = False

    def _consume_as_leader(self) -> None:
        if self._resign.is_set() or self._ended.is_set():
            return
        with self._build():
            self.leading.set()
            try:
                self._resign.wait()
            finally:
                self.leading.clear()

    def _release(self, lock: Lock) -> None:
        while lock.is_acquired and not self._zk._stopped.is_set():
            try:
                with unavailable(self._zk):
                    lock.release()
            except Exception as error:
                log.debug("releasing %s: %r", self._path, error)
                SYSTEM_CLOCK.sleep(_RETRY_PAUSE_S)
            else:
                return
