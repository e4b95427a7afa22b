"""A connection to queues in ZooKeeper; transactions take from them and put to them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakSet

from kazoo.exceptions import NoNodeError

from kmqpy.errors import Closed, ConfigError, QueueNotFound
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES
from kmqpy.zookeeper.queue.dead_letters import DeadLetters
from kmqpy.zookeeper.queue.layout import QueuePaths, in_order, is_item, transactions_path
from kmqpy.zookeeper.queue.policies import AtLeastOnce, Policy
from kmqpy.zookeeper.queue.sessions import SessionWatch
from kmqpy.zookeeper.queue.transaction import Transaction
from kmqpy.zookeeper.session import connect, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection
from kmqpy.zookeeper.watched_children import WatchedChildren

_LISTED = 100
_LISTED_SHARE = 10
"""Before the queue is listed again, 100 items are tried, or one in ten of them if that is more. Listing finds
new priorities, and items given back; in a deep queue it costs as much as many takes."""
_DONE = 50
"""The nodes of so many finished transactions are deleted together: one by one, each would cost the server a
sync of its disk, for which the next commit waits."""
_FORGOTTEN_AFTER_MS = 86_400_000
"""Nobody asks any more for a commit that is older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZkQueueSettings:
    """How queues are used; those who share a queue should agree.

    root                the znode of all queues
    policy              how often an item is handed out: AtLeastOnce, ConsumeTimes, ConsumeOnce
    strict_fifo         hand nothing out while an earlier item is taken by another transaction
    session_timeout_ms  how long the locks of a killed process last
    max_packet_bytes    the jute.maxbuffer of the servers
    """

    root: str = "/zms"
    policy: Policy = field(default_factory=AtLeastOnce)
    strict_fifo: bool = False
    session_timeout_ms: int = 6_000
    max_packet_bytes: int = MAX_PACKET_BYTES

    def __post_init__(self) -> None:
        if not self.root.startswith("/") or self.root.endswith("/"):
            raise ConfigError(f"root: {self.root!r} must be the path of a znode, like /zms")


class _Source:
    """The listing and locks that a process remembers of a queue it takes from."""

    def __init__(self, items: WatchedChildren, locks: WatchedChildren, changed: threading.Event) -> None:
        self.items = items
        self.locks = locks
        self.changed = changed
        self.names: deque[str] = deque()


class ZkQueue:
    """Takes from and puts to any number of queues, with one connection and session. Thread-safe.

    close() ends the session: the locks of all transactions are gone then, and they can't be used any more.
    Raises Unavailable when ZooKeeper does not answer.
    """

    def __init__(
        self, connection: ZooKeeperConnection | None = None, settings: ZkQueueSettings | None = None
    ) -> None:
        self.settings = settings or ZkQueueSettings()
        self._connection = contextlib.ExitStack()
        given = connection or ZooKeeperConnection.from_environment()
        zk = self._connection.enter_context(connect(given, self.settings.session_timeout_ms))
        self.session = SessionWatch(zk)
        self._mutex = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._open: WeakSet[Transaction] = WeakSet()
        self._done: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def init(self, *queues: str) -> None:
        """Make the znodes of these queues, if they are missing. Raises Unavailable."""
        zk, commits = self.session.zk, transactions_path(self.settings.root)
        with unavailable(zk):
            ensure_path(zk, commits)
            for queue in queues:
                for path in self.paths(queue).parents:
                    ensure_path(zk, path)
            now_ms = zk.set(commits, b"").mtime  # by the server's clock, as the times of the others
            for name in zk.get_children(commits):
                with contextlib.suppress(NoNodeError):
                    stat = zk.exists(f"{commits}/{name}")
                    if stat is not None and now_ms - stat.ctime > _FORGOTTEN_AFTER_MS:
                        zk.delete(f"{commits}/{name}")

    def transaction(self) -> Transaction:
        """Begin a unit of work, in the present session."""
        if self.session.closed:
            raise Closed("the queue is closed")
        made = Transaction(self)
        with self._mutex:
            self._open.add(made)
        return made

    def size(self, queue: str) -> int:
        """The number of items, those that are taken included. Raises Unavailable, QueueNotFound."""
        with unavailable(self.session.zk):
            stat = self.session.get(self.session.zk.exists_async(self.paths(queue).items))
        if stat is None:
            raise self._missing(queue)
        return int(stat.numChildren)

    def dead_letters(self, queue: str) -> DeadLetters:
        """Return the items that the policy handed out too often."""
        return DeadLetters(self.session, self.paths(queue))

    def wait_for_change(self, source: str, timeout: float) -> bool:
        """Wait until the items or locks of a queue may have changed; False after `timeout` s."""
        return self._source(source).changed.wait(timeout)

    def close(self) -> None:
        """Close the connection, which gives all items back; may be called twice."""
        with self._mutex:
            if not self.session.closed:
                self._delete_done()
        self.session.closed = True
        self._connection.close()
        with self._mutex:
            for source in self._sources.values():
                source.changed.set()

    def paths(self, queue: str) -> QueuePaths:
        """The znodes of a queue; raises ConfigError for a name that can't be one."""
        return QueuePaths(self.settings.root, queue)

    def candidates(self, source: str) -> Iterator[str]:
        """The names of items that may be free, in the order in which to try them; for Transaction."""
        known = self._source(source)
        if self.settings.strict_fifo:
            yield from self._listed(source, known, fresh=True)
            return
        yield from self._drawn(known)
        names = self._listed(source, known, fresh=False)
        step = max(_LISTED, len(names) // _LISTED_SHARE)
        for start in range(0, len(names), step):  # further, where none of the first can be had now
            with self._mutex:
                known.names = deque(names[start : start + step])
            yield from self._drawn(known)

    def forget(self, transaction: Transaction, node: str | None) -> None:
        """A transaction has ended, and nobody will ask for its `node` any more; for Transaction."""
        with self._mutex:
            self._open.discard(transaction)
            if node is not None:
                self._done.append(node)
            if len(self._done) >= _DONE:
                self._delete_done()

    def _delete_done(self) -> None:
        for node in self._done:
            self.session.zk.delete_async(node)
        self._done.clear()

    def _drawn(self, known: _Source) -> Iterator[str]:
        """The names that are left of a listing, each for one thread."""
        while True:
            with self._mutex:
                if not known.names:
                    return
                name = known.names.popleft()
            yield name

    def _listed(self, source: str, known: _Source, *, fresh: bool) -> list[str]:
        zk, paths = self.session.zk, self.paths(source)
        with unavailable(zk):
            if fresh:
                zk.sync(paths.items)
                names = zk.get_children(paths.items) if zk.exists(paths.items) else []
                locks: list[str] = []
            else:
                known.changed.clear()
                locks, names = known.locks.names(), known.items.names()
            if not names and zk.exists(paths.items) is None:
                raise self._missing(source)
        return in_order(filter(is_item, names), locks)

    def _missing(self, queue: str) -> QueueNotFound:
        return QueueNotFound(f"queue {queue!r}: there is no {self.paths(queue).items}; make it with init()")

    def _source(self, source: str) -> _Source:
        with self._mutex:
            if source not in self._sources:
                paths, changed = self.paths(source), threading.Event()
                zk = self.session.zk
                self._sources[source] = _Source(
                    WatchedChildren(zk, paths.items, changed),
                    WatchedChildren(zk, paths.locks, changed),
                    changed,
                )
            return self._sources[source]
