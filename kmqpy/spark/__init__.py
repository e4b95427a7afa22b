"""Queues on Apache Spark: their state as DataFrames, and processing with acknowledgement.

    spark = configure_spark_with_kmq(SparkSession.builder).getOrCreate()

Needs the extra `kmqpy[spark]`. Uses only what Spark Connect has, too.
"""

from kmqpy.spark.session import configure_spark_with_kmq

__all__ = ["configure_spark_with_kmq"]
