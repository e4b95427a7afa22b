"""What executors ask ZooKeeper: whether the tracker they work for leads a partition, and where to begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_offset
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import address, check_access, gather, new_client, session_of, stop, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection

_TIMEOUT_S = 5.0
_QUIET_S = 2.0
"""How long ZooKeeper is left in peace after it did not answer: there are many partitions."""


class Mandate:
    """Whether a tracker in another process leads a partition: asked of ZooKeeper's leader each time.

    It does while the leader znode and that tracker's member znode are of one session (rule R13).
    Raises Unavailable. For one thread.
    """

    def __init__(
        self, zookeeper: ZooKeeperConnection, root: str, tracker_id: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._paths = ZnodePaths(root)
        self._member = self._paths.tracker(tracker_id)
        self._clock = clock
        self._zk = new_client(zookeeper)
        self._connected = self._zk.start_async()
        self._quiet_until = 0.0

    def epoch(self, queue: str, partition: int) -> int | None:
        """The epoch of its grant; None when it does not lead the partition."""
        path = self._paths.leader(queue, partition)
        calls = (lambda: self._zk.sync_async(path), lambda: self._zk.exists_async(path), self._us)
        _, leader, member = self._ask(*calls)
        if session_of(leader) is None or session_of(leader) != session_of(member):
            return None
        return int(leader.czxid)

    def stored_offset(self, queue: str, partition: int) -> StoredOffset | None:
        """What the predecessor stored; None when absent or unreadable."""
        path = self._paths.offset(queue, partition)
        _, found = self._ask(lambda: self._zk.sync_async(path), lambda: self._zk.get_async(path))
        return decode_offset(path, found[0]) if found else None

    def close(self) -> None:
        """End the session; it owns nothing."""
        stop(self._zk)

    def _us(self) -> Any:
        return self._zk.exists_async(self._member)

    def _ask(self, *calls: Callable[[], Any]) -> list[Any]:
        if self._clock.monotonic() < self._quiet_until:
            raise Unavailable(f"ZooKeeper at {address(self._zk)} did not answer just now")
        try:
            if not self._connected.wait(_TIMEOUT_S):
                check_access(self._zk)
                raise Unavailable(f"ZooKeeper at {address(self._zk)} does not answer")
            with unavailable(self._zk):
                return gather([call() for call in calls], _TIMEOUT_S)
        except Unavailable:
            self._quiet_until = self._clock.monotonic() + _QUIET_S
            raise
