"""The partitions and queues of a tracker, published to all of its threads."""

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

    owned      partitions whose leader znode is ours, with their epochs; a later acquisition has a larger one
    releasing  those of them to finish and then give up with release()
    queues     the registered queues that this tracker serves
    connected  whether there is a session; says nothing about its age, see may_redeliver()
    problems   znodes, by path, that keep something from being tracked, and why
    """

    owned: Mapping[Partition, int] = field(default_factory=lambda: MappingProxyType({}))
    releasing: frozenset[Partition] = frozenset()
    queues: Mapping[str, RegisteredQueue] = field(default_factory=lambda: MappingProxyType({}))
    connected: bool = False
    problems: tuple[str, ...] = ()


class PublishedView:
    """Holds the view; a partition whose release was requested leaves it at once. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view = LeadershipView()
        self._releases: dict[Partition, int] = {}
        """Requested releases, with the epoch that is to be given up."""

    @property
    def view(self) -> LeadershipView:
        """The view, without what was released."""
        return self._view

    def publish(self, view: LeadershipView) -> None:
        """Replace the view."""
        with self._lock:
            self._view = self._without_releases(view)

    def release(self, partition: Partition) -> bool:
        """Request the release of a partition; False when it is not owned."""
        with self._lock:
            epoch = self._view.owned.get(partition)
            if epoch is None:
                return False
            self._releases[partition] = epoch
            self._view = self._without_releases(self._view)
        return True

    def releases(self) -> dict[Partition, int]:
        """The requested releases, with their epochs."""
        with self._lock:
            return dict(self._releases)

    def released(self, partition: Partition, epoch: int) -> None:
        """Note that a requested release is done."""
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
