"""Reads the registry in ZooKeeper (its queues, trackers and partition leaders) into snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import NoAuthError

from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, decode_queue, decode_tracker, partitions_of
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.kafka.settings import QueueSettings, is_topic_name, queue_of
from kmqpy.zookeeper.session import session_of
from tracker.leadership.assignment import Member, Partition
from tracker.leadership.znode_cache import ZnodeCache

log = logging.getLogger(__name__)

ChooseLeaders = Callable[[Mapping[str, RegisteredQueue], frozenset[Member]], Iterable[Partition]]
"""Chooses the partitions whose leader znodes are read, from the queues and the eligible members."""


@dataclass(frozen=True)
class RegistrySnapshot:
    """The registered trackers, the queues that this tracker serves, and the leaders of partitions.

    members   by id of a registered tracker: the (data, stat) of its znode
    eligible  the members whose znode belongs to a session and can be decoded; only they may get partitions
    queues    by name: the registered queues that this tracker serves
    versions  by name of a queue: the version of its znode
    leaders   by partition that was chosen: the stat of its leader znode, or None if there is no such znode
    problems  texts: the path of a znode that can't be used, and why
    """

    members: Mapping[str, tuple[bytes, Any]]
    eligible: frozenset[Member]
    queues: Mapping[str, RegisteredQueue]
    versions: Mapping[str, int]
    leaders: Mapping[Partition, Any]
    problems: tuple[str, ...] = ()


class RegistryReader:
    """Reads snapshots of the registry, and logs each unusable znode once without failing because of it.

    Caches decoded values by the data of their znode, not by its version: a ZooKeeper that was restored from a
    backup may use a version again for other data. If the settings of a queue can't be decoded any more, the
    last good settings stay in use.
    """

    def __init__(self, paths: ZnodePaths, queues: frozenset[str] | None) -> None:
        self._paths = paths
        self._served = queues
        self._last_good: dict[str, tuple[bytes, QueueSettings, bool]] = {}
        self._problems: dict[str, str] = {}
        self._members: dict[str, tuple[bytes, Member | None]] = {}
        self._partition_lists: dict[str, tuple[list[str], int, list[int]]] = {}
        self._last: RegistrySnapshot | None = None

    def read(self, znodes: ZnodeCache, choose_leaders: ChooseLeaders) -> RegistrySnapshot:
        """Read what is not cached or has changed; NoAuthError: we may not list trackers and queues."""
        if self._last is not None and znodes.clean:
            return self._last
        self._last = None
        paths = self._paths
        tops = znodes.children([paths.trackers, paths.queues])
        if znodes.refused.intersection(tops):
            raise NoAuthError
        ids = sorted(tops[paths.trackers] or ())
        names = sorted(name for name in tops[paths.queues] or () if is_topic_name(name))
        if self._served is not None:
            names = [name for name in names if not self._served.isdisjoint((name, queue_of(name)))]
        self._last_good = {name: self._last_good[name] for name in names if name in self._last_good}
        data = znodes.data([*map(paths.tracker, ids), *map(paths.queue, names)])
        children = znodes.children(map(paths.partitions, names))
        before, self._problems = self._problems, {}
        queues, versions = {}, {}
        for name in names:
            found, numbers = data[paths.queue(name)], children[paths.partitions(name)]
            if paths.queue(name) in znodes.refused:
                self._problems[paths.queue(name)] = "its ACL does not let us read it"
            if found is None or (known := self._queue(name, found[0])) is None:
                continue
            settings, deleting = known
            size, missing = self._partitions(name, numbers or [])
            if not deleting and (missing or not size):
                lost = ", ".join(map(str, missing[:10])) or "all partitions"
                self._problems[paths.partitions(name)] = f"lacks {lost}; run: kmq queue create {name}"
            queues[name] = RegisteredQueue(settings, size, deleting)
            versions[name] = found[1].version
        members = {i: found for i in ids if (found := data[paths.tracker(i)]) is not None}
        self._members = {i: self._member(i, found[0]) for i, found in members.items()}
        eligible = frozenset(
            member
            for i, (_, member) in self._members.items()
            if member is not None and session_of(members[i][1]) is not None
        )
        for path, problem in self._problems.items():
            if before.get(path) != problem:
                log.error("%s %s", path, problem)
        partitions = {p: paths.leader(*p) for p in choose_leaders(queues, eligible)}
        stats = znodes.stats(partitions.values())
        self._last = RegistrySnapshot(
            members=members,
            eligible=eligible,
            queues=queues,
            versions=versions,
            leaders={partition: stats[path] for partition, path in partitions.items()},
            problems=tuple(f"{path} {problem}" for path, problem in self._problems.items()),
        )
        return self._last

    def _partitions(self, name: str, children: list[str]) -> tuple[int, list[int]]:
        """The number of partitions, and the missing ones; cached until the list of znodes is read again."""
        known = self._partition_lists.get(name)
        if known is None or known[0] is not children:
            known = self._partition_lists[name] = (children, *partitions_of(children))
        return known[1:]

    def _queue(self, name: str, data: bytes) -> tuple[QueueSettings, bool] | None:
        known = self._last_good.get(name)
        if known is None or known[0] != data:
            try:
                known = self._last_good[name] = (data, *decode_queue(name, data))
            except ConfigError as error:
                problem = f"can't be read: {error}; write it again with: kmq queue create {name}"
                self._problems[self._paths.queue(name)] = problem
        return known and known[1:]

    def _member(self, tracker_id: str, data: bytes) -> tuple[bytes, Member | None]:
        known = self._members.get(tracker_id)
        if known is not None and known[0] == data:
            return known
        try:
            info = decode_tracker(tracker_id, data)
        except ConfigError as error:
            log.error("%s can't be read: %s", self._paths.tracker(tracker_id), error)
            return data, None
        return data, Member(info.id, info.queues, info.kafka_ok)
