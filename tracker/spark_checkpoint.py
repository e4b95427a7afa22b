"""Whose a checkpoint of the tracker on Spark is."""

from __future__ import annotations

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError

_NAMES = ("queue", "queue_topic_id", "markers_topic_id")


def claim(session: SparkSession, folder: str, queue: str, topic_ids: tuple[str, str]) -> None:
    """Note that the checkpoint in `folder` is of `queue`, whose topics and their markers have these ids.

    Read and written by Spark, on whatever file system that is. Raises ConfigError if it is another
    queue's, or can't be used.
    """
    path, own = f"{folder}/queue", (queue, *topic_ids)
    columns = [sf.lit(value).alias(name) for name, value in zip(_NAMES, own, strict=True)]
    mine = session.range(1).select(*columns).coalesce(1)
    schema = ", ".join(f"{name} STRING" for name in _NAMES)
    try:
        mine.write.mode("ignore").json(path)
        found = session.read.schema(schema).json(path).collect()
        if not found:  # somebody was killed while writing it
            mine.write.mode("overwrite").json(path)
            return
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"checkpoint: {folder} can't be used: {one_line(error)}") from None
    if tuple(found[0]) == own:
        return
    whose = f"of queue {found[0]['queue']!r}, not of {queue!r}"
    if found[0]["queue"] == queue:
        whose = f"of a queue {queue!r} whose topics have been deleted and created anew since"
    raise ConfigError(f"checkpoint: {folder} is {whose}; name another folder")


def one_line(error: Exception | None) -> str:
    """The first line of what Spark says, which goes on for pages."""
    text = str(error) if error is not None else "stopped by somebody else"
    return " ".join(text.split("\n\n")[0].split("\n=== ")[0].split())[:500]
