"""Sends the requests of the registry to ZooKeeper, and waits for each answer for a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import failure, gather, unavailable

K = TypeVar("K")

MAX_TRIES = 10
"""A change of znodes raises Unavailable when this many tries failed because others changed the znodes."""


class RegistryRequests:
    """Reads and changes the znodes under `root`, through a started client.

    `timeout` (seconds) bounds the wait for each answer.
    """

    def __init__(self, zk: KazooClient, root: str, timeout: float) -> None:
        self.zk = zk
        self.paths = ZnodePaths(root)
        self._timeout = timeout

    def raw(self, name: str) -> tuple[tuple[bytes, Any] | None, list[str] | None]:
        """Return (data, stat) of a queue's znode and the names below `partitions`; None where missing."""
        return self.all_raw([name])[0]

    def all_raw(self, names: Sequence[str]) -> list[tuple[tuple[bytes, Any] | None, list[str] | None]]:
        """Return the same of each of these queues, read at once."""
        answers = gather(
            [
                answer
                for name in names
                for answer in (
                    self.zk.get_async(self.paths.queue(name)),
                    self.zk.get_children_async(self.paths.partitions(name)),
                )
            ],
            self._timeout,
        )
        return list(zip(answers[::2], answers[1::2], strict=True))

    def children(self, path: str) -> list[str]:
        """Return the names of the znodes below `path`, sorted; empty if there is no such znode."""
        with unavailable(self.zk):
            return sorted(gather([self.zk.get_children_async(path)], self._timeout)[0] or ())

    def data(self, keys: Iterable[K], path: Callable[[K], str]) -> list[tuple[K, bytes, Any]]:
        """Return key, data and stat of each existing znode; `path` names the znode of a key."""
        keys = list(keys)
        with unavailable(self.zk):
            found = gather([self.zk.get_async(path(key)) for key in keys], self._timeout)
        return [(key, *value) for key, value in zip(keys, found, strict=True) if value]

    def wait(self, result: Any) -> Any:
        """Wait for the answer to a request that was sent."""
        return result.get(timeout=self._timeout)

    def tree(self, top: str) -> dict[str, Any]:
        """Return the stats of the znode `top` and of all below it, parents first; empty without `top`."""
        stats: dict[str, Any] = {}
        level = [top]
        while level:
            found = gather([self.zk.exists_async(path) for path in level], self._timeout)
            there = {path: stat for path, stat in zip(level, found, strict=True) if stat is not None}
            stats |= there
            parents = [path for path, stat in there.items() if stat.numChildren]
            children = gather([self.zk.get_children_async(path) for path in parents], self._timeout)
            level = [
                f"{path}/{child}"
                for path, names in zip(parents, children, strict=True)
                for child in sorted(names or ())
            ]
        return stats

    def commit(self, transaction: Any) -> bool:
        """Commit a transaction. Returns False if others changed its znodes first; raises other errors."""
        error = failure(self.wait(transaction.commit_async()))
        if error is None:
            return True
        if isinstance(error, BadVersionError | NodeExistsError | NoNodeError | NotEmptyError):
            return False
        raise error
