"""Options by which a command starts Spark, and the builder of its Spark session."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kmqpy.cli.options import pairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where Spark is, and with which settings and packages it runs."""
    for option in (
        click.option(
            "--conf", "settings", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; repeatable."
        ),
        click.option(
            "--packages", metavar="COORDINATES", multiple=True, help="Maven packages for Spark; repeatable."
        ),
        click.option(
            "--remote", metavar="URL", help="A Spark Connect server instead: sc://host, or local[*]."
        ),
        click.option(
            "--master", metavar="URL", help="Spark's master [local[*,4], or what spark-submit says]."
        ),
    ):
        command = option(command)
    return command


def check_session_options(given: Mapping[str, Any]) -> None:
    """Raise click's UsageError for options of session_options() that exclude each other."""
    if given["master"] and given["remote"]:
        raise click.UsageError("--master and --remote: give one of them")


def builder_of(given: Mapping[str, Any], name: str, needed: Mapping[str, str]) -> SparkSession.Builder:
    """Return the builder of a session called `name`.

    given   the options of session_options()
    needed  settings that the session must have; they overrule --conf
    """
    from pyspark.sql import SparkSession

    from kmqpy.spark.portable import SETTINGS

    conf = _conf(given["settings"], {**SETTINGS, **needed})
    builder: SparkSession.Builder = SparkSession.builder.appName(name)
    if given["remote"]:
        builder = builder.remote(given["remote"])
    elif given["master"] or not os.environ.keys() & {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "MASTER"}:
        builder = builder.master(given["master"] or "local[*,4]")
        if (given["master"] or "local").startswith("local"):  # Spark's default, 200, is for a cluster
            builder = builder.config("spark.sql.shuffle.partitions", "4")
    return builder.config(map=conf)


def _conf(given: tuple[str, ...], needed: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of --conf and the needed ones; extensions of both. Raises click's UsageError."""
    found: dict[str, Any] = dict(pairs(given, "--conf"))
    for key in found:
        if not key.startswith("spark."):
            raise click.UsageError(f"--conf {key}: is no setting of Spark; those begin with spark.")
    for key, value in needed.items():
        if key == "spark.sql.extensions" and key in found:
            value = f"{found[key]},{value}"
        found[key] = value
    return found
