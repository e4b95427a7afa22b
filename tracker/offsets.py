"""The safe markers offset of each partition, in ZooKeeper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from kmqpy.registry import Paths, StoredOffset, decode_offset
from kmqpy.zookeeper import gather, unavailable
from tracker.assignment import Partition

ATTEMPTS = 10  # of a versioned write that others keep disturbing


class Offsets:
    """Reads, and versioned writes by the owner of a partition; for one thread at a time.

    `is_ours` judges the stat of a leader znode. An offset that an older owner still manages to
    write was safe when that owner knew it, so at worst more markers are read again.
    """

    def __init__(self, zk: KazooClient, paths: Paths, timeout: float, is_ours: Callable[[Any], bool]) -> None:
        self._zk = zk
        self._paths = paths
        self._timeout = timeout
        self._is_ours = is_ours
        self._versions: dict[Partition, int] = {}

    def read(self, key: Partition) -> StoredOffset | None:
        """The stored offset, as ZooKeeper's leader has it; None when absent or unreadable."""
        path = self._paths.offset(*key)
        with unavailable(self._zk):
            _, found = gather([self._zk.sync_async(path), self._zk.get_async(path)], self._timeout)
        self._remember(key, found and found[1])
        return decode_offset(*key, found[0]) if found else None

    def write(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store those whose partition is ours; returns them."""
        done: set[Partition] = set()
        pending = dict(offsets)
        with unavailable(self._zk):
            for _ in range(ATTEMPTS):
                pending = self._ours(pending)
                if not pending:
                    break
                calls = {key: self._write(key, stored) for key, stored in pending.items()}
                for key, call in calls.items():
                    if self._written(key, call):
                        done.add(key)
                        del pending[key]
        return frozenset(done)

    def _ours(self, offsets: dict[Partition, StoredOffset]) -> dict[Partition, StoredOffset]:
        calls = [self._zk.exists_async(self._paths.leader(*key)) for key in offsets]
        stats = dict(zip(offsets, gather(calls, self._timeout), strict=True))
        return {key: stored for key, stored in offsets.items() if self._is_ours(stats[key])}

    def _write(self, key: Partition, stored: StoredOffset) -> Any:
        path, version = self._paths.offset(*key), self._versions.get(key)
        if version is None:
            return self._zk.create_async(path, stored.to_json())
        return self._zk.set_async(path, stored.to_json(), version)

    def _written(self, key: Partition, call: Any) -> bool:
        """Whether a write went through; if not, the version is brought up to date."""
        try:
            result = call.get(timeout=self._timeout)
        except (BadVersionError, NodeExistsError, NoNodeError):
            path = self._paths.offset(*key)
            self._remember(key, gather([self._zk.exists_async(path)], self._timeout)[0])
            return False
        self._versions[key] = 0 if isinstance(result, str) else result.version
        return True

    def _remember(self, key: Partition, stat: Any) -> None:
        if stat is None:
            self._versions.pop(key, None)
        else:
            self._versions[key] = stat.version
