"""Writes Parquet, ORC, JSON and CSV files, so that any reader of the folder sees each row once.

Spark writes a micro-batch into a folder beside the target, from where the driver moves the finished files.
The driver lists these files in last.json before it moves them. If it died meanwhile, the next micro-batch
removes the files in that list. If all files were moved, they stay, and a rerun adds missing messages.

last.json also has the highest number of a micro-batch that its run (see checkpoint.identity_of) has written.
Lower numbers come from an old copy of the checkpoint: the folder may have messages of such a micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError, Unavailable, shown
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.portable import TEXT_OPTIONS, portable
from kmqpy.spark.sinks.limits import Limit, folder_limits, no_infinity
from kmqpy.spark.sinks.origin import COPY, without_known
from kmqpy.spark.sinks.target import Sink, Target

FORMATS = ("parquet", "orc", "json", "csv")

ASSUMED_ROW_BYTES = 100
"""The size of a row, in bytes, that a sink assumes if no written file shows the real one."""
_CHANGED = "somebody has changed it: put back what it was, or name a new folder, and a new checkpoint"


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder: `uri` is its name for Spark, `root` its name in Arrow's file system `system`."""

    system: fs.FileSystem
    uri: str
    root: str


@dataclass(frozen=True)
class FolderTarget(Target):
    """A Target that is a folder. Files in `<path>.kmq` name the queue of its rows, and who may write."""

    def _place(self) -> _Folder:
        return place_of(self.sink.path)

    def take_over(self, run: str) -> None:
        take_over(self._place(), run)

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        return folder_limits(schema, self.sink.partition_by)

    def _noted_queue(self, queue: str, ending: str) -> str:
        place = self._place()
        path = f"{place.root}.kmq/queue{ending}.json"
        with unavailable(f"out: {path}"):
            found = _object_in(place.system, path)
            if not found:
                replace_file(place.system, path, json.dumps({"queue": queue}).encode())
            return str(found.get("queue", queue))


