"""`kmq spark-tracker`: runs trackers on Spark until SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import asdict
from typing import Any

import click

from kmqpy.cli.options import Cli, connected_service, log_options, pairs
from kmqpy.cli.output import print_json, print_table
from kmqpy.core import logs
from tracker.command import register, settings_of, settings_options
from tracker.spark.checks import MAX_FAILURES, with_retries

_COLUMNS = ("tracker", "host", "starts", "partitions", "redelivered", "dead_lettered")


@click.command(
    short_help="Run trackers on the executors of a Spark cluster.",
    epilog="\b\nExample:\n  kmq spark-tracker --trackers 8 --queue orders --master spark://host:7077",
)
@connected_service
@click.option(
    "--trackers", type=click.IntRange(1), default=2, metavar="N", help="How many; each takes a slot [2]."
)
@click.option("--queue", "queues", multiple=True, help="Serve this queue only; repeatable. Default: all.")
@click.option("--master", metavar="URL", help="Master of Spark [local[N]; or spark-submit's].")
@click.option("--remote", metavar="URL", help="A Spark Connect server instead: sc://host, or local[N].")
@click.option("--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; repeatable.")
@log_options("text")
@settings_options
def spark_tracker(
    cli: Cli,
    trackers: int,
    queues: tuple[str, ...],
    master: str | None,
    remote: str | None,
    conf: tuple[str, ...],
    log_level: str,
    log_format: str,
    **given: Any,
) -> None:
    """Run trackers as tasks of a Spark job: what `kmq tracker` does, placed and restarted by Spark.

    They share the partitions with all other trackers, on Spark or not. Settings come from the config file's
    table [tracker], then KMQ_TRACKER_… in the environment, then the options here; --http-port is the port of
    the first tracker, and each further tracker has the next port. At the end, the command prints what each
    tracker did since its last start.
    """
    # Not before: `kmq --help` loads this module, and must not load Spark.
    from tracker.spark.job import TrackerJob  # isort: skip  # says what to install where PySpark is not

    from pyspark.sql import SparkSession

    from kmqpy.spark.session import start, stop

    if master and remote:
        raise click.UsageError("--master and --remote: give one of them")
    logs.setup(log_level, log_format)
    settings = settings_of(cli, queues, given)
    register(cli, settings.queues)
    builder = SparkSession.builder.appName("kmq trackers").config(
        map={
            "spark.ui.showConsoleProgress": "false",
            "spark.task.maxFailures": str(MAX_FAILURES),
            **dict(pairs(conf, "--conf")),
        }
    )
    if remote:
        builder = builder.remote(with_retries(remote))
    elif master or not os.environ.keys() & {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "MASTER"}:
        builder = builder.master(with_retries(master or f"local[{trackers}]"))
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    session = start(builder, connector=False)
    try:
        job = TrackerJob(
            session,
            cli.connection,
            cli.zookeeper,
            trackers=trackers,
            settings=settings,
            log_level=log_level,
            log_format=log_format,
            stopping=stopping,
        )
        reports = sorted(job.run(), key=lambda report: report.number)
    finally:
        stop(session)
    if cli.json:
        print_json([asdict(report) for report in reports])
    elif reports:
        print_table(
            [name.replace("_", "-") for name in _COLUMNS],
            [[getattr(report, name) for name in _COLUMNS] for report in reports],
        )
