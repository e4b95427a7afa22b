"""Connects to queues in ZooKeeper; its transactions take items from queues and put items to queues."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
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
from kmqpy.zookeeper.queue.dead_letters import DeadItems
from kmqpy.zookeeper.queue.layout import (
    QueuePaths,
    is_lock,
    is_queue_name,
    missing_queue,
    transactions_path,
)
from kmqpy.zookeeper.queue.policies import AtLeastOnce, Policy
from kmqpy.zookeeper.queue.reads import Reads
from kmqpy.zookeeper.queue.sessions import SessionWatch
from kmqpy.zookeeper.queue.transaction import Transaction
from kmqpy.zookeeper.session import connect, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
"""A warning about the same item is logged at most once in this many seconds."""
_UNUSED_RECORD_AFTER_MS = 86_400_000
"""init() deletes a commit record that no commit has written for this many ms (a day). By then no client asks
for that commit any more, and a client that still uses the record creates it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZkQueueSettings:
    """The settings of a ZkQueue; all processes that share a queue should use the same settings.

    root                the parent of all queues
    policy              how often an item is handed out: AtLeastOnce, ConsumeTimes, ConsumeOnce, or a Policy
                        of your own
    policies            the policies of single queues, by name; all others have `policy`
    strict_fifo         whether no item is handed out while another transaction has an earlier item
    session_timeout_ms  ZooKeeper removes the locks of a killed process after this many ms
    max_packet_bytes    the jute.maxbuffer of the servers; a commit that is not a little smaller
                        (see packets.py) raises MessageError
    """

    root: str = "/zms"
    policy: Policy = field(default_factory=AtLeastOnce)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    strict_fifo: bool = False
    session_timeout_ms: int = 6_000
    max_packet_bytes: int = MAX_PACKET_BYTES

    def __post_init__(self) -> None:
        if not self.root.startswith("/") or self.root.endswith("/"):
            raise ConfigError(f"root: {self.root!r} must be the path of a znode, like /zms")
        _check_policy("policy", self.policy)
        if not isinstance(self.policies, Mapping):
            raise ConfigError(f"policies: {self.policies!r} must be a dict of queues and their policies")
        for queue, policy in self.policies.items():
            QueuePaths(self.root, queue)
            _check_policy(f"policies[{queue!r}]", policy)

    def policy_of(self, queue: str) -> Policy:
        """Return the policy of a queue."""
        return self.policies.get(queue, self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZkQueueStats:
    """How many items a queue has.

    items  all that are not dead letters, taken ones included
    taken  those that transactions have taken
    dead   the dead letters
    """

    queue: str
    items: int
    taken: int
    dead: int


def _check_policy(name: str, policy: object) -> None:
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(f"{name}: {policy!r} is no policy; give one like AtLeastOnce() or ConsumeTimes(3)")


class ZkQueue:
    """Takes items from any number of queues and puts items to them, over one connection. Thread-safe.

    close() ends the session: all locks are gone then, and the transactions can't be used any more. The
    constructor raises Unavailable if ZooKeeper does not answer, and AccessDenied.
    """

    def __init__(
        self, connection: ZooKeeperConnection | None = None, settings: ZkQueueSettings | None = None
    ) -> None:
        self.settings = settings or ZkQueueSettings()
        self._connection = contextlib.ExitStack()
        given = connection or ZooKeeperConnection.from_environment()
        probe = MultiReadProbe()
        zk = self._connection.enter_context(connect(given, self.settings.session_timeout_ms, greeting=probe))
        self.session = SessionWatch(zk)
        self._mutex = threading.Lock()
        self._sources: dict[str, Candidates] = {}
        self._throttle = Throttle(_WARN_EVERY_S)
        self.reads = Reads(self.session, probe)
        """Reads znodes for transactions."""
        self.records = CommitRecords(zk, transactions_path(self.settings.root))
        """Lends commit records to transactions."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def init(self, *queues: str) -> None:
        """Create missing znodes of these queues, and delete old commit records. Raises Unavailable."""
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
        """Return the number of items, taken ones included. Raises Unavailable, QueueNotFound."""
        with unavailable(self.session.zk):
            stat = self.session.get(self.session.zk.exists_async(self.paths(queue).items))
        if stat is None:
            raise missing_queue(self.paths(queue), self.paths(queue).items)
        return int(stat.numChildren)

    def queues(self) -> list[str]:
        """Return the names of the queues below `root`, sorted; none without `root`. Raises Unavailable."""
        zk = self.session.zk
        with unavailable(zk):
            try:
                names = filter(is_queue_name, zk.get_children(self.settings.root))
            except NoNodeError:
                return []
            return [name for name in sorted(names) if zk.exists(self.paths(name).items) is not None]

    def stats(self, queue: str) -> ZkQueueStats:
        """Return how many items a queue has. Raises Unavailable, QueueNotFound."""
        paths, zk = self.paths(queue), self.session.zk
        with unavailable(zk):
            try:
                taken = sum(map(is_lock, zk.get_children(paths.locks)))
            except NoNodeError:
                raise missing_queue(paths, paths.locks) from None
        dead = self.dead_letters(queue).size()
        return ZkQueueStats(queue=queue, items=self.size(queue), taken=taken, dead=dead)

    def dead_letters(self, queue: str) -> DeadItems:
        """Return the dead letters of a queue: the items that the policy handed out too often."""
        return DeadItems(self.session, self.reads, self.paths(queue))

    def wait_for_change(self, source: str, timeout: float) -> bool:
        """Wait until the items or locks of a queue may have changed; return False after `timeout` s."""
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

    def paths(self, queue: str) -> QueuePaths:
        """Return the paths of a queue's znodes; raise ConfigError if no queue can have this name."""
        return QueuePaths(self.settings.root, queue)

    def source(self, queue: str) -> Candidates:
        """Return the Candidates of a queue, which all threads share; for Transaction."""
        with self._mutex:
            if queue not in self._sources:
                self._sources[queue] = Candidates(self.session, self.paths(queue))
            return self._sources[queue]

    def warn_of_item(self, queue: str, error: KmqError) -> None:
        """Log, once a minute for each item, that it can't be taken; for Transaction."""
        if self._throttle.allows(str(error)):
            _log.warning("queue %s: an item can't be taken and stays: %s", queue, error)
