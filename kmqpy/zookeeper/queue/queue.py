"""Connects to queues in ZooKeeper; its transactions take items from queues and put items to queues."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kazoo.exceptions import BadVersionError, NoAuthError, NoNodeError, NotEmptyError

from kmqpy.core.closeable import Closeable
from kmqpy.errors import Closed
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.multi_read import MultiReadProbe
from kmqpy.zookeeper.queue.dead_letters import DeadItems
from kmqpy.zookeeper.queue.layout import is_lock, is_queue_name, missing_queue, transactions_path
from kmqpy.zookeeper.queue.shared import SharedQueues, ZkQueueSettings
from kmqpy.zookeeper.queue.transaction import Transaction
from kmqpy.zookeeper.session import connect, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection

_UNUSED_RECORD_AFTER_MS = 86_400_000
"""init() deletes a commit record that no commit has written for this many ms (a day). By then no client asks
for that commit any more, and a client that still uses the record creates it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZkQueueStats:
    """How many items a queue has.

    Attributes:
        queue: The queue's name.
        items: All that are not dead letters, taken ones included.
        taken: Those that transactions have taken.
        dead: The dead letters.
    """

    queue: str
    items: int
    taken: int
    dead: int


class ZkQueue(SharedQueues, Closeable):
    """Takes items from any number of queues and puts items to them, over one connection. Thread-safe.

    close() ends the session: all locks are gone then, and the transactions can't be used any more.

    Args:
        connection: Where ZooKeeper is.
        settings: Of its queues; default: those of ZkQueueSettings.

    Raises:
        Unavailable: ZooKeeper does not answer.
        AccessDenied: The server refuses the login, or the operation.
    """

    def __init__(
        self, connection: ZooKeeperConnection | None = None, settings: ZkQueueSettings | None = None
    ) -> None:
        settings, probe = settings or ZkQueueSettings(), MultiReadProbe()
        given = connection or ZooKeeperConnection.from_environment()
        self._connection = contextlib.ExitStack()
        zk = self._connection.enter_context(connect(given, settings.session_timeout_ms, greeting=probe))
        super().__init__(zk, probe, settings)

    def init(self, *queues: str) -> None:
        """Create missing znodes of these queues, and delete old commit records.

        Args:
            queues: Their names.

        Raises:
            Unavailable: The storage does not answer.
        """
        zk, commits = self.session.zk, transactions_path(self.settings.root)
        with unavailable(zk):
            ensure_path(zk, commits)
            for queue in queues:
                for path in self.paths(queue).parents:
                    ensure_path(zk, path)
            now_ms = zk.set(commits, b"").mtime  # by the server's clock, as are the times of the records
            for name in zk.get_children(commits):
                # A record that a commit writes meanwhile stays: it tells whether this commit happened.
                # A znode of others, with znodes below it or that we may not delete, does no harm.
                with contextlib.suppress(NoNodeError, BadVersionError, NotEmptyError, NoAuthError):
                    stat = zk.exists(f"{commits}/{name}")
                    if stat is not None and now_ms - stat.mtime > _UNUSED_RECORD_AFTER_MS:
                        zk.delete(f"{commits}/{name}", version=stat.version)

    def transaction(self) -> Transaction:
        """Begin a unit of work, in the present session. Raises Closed after close()."""
        if self.session.closed:
            raise Closed("the queue is closed")
        return Transaction(self)

    def size(self, queue: str) -> int:
        """Return the number of items, taken ones included.

        Args:
            queue: The queue's name.

        Raises:
            Unavailable: The storage does not answer.
            QueueNotFound: There is no such queue.
        """
        with unavailable(self.session.zk):
            stat = self.session.get(self.session.zk.exists_async(self.paths(queue).items))
        if stat is None:
            raise missing_queue(self.paths(queue), self.paths(queue).items)
        return int(stat.numChildren)

    def queues(self) -> list[str]:
        """Return the names of the queues below `root`, sorted; none without `root`.

        Raises:
            Unavailable: The storage does not answer.
        """
        zk = self.session.zk
        with unavailable(zk):
            try:
                names = filter(is_queue_name, zk.get_children(self.settings.root))
            except NoNodeError:
                return []
            return [name for name in sorted(names) if zk.exists(self.paths(name).items) is not None]

    def stats(self, queue: str) -> ZkQueueStats:
        """Return how many items a queue has.

        Args:
            queue: The queue's name.

        Raises:
            Unavailable: The storage does not answer.
            QueueNotFound: There is no such queue.
        """
        paths, zk = self.paths(queue), self.session.zk
        with unavailable(zk):
            try:
                taken = sum(map(is_lock, zk.get_children(paths.locks)))
            except NoNodeError:
                raise missing_queue(paths, paths.locks) from None
        dead = self.dead_letters(queue).size()
        return ZkQueueStats(queue=queue, items=self.size(queue), taken=taken, dead=dead)

    def dead_letters(self, queue: str) -> DeadItems:
        """Return the dead letters of a queue: the items that the policy handed out too often.

        Args:
            queue: The queue's name.
        """
        return DeadItems(self.session, self.reads, self.paths(queue))

    def wait_for_change(self, source: str, timeout: float) -> bool:
        """Wait until the items or locks of a queue may have changed.

        Args:
            source: The queue's name.
            timeout: Seconds.

        Returns:
            False after `timeout`.
        """
        return self.source(source).changed.wait(timeout)

    def close(self) -> None:
        """End the session, which unlocks all taken items, and close the connection; may be called twice."""
        with self._mutex:
            if not self.session.closed:
                self.records.delete()
        self.session.closed = True
        self._connection.close()
        with self._mutex:
            for source in self._sources.values():
                source.changed.set()
