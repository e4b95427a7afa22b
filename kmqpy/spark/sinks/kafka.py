"""Writes rows to a topic of Kafka, at least once: Spark's Kafka sink has no transactions."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructType

from kmqpy.errors import ConfigError
from kmqpy.spark.portable import TEXT_OPTIONS, portable
from kmqpy.spark.sinks.limits import Limit, no_infinity
from kmqpy.spark.sinks.origin import COPY, ORIGIN
from kmqpy.spark.sinks.target import Target


@dataclass(frozen=True)
class KafkaTarget(Target):
    """Writes records to the topic `path`, in the queue's Kafka or in that of kafka.bootstrap.servers.

    The columns `key` and `value` of a row become the key and value of the record. Without a column `value`,
    the record's value is the row as JSON. The headers original_partition, original_offset and original_row
    identify the row.
    """

    def __post_init__(self) -> None:
        if self.sink.partition_by:
            raise ConfigError("partition by: a topic has no folders")

    def check(self, spark: SparkSession, schema: StructType) -> None:  # noqa: ARG002
        for name in {"key", "value"} & set(schema.names):
            if not isinstance(kind := schema[name].dataType, StringType | BinaryType):
                raise ConfigError(
                    f"schema: column {name!r} is the {name} of a record: string or binary, "
                    f"not {kind.simpleString()}"
                )

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        return () if "value" in schema.names else no_infinity(schema)

    def write(self, batch: DataFrame, number: int, run: str) -> None:  # noqa: ARG002
        rows = batch.drop(COPY)
        fields = [name for name in rows.columns if name not in ORIGIN]
        value = F.col("value") if "value" in fields else F.to_json(F.struct(*fields), TEXT_OPTIONS)
        key = F.col("key") if "key" in fields else F.lit(None).cast("binary")
        names = (
            F.struct(F.lit(name).alias("key"), F.col(name).cast("string").cast("binary").alias("value"))
            for name in ORIGIN
        )
        records = rows.select(key.alias("key"), value.alias("value"), F.array(*names).alias("headers"))
        with portable(batch.sparkSession):
            records.write.format("kafka").options(**self.sink.options).option("topic", self.sink.path).save()
