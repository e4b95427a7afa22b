"""Settings of Spark for tests."""

import functools
from collections.abc import Sequence

from py4j.java_gateway import JVMView
from pyspark.sql import SparkSession

from kmqpy.spark import configure_spark_with_kmq

# PySpark asks for the same Java classes again and again, and each time Java searches hundreds of jars.
JVMView.__getattr__ = functools.cache(JVMView.__getattr__)

SMALL = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # What is described, replanned and traced back for people and large data costs more here than the data.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.adaptive.enabled": "false",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Half the start; what runs for seconds gains nothing from the second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
INTERPRETED = {
    # Compiling a query costs more than running it on a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""For most tests; test_connect and test_driver_killed have their queries compiled, as users have."""

QUICK_WORKERS = {"spark.python.daemon.module": "tests.spark.quick_daemon"}


DATABASES = ("spark-postgresql", "spark-sqlite")
"""Jars that tests of sinks need."""


def small(builder: SparkSession.Builder, jar_sets: Sequence[str] = ()) -> SparkSession.Builder:
    """Settings for little data and little time."""
    return configure_spark_with_kmq(builder.config(map=SMALL), jar_sets=jar_sets)
