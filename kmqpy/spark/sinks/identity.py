"""Gives each checkpoint a name, the `run` of sinks: micro-batches are numbered within a checkpoint."""

from __future__ import annotations

import uuid

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.errors import ConfigError
from kmqpy.spark.checkpoint import error_line


def identity_of(spark: SparkSession, checkpoint: str) -> str:
    """The name that was given to this checkpoint when it was first used; raises ConfigError.

    A checkpoint that is deleted and made again gets another name: its micro-batches begin at 0 again.
    """
    path = f"{checkpoint.rstrip('/')}/kmq-run"
    made = spark.range(1).select(F.lit(uuid.uuid4().hex[:16]).alias("value")).coalesce(1)
    try:
        made.write.mode("ignore").text(path)
        found = spark.read.text(path).collect()
        if not found:  # a driver was killed while it wrote the file
            made.write.mode("overwrite").text(path)
            found = spark.read.text(path).collect()
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"checkpoint: {checkpoint} can't be used: {error_line(error)}") from None
    return str(found[0]["value"])
