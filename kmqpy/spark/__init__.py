"""Reads the state of queues as Spark DataFrames, and processes their messages with acknowledgement.

    spark = configure_spark_with_kmq(SparkSession.builder).getOrCreate()
    KmqSpark(spark, "host:9092", queue="jobs").depth().show()

Importing this package without the extra `kmqpy[spark]` raises MissingExtra. The package works with classic
Spark sessions and with Spark Connect.
"""

from importlib.util import find_spec

from kmqpy.errors import MissingExtra

for _needed in ("pyspark", "pandas", "pyarrow"):
    if find_spec(_needed) is None:
        raise MissingExtra("spark", f"kmqpy.spark (no {_needed} here)")

from kmqpy.spark.queue import KmqSpark  # noqa: E402
from kmqpy.spark.session import configure_spark_with_kmq  # noqa: E402
from kmqpy.spark.source import register  # noqa: E402
from kmqpy.spark.state import State  # noqa: E402

__all__ = ["KmqSpark", "State", "configure_spark_with_kmq", "register"]
