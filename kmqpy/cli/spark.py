"""The commands `kmq spark-jars`, `kmq pipeline` and `kmq spark-state`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kmqpy.cli.options import DURATION, Cli, connected, pairs
from kmqpy.cli.output import PartlyDone, print_json, print_lines, warn
from kmqpy.kafka.admin.stats import queue_stats
from kmqpy.kafka.settings import QueueSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmqpy.spark.pipeline import Progress


_SESSION_OPTIONS = (
    click.option("--master", metavar="URL", help="Spark's master [local[*,4], or what spark-submit says]."),
    click.option("--remote", metavar="URL", help="A Spark Connect server instead: sc://host, or local[*]."),
    click.option(
        "--packages", metavar="COORDINATES", multiple=True, help="Maven packages for Spark; repeatable."
    ),
    click.option(
        "--conf", "settings", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; repeatable."
    ),
)


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where Spark is, and with which settings and packages it runs."""
    for option in reversed(_SESSION_OPTIONS):
        command = option(command)
    return command


def builder_of(given: Mapping[str, Any], name: str, needed: Mapping[str, str]) -> SparkSession.Builder:
    """Return the builder of a session called `name`.

    given   the options of session_options()
    needed  settings that the session must have; they overrule --conf
    """
    from pyspark.sql import SparkSession

    from kmqpy.spark.portable import SETTINGS

    conf: dict[str, Any] = dict(pairs(given["settings"], "--conf"))
    for key in conf:
        if not key.startswith("spark."):
            raise click.UsageError(f"--conf {key}: is not a setting of Spark; those begin with spark.")
    for key, value in {**SETTINGS, **needed}.items():
        added = key == "spark.sql.extensions" and key in conf
        conf[key] = f"{conf[key]},{value}" if added else value
    builder: SparkSession.Builder = SparkSession.builder.appName(name)
    if given["remote"]:
        builder = builder.remote(given["remote"])
    elif given["master"] or not os.environ.keys() & {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "MASTER"}:
        builder = builder.master(given["master"] or "local[*,4]")
        if (given["master"] or "local").startswith("local"):  # Spark's default, 200, is for a cluster
            builder = builder.config("spark.sql.shuffle.partitions", "4")
    return builder.config(map=conf)


def _check_session_options(given: Mapping[str, Any]) -> None:
    if given["master"] and given["remote"]:
        raise click.UsageError("--master and --remote: give one of them")


@click.command(name="spark-jars")
@click.option(
    "--sink",
    "sinks",
    metavar="NAME",
    multiple=True,
    help="Add the jars of a sink: delta, postgresql, sqlite.",
)
@connected
def spark_jars(cli: Cli, sinks: tuple[str, ...]) -> None:
    """Print the jars that Spark needs, as spark-submit takes them.

    The command fetches jars that are not in the cache. In a program that starts Spark itself, without
    spark-submit, configure_spark_with_kmq() adds the jars.

    \b
    Example:
      spark-submit --jars "$(kmq spark-jars)" job.py
    """
    from kmqpy.spark.session import spark_jars

    for name in sinks:
        if name not in ("delta", "postgresql", "sqlite"):
            raise click.UsageError(
                f"--sink {name}: has no jars of its own; delta, postgresql and sqlite have"
            )
    paths = [str(path) for path in spark_jars(f"spark-{name}" for name in sinks)]
    cli.tell(paths, ",".join(paths))


