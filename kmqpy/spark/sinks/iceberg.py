"""Writes micro-batches to Iceberg tables: Spark writes files, and the driver adds them in one commit.

The driver uses pyiceberg: there is no Iceberg runtime for Spark 4.2. A commit has the number of its
micro-batch, and the run: the name of the checkpoint that counts these numbers.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError, KmqError, MissingExtra, NotSupported, Unavailable
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.portable import portable
from kmqpy.spark.sinks.files import arranged, check_partitioning, data_files, persisted, place_of
from kmqpy.spark.sinks.limits import Limit, folder_limits
from kmqpy.spark.sinks.origin import COPY, offsets_of, origin_schema, without_written
from kmqpy.spark.sinks.target import Target

try:
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.exceptions import CommitFailedException
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.table import Table, TableProperties
    from pyiceberg.transforms import IdentityTransform
except ImportError:
    raise MissingExtra("iceberg", "Writing to Iceberg tables") from None

_log = logging.getLogger(__name__)

_MAX_COMMIT_TRIES = 10
"""How often a commit is tried if another one comes first each time; then Unavailable is raised."""

_RUN_KEY, _BATCH_KEY, _TRY_KEY = "kmq.run", "kmq.batch", "kmq.try"
"""Keys in the summary of a snapshot of the table: the run, its micro-batch, and the folder of the try."""

_QUEUE_PROPERTY = "kmq.queue"

_TRY_NAME = re.compile("[0-9a-f]{32}")
_BATCH_NUMBER = re.compile("[0-9]{1,18}")

_FOLDER_COLUMN_PREFIX = "kmq_folder_"
"""Begins the names of copies of columns: Spark names folders by them, and leaves them out of the files."""


@dataclass(frozen=True, slots=True)
class _SearchedFiles:
    """The files of the table that may have messages with original offsets in `span`, lowest to highest."""

    span: tuple[int, int] = (0, 0)
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """Files that are written, and not yet part of the table; `name` is the folder of this try."""

    name: str
    paths: list[str]
    searched: _SearchedFiles


@dataclass(frozen=True)
class IcebergTarget(Target):
    """Writes to an Iceberg table; `path` is its name (`namespace.table`), options are those of its catalog.

    The table's property `kmq.batch.<run>` is the highest number of a micro-batch of that run in the table. Of
    micro-batches up to that number, only messages that the table lacks are added.
    """

    def check(self, spark: SparkSession, schema: StructType) -> None:
        check_partitioning(self.sink, schema)
        with self._errors_as(ConfigError):
            table = self._create_or_check(to_arrow_schema(schema, timezone="UTC"))
            # A schema that Spark can't write there fails here, not in the first micro-batch.
            staged = f"{table.location()}/data/kmq-check-{uuid.uuid4().hex}"
            with portable(spark):
                spark.createDataFrame([], schema).write.parquet(place_of(staged).uri)
            place = place_of(staged)
            place.system.delete_dir(place.root)

    def write(self, batch: DataFrame, number: int, run: str) -> None:
        with persisted(batch) as rows:
            if count := rows.count():
                self._add(rows, count, run, number)

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        with self._errors_as(Unavailable):
            tasks = list(self._table().scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise NotSupported(
                f"out: Iceberg table {self.sink.path!r}: Spark can't read deleted rows; compact it first"
            )
        return _rows_of(spark, [task.file.file_path for task in tasks], schema)

    def _add(self, rows: DataFrame, count: int, run: str, number: int) -> None:
        """Add the rows of messages that the table does not have, in one commit.

        It is valid only for the table that was searched for these messages, else the table is searched again.
        """
        staged: _Staged | None = None
        for left in reversed(range(_MAX_COMMIT_TRIES)):
            with self._errors_as(Unavailable):
                table = self._table()
            searched = self._files_to_search(table, rows, run, again=_may_have(table, run, number))
            if staged is None or staged.searched != searched:
                staged = self._stage(rows, count, searched, _folder_of(table, run, number))
            with self._errors_as(Unavailable):
                try:
                    if staged.paths:
                        _commit(table, staged, run, number)
                except CommitFailedException:
                    if not left:
                        raise
                else:
                    break
        with self._errors_as(Unavailable):
            self._delete_failed_tries(self._table(), run, number)

    def _files_to_search(self, table: Table, rows: DataFrame, run: str, *, again: bool) -> _SearchedFiles:
        """Return the files of the table that may have messages of these rows.

        If the table can't have this micro-batch (`again` is False), and this run made the newest commit, it
        can have only messages of which these rows are copies, so only copies are looked for.
        """
        newest = table.current_snapshot()
        if newest is None:
            return _SearchedFiles()
        is_last = newest.summary is not None and newest.summary.get(_RUN_KEY) == run
        span = offsets_of(rows.where(COPY) if is_last and not again else rows)
        if span is None:
            return _SearchedFiles()
        between = f"original_offset >= {span[0]} and original_offset <= {span[1]}"
        with self._errors_as(Unavailable):
            files = {task.file.file_path for task in table.scan(row_filter=between).plan_files()}
        return _SearchedFiles(span, frozenset(files))

    def _stage(self, rows: DataFrame, count: int, searched: _SearchedFiles, parent: str) -> _Staged:
        """Write the rows of messages that are in none of the files `searched` into a folder in `parent`."""
        # Each try has its own folder: a driver that seemed dead may still add the files of its try.
        name = uuid.uuid4().hex
        new = rows.drop(COPY)
        if searched.files:
            new = without_written(
                rows, _rows_of(rows.sparkSession, sorted(searched.files), origin_schema()), searched.span
            )
            if new.isEmpty():
                return _Staged(name=name, paths=[], searched=searched)
        copies = {f"{_FOLDER_COLUMN_PREFIX}{name}": F.col(name) for name in self.sink.partition_by}
        new = arranged(new, self.sink, count).withColumns(copies)
        folder = place_of(f"{parent}/{name}")
        with portable(new.sparkSession):
            new.write.partitionBy(*copies).parquet(folder.uri)
        with self._errors_as(Unavailable):
            found = data_files(folder.system, folder.root)
        paths = [f"{folder.uri}{info.path.removeprefix(folder.root)}" for info in found]
        return _Staged(name=name, paths=paths, searched=searched)

    def _delete_failed_tries(self, table: Table, run: str, number: int) -> None:
        """Delete the files of failed tries to write a micro-batch, which are no part of the table.

        Nothing is deleted if no snapshot of the micro-batch is left: only that says which try succeeded.
        """
        try:
            own = [one.summary for one in table.snapshots() if one.summary and one.summary[_RUN_KEY] == run]
            kept = {summary[_TRY_KEY] for summary in own if summary[_BATCH_KEY] == str(number)} - {None}
            folder = place_of(_folder_of(table, run, number))
            found = folder.system.get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
            names = {one.base_name for one in found if _TRY_NAME.fullmatch(one.base_name)} - kept
            if kept and names:
                # A micro-batch may have been written several times, and its first snapshots may have expired.
                for task in table.scan().plan_files():
                    names -= {*task.file.file_path.split("/")}
            for name in names if kept else ():
                folder.system.delete_dir(f"{folder.root}/{name}")
        except (pa.ArrowException, OSError) as error:
            _log.warning("Iceberg table %s: files of failed tries stay there: %s", self.sink.path, error)

    def _create_or_check(self, columns: pa.Schema) -> Table:
        """The table, created if need be; raises ConfigError if it has other columns or partitions."""
        catalog, name = self._catalog(), self.sink.path
        if "." not in name:
            raise ConfigError(f"out: {name!r} names no Iceberg table; write it as namespace.table")
        if not catalog.table_exists(name):
            catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
            with catalog.create_table_transaction(name, columns) as new, new.update_spec() as specification:
                for column in self.sink.partition_by:
                    specification.add_identity(column)
        table = catalog.load_table(name)
        theirs = table.schema()
        ours = pyarrow_to_schema(columns, name_mapping=theirs.name_mapping)  # with the table's field ids
        for field in ours.fields:
            kind = theirs.find_field(field.field_id).field_type
            if kind != field.field_type:
                raise ConfigError(
                    f"schema: column {field.name!r}: {field.field_type}, but table {name!r} has {kind}"
                )
        for field in theirs.fields:
            if field.required:
                raise ConfigError(
                    f"out: table {name!r}: column {field.name!r} is required; Spark's may be null"
                )
        partitions = {
            (theirs.find_column_name(one.source_id), isinstance(one.transform, IdentityTransform))
            for one in table.spec().fields
        }
        if partitions != {(column, True) for column in self.sink.partition_by}:
            raise ConfigError(
                f"partition by: table {name!r} has {table.spec()}; name the same columns, and only these"
            )
        return table

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        return folder_limits(schema, self.sink.partition_by, prefix=_FOLDER_COLUMN_PREFIX)

    def _noted_queue(self, queue: str, ending: str) -> str:
        name = f"{_QUEUE_PROPERTY}{ending}"
        with self._errors_as(ConfigError):
            table = self._table()
            if name not in table.properties:
                with table.transaction() as transaction:
                    transaction.set_properties({name: queue})
            return table.properties.get(name, queue)

    def _table(self) -> Table:
        return self._catalog().load_table(self.sink.path)

    def _catalog(self) -> Catalog:
        properties = {key: value for key, value in self.sink.options.items() if key != "catalog"}
        return load_catalog(self.sink.options.get("catalog", "default"), **properties)

    @contextmanager
    def _errors_as(self, kind: type[KmqError]) -> Iterator[None]:
        """Raise `kind` for whatever pyiceberg, the clients of catalogs, and Arrow raise."""
        try:
            yield
        except KmqError:
            raise
        except Exception as error:
            raise kind(f"out: Iceberg table {self.sink.path!r}: {error_line(error)}") from error


def _may_have(table: Table, run: str, number: int) -> bool:
    """Return True if the table may have this micro-batch of the run, or a later one."""
    latest = _latest_batch(table, run)
    return latest is None or latest >= number


def _latest_batch(table: Table, run: str) -> int | None:
    """The latest micro-batch of the run in the table; -1 if none, None if that is not known."""
    value = table.properties.get(f"kmq.batch.{run}")
    if value is None:
        return -1
    return int(value) if _BATCH_NUMBER.fullmatch(value) else None


def _folder_of(table: Table, run: str, number: int) -> str:
    """The URI of the folder with the tries to write a micro-batch."""
    return f"{table.location()}/data/kmq-{run}-{number:09d}"


def _commit(table: Table, staged: _Staged, run: str, number: int) -> None:
    """Add the files to the table as it was loaded; raises CommitFailedException if it has changed since."""
    # With retries, pyiceberg would add the files to a newer state of the table, which was not searched.
    properties = {**table.metadata.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    told = {_RUN_KEY: run, _BATCH_KEY: str(number), _TRY_KEY: staged.name}
    with table.transaction() as transaction:
        # The names of the files are new, so pyiceberg need not look for them in the whole table.
        transaction.add_files(staged.paths, snapshot_properties=told, check_duplicate_files=False)
        # Never smaller than before: an old copy of a checkpoint repeats numbers.
        transaction.set_properties(
            {f"kmq.batch.{run}": str(max(number, _latest_batch(table, run) or number))}
        )


def _rows_of(spark: SparkSession, paths: Sequence[str], schema: StructType) -> DataFrame:
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)
