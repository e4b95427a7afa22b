"""Turns bodies that are JSON objects into rows of a schema, with Spark's from_json.

Spark judges each body before its message is processed, and makes the row afterwards. In between, Python sees
the body unchanged, and the reason why it can't become a row. So Python converts no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from kmqpy.errors import ConfigError
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.frame_function import ERROR, REJECT

BODY_SCHEMA = "value binary"
"""The schema of the rows that PassBodies returns."""

_REFUSAL = "refused"
"""The column with the reason why a body can't become a row; null where it can."""
_CORRUPT = "_kmq_corrupt"
_NO_OBJECT = "not a JSON object"


def check_readable(spark: SparkSession, schema: StructType) -> None:
    """Raise ConfigError unless from_json can make rows of this schema."""
    try:
        one = spark.range(1).select(F.lit("{}").alias("value"))
        assert with_fields(with_refusals(one, schema), schema).columns  # Connect analyses it only now
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"schema: JSON has no such values: {error_line(error)}") from None


def with_refusals(df: DataFrame, schema: StructType) -> DataFrame:
    """`df` with a column that says why its `value` can't become a row of this schema; null where it can."""
    text = F.col("value").cast("string")
    # from_json ignores text after an object, but not within brackets.
    objects = F.from_json(F.concat(F.lit("["), text, F.lit("]")), ArrayType(schema.toNullable()))
    is_object = F.coalesce((F.size(objects) == 1) & objects[0].isNotNull(), F.lit(False))  # noqa: FBT003
    bad = F.concat_ws(", ", *(F.when(~_fits(text, [field]), _mismatch(field)) for field in schema))
    reason = F.when(~is_object, _NO_OBJECT).when(
        ~_fits(text, schema.fields), F.concat(F.lit("not of the schema: "), bad)
    )
    return df.withColumn(_REFUSAL, reason)


def with_fields(bodies: DataFrame, schema: StructType) -> DataFrame:
    """`bodies` with the fields of its JSON objects instead of the column `value`."""
    others = [name for name in bodies.columns if name not in ("value", _REFUSAL)]
    row = F.from_json(F.col("value").cast("string"), schema.toNullable()).alias("value")
    return bodies.select(row, *others).select("value.*", *others)


@dataclass(frozen=True)
class PassBodies:
    """A function for KmqSpark.process: hands bodies on unchanged; rejects those that can't become rows."""

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the bodies of a frame of messages, with the reasons of with_refusals()."""
        found = frame[["value"]].copy()
        found[ERROR] = frame[_REFUSAL]
        found[REJECT] = frame[_REFUSAL].notna()
        return found


def _fits(text: Column, fields: Sequence[StructField]) -> Column:
    """True where each value of a JSON object has the type of its field."""
    wanted = StructType([*fields, StructField(_CORRUPT, StringType())]).toNullable()
    return F.from_json(text, wanted, {"columnNameOfCorruptRecord": _CORRUPT})[_CORRUPT].isNull()


def _mismatch(field: StructField) -> str:
    return f"{field.name} is no {field.dataType.simpleString()}"
