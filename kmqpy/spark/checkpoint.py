"""Whose a checkpoint is, and the first line of what Spark says."""

from __future__ import annotations

from collections.abc import Mapping

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError


def claim(session: SparkSession, checkpoint: str, file: str, queue: str, ids: Mapping[str, str]) -> None:
    """Note in `file` of a checkpoint that it is of `queue`, whose topics have these ids.

    Offsets of another topic mean other messages. Read and written by Spark, on whatever file system
    that is. Raises ConfigError if it is noted otherwise there, or can't be used.
    """
    if not isinstance(checkpoint, str) or not checkpoint.strip("/ "):
        raise ConfigError(f"checkpoint: {checkpoint!r} is no folder of its own")
    path, own = f"{checkpoint.rstrip('/')}/{file}", {"queue": queue, **ids}
    mine = session.range(1).select(*(sf.lit(value).alias(name) for name, value in own.items())).coalesce(1)
    schema = ", ".join(f"{name} STRING" for name in own)
    try:
        mine.write.mode("ignore").json(path)
        found = session.read.schema(schema).json(path).collect()
        if not found:  # somebody was killed while writing it
            mine.write.mode("overwrite").json(path)
            return
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"checkpoint: {checkpoint} can't be used: {one_line(error)}") from None
    noted = found[0].asDict()
    if noted == own:
        return
    whose = f"of queue {noted['queue']!r}, not of {queue!r}"
    if noted["queue"] is None:
        whose = f"of nobody knows which queue: its file {file!r} can't be read"
    elif noted["queue"] == queue:
        whose = f"of a queue {queue!r} whose topics have been deleted and recreated since"
    raise ConfigError(f"checkpoint: {checkpoint} is {whose}; name another folder")


def one_line(error: Exception | None) -> str:
    """The first line of what Spark says, which goes on for pages."""
    text = str(error) if error is not None else "stopped by somebody else"
    for end in ("\n\n", "\n=== ", "\n\tat "):
        text = text.strip().partition(end)[0]
    return " ".join(text.split())[:500]
