"""Iceberg tables, by pyiceberg: Spark writes the files, the driver adds them in one commit with their number.

There is no runtime of Iceberg for Spark 4.2, so Spark sees Parquet files, and Python asks the catalog.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError, KmqError, MissingExtra, NotSupported, Unavailable
from kmqpy.spark.checkpoint import one_line
from kmqpy.spark.sinks.files import (
    FIRST_GUESS,
    arranged,
    check_partitioning,
    data_files,
    persisted,
    place_of,
)
from kmqpy.spark.sinks.origin import origin_schema, without_known
from kmqpy.spark.sinks.target import Target

try:
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.exceptions import CommitFailedException
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.transforms import IdentityTransform
except ImportError:
    raise MissingExtra("iceberg", "Writing to Iceberg tables") from None

_TRIES = 10
"""How often a commit is tried where another commit comes first."""

_FOLDER = "kmq_folder_"
"""Prefix of copies of columns, which name folders. Spark leaves those out of files; Iceberg needs them."""


@dataclass(frozen=True)
class IcebergTarget(Target):
    """An Iceberg table, `path` its name (`namespace.table`); options are those of its catalog in pyiceberg.

    The option `catalog` names one of pyiceberg's configuration; it is "default" without it. The table's
    property `kmq.batch.<run>` is the number of the last micro-batch that it has, so that none is added twice.
    """

    # Spark's default, INT96, is no type of Iceberg.
    settings: ClassVar[Mapping[str, str]] = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}

    def check(self, spark: SparkSession, schema: StructType) -> None:
        """See Target. Makes the table where there is none."""
        check_partitioning(self.sink, schema)
        for name, value in self.settings.items():
            if (found := spark.conf.get(name)) != value:
                raise ConfigError(f"Spark: {name} is {found}; an Iceberg table needs {value}")
        with self._told(ConfigError):
            table = self._made(to_arrow_schema(schema, timezone="UTC"))
            # What Spark can't write there fails here, not in the first micro-batch.
            staged = f"{table.location()}/data/kmq-check-{uuid.uuid4().hex}"
            spark.createDataFrame([], schema).write.parquet(place_of(staged).uri)
            place = place_of(staged)
            place.system.delete_dir(place.root)

    def write(self, batch: DataFrame, number: int, run: str) -> None:
        """See Target."""
        with self._told(Unavailable):
            table = self._catalog().load_table(self.sink.path)
            if _has(table, run, number):
                return
        with persisted(batch) as rows:
            if not (count := rows.count()):
                return
            new = without_known(rows, lambda low, high: self._near(batch.sparkSession, table, low, high))
            copies = {f"{_FOLDER}{name}": F.col(name) for name in self.sink.partition_by}
            new = arranged(new, self.sink, count, FIRST_GUESS).withColumns(copies)
            # A name of its own for each try: a driver that was thought dead may still add its files.
            folder = place_of(f"{table.location()}/data/kmq-{run}-{number:09d}-{uuid.uuid4().hex[:8]}")
            new.write.partitionBy(*copies).parquet(folder.uri)
        with self._told(Unavailable):
            found = data_files(folder.system, folder.root)
            self._add([f"{folder.uri}{info.path.removeprefix(folder.root)}" for info in found], number, run)

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        """See Target. Raises NotSupported where rows of files were deleted, which Spark would not see."""
        with self._told(Unavailable):
            tasks = list(self._catalog().load_table(self.sink.path).scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise NotSupported(
                f"out: Iceberg table {self.sink.path!r}: Spark can't read deleted rows; compact it first"
            )
        return _rows_of(spark, tasks, schema)

    def _near(self, spark: SparkSession, table: Table, low: int, high: int) -> DataFrame:
        """Origins of rows in the files that may hold messages between two offsets."""
        between = f"original_offset >= {low} and original_offset <= {high}"
        with self._told(Unavailable):
            tasks = list(table.scan(row_filter=between).plan_files())
        return _rows_of(spark, tasks, origin_schema())

    def _add(self, paths: list[str], number: int, run: str) -> None:
        """Add files to the table, unless it has this micro-batch; again where another commit came first."""
        if not paths:
            return
        for left in reversed(range(_TRIES)):
            table = self._catalog().load_table(self.sink.path)
            if _has(table, run, number):
                return
            batch = {"kmq.run": run, "kmq.batch": str(number)}
            try:
                with table.transaction() as transaction:
                    # Their names are new, so they are not looked for in the whole table.
                    transaction.add_files(paths, snapshot_properties=batch, check_duplicate_files=False)
                    transaction.set_properties({_property(run): str(number)})
            except CommitFailedException:
                if not left:
                    raise
            else:
                return

    def _made(self, columns: pa.Schema) -> Table:
        """The table, with these columns; raises ConfigError where it has others, or other partitions."""
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
        ours = pyarrow_to_schema(columns, name_mapping=theirs.name_mapping)  # with the ids that they have
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
                f"partition by: table {name!r} has {table.spec()}; name columns as it does, and only such"
            )
        return table

    def _catalog(self) -> Catalog:
        properties = {key: value for key, value in self.sink.options.items() if key != "catalog"}
        return load_catalog(self.sink.options.get("catalog", "default"), **properties)

    @contextmanager
    def _told(self, kind: type[KmqError]) -> Iterator[None]:
        """Raise `kind` for whatever pyiceberg, the clients of catalogs, and Arrow raise."""
        try:
            yield
        except KmqError:
            raise
        except Exception as error:
            raise kind(f"out: Iceberg table {self.sink.path!r}: {one_line(error)}") from error


def _property(run: str) -> str:
    return f"kmq.batch.{run}"


def _has(table: Table, run: str, number: int) -> bool:
    return int(table.properties.get(_property(run), -1)) >= number


def _rows_of(spark: SparkSession, tasks: list[FileScanTask], schema: StructType) -> DataFrame:
    paths = [task.file.file_path for task in tasks]
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)
