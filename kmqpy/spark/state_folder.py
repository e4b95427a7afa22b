"""Reads and writes the folder of a state table: its versions, and the Parquet files that versions name.

    versions/00000000000000000012.json   a version; the one with the largest number counts
    rows/12-1f0c…/in_partition=0/in_block=3/part-….parquet
    lanes/retry/…                            of a queue with lanes: the table of each lane but the main one

A version appears by one rename, after its files were written. Files are never changed. commit() deletes files
that only old versions name, and files of updates that failed or were killed.
"""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from typing import Any

from pyarrow import fs

from kmqpy.errors import ConfigError, DecodeError
from kmqpy.spark.sinks.files import place_of, replace_file, unavailable
from kmqpy.spark.state_version import Block, StateVersion

PARTITION, BLOCK = "in_partition", "in_block"
"""Columns that name the folders of rows."""

KEPT_VERSIONS = 3
"""commit() keeps this many versions, and deletes older ones: a frame of a version can be evaluated until this
many newer versions have been written."""

_VERSIONS, _ROWS, LANES = "versions", "rows", "lanes"


class StateFolder:
    """The folder of one state table. Methods raise Unavailable when the file system can't be reached."""

    def __init__(self, path: str) -> None:
        """Raise ConfigError for a place that Arrow can't reach."""
        if not isinstance(path, str) or not path.strip("/ "):
            raise ConfigError(f"table: invalid folder {path!r}: name a folder for it alone")
        self.path = path
        self._place = place_of(path, "table")
        self._system = self._place.system

    def latest(self) -> StateVersion | None:
        """The newest version; None in a folder without one.

        Raises ConfigError if that version can't be read, and for a folder that is not a state table.
        """
        with self._unavailable():
            if numbers := self._numbers():
                return self._version(numbers[-1])
            names = {one.base_name for one in self._listed("")}
        if foreign := sorted(names - {_VERSIONS, _ROWS, LANES}):
            raise ConfigError(
                f"table: {self.path!r} holds {foreign[0]!r} and is not a state table; name an empty folder"
            )
        return None

    def new_rows(self, number: int) -> str:
        """The name of a new folder for the rows that version `number` adds."""
        return f"{number}-{uuid.uuid4().hex[:16]}"

    def uri(self, rows: str, block: Block | None = None) -> str:
        """The URI, for Spark, of the folder named `rows`, or of one block in it."""
        of_rows = f"{self._place.uri}/{_ROWS}/{rows}"
        return of_rows if block is None else f"{of_rows}/{_block_folder(block)}"

    def blocks_in(self, rows: str) -> list[Block]:
        """The blocks that Spark has written into the folder named `rows`."""
        with self._unavailable():
            return [
                (int(partition.base_name.partition("=")[2]), int(block.base_name.partition("=")[2]))
                for partition in self._listed(f"{_ROWS}/{rows}")
                if partition.base_name.startswith(f"{PARTITION}=")
                for block in self._listed(f"{_ROWS}/{rows}/{partition.base_name}")
            ]

    def commit(self, version: StateVersion) -> None:
        """Make `version` the newest one, and delete the files that only old versions name.

        Raises ConfigError if another update has written this version meanwhile.
        """
        with self._unavailable():
            if version.number in self._numbers():
                raise ConfigError(
                    f"table: {self.path!r} was updated by another run meanwhile; run one at a time"
                )
            replace_file(self._system, self._version_path(version.number), version.to_json())
            self._clean(version)

    def _clean(self, newest: StateVersion) -> None:
        """Delete old versions and files, and keep those of the newest KEPT_VERSIONS."""
        *old, _ = self._numbers()
        dropped = [number for number in old if number <= newest.number - KEPT_VERSIONS]
        kept = [newest, *(self._version(number) for number in old if number not in dropped)]
        used = {(rows, block) for version in kept for block, rows in version.blocks.items()}
        used_folders = {rows for rows, _ in used}
        for number in dropped:
            for block, rows in self._version(number).blocks.items():
                if (rows, block) not in used and rows in used_folders:
                    self._delete(f"{self._place.root}/{_ROWS}/{rows}/{_block_folder(block)}")
            self._system.delete_file(self._version_path(number))
        for folder in self._listed(_ROWS):
            # A folder of this or a higher number is that of this update, or of another one that can't commit.
            number = folder.base_name.partition("-")[0]
            if folder.base_name not in used_folders and int(number) < newest.number:
                self._delete(folder.path)

    def _delete(self, path: str) -> None:
        if self._system.get_file_info(path).type == fs.FileType.Directory:
            self._system.delete_dir(path)

    def _version(self, number: int) -> StateVersion:
        path = self._version_path(number)
        with self._system.open_input_file(path) as file:
            data = file.read()
        try:
            return StateVersion.from_json(data)
        except DecodeError as error:
            raise ConfigError(
                f"table: {path}: {error}; "
                "name another folder, or delete this one: update() fills it from the markers"
            ) from None

    def _numbers(self) -> list[int]:
        names = (one.base_name.partition(".") for one in self._listed(_VERSIONS))
        return sorted(int(number) for number, _, kind in names if number.isdecimal() and kind == "json")

    def _version_path(self, number: int) -> str:
        return f"{self._place.root}/{_VERSIONS}/{number:020d}.json"

    def _listed(self, folder: str) -> list[Any]:
        root = f"{self._place.root}/{folder}".rstrip("/")
        found: list[Any] = self._system.get_file_info(fs.FileSelector(root, allow_not_found=True))
        return found

    def _unavailable(self) -> AbstractContextManager[None]:
        return unavailable(f"table: {self.path}")


def _block_folder(block: Block) -> str:
    return f"{PARTITION}={block[0]}/{BLOCK}={block[1]}"
