"""The command `kmq spark-state`: a table with the state of each message."""

from __future__ import annotations

import json
from typing import Any

import click

from kmqpy.cli.options import Cli, connected
from kmqpy.cli.output import print_json, print_lines
from kmqpy.cli.spark_session import builder_of, check_session_options, session_options


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

    check_session_options(given)
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
