"""Writes kmqpy's own files into a checkpoint of Spark: its queue, and the messages that failed.

Also shortens Spark's errors to one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError
from kmqpy.kafka.places import Place

_PYTHON_TRACEBACK = "Traceback (most recent call last):"
_LOST_TASK_PREFIX = re.compile(r"^.*most recent failure: Lost task .*?\): (?=.)")
_JAVA_PACKAGE = re.compile(r"^(?:[\w$]+\.)+(?=[\w$]+: )")


def bind_checkpoint(
    session: SparkSession, checkpoint: str, file: str, queue: str, ids: Mapping[str, str]
) -> None:
    """Note in a checkpoint, in the file `file`, that it belongs to `queue`, whose topics have these ids.

    The offsets in a checkpoint mean other messages in any other topic, also in a recreated one. Spark reads
    and writes the file, so the checkpoint may be on any file system that Spark reaches.

    Raises ConfigError if the file names another queue or other ids, or if Spark can't use the checkpoint.
    """
    if not isinstance(checkpoint, str) or not checkpoint.strip("/ "):
        raise ConfigError(f"checkpoint: {checkpoint!r} is no folder of its own")
    path, own = f"{checkpoint.rstrip('/')}/{file}", {"queue": queue, **ids}
    mine = session.range(1).select(*(sf.lit(value).alias(name) for name, value in own.items())).coalesce(1)
    schema = ", ".join(f"{name} STRING" for name in own)
    try:
        mine.write.mode("ignore").json(path)
        found = session.read.schema(schema).json(path).collect()
        if not found:  # a driver was killed while it wrote the file
            mine.write.mode("overwrite").json(path)
            return
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"checkpoint: {checkpoint} can't be used: {error_line(error)}") from None
    noted = found[0].asDict()
    if noted == own:
        return
    whose = f"of queue {noted['queue']!r}, not of {queue!r}"
    if noted["queue"] is None:
        whose = f"of nobody knows which queue: its file {file!r} can't be read"
    elif noted["queue"] == queue:
        whose = f"of a queue {queue!r} whose topics have been deleted and recreated since"
    raise ConfigError(f"checkpoint: {checkpoint} is {whose}; name another folder")


class RememberedFailures:
    """Keeps the failed messages, and the progress then, in a file of a checkpoint: see isolation.remember().

    A file that can't be read counts as empty: that costs no message an attempt.
    """

    _SCHEMA = "partition INT, offset LONG, progress LONG"

    def __init__(self, session: SparkSession, checkpoint: str) -> None:
        self._session = session
        self._path = f"{checkpoint.rstrip('/')}/kmq-alone"

    def load(self) -> dict[Place, int]:
        """Return the memory that was saved last, in the order in which it was saved."""
        try:
            rows = self._session.read.schema(self._SCHEMA).json(self._path).collect()
        except (PySparkException, Py4JError):
            return {}  # there is no file yet
        return {(row["partition"], row["offset"]): row["progress"] for row in rows if None not in row}

    def save(self, remembered: Mapping[Place, int]) -> None:
        """Replace the file; raises ConfigError when Spark can't write it."""
        rows = [(*place, progress) for place, progress in remembered.items()]
        frame = self._session.createDataFrame(rows, self._SCHEMA).coalesce(1)
        try:
            frame.write.mode("overwrite").json(self._path)
        except (PySparkException, Py4JError) as error:
            raise ConfigError(f"checkpoint: {self._path} can't be written: {error_line(error)}") from None


def error_line(error: Exception | str | None) -> str:
    """Return the beginning of an error of Spark, up to a blank line or a stack trace, as one line."""
    text = str(error) if error is not None else "stopped by somebody else"
    for end in ("\n\n", "\n=== ", "\n\tat "):
        text = text.strip().partition(end)[0]
    return " ".join(text.split())[:500]


def cause(failure: str) -> str:
    """Return the innermost cause in the error with which a query failed, as one line."""
    *outer, inner = failure.split(_PYTHON_TRACEBACK)
    if outer:  # a Python traceback: keep the lines that belong to no stack frame
        lines = [line for line in inner.splitlines() if line and not line[0].isspace()]
        of_java = len(lines) > 1 and "Py4JJavaError: " in lines[0]
        found = error_line(lines[of_java].removeprefix(": ")) if lines else error_line(failure)
    else:
        found = error_line(failure.rpartition("Caused by: ")[2])
    return _JAVA_PACKAGE.sub("", _LOST_TASK_PREFIX.sub("", found))
