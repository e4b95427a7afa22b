"""`kmq spark-jars`."""

from __future__ import annotations

import click

from kmqpy.cli.options import Cli, connected
from kmqpy.cli.output import print_json


@click.command(name="spark-jars")
@connected
def spark_jars(cli: Cli) -> None:
    """Print the jars that Spark needs, as spark-submit takes them.

    The first time, they are fetched. Without spark-submit, configure_spark_with_kmq() adds them.

    \b
    Example:
      spark-submit --jars "$(kmq spark-jars)" job.py
    """
    from kmqpy.spark.session import spark_jars

    paths = [str(path) for path in spark_jars()]
    if cli.json:
        print_json(paths)
    else:
        click.echo(",".join(paths))
