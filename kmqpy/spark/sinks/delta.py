"""Writes micro-batches to Delta tables: each is one commit, with the number of the micro-batch.

Delta ignores a micro-batch, without an error, if the table has one with that number or a higher one. So this
sink notes the number in a file beside the table before it writes. If the number was noted before, the sink
searches the table for messages of the micro-batch, and appends the rows of messages that are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.portable import portable
from kmqpy.spark.sinks.files import (
    ASSUMED_ROW_BYTES,
    arranged,
    check_owner,
    check_partitioning,
    is_begun,
    noted_queue,
    persisted,
    place_of,
    take_over,
)
from kmqpy.spark.sinks.limits import Limit, folder_limits
from kmqpy.spark.sinks.origin import without_known
from kmqpy.spark.sinks.target import Target


@dataclass(frozen=True)
class DeltaTarget(Target):
    """Writes to a Delta table in a folder, which it creates if there is none."""

    settings: ClassVar[Mapping[str, str]] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }

    def check(self, spark: SparkSession, schema: StructType) -> None:
        """See Target. Creates the table, so that the first micro-batch finds one."""
        check_partitioning(self.sink, schema)
        try:
            empty = spark.createDataFrame([], schema)
            writer = empty.write.format("delta").options(**self.sink.options).mode("append")
            with portable(spark):
                writer.partitionBy(*self.sink.partition_by).save(self._uri)
        except PySparkException as error:
            raise ConfigError(f"out: Delta table {self.sink.path!r}: {error_line(error)}") from None

    def write(self, batch: DataFrame, number: int, run: str) -> None:
        """See Target."""
        check_owner(place_of(self.sink.path), run)
        again = is_begun(place_of(self.sink.path), run, number)
        once = {"txnAppId": f"kmq-{run}", "txnVersion": str(number)}
        with persisted(batch) as rows:
            self._append(self._without_known(rows, again=again), rows.count(), once)
            # Delta ignored the append if it had this number already. Then no other driver can add it, either.
            if again and not (missing := self._without_known(rows, again=True)).isEmpty():
                self._append(missing, rows.count(), {})

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        """See Target."""
        return spark.read.format("delta").load(self._uri).select(*schema.names)

    def _without_known(self, rows: DataFrame, *, again: bool) -> DataFrame:
        """The rows of messages that the table does not have; see without_known()."""
        return without_known(
            rows, lambda *_: rows.sparkSession.read.format("delta").load(self._uri), again=again
        )

    def _append(self, rows: DataFrame, count: int, once: Mapping[str, str]) -> None:
        new = arranged(rows, self.sink, count, ASSUMED_ROW_BYTES)
        writer = new.write.format("delta").options(**{**self.sink.options, **once}).mode("append")
        with portable(rows.sparkSession):
            writer.partitionBy(*self.sink.partition_by).save(self._uri)

    def take_over(self, run: str) -> None:
        """See Target."""
        take_over(place_of(self.sink.path), run)

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        """See Target."""
        return folder_limits(schema, self.sink.partition_by)

    def _noted_queue(self, queue: str) -> str:
        return noted_queue(place_of(self.sink.path), queue)

    @property
    def jar_sets(self) -> tuple[str, ...]:
        """See Target."""
        return ("spark-delta",)

    @property
    def _uri(self) -> str:
        return place_of(self.sink.path).uri
