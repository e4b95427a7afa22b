"""Znodes that tell whether a commit happened."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

_CHANGED = (BadVersionError, NodeExistsError, NoNodeError)


class CommitRecord:
    """A znode that holds the id of the last of the commits that used it; one commit uses it at a time.

    A commit writes it in the same ZooKeeper transaction, on the condition that it has not changed since we
    know it. So the commit happens once, even if it is sent again, and reading the znode tells whether it did.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._version: int | None = None
        """The version that we know; None: the znode is not there."""

    def write(self, multi: Any, commit: str) -> None:
        """Add it as the first operation of a kazoo transaction."""
        assert not multi.operations
        if self._version is None:
            multi.create(self.path, commit.encode())
        else:
            multi.set_data(self.path, commit.encode(), self._version)

    def note(self, results: list[Any]) -> bool:
        """Learn from the results of that transaction; False if it was refused for the sake of this znode.

        Then, and after a lost answer, it has to be read, before it is written again.
        """
        first = results[0]
        if self._version is None:
            if not isinstance(first, Exception):
                self._version = 0
            return not isinstance(first, NodeExistsError)
        if not isinstance(first, Exception):
            self._version = first.version
        return not isinstance(first, _CHANGED)

    def read(self, data: bytes, stat: Any) -> str:
        """Return the id of the last commit, of what was read; None as `stat`: the znode is not there."""
        self._version = None if stat is None else stat.version
        return data.decode(errors="replace")


class CommitRecords:
    """The records of one client. Thread-safe."""

    def __init__(self, zk: KazooClient, parent: str) -> None:
        self._zk = zk
        self._parent = parent
        self._mutex = threading.Lock()
        self._free: list[CommitRecord] = []
        self._made: list[str] = []

    def borrow(self) -> CommitRecord:
        """Return a record that no other commit uses."""
        with self._mutex:
            if self._free:
                return self._free.pop()
            self._made.append(f"{self._parent}/{uuid.uuid4().hex}")
            return CommitRecord(self._made[-1])

    def give_back(self, record: CommitRecord) -> None:
        """Let other commits use a record, when nobody will ask any more whether its commit happened."""
        with self._mutex:
            self._free.append(record)

    def delete(self) -> None:
        """Delete the znodes of all, without waiting for it."""
        with self._mutex:
            for path in self._made:
                self._zk.delete_async(path)
            self._made.clear()
            self._free.clear()
