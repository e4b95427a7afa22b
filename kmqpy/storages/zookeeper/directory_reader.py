"""Reads the directory of a queue, and its table where it names another one than before."""

from __future__ import annotations

from collections.abc import Mapping

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.storages.zookeeper.directory import NO_TABLE, Directory, PageSummary, read_table
from kmqpy.storages.zookeeper.rows import not_ours
from kmqpy.storages.zookeeper.znodes import Znodes


class DirectoryReader:
    """Reads the directory of one queue; keeps the last table that it read. For one thread at a time."""

    def __init__(self, znodes: Znodes, generation: str) -> None:
        self._znodes = znodes
        self._generation = generation
        self.path = znodes.directory_path(generation)
        self.table_path = f"{self.path}/table"
        self._named = NO_TABLE
        self._table: Mapping[int, PageSummary] = {}

    def read(self, known: int | None) -> tuple[Directory | None, int] | None:
        """The directory and its version; the version alone if it is the `known` one; None: it was deleted.

        Raises ConfigError for a directory or a table that can't be read, Unavailable.
        """
        deadline = SYSTEM_CLOCK.monotonic() + self._znodes.timeout_s
        looked_at = None
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
                if version == looked_at:
                    raise not_ours(self.table_path, str(error)) from None
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise Unavailable(f"znode {self.path}: others change it all the time") from None
                looked_at = version  # others may have changed both since the directory was read

    def keep(self, directory: Directory) -> None:
        """Keep the table of a directory that was just committed with it."""
        self._named, self._table = directory.table, directory.pages

    def forget(self) -> None:
        """Read the table again when it is needed next."""
        self._named = NO_TABLE

    def _read_table(self, named: bytes) -> Mapping[int, PageSummary]:
        if named != self._named:
            (data,) = self._znodes.read([self.table_path])
            if data is None:
                raise _OtherTable("it is missing")
            found, table = read_table(data, self.table_path)
            if found != named:
                raise _OtherTable("it is not the one that the directory means")
            self._named, self._table = named, table
        return self._table


class _OtherTable(Exception):
    """The table is not the one that a directory names."""
