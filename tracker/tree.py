"""What the registry says at one moment, as a tracker needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kmqpy.config import QueueSettings
from kmqpy.errors import ConfigError
from kmqpy.registry import (
    Paths,
    RegisteredQueue,
    decode_queue,
    decode_tracker,
    partition_numbers,
)
from tracker.assignment import Member, Partition
from tracker.znodes import Znodes

log = logging.getLogger(__name__)

Wanted = Callable[[Mapping[str, RegisteredQueue], frozenset[Member]], Iterable[Partition]]
"""Which leaders to read, from the queues and the eligible members."""


@dataclass(frozen=True)
class Tree:
    """Registered trackers, the queues that this one serves, and their leaders.

    members   (data, stat) of each tracker's znode
    eligible  those members whose data can be read
    queues    the queues to serve
    versions  of the queues' znodes
    leaders   the stat of the leader znode of each partition that was asked for; None where none is
    """

    members: Mapping[str, tuple[bytes, Any]]
    eligible: frozenset[Member]
    queues: Mapping[str, RegisteredQueue]
    versions: Mapping[str, int]
    leaders: Mapping[Partition, Any]


class TreeReader:
    """Reads trees; what can't be read is logged once per version and does not stop the rest.

    A queue whose settings can't be read any more keeps the last good ones.
    """

    def __init__(self, paths: Paths, queues: frozenset[str] | None) -> None:
        self._paths = paths
        self._served = queues
        self._good: dict[str, tuple[int, QueueSettings, bool]] = {}
        self._complaints: dict[str, int] = {}
        self._members: dict[str, tuple[int, Member | None]] = {}
        self._sizes: dict[str, tuple[list[str], int]] = {}
        self._last: Tree | None = None

    def read(self, znodes: Znodes, wanted: Wanted) -> Tree:
        """The tree now, or as it was last read where no watch says that it has changed."""
        if self._last is not None and znodes.clean:
            return self._last
        self._last = None
        paths = self._paths
        tops = znodes.children([paths.trackers, paths.queues])
        ids = sorted(tops[paths.trackers] or ())
        names = sorted(tops[paths.queues] or ())
        if self._served is not None:
            names = [name for name in names if name in self._served]
        self._good = {name: self._good[name] for name in names if name in self._good}
        data = znodes.data([*map(paths.tracker, ids), *map(paths.queue, names)])
        children = znodes.children(map(paths.partitions, names))
        queues, versions = {}, {}
        for name in names:
            found, numbers = data[paths.queue(name)], children[paths.partitions(name)]
            if found is not None and numbers is not None and (known := self._queue(name, *found)):
                settings, deleting = known
                queues[name] = RegisteredQueue(settings, self._size(name, numbers), deleting)
                versions[name] = found[1].version
        members = {i: found for i in ids if (found := data[paths.tracker(i)]) is not None}
        self._members = {i: self._member(i, *found) for i, found in members.items()}
        eligible = frozenset(member for _, member in self._members.values() if member is not None)
        partitions = {p: paths.leader(*p) for p in wanted(queues, eligible)}
        stats = znodes.stats(partitions.values())
        self._last = Tree(
            members=members,
            eligible=eligible,
            queues=queues,
            versions=versions,
            leaders={partition: stats[path] for partition, path in partitions.items()},
        )
        return self._last

    def _size(self, name: str, children: list[str]) -> int:
        """How many partitions; counted once for each list that was read."""
        known = self._sizes.get(name)
        if known is None or known[0] is not children:
            known = self._sizes[name] = (children, partition_numbers(children))
        return known[1]

    def _queue(self, name: str, data: bytes, stat: Any) -> tuple[QueueSettings, bool] | None:
        """Settings and deletion mark."""
        known = self._good.get(name)
        if known is None or known[0] != stat.mzxid:
            try:
                known = self._good[name] = (stat.mzxid, *decode_queue(name, data))
            except ConfigError as error:
                self._complain(f"queue {name!r}", stat.mzxid, error)
        return known and known[1:]

    def _member(self, tracker_id: str, data: bytes, stat: Any) -> tuple[int, Member | None]:
        """The member and of which version of its znode."""
        known = self._members.get(tracker_id)
        if known is not None and known[0] == stat.mzxid:
            return known
        try:
            info = decode_tracker(tracker_id, data)
        except ConfigError as error:
            self._complain(f"tracker {tracker_id!r}", stat.mzxid, error)
            return stat.mzxid, None
        return stat.mzxid, Member(info.id, info.queues, info.kafka_ok)

    def _complain(self, what: str, version: int, error: Exception) -> None:
        if self._complaints.get(what) != version:
            self._complaints[what] = version
            log.error("%s can't be read: %s", what, error)


def owner(stat: Any) -> int | None:
    """The session that a znode belongs to; None for no znode."""
    return None if stat is None else stat.ephemeralOwner
