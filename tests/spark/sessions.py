"""Settings of Spark for tests."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pyspark
from py4j.java_gateway import JavaClass, JVMView
from pyspark.sql import SparkSession

from kmqpy.spark import configure_spark_with_kmq
from kmqpy.spark.sinks.delta import DeltaTarget
from kmqpy.spark.sinks.iceberg import IcebergTarget

# PySpark asks for the same Java classes again and again, and each time Java searches hundreds of jars.
JVMView.__getattr__ = functools.cache(JVMView.__getattr__)
JavaClass.__getattr__ = functools.cache(JavaClass.__getattr__)  # functions, a request each time

_JARS = Path(pyspark.__file__).parent / "jars"
_MOST_USED = (
    *("scala-library", "spark-core_", "spark-catalyst_", "spark-sql_", "spark-sql-api_"),
    *("spark-common-utils_", "spark-unsafe_", "spark-network-common_", "py4j", "log4j", "scala-reflect"),
    *("json4s", "jackson", "netty", "arrow", "parquet", "hadoop-client"),
)
"""Jars in which most classes are; Java looks for each class in one jar after the other."""

SMALL = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # What is described, checked, replanned and traced back for people and large data costs more here than
    # the data.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.extraClassPath": ":".join(
        str(jar) for name in _MOST_USED for jar in sorted(_JARS.glob(f"{name}*"))
    ),
    # A third of the start; what runs for seconds gains nothing from the second compiler. The first one alone
    # has a small code cache: code was thrown away, and compiled again.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    "-XX:+UseSerialGC -Xmn400m -XX:MetaspaceSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
}
CHEAP_QUERIES = {
    # Compiling a query costs more than running it on a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Spark's own for local files starts sixteen processes in each micro-batch (readlink).
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing"
    ".FileSystemBasedCheckpointFileManager",
}
"""For all tests but test_connect, which has queries compiled and checkpoints written as users have."""

QUICK_WORKERS = {"spark.python.daemon.module": "tests.spark.quick_daemon"}

JARS = ("spark-delta", "spark-postgresql", "spark-sqlite")
"""Those that tests of sinks need."""

# 50 partitions are for large tables.
SINKS = {
    **DeltaTarget.settings,
    **IcebergTarget.settings,
    "spark.databricks.delta.snapshotPartitions": "1",
}


def small(builder: SparkSession.Builder, jar_sets: Sequence[str] = ()) -> SparkSession.Builder:
    """Settings for little data and little time."""
    return configure_spark_with_kmq(builder.config(map=SMALL), jar_sets=jar_sets)
