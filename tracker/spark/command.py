"""`kmq spark-tracker`: runs a tracker on Spark until SIGTERM or Ctrl-C."""

from __future__ import annotations

import functools
import signal
from datetime import timedelta
from typing import Any

import click

from kmqpy.cli.options import DURATION, Cli, connected_service, pairs
from kmqpy.core import logs
from tracker.command import log_options, register, settings_of, settings_options

_OF_THREADS = (
    "offset_writes_per_s",
    "use_now_for_redeliver_despite_no_marker_seen_for_ms",
    "workers",
    "count_interval_ms",
    "tracing",
)
"""Settings that say nothing to executors."""


@click.command(
    short_help="Redeliver on the executors of a Spark cluster.",
    epilog="Example:  kmq spark-tracker --queue orders --checkpoint /shared/orders --master spark://host:7077",
)
@connected_service
@click.option("--queue", required=True, help="The queue to serve.")
@click.option(
    "--checkpoint",
    metavar="FOLDER",
    required=True,
    help="Where Spark keeps the state: a path or URL that driver and executors reach; of this queue only.",
)
@click.option(
    "--trigger", type=DURATION, default="1s", metavar="DURATION", help="How often partitions get a turn [1s]."
)
@click.option("--tasks", type=click.IntRange(1), metavar="N", help="Turns at a time [the cores there are].")
@click.option("--master", metavar="URL", help="Of the Spark cluster [local[*]; or spark-submit's].")
@click.option("--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; repeatable.")
@log_options
@functools.partial(settings_options, but=_OF_THREADS)
def spark_tracker(
    cli: Cli,
    queue: str,
    checkpoint: str,
    trigger: timedelta,
    tasks: int | None,
    master: str | None,
    conf: tuple[str, ...],
    log_level: str,
    log_format: str,
    **given: Any,
) -> None:
    """Redeliver for one queue on Spark: what `kmq tracker` does, on as many machines as Spark has.

    It shares the partitions with other trackers of the queue, on Spark or not. Settings come from the
    config file's table [tracker], then KMQ_TRACKER_… in the environment, then the options here.
    """
    # Not before: `kmq --help` loads this module, and must not load Spark.
    from kmqpy.spark.session import start, stop

    logs.setup(log_level, log_format)
    settings = settings_of(cli, (queue,), given)
    options: dict[str, bool | float | int | str | None] = {
        "spark.ui.showConsoleProgress": "false",
        **dict(pairs(conf, "--conf")),
    }
    if master is not None:
        options["spark.master"] = master
    from pyspark.sql import SparkSession

    from tracker.spark.tracker import SparkTracker  # says what to install where PySpark is not

    register(cli, settings.queues)
    builder = SparkSession.builder.appName(f"kmq tracker of {queue}").config(map=options)
    session = start(builder)
    try:
        service = SparkTracker(
            session,
            cli.connection,
            cli.zookeeper,
            queue,
            checkpoint=checkpoint,
            trigger=trigger.total_seconds(),
            tasks=tasks,
            settings=settings,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.request_stop())
        service.run()
    finally:
        stop(session)