@dataclass(frozen=True)
class FileTarget(FolderTarget):
    """Writes files of one format into a folder."""

    def check(self, spark: SparkSession, schema: StructType) -> None:
        check_partitioning(self.sink, schema)
        place = self._place()
        try:
            _refuse_foreign(place, self.sink.format)
            # A schema that can't be written fails here, not in the first micro-batch.
            self._stage(spark.createDataFrame([], schema), place)
        except (PySparkException, pa.ArrowException, OSError) as error:
            raise ConfigError(f"out: {self.sink.path!r} can't be used: {error_line(error)}") from None

    def write(self, batch: DataFrame, number: int, run: str) -> None:
        place = self._place()
        staging, last = f"{place.root}.kmq/staging", f"{place.root}.kmq/last.json"
        prefix = _file_prefix(run, number)
        with unavailable(f"out: {self.sink.path}"), persisted(batch) as rows:
            # Read before the check, so that it is not the list of a pipeline that takes the folder over now.
            before = _object_in(place.system, last)
            check_owner(place, run)
            latest = before.get("latest") if before.get("run") == run else None
            # If another run has written last, the list does not say what this run has written.
            again = bool(before) and not (isinstance(latest, int) and latest < number)
            if _is_half_moved(before, run, number):
                for name in _listed_names(before, last):
                    path = f"{place.root}/{name}"
                    if place.system.get_file_info(path).type == fs.FileType.File:
                        place.system.delete_file(path)
            count = rows.count()
            if not count:
                return
            fields = StructType([field for field in batch.schema if field.name != COPY])
            new = without_known(rows, lambda *_: self.read(batch.sparkSession, fields), again=again)
            size = before.get("row_bytes")
            if not isinstance(size, int) or size < 1:
                size = ASSUMED_ROW_BYTES
            self._stage(arranged(new, self.sink, count, size), place, size)
            staged = data_files(place.system, staging)
            moves = {}
            for info in staged:
                folder, slash, name = info.path.removeprefix(f"{staging}/").rpartition("/")
                moves[info.path] = f"{folder}{slash}{prefix}{name}"
            # Rows that the folder had already are in `count`, but not in the staged files. So one micro-batch
            # may halve the size at most.
            measured = sum(info.size for info in staged) // count
            told = {
                "run": run,
                "batch": number,
                "latest": max(number, latest) if isinstance(latest, int) else number,
                "files": list(moves.values()),
                "moved": False,
                "row_bytes": max(1, size // 2, measured),
            }
            replace_file(place.system, last, json.dumps(told).encode())
            for path, name in moves.items():
                target = f"{place.root}/{name}"
                place.system.create_dir(target.rpartition("/")[0], recursive=True)
                place.system.move(path, target)
            replace_file(place.system, last, json.dumps({**told, "moved": True}).encode())
            # A pipeline that took the folder over before the list said `moved` may have removed the files.
            check_owner(place, run)

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        place = self._place()
        place.system.create_dir(place.root, recursive=True)
        options = {"timeZone": "UTC", **self.sink.options}
        return spark.read.format(self.sink.format).options(**options).schema(schema).load(place.uri)

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        return super().limits(schema) + (no_infinity(schema) if self.sink.format == "json" else ())

    def _stage(self, rows: DataFrame, place: _Folder, row_bytes: int = ASSUMED_ROW_BYTES) -> None:
        most = {"maxRecordsPerFile": str(max(1, self.sink.file_bytes // row_bytes))}
        options = {**most, **text_options(self.sink), **self.sink.options}
        writer = rows.write.format(self.sink.format).options(**options).mode("overwrite")
        with portable(rows.sparkSession):
            writer.partitionBy(*self.sink.partition_by).save(f"{place.uri}.kmq/staging")


def text_options(sink: Sink) -> Mapping[str, str]:
    """How times are written by formats of text."""
    return TEXT_OPTIONS if sink.format in ("json", "csv") else {}


def place_of(path: str, option: str = "out") -> _Folder:
    """The folder at a path or URI; raises ConfigError where Arrow can't reach it."""
    local = path.removeprefix("file:").removeprefix("//") if path.startswith("file:") else path
    if "://" not in local:  # Spark takes a path as it stands, where Arrow would read %20 as a space
        root = str(Path(local).absolute())
        return _Folder(fs.LocalFileSystem(), f"file://{root}", root)
    uri = path.rstrip("/")
    try:
        system, root = fs.FileSystem.from_uri(uri.replace("s3a://", "s3://", 1))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{option}: {path!r} can't be used: {error_line(error)}") from None
    return _Folder(system, uri, root)


def check_partitioning(sink: Sink, schema: StructType) -> None:
    """Raise ConfigError unless `schema` has the columns of `partition_by`, and `file_bytes` is at least 1."""
    for name in sink.partition_by:
        if name not in schema.names:
            raise ConfigError(f"partition by: no column {name!r}; there are {', '.join(schema.names)}")
    if sink.file_bytes < 1:
        raise ConfigError(f"file size: {sink.file_bytes} bytes; it must be at least 1")


def arranged(rows: DataFrame, sink: Sink, count: int, row_bytes: int = ASSUMED_ROW_BYTES) -> DataFrame:
    """The `count` rows in as few partitions, and so files, as their size allows.

    With `partition_by`, all rows of one folder are in one partition, whatever their size.
    """
    if sink.partition_by:
        return rows.repartition(*sink.partition_by)
    return rows.coalesce(max(1, math.ceil(count * row_bytes / sink.file_bytes)))


@contextmanager
def persisted(batch: DataFrame) -> Iterator[DataFrame]:
    """The micro-batch, cached: evaluating it again would call the user's function again."""
    kept = batch.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield kept
    finally:
        kept.unpersist()


@contextmanager
def unavailable(what: str) -> Iterator[None]:
    """Raise Unavailable for errors of Arrow and of the file system."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise Unavailable(f"{what}: {error_line(error)}") from error


def _refuse_foreign(place: _Folder, form: str) -> None:
    """Raise ConfigError if the folder has files that no pipeline with the format `form` has written."""
    for info in _files_in(place.system, place.root):
        name = info.path.removeprefix(f"{place.root}/")
        if not info.base_name.startswith("kmq-") or f".{form}" not in name:
            raise ConfigError(
                f"out: {place.root!r} holds {name!r}, which is not a {form} file of a pipeline; "
                "name an empty or a new folder"
            )


def _files_in(system: fs.FileSystem, root: str) -> list[Any]:
    found = system.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))
    return [info for info in found if info.type == fs.FileType.File]


def data_files(system: fs.FileSystem, root: str) -> list[Any]:
    """The files with rows that Spark has written into a folder, as Arrow's FileInfo."""
    return [info for info in _files_in(system, root) if not info.base_name.startswith(("_", "."))]


def _is_half_moved(last: Mapping[str, Any], run: str, number: int) -> bool:
    """Return True if a driver died while it moved the files in this list: then they must be removed.

    A list without `moved` is of an older kmqpy, which removed them only in a rerun of the same micro-batch.
    """
    return last.get("moved", (last.get("run"), last.get("batch")) != (run, number)) is False


def take_over(place: _Folder, run: str) -> None:
    """Note that from now on this run alone may write into the folder."""
    path = f"{place.root}.kmq/owner.json"
    with unavailable(f"out: {path}"):
        replace_file(place.system, path, json.dumps({"run": run}).encode())


def check_owner(place: _Folder, run: str) -> None:
    """Raise ConfigError where another run has taken the folder over."""
    path = f"{place.root}.kmq/owner.json"
    with unavailable(f"out: {path}"):
        owner = _object_in(place.system, path).get("run", run)
    if owner != run:
        raise ConfigError(
            f"out: {place.root!r}: a pipeline with another checkpoint was started there; "
            "run one at a time, or give each a folder of its own"
        )


def is_begun(place: _Folder, run: str, number: int) -> bool:
    """Return True if the run may have begun this micro-batch, or a later one; else note it as begun."""
    path = f"{place.root}.kmq/begun-{run}.json"
    with unavailable(f"out: {path}"):
        # Without a note, only micro-batch 0 is known to be new.
        begun = _object_in(place.system, path).get("batch", -1 if number == 0 else None)
        if not isinstance(begun, int) or begun >= number:
            return True
        replace_file(place.system, path, json.dumps({"batch": number}).encode())
    return False


def _object_in(system: fs.FileSystem, path: str) -> dict[str, Any]:
    """The JSON object in a file, empty if the file does not exist; raises ConfigError for other contents."""
    if system.get_file_info(path).type != fs.FileType.File:
        return {}
    with system.open_input_file(path) as file:
        data = file.read()
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"out: the file {path!r} holds no JSON object; {_CHANGED}")
    return found


def _file_prefix(run: object, number: object) -> str:
    return f"kmq-{run}-{number!s:0>9}-"


def _listed_names(last: dict[str, Any], path: str) -> list[str]:
    """The names in the list of the last micro-batch; raises ConfigError for one that kmqpy would not give."""
    names, prefix = last.get("files"), _file_prefix(last.get("run"), last.get("batch"))
    for name in names if isinstance(names, list) else [names]:
        *folders, file = str(name).split("/")
        if ".." in folders or not file.startswith(prefix):
            raise ConfigError(
                f"out: the file {path!r}: files: {shown(name)} does not begin with {prefix}; {_CHANGED}"
            )
    return list(names or ())


def replace_file(system: fs.FileSystem, path: str, data: bytes) -> None:
    """Write a file, and its folder, so that it appears by one rename."""
    system.create_dir(path.rpartition("/")[0], recursive=True)
    with system.open_output_stream(f"{path}.new") as file:
        file.write(data)
    system.move(f"{path}.new", path)
