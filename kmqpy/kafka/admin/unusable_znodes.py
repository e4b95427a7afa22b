"""Finds unusable znodes of the registry, and removes those that have not changed since.

kmqpy works in spite of them (rule R25 of docs/rules.md): it ignores most, and replaces some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import BadVersionError, NoNodeError, NotEmptyError

from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.registry_entries import parse_offset, partitions_of
from kmqpy.kafka.admin.registry_requests import RegistryRequests
from kmqpy.kafka.admin.znode_paths import parent_of
from kmqpy.kafka.settings import is_topic_name
from kmqpy.zookeeper.session import session_of, unavailable


@dataclass(frozen=True)
class UnusableZnode:
    """An unusable znode: made by hand, restored from a backup, or damaged.

    why           what is wrong with it
    czxid, mzxid  the ZooKeeper transactions that created and last changed it
    """

    path: str
    why: str
    czxid: int
    mzxid: int


class UnusableZnodes:
    """The part of Registry that finds and removes them."""

    _requests: RegistryRequests

    def unusable_znodes(self, name: str) -> list[UnusableZnode]:
        """Return the unusable znodes of a queue, deepest first. kmqpy works in spite of them."""
        requests = self._requests
        top, partitions = requests.paths.queue(name), requests.paths.partitions(name)
        with unavailable(requests.zk):
            stats = requests.tree(top)
        count, _ = partitions_of(path.rpartition("/")[2] for path in stats if parent_of(path) == partitions)
        why = dict.fromkeys(stats, "not made by kmqpy")
        for fine in (top, partitions, *(requests.paths.partition(name, number) for number in range(count))):
            why.pop(fine, None)
        numbers = [number for number in range(count) if requests.paths.partition(name, number) in stats]
        for number in numbers:
            leader = requests.paths.leader(name, number)
            if leader in stats and session_of(stats[leader]) is not None:
                del why[leader]
            elif leader in stats:
                why[leader] = "a leader without a session: no tracker made it"
            why.pop(requests.paths.offset(name, number), None)
        for number, data, stat in requests.data(numbers, lambda number: requests.paths.offset(name, number)):
            try:
                parse_offset(data)
            except ConfigError as error:
                path = requests.paths.offset(name, number)
                why[path], stats[path] = f"can't be read: {error}", stat
        return [_unusable(path, why[path], stats[path]) for path in reversed(stats) if path in why]

    def stray_unusable_znodes(self) -> list[UnusableZnode]:
        """Return unusable znodes outside of queues: of trackers, and those whose name no queue can have."""
        requests = self._requests
        with unavailable(requests.zk):
            stats = requests.tree(requests.paths.trackers)
            stats.pop(requests.paths.trackers, None)
            for tracker in [path for path, stat in stats.items() if session_of(stat) is not None]:
                del stats[tracker]
            why = dict.fromkeys(stats, "a tracker without a session: none runs there")
            for name in requests.children(requests.paths.queues):
                if not is_topic_name(name):
                    below = requests.tree(requests.paths.queue(name))
                    stats |= below
                    why |= dict.fromkeys(below, "no queue can have this name")
        return [_unusable(path, why[path], stats[path]) for path in reversed(stats)]

    def remove_unusable_znodes(self, found: Iterable[UnusableZnode]) -> list[UnusableZnode]:
        """Remove those of `found` that have not changed, in this order. Returns the removed ones.

        Leaves out znodes that have got children meanwhile.
        """
        requests, removed = self._requests, []
        with unavailable(requests.zk):
            for one in found:
                stat = requests.wait(requests.zk.exists_async(one.path))
                if stat is None or (stat.czxid, stat.mzxid) != (one.czxid, one.mzxid):
                    continue
                with contextlib.suppress(BadVersionError, NoNodeError, NotEmptyError):
                    requests.wait(requests.zk.delete_async(one.path, stat.version))
                    removed.append(one)
        return removed


def _unusable(path: str, why: str, stat: Any) -> UnusableZnode:
    return UnusableZnode(path, why, stat.czxid, stat.mzxid)
