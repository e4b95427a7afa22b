"""A connection to queues in ZooKeeper; transactions take from them and put to them."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass, field
from typing import Self

from kazoo.exceptions import BadVersionError, NoAuthError, NoNodeError, NotEmptyError

from kmqpy.core.throttle import Throttle
from kmqpy.errors import Closed, ConfigError, KmqError
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.multi_read import MultiReadProbe
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES
from kmqpy.zookeeper.queue.candidates import Candidates
from kmqpy.zookeeper.queue.commit_records import CommitRecords
from kmqpy.zookeeper.queue.dead_letters import DeadLetters
from kmqpy.zookeeper.queue.layout import QueuePaths, missing_queue, transactions_path
from kmqpy.zookeeper.queue.policies import AtLeastOnce, Policy
from kmqpy.zookeeper.queue.reads import Reads
from kmqpy.zookeeper.queue.sessions import SessionWatch
from kmqpy.zookeeper.queue.transaction import Transaction
from kmqpy.zookeeper.session import connect, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
_FORGOTTEN_AFTER_MS = 86_400_000
"""Nobody asks any more for a commit that is older, and who still uses its znode makes it again."""


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
        greeting = MultiReadProbe()
        zk = self._connection.enter_context(
            connect(given, self.settings.session_timeout_ms, greeting=greeting)
        )
        self.session = SessionWatch(zk)
        self._mutex = threading.Lock()
        self._sources: dict[str, Candidates] = {}
        self._throttle = Throttle(_WARN_EVERY_S)
        self.reads = Reads(self.session, greeting)
        """For Transaction."""
        self.records = CommitRecords(zk, transactions_path(self.settings.root))
        """For Transaction."""

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
                # One that a commit uses meanwhile is left alone: it tells whether that happened.
                # One of others, with znodes below it or that we may not delete, does no harm.
                with contextlib.suppress(NoNodeError, BadVersionError, NotEmptyError, NoAuthError):
                    stat = zk.exists(f"{commits}/{name}")
                    if stat is not None and now_ms - stat.mtime > _FORGOTTEN_AFTER_MS:
                        zk.delete(f"{commits}/{name}", version=stat.version)

    def transaction(self) -> Transaction:
        """Begin a unit of work, in the present session."""
        if self.session.closed:
            raise Closed("the queue is closed")
        return Transaction(self)

    def size(self, queue: str) -> int:
        """The number of items, those that are taken included. Raises Unavailable, QueueNotFound."""
        with unavailable(self.session.zk):
            stat = self.session.get(self.session.zk.exists_async(self.paths(queue).items))
        if stat is None:
            raise missing_queue(self.paths(queue), self.paths(queue).items)
        return int(stat.numChildren)

    def dead_letters(self, queue: str) -> DeadLetters:
        """Return the items that the policy handed out too often."""
        return DeadLetters(self.session, self.reads, self.paths(queue))

    def wait_for_change(self, source: str, timeout: float) -> bool:
        """Wait until the items or locks of a queue may have changed; False after `timeout` s."""
        return self.source(source).changed.wait(timeout)

    def close(self) -> None:
        """Close the connection, which gives all items back; may be called twice."""
        with self._mutex:
            if not self.session.closed:
                self.records.delete()
        self.session.closed = True
        self._connection.close()
        with self._mutex:
            for source in self._sources.values():
                source.changed.set()

    def paths(self, queue: str) -> QueuePaths:
        """The znodes of a queue; raises ConfigError for a name that can't be one."""
        return QueuePaths(self.settings.root, queue)

    def source(self, queue: str) -> Candidates:
        """Return the candidates of a queue, which are the same for all threads; for Transaction."""
        with self._mutex:
            if queue not in self._sources:
                self._sources[queue] = Candidates(self.session, self.paths(queue))
            return self._sources[queue]

    def warn_of_item(self, queue: str, error: KmqError) -> None:
        """Log, once a minute for each item, that it can't be taken; for Transaction."""
        if self._throttle.allows(str(error)):
            _log.warning("queue %s: an item can't be taken and stays: %s", queue, error)
