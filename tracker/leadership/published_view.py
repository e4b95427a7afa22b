"""Lets all threads of a tracker read its partitions and queues, which the leadership's thread publishes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from tracker.leadership.assignment import Partition


@dataclass(frozen=True)
class LeadershipView:
    """The partitions and queues of this tracker at one moment.

    owned      by partition whose leader znode belongs to our session: its epoch. The epoch is the znode's
               czxid (the number of the transaction that created it), so a later owner has a larger epoch
    releasing  owned partitions that the tracker should finish and then give up with release()
    queues     the registered queues that this tracker serves
    connected  whether a session is connected; Leadership.may_redeliver() tells whether it certainly lives
    problems   texts: the path of a znode that can't be used, and why
    """

    owned: Mapping[Partition, int] = field(default_factory=lambda: MappingProxyType({}))
    releasing: frozenset[Partition] = frozenset()
    queues: Mapping[str, RegisteredQueue] = field(default_factory=lambda: MappingProxyType({}))
    connected: bool = False
    problems: tuple[str, ...] = ()


class PublishedView:
    """Holds the current view, without partitions whose release was requested. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view = LeadershipView()
        self._releases: dict[Partition, int] = {}
        """By partition whose release was requested: the epoch that is given up."""

    @property
    def view(self) -> LeadershipView:
        return self._view

    def publish(self, view: LeadershipView) -> None:
        with self._lock:
            self._view = self._without_releases(view)

    def release(self, partition: Partition) -> bool:
        """Request the release of a partition; returns False if it is not owned."""
        with self._lock:
            epoch = self._view.owned.get(partition)
            if epoch is None:
                return False
            self._releases[partition] = epoch
            self._view = self._without_releases(self._view)
        return True

    def releases(self) -> dict[Partition, int]:
        """The requested releases that are not done: epochs by partition."""
        with self._lock:
            return dict(self._releases)

    def released(self, partition: Partition, epoch: int) -> None:
        """Note that the leader znode of this epoch is deleted, or was not ours any more."""
        with self._lock:
            if self._releases.get(partition) == epoch:
                del self._releases[partition]

    def forget_releases(self) -> None:
        """Drop all requested releases: the session that owned the partitions has ended."""
        with self._lock:
            self._releases.clear()

    def _without_releases(self, view: LeadershipView) -> LeadershipView:
        owned = {p: epoch for p, epoch in view.owned.items() if self._releases.get(p) != epoch}
        return replace(
            view, owned=MappingProxyType(owned), releasing=frozenset(view.releasing & owned.keys())
        )
