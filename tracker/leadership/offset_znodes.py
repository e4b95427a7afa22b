"""Stores the safe offset of each partition in ZooKeeper: from there its next owner reads markers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NoAuthError, NodeExistsError, NoNodeError

from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_offset
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import failure, gather, unavailable
from tracker.leadership.assignment import Partition

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 10
"""write() leaves an offset out after this many attempts that found the znode changed by another process."""
MAX_OFFSETS_PER_TRANSACTION = 100
"""One ZooKeeper transaction writes at most this many offsets."""
MAX_BYTES_PER_TRANSACTION = 500_000
"""Half of the largest packet that ZooKeeper accepts. A larger offset gets a transaction of its own."""
EARLY_WRITE_MARKERS = 50_000
"""When a successor would have to read this many markers, OffsetWriteSchedule lets an offset be written early.
A successor reads this many markers in a fraction of a second."""


class OffsetWriteSchedule:
    """Decides when the offset of a partition is written: seldom where there are many partitions.

    All trackers together write about `writes_per_s` offsets a second, and no partition's offset more often
    than every `every_s` seconds. A busy partition's offset waits only for that.
    """

    def __init__(self, every_s: float, writes_per_s: float) -> None:
        self._every_s = every_s
        self._writes_per_s = writes_per_s
        self._written: dict[Partition, float] = {}

    def interval_s(self, partitions: int) -> float:
        """The seconds between two writes of an offset, if all queues together have this many partitions."""
        return max(self._every_s, partitions / self._writes_per_s)

    def is_due(self, key: Partition, markers: int, partitions: int, now: float) -> bool:
        """True if an offset is due to be written; `markers` is what a successor would read again."""
        written = self._written.setdefault(key, now - self._every_s)
        if markers >= EARLY_WRITE_MARKERS:
            return now - written >= self._every_s
        return now - written >= self.interval_s(partitions)

    def written(self, keys: Iterable[Partition], now: float) -> None:
        self._written.update(dict.fromkeys(keys, now))

    def forget(self, owned: Iterable[Partition]) -> None:
        keep = set(owned)
        self._written = {key: at for key, at in self._written.items() if key in keep}


class OffsetStore:
    """Reads and writes the offset znodes of owned partitions. For one thread at a time.

    is_ours       tells from the stat of a leader znode whether it belongs to our session
    seen_as_ours  returns which of the given partitions our session owns, going by cached leader znodes
    member        the path of our member znode, which ZooKeeper deletes when our session ends

    A former owner may still write its offset late. That offset was safe when that owner computed it, so at
    worst the next owner reads more markers again.
    """

    def __init__(
        self,
        zk: KazooClient,
        paths: ZnodePaths,
        timeout: float,
        is_ours: Callable[[Any], bool],
        seen_as_ours: Callable[[Iterable[Partition]], set[Partition]],
        member: str,
    ) -> None:
        self._zk = zk
        self._paths = paths
        self._timeout = timeout
        self._is_ours = is_ours
        self._seen_as_ours = seen_as_ours
        self._member = member
        self._versions: dict[Partition, int] = {}

    def read(self, key: Partition) -> StoredOffset | None:
        """The stored offset, as the leading ZooKeeper server has it; None if it is absent or undecodable."""
        path = self._paths.offset(*key)
        with unavailable(self._zk):
            _, found = gather([self._zk.sync_async(path), self._zk.get_async(path)], self._timeout)
        self._remember(key, found and found[1])
        return decode_offset(path, found[0]) if found else None

    def write(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store offsets; returns the partitions whose offset was stored.

        Left out are partitions that our session does not lead (any more), offset znodes whose ACL does not
        let us write, and znodes that others have changed `MAX_ATTEMPTS` times meanwhile.
        """
        done: set[Partition] = set()
        pending = dict(offsets)
        with unavailable(self._zk):
            if len(pending) > 1:
                done = self._write_together(pending)
                pending = {key: stored for key, stored in pending.items() if key not in done}
            for _ in range(MAX_ATTEMPTS):
                pending = self._ours(pending)
                if not pending:
                    break
                calls = {key: self._write(key, stored) for key, stored in pending.items()}
                for key, call in calls.items():
                    try:
                        written = self._written(key, call)
                    except NoAuthError:  # the znodes of other partitions may still be writable
                        log.warning("%s is not stored: its ACL does not let us", self._paths.offset(*key))
                        del pending[key]
                        continue
                    if written:
                        done.add(key)
                        del pending[key]
        return frozenset(done)

    def _write_together(self, offsets: Mapping[Partition, StoredOffset]) -> set[Partition]:
        """Store offsets in few transactions where the znode's version is known; returns the partitions."""
        known = [key for key in self._seen_as_ours(offsets) if key in self._versions]
        calls = []
        for keys in _groups({key: offsets[key].to_json() for key in known}):
            transaction = self._zk.transaction()
            transaction.check(self._member, -1)
            for key, data in keys.items():
                transaction.set_data(self._paths.offset(*key), data, self._versions[key])
            calls.append((keys, transaction.commit_async()))
        done: set[Partition] = set()
        for keys, call in calls:
            results = call.get(timeout=self._timeout)
            if failure(results) is None:  # else write() writes each of them by itself
                self._versions.update(zip(keys, (stat.version for stat in results[1:]), strict=True))
                done.update(keys)
        return done

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
        """Wait for a write; if the znode's version was another one, note that version and return False."""
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


def _groups(data: Mapping[Partition, bytes]) -> Iterator[dict[Partition, bytes]]:
    """Group the offsets so that each group fits into one ZooKeeper transaction."""
    group: dict[Partition, bytes] = {}
    size = 0
    for key, value in data.items():
        if group and (
            len(group) == MAX_OFFSETS_PER_TRANSACTION or size + len(value) > MAX_BYTES_PER_TRANSACTION
        ):
            yield group
            group, size = {}, 0
        group[key] = value
        size += len(value)
    if group:
        yield group
