"""Writes the ephemeral znodes of a tracker: its member znode, and the leader znode of each partition it owns.

Each znode belongs to the tracker's ZooKeeper session and vanishes with it. A znode at such a path that is not
ephemeral (restored from a backup, or made by hand) belongs to no live tracker: a tracker replaces it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.registry_entries import TrackerInfo
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import failure, gather, session_of
from tracker.leadership.assignment import Partition
from tracker.leadership.registry_view import RegistrySnapshot
from tracker.leadership.znode_cache import ZnodeCache

log = logging.getLogger(__name__)

_HOW_TO_FIX = "clear it up with: kmq doctor --fix"


class MemberZnode:
    """Creates and corrects the znode that says which queues this tracker serves and whether it reaches Kafka.

    Only the leadership's thread calls `ensure`.
    """

    def __init__(
        self, zk: Any, znodes: ZnodeCache, paths: ZnodePaths, info: TrackerInfo, timeout_s: float
    ) -> None:
        self._zk = zk
        self._znodes = znodes
        self._parent = paths.trackers
        self._path = paths.tracker(info.id)
        self._info = info
        self._timeout = timeout_s
        self.registered = threading.Event()
        """Set once `ensure` has found the znode in this tracker's session, with the right data."""
        self.other_session: int | None = None
        """The last other session found under this id: an earlier one of this tracker, or another's."""

    def set_kafka_ok(self, ok: bool) -> None:
        """Note whether this tracker reaches Kafka; the next `ensure` writes it. For any thread."""
        self._info = replace(self._info, kafka_ok=ok)

    def ensure(self, tree: RegistrySnapshot, session: int) -> bool:
        """Create or correct the znode; returns True if it had to be written.

        While another session is registered under this tracker's id, it only logs a warning.
        """
        data = self._info.to_json()
        found = tree.members.get(self._info.id)
        if found is None:
            call = self._zk.create_async(self._path, data, ephemeral=True, makepath=True)
        elif session_of(found[1]) is None:
            self._replace_without_session(found[1], data)
            return True
        elif session_of(found[1]) != session:
            if self.other_session != session_of(found[1]):
                self.other_session = session_of(found[1])
                text = "another session is registered under this id; waiting for its end"
                log.warning(text, extra={"tracker": self._info.id})
            return False
        elif found[0] != data:
            call = self._zk.set_async(self._path, data)
        else:
            self.registered.set()
            return False
        with contextlib.suppress(NodeExistsError):  # the znode was created since `tree` was read
            call.get(timeout=self._timeout)
        self._znodes.forget(self._path)
        self._znodes.forget(self._parent)
        return True

    def _replace_without_session(self, stat: Any, data: bytes) -> None:
        """Replace our member znode if it has no session: it would never expire. Raises Unavailable."""
        transaction = self._zk.transaction()
        transaction.delete(self._path, stat.version)
        transaction.create(self._path, data, ephemeral=True)
        error = failure(transaction.commit_async().get(timeout=self._timeout))
        self._znodes.forget(self._path)
        if isinstance(error, NotEmptyError):
            raise Unavailable(f"{self._path} belongs to no session, and something is below it; {_HOW_TO_FIX}")
        if error is None:
            log.warning("%s belonged to no session; replaced", self._path, extra={"tracker": self._info.id})


class LeaderZnodes:
    """Creates and deletes the znodes that make this tracker the leader of partitions.

    Only the leadership's thread uses this class.
    """

    def __init__(
        self, zk: Any, znodes: ZnodeCache, paths: ZnodePaths, tracker_id: str, timeout_s: float
    ) -> None:
        self._zk = zk
        self._znodes = znodes
        self._paths = paths
        self._id = tracker_id
        self._timeout = timeout_s
        self.blocked: dict[Partition, str] = {}
        """By partition: why its leader znode could not be created by the last `acquire`."""

    def acquire(self, partitions: Iterable[Partition], tree: RegistrySnapshot) -> bool:
        """Try to create the leader znodes of these partitions; returns True if any was created.

        A leader znode without a session is replaced. No tracker makes such a znode, so nobody relies on it.
        If another tracker has just replaced the znode, we take over from that tracker as from any other.
        """
        made = False
        self.blocked = {}
        calls = {}
        for key in partitions:
            transaction = self._zk.transaction()
            # Fails if the queue was changed, say marked as deleting, since `tree` was read.
            transaction.check(self._paths.queue(key[0]), tree.versions[key[0]])
            restored = tree.leaders.get(key)
            if restored is not None:
                transaction.delete(self._paths.leader(*key), restored.version)
            transaction.create(self._paths.leader(*key), self._id.encode(), ephemeral=True)
            calls[key] = transaction.commit_async()
        for key, call in calls.items():
            error = failure(call.get(timeout=self._timeout))
            path = self._paths.leader(*key)
            self._znodes.forget(path)
            if error is None:
                made = True
                if tree.leaders.get(key) is not None:
                    log.warning("%s belonged to no session; replaced", path, extra=self._about(key))
                log.info("partition acquired", extra=self._about(key))
            elif isinstance(error, BadVersionError | NoNodeError):
                self._znodes.forget(self._paths.queues)
                self._znodes.forget(self._paths.queue(key[0]))
                self._znodes.forget(self._paths.partitions(key[0]))
            elif not isinstance(error, NodeExistsError):
                self.blocked[key] = f"{path} can't be taken: {_why_blocked(error)}"
        return made

    def give_up(
        self, releases: Mapping[Partition, int], tree: RegistrySnapshot, session: int
    ) -> set[Partition]:
        """Delete the leader znodes of these partitions; returns the partitions that our session still had.

        `releases`: by partition, the epoch that is given up; the znode of a later epoch is not deleted.
        """
        ours = {
            key: self._paths.leader(*key)
            for key, epoch in releases.items()
            if (stat := tree.leaders.get(key)) is not None
            and (stat.ephemeralOwner, stat.czxid) == (session, epoch)
        }
        calls = []
        for path in ours.values():
            # ZooKeeper has deleted our member znode if our session has ended. The check fails then, even if
            # this request arrives in a new session while another tracker leads the partition.
            transaction = self._zk.transaction()
            transaction.check(self._paths.tracker(self._id), -1)
            transaction.delete(path)
            calls.append(transaction.commit_async())
        for (key, path), results in zip(ours.items(), gather(calls, self._timeout), strict=True):
            self._znodes.forget(path)
            error = failure(results or ())
            if error is not None and not isinstance(error, NoNodeError):
                raise error
            log.info("partition released", extra=self._about(key))
        return set(ours)

    def _about(self, key: Partition) -> dict[str, Any]:
        return {"queue": key[0], "partition": key[1], "tracker": self._id}


def _why_blocked(error: Exception) -> str:
    if isinstance(error, NotEmptyError):
        return f"it belongs to no session, and something is below it; {_HOW_TO_FIX}"
    return f"{type(error).__name__}; check the ACLs of the znodes"
