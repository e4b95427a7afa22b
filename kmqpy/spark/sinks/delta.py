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
    FolderTarget,
    arranged,
    check_owner,
    check_partitioning,
    is_begun,
    persisted,
)
from kmqpy.spark.sinks.origin import without_known


@dataclass(frozen=True)
class DeltaTarget(FolderTarget):
    """Writes to a Delta table in a folder, which it creates if there is none."""

    jar_sets = ("spark-delta",)
    settings: ClassVar[Mapping[str, str]] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }

    def check(self, spark: SparkSession, schema: StructType) -> None:
        check_partitioning(self.sink, schema)
        try:
            self._append(spark.createDataFrame([], schema), {})  # so the first micro-batch finds a table
        except PySparkException as error:
            raise ConfigError(f"out: Delta table {self.sink.path!r}: {error_line(error)}") from None

    def write(self, batch: DataFrame, number: int, run: str) -> None:
        check_owner(self._place(), run)
        again = is_begun(self._place(), run, number)
        once = {"txnAppId": f"kmq-{run}", "txnVersion": str(number)}
        with persisted(batch) as rows:
            count = rows.count()
            self._append(arranged(self._without_known(rows, again=again), self.sink, count), once)
            # Delta ignored the append if it had this number already. Then no other driver can add it, either.
            if again and not (missing := self._without_known(rows, again=True)).isEmpty():
                self._append(arranged(missing, self.sink, count), {})

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        return spark.read.format("delta").load(self._place().uri).select(*schema.names)

    def _without_known(self, rows: DataFrame, *, again: bool) -> DataFrame:
        """The rows of messages that the table does not have; see without_known()."""
        table = rows.sparkSession.read.format("delta")
        return without_known(rows, lambda *_: table.load(self._place().uri), again=again)

    def _append(self, rows: DataFrame, once: Mapping[str, str]) -> None:
        writer = rows.write.format("delta").options(**{**self.sink.options, **once}).mode("append")
        with portable(rows.sparkSession):
            writer.partitionBy(*self.sink.partition_by).save(self._place().uri)
