"""Writes and reads the znodes that tell whether a commit happened."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

_RECORD_CHANGED = (BadVersionError, NodeExistsError, NoNodeError)
"""ZooKeeper refuses a write with one of these errors if the record is not as this client last knew it: the
client's own earlier write happened after all, or init() of another client deleted the record."""


class CommitRecord:
    """A znode that holds the id of the last commit that wrote it; one commit uses it at a time.

    A commit writes its id to the record in the same ZooKeeper transaction, on the condition that the record
    has not changed since this client last wrote or read it. So a commit that is sent twice happens once, and
    the record tells whether it happened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._version: int | None = None
        """The version that this client last wrote or read; None: the znode does not exist."""

    def write(self, multi: Any, commit: str) -> None:
        """Add the write of the id `commit` to a kazoo transaction, as its first operation."""
        assert not multi.operations
        if self._version is None:
            multi.create(self.path, commit.encode())
        else:
            multi.set_data(self.path, commit.encode(), self._version)

    def note(self, results: list[Any]) -> bool:
        """Learn from the results of the transaction; return False if it failed because of a changed record.

        In this case, and after a lost answer, the record must be read before it is written again.
        """
        first = results[0]
        if self._version is None:
            if not isinstance(first, Exception):
                self._version = 0
            return not isinstance(first, NodeExistsError)
        if not isinstance(first, Exception):
            self._version = first.version
        return not isinstance(first, _RECORD_CHANGED)

    def read(self, data: bytes, stat: Any) -> str:
        """Learn from the znode's data and stat (None: no znode), and return the id of the last commit."""
        self._version = None if stat is None else stat.version
        return data.decode(errors="replace")


class CommitRecords:
    """Lends the commit records of one client to its commits, one after the other. Thread-safe."""

    def __init__(self, zk: KazooClient, parent: str) -> None:
        self._zk = zk
        self._parent = parent
        self._mutex = threading.Lock()
        self._free: list[CommitRecord] = []
        self._made: list[str] = []

    def borrow(self) -> CommitRecord:
        """Return a record that no other commit uses; make one if all are in use."""
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
        """Delete the znodes of all records, without waiting for the answers."""
        with self._mutex:
            for path in self._made:
                self._zk.delete_async(path)
            self._made.clear()
            self._free.clear()
