"""Settings of Spark for tests."""

import contextlib
import fcntl
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyspark
from py4j.java_gateway import JavaClass, JVMView
from pyspark import SparkContext
from pyspark.sql import SparkSession

from kmqpy.dev.class_archive import archive_for
from kmqpy.dev.jars import cache_folder
from kmqpy.dev.java import find_java
from kmqpy.spark import configure_spark_with_kmq
from kmqpy.spark.sinks.delta import DeltaTarget
from kmqpy.spark.sinks.iceberg import IcebergTarget

# PySpark asks for the same Java classes again and again, and each time Java searches hundreds of jars.
JVMView.__getattr__ = functools.cache(JVMView.__getattr__)
JavaClass.__getattr__ = functools.cache(JavaClass.__getattr__)  # functions, a request each time

_MOST_USED = (
    *("scala-library", "spark-core_", "spark-catalyst_", "spark-sql_", "spark-sql-api_"),
    *("spark-common-utils_", "spark-unsafe_", "spark-network-common_", "py4j", "log4j", "scala-reflect"),
    *("json4s", "jackson", "netty", "arrow", "parquet", "hadoop-client"),
)
"""Jars in which most classes are; Java looks for each class in one jar after the other."""


def _most_used_first(jar: Path) -> tuple[int, str]:
    ranks = (rank for rank, name in enumerate(_MOST_USED) if jar.name.startswith(name))
    return next(ranks, len(_MOST_USED)), jar.name


_JARS = sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"), key=_most_used_first)
ARCHIVE = archive_for("spark", find_java("Spark", "spark"), _JARS, cache_folder() / "classes")
"""With it a JVM of Spark needs a third less CPU time. The shared session records it, see `recording`."""

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
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
    # All jars, before the folder of settings, which is another one each time: else no archive fits.
    "spark.driver.extraClassPath": ":".join(map(str, _JARS)),
    # A third of the start; what runs for seconds gains nothing from the second compiler. The first one alone
    # has a small code cache: code was thrown away, and compiled again.
    JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    "-XX:+UseSerialGC -Xmn400m -XX:MetaspaceSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    + " ".join(ARCHIVE.java_options(None) if ARCHIVE else ()),
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


@contextlib.contextmanager
def recording() -> Iterator[list[str]]:
    """Give the Java options of a session that is stopped within: to record the archive, if there is none.

    One process of several records: it costs half a minute of CPU time.
    """
    with contextlib.ExitStack() as ends:
        if ARCHIVE is None or ARCHIVE.file or not _is_first(ends):
            yield []
            return
        file = Path(ends.enter_context(tempfile.TemporaryDirectory()), "spark.jsa")
        yield ARCHIVE.java_options(file)
        gateway = SparkContext._gateway
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()  # whereupon the JVM writes the archive, and ends
        gateway.proc.wait(300)
        if file.exists():
            ARCHIVE.keep(file)


def _is_first(ends: contextlib.ExitStack) -> bool:
    """Lock the archive until `ends`; False if another process records it."""
    assert ARCHIVE is not None
    ARCHIVE.folder.mkdir(parents=True, exist_ok=True)
    lock = ends.enter_context((ARCHIVE.folder / "spark.lock").open("w"))
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
