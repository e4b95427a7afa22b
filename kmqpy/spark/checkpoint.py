"""What kmqpy notes in a checkpoint: its queue, messages that failed. Spark's errors on one line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError
from kmqpy.kafka.places import Place

_TRACEBACK = "Traceback (most recent call last):"
_TASK = re.compile(r"^.*most recent failure: Lost task .*?\): (?=.)")
_PACKAGE = re.compile(r"^(?:[\w$]+\.)+(?=[\w$]+: )")


def bind_checkpoint(
    session: SparkSession, checkpoint: str, file: str, queue: str, ids: Mapping[str, str]
) -> None:
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


class Remembered:
    """A number for each of some messages, in a file of a checkpoint; see `kmqpy.spark.isolation`.

    A file that can't be read is ignored: that costs no message an attempt.
    """

    _SCHEMA = "partition INT, offset LONG, progress LONG"

    def __init__(self, session: SparkSession, checkpoint: str) -> None:
        self._session = session
        self._path = f"{checkpoint.rstrip('/')}/kmq-alone"

    def load(self) -> dict[Place, int]:
        """Return what was saved last, in its order."""
        try:
            rows = self._session.read.schema(self._SCHEMA).json(self._path).collect()
        except (PySparkException, Py4JError):
            return {}  # there is none yet
        return {(row["partition"], row["offset"]): row["progress"] for row in rows if None not in row}

    def save(self, remembered: Mapping[Place, int]) -> None:
        """Raises ConfigError when it can't be written."""
        rows = [(*place, progress) for place, progress in remembered.items()]
        frame = self._session.createDataFrame(rows, self._SCHEMA).coalesce(1)
        try:
            frame.write.mode("overwrite").json(self._path)
        except (PySparkException, Py4JError) as error:
            raise ConfigError(f"checkpoint: {self._path} can't be written: {one_line(error)}") from None


def one_line(error: Exception | str | None) -> str:
    """The first line of an error of Spark, which may be pages long."""
    text = str(error) if error is not None else "stopped by somebody else"
    for end in ("\n\n", "\n=== ", "\n\tat "):
        text = text.strip().partition(end)[0]
    return " ".join(text.split())[:500]


def cause(failure: str) -> str:
    """The innermost cause in Spark's error of a query that has failed, on one line."""
    *outer, inner = failure.split(_TRACEBACK)
    if outer:  # of Python: what belongs to no frame
        lines = [line for line in inner.splitlines() if line and not line[0].isspace()]
        of_java = len(lines) > 1 and "Py4JJavaError: " in lines[0]
        found = one_line(lines[of_java].removeprefix(": ")) if lines else one_line(failure)
    else:
        found = one_line(failure.rpartition("Caused by: ")[2])
    return _PACKAGE.sub("", _TASK.sub("", found))