@click.command(name="pipeline", short_help="Process a queue's messages with Spark, and write the results.")
@click.argument("queue")
@click.option(
    "--out",
    required=True,
    metavar="PLACE",
    help="A folder, an Iceberg table, the JDBC URL of a database, or a topic.",
)
@click.option("--schema", required=True, metavar="DDL", help="Columns of the rows: 'id long, total double'.")
@click.option(
    "--function",
    metavar="MODULE:NAME",
    help="The function that makes rows of messages, see docs/spark.md. Default: bodies are JSON objects.",
)
@click.option("--format", "form", default="parquet", show_default=True, help="A sink, see docs/spark.md.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="For the format; repeatable.")
@click.option(
    "--partition-by", metavar="COLUMN", multiple=True, help="A folder for each of its values; repeatable."
)
@click.option(
    "--file-size", type=click.IntRange(1), default=128, show_default=True, help="Of each file, about, in MiB."
)
@click.option(
    "--checkpoint", metavar="DIR", help="Spark's checkpoint [OUT.kmq/checkpoint, if OUT is a folder]."
)
@click.option("--aggregate", metavar="SQL", help="Query of the view `rows`; at the end, into OUT-aggregate.")
@click.option("--report", metavar="DIR", help="Write the queue's health there, as text and PNG.")
@click.option("--drain", is_flag=True, help="Go on until the queue is empty, redeliveries included.")
@click.option("--follow", is_flag=True, help="Go on until SIGTERM or Ctrl-C.")
@click.option(
    "--trigger", type=DURATION, default="1s", show_default=True, help="With --follow: from batch to batch."
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=500_000,
    show_default=True,
    help="Most messages of a batch.",
)
@click.option(
    "--lease", type=DURATION, default="5m", show_default=True, help="Of messages; must outlast a batch."
)
@session_options
@connected
def pipeline(cli: Cli, queue: str, **given: Any) -> None:
    """Process what a queue holds on Spark, and acknowledge each message that was written.

    A tracker redelivers messages that fail and dead-letters those that keep failing. At the end, the
    health of the queue is printed; the exit code is 1 if messages have become dead letters. SIGTERM or
    Ctrl-C ends it after the micro-batch that it is in.

    \b
    Example:
      kmq pipeline orders --schema "id long, customer string, total double" --out orders.parquet \\
        --aggregate "select customer, sum(total) total from rows group by customer" --report report --drain
    """
    from kmqpy.spark import KmqSpark  # first: it says which packages are missing
    from kmqpy.spark.checkpoint import cause, error_line
    from kmqpy.spark.health import health
    from kmqpy.spark.pipeline import Sink, check_aggregate, dead_letters, run_pipeline, write_aggregate
    from kmqpy.spark.session import start, stop
    from kmqpy.spark.sinks import FOLDER_FORMATS, checkpoint_of, target_of

    from py4j.protocol import Py4JError, Py4JNetworkError  # isort: skip
    from pyspark.errors import PySparkException  # isort: skip

    if given["drain"] and given["follow"]:
        raise click.UsageError("--drain and --follow: give one of them")
    if given["follow"] and (given["aggregate"] or given["report"]):
        raise click.UsageError("--aggregate and --report: these need the end of a run, and --follow has none")
    _check_session_options(given)
    if given["aggregate"] and given["form"] not in FOLDER_FORMATS:
        raise click.UsageError(f"--aggregate: only for files and Delta tables, not for {given['form']}")
    sink = Sink(
        path=given["out"],
        format=given["form"],
        options=dict(pairs(given["options"], "--option")),
        partition_by=given["partition_by"],
        file_bytes=given["file_size"] * 2**20,
        checkpoint=given["checkpoint"],
    )
    target = target_of(sink, cli.connection)
    checkpoint_of(sink)
    builder = builder_of(given, f"kmq pipeline {queue}", target.settings)
    function = None if given["function"] is None else _load_function(given["function"])
    settings = cli.queue(queue)
    spark = start(builder, packages=given["packages"], jar_sets=target.jar_sets)
    stopping = _stop_signal()
    skipped: list[int] = []
    dead_before = dead_letters(cli.connection, settings)
    try:
        if given["aggregate"]:
            check_aggregate(spark, given["schema"], given["aggregate"])
        with _progress_line(shown=not cli.json and sys.stderr.isatty()) as progress:
            ended = run_pipeline(
                spark,
                settings,
                cli.connection,
                sink=sink,
                function=function,
                stop=stopping,
                progress=progress,
                on_skipped=skipped.append,
                **{
                    name: given[name]
                    for name in ("schema", "drain", "follow", "trigger", "max_batch", "lease")
                },
            )
        if skipped:
            warn(f"{sum(skipped):,} messages were deleted (a purge, retention) before the pipeline read them")
        if not ended:
            _summarize(cli, settings)
            return
        if given["aggregate"]:
            write_aggregate(spark, sink, given["schema"], given["aggregate"], cli.connection)
        found = health(KmqSpark(spark, cli.connection, settings))
        if given["report"]:
            found.save(given["report"])
        if cli.json:
            tables = found.tables.items()
            print_json({name: json.loads(table.to_json(orient="records")) for name, table in tables})
        else:
            print_lines(str(found))
        if (more := dead_letters(cli.connection, settings) - dead_before) > 0:
            raise PartlyDone(f"{more:,} messages became dead letters; see: kmq dlq list {queue}")
    except PySparkException as error:
        raise click.ClickException(f"Spark: {cause(str(error))}") from error
    except (Py4JError, ConnectionError) as error:  # a signal to the process group ends the JVM at once
        if not stopping():
            gone = isinstance(error, ConnectionError | Py4JNetworkError)
            what = "its JVM has gone, and messages that it did not acknowledge will be redelivered: "
            raise click.ClickException(f"Spark: {what if gone else ''}{error_line(error)}") from error
        warn("Spark has gone first; messages that it did not acknowledge will be redelivered")
    finally:
        stop(spark)


def _summarize(cli: Cli, queue: QueueSettings) -> None:
    """Print what a stopped run has left in the queue: quickly, unlike the report of the queue's health."""
    found = queue_stats(cli.connection, queue)
    left = {name: getattr(found, name) for name in ("depth", "in_flight", "dead_letters")}
    shown = f"{found.depth:,} waiting, {found.in_flight:,} in flight, {found.dead_letters:,} dead letters"
    text = f"stopped; what was written is acknowledged. The queue holds: {shown}"
    cli.tell({"stopped": True, **left}, text)


@contextmanager
def _progress_line(*, shown: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function that overwrites one line of the terminal with progress; None unless `shown`."""

    def show(progress: Progress) -> None:
        counts = (progress.behind, progress.dead_letters)
        behind, dead = ("?" if count is None else f"{count:,}" for count in counts)
        text = (
            f"{progress.messages:,} messages, {progress.per_s:,.0f}/s, {behind} behind, {dead} dead letters"
        )
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    try:
        yield show if shown else None
    finally:
        if shown:
            click.echo(err=True)


def _load_function(name: str) -> Any:
    """Import the function `module:name`, from the current folder too; executors get its module's code."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
        function = getattr(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(f"--function {name}: write it as module:name ({error})") from None
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return function


def _stop_signal() -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT: the returned function tells if one has come; a second ends the process."""
    stopping = threading.Event()

    def stop(number: int, _frame: Any) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping.is_set


@click.command(name="spark-state", short_help="Keep the state of each message as a table, by Spark.")
@click.argument("queue")
@click.option("--table", required=True, metavar="DIR", help="A folder of its own; made where there is none.")
@click.option("--restart", is_flag=True, help="Make the table anew, from all that Kafka keeps.")
@session_options
@connected
def spark_state(cli: Cli, queue: str, **given: Any) -> None:
    """Bring a table with the state of each message up to date, and count the messages.

    It reads what was written since the last run, whatever the queue holds beside. The table is a folder of
    Parquet files, which KmqSpark.state_table() reads.

    \b
    Example:
      kmq spark-state jobs --table /data/jobs-state
    """
    from kmqpy.spark import KmqSpark  # first: it says which packages are missing
    from kmqpy.spark.checkpoint import cause
    from kmqpy.spark.session import start, stop

    from py4j.protocol import Py4JError  # isort: skip
    from pyspark.errors import PySparkException  # isort: skip
    from pyspark.sql import functions as F  # noqa: N812  # isort: skip

    _check_session_options(given)
    settings = cli.queue(queue)
    spark = start(builder_of(given, f"kmq spark-state {queue}", {}), packages=given["packages"])
    try:
        kmq = KmqSpark(spark, cli.connection, settings)
        table = kmq.state_table(given["table"])
        update = table.update(restart=given["restart"])
        found = kmq.depth(table.messages()).withColumn("oldest_pending_ms", F.unix_millis("oldest_pending"))
        depth: Any = found.drop("oldest_pending").toPandas()
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise click.ClickException(f"Spark: {cause(str(error))}") from error
    finally:
        stop(spark)
    if cli.json:
        rows = json.loads(depth.to_json(orient="records"))
        print_json({"version": update.version, "markers": update.markers, "depth": rows})
    else:
        print_lines(
            f"{depth.to_string(index=False)}\n\nversion {update.version}: {update.markers:,} markers read, "
            f"{update.blocks_written:,} of {update.blocks:,} blocks written"
        )
