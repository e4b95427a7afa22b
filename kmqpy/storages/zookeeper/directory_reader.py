"""Reads the directory of a queue, and the table of its pages if the one read last is out of date."""

from __future__ import annotations

from collections.abc import Mapping

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.storages.zookeeper.directory import NO_TABLE, Directory, PageSummary, read_table
from kmqpy.storages.zookeeper.rows import not_ours
from kmqpy.storages.zookeeper.znodes import Znodes


class DirectoryReader:
    """Reads the directory of one queue, and keeps the last table. For one thread at a time."""

    def __init__(self, znodes: Znodes, generation: str) -> None:
        self._znodes = znodes
        self._generation = generation
        self.path = znodes.directory_path(generation)
        self.table_path = f"{self.path}/table"
        self._table_commit = NO_TABLE
        self._table: Mapping[int, PageSummary] = {}

    def read(self, known: int | None) -> tuple[Directory | None, int] | None:
        """The directory and its version; (None, version) if that is `known`; None if the queue was deleted.

        Raises ConfigError for a damaged directory or table, and Unavailable.
        """
        deadline = SYSTEM_CLOCK.monotonic() + self._znodes.timeout_s
        retried_version = None
        while True:
            found = self._znodes.read_directory(self._generation)
            if found is None:
                return None
            data, version = found
            if version == known:
                return None, version
            try:
                return Directory.from_bytes(data, self.path, self._read_table), version
            except _OtherTable as error:
                if version == retried_version:
                    raise not_ours(self.table_path, str(error)) from None
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise Unavailable(f"znode {self.path}: others change it all the time") from None
                retried_version = version  # perhaps others have changed both: read both again

    def keep(self, directory: Directory) -> None:
        """Keep the table that a commit of this process has just written with this directory."""
        self._table_commit, self._table = directory.table, directory.pages

    def forget(self) -> None:
        """Forget the table, so that the next read() reads it again."""
        self._table_commit = NO_TABLE

    def _read_table(self, commit: bytes) -> Mapping[int, PageSummary]:
        if commit != self._table_commit:
            (data,) = self._znodes.read([self.table_path])
            if data is None:
                raise _OtherTable("it is missing")
            found, table = read_table(data, self.table_path)
            if found != commit:
                raise _OtherTable("it is not the one that the directory means")
            self._table_commit, self._table = commit, table
        return self._table


class _OtherTable(Exception):
    """The table is not the one that a directory names."""
