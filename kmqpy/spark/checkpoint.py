"""Writes kmqpy's own files into a checkpoint of Spark: its queue, its name, and the messages that failed.

Also shortens Spark's errors to one line.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.errors import ConfigError
from kmqpy.kafka.places import Place

_PYTHON_TRACEBACK = "Traceback (most recent call last):"
_LOST_TASK_PREFIX = re.compile(r"^.*most recent failure: Lost task .*?\): (?=.)")
_JAVA_PACKAGE = re.compile(r"^(?:[\w$]+\.)+(?=[\w$]+: )")


def bind_checkpoint(
    session: SparkSession, checkpoint: str, queue: str, topic_id: str, queue_name: str = ""
) -> None:
    """Note in a checkpoint that it belongs to this queue; raises ConfigError if it belongs to another.

    The offsets in a checkpoint mean other messages in any other topic, even in a recreated one.

    queue_name  if `queue` is the name of a lane: that of the queue. Each lane has a note of its own
    """
    if not isinstance(checkpoint, str) or not checkpoint.strip("/ "):
        raise ConfigError(f"checkpoint: invalid folder {checkpoint!r}: name a folder for it alone")
    own = {"queue": queue, "topic_id": topic_id}
    ending = queue.removeprefix(queue_name or queue)
    noted = _noted(session, checkpoint, f"kmq{ending}", "json", own)
    if noted == own:
        return
    whose = f"to queue {noted['queue']!r}, not to {queue!r}"
    if noted["queue"] is None:
        whose = f"to an unknown queue: its file 'kmq{ending}' can't be read"
    elif noted["queue"] == queue:
        what = "lane" if ending else "queue"
        whose = f"to a {what} {queue!r} whose topics have been deleted and recreated since"
    raise ConfigError(f"checkpoint: {checkpoint} belongs {whose}; name another folder")


def identity_of(session: SparkSession, checkpoint: str) -> str:
    """The name that was given to this checkpoint when it was first used: the `run` of sinks.

    Micro-batches are numbered within a checkpoint. One that is deleted and made again gets another name,
    because its micro-batches begin at 0 again. Raises ConfigError.
    """
    return str(_noted(session, checkpoint, "kmq-run", "text", {"value": uuid.uuid4().hex[:16]})["value"])


def _noted(
    session: SparkSession, checkpoint: str, file: str, form: str, own: Mapping[str, str]
) -> dict[str, str | None]:
    """The values in a file of the checkpoint, which is written with `own` if it does not exist.

    Spark reads and writes the file, so the checkpoint may be on any file system that Spark reaches.
    """
    path = f"{checkpoint.rstrip('/')}/{file}"
    mine = session.range(1).select(*(F.lit(value).alias(name) for name, value in own.items())).coalesce(1)
    schema = ", ".join(f"{name} STRING" for name in own)
    try:
        mine.write.mode("ignore").format(form).save(path)
        found = session.read.schema(schema).format(form).load(path).collect()
        if not found:  # a driver was killed while it wrote the file
            mine.write.mode("overwrite").format(form).save(path)
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"checkpoint: {checkpoint} can't be used: {error_line(error)}") from None
    return found[0].asDict() if found else dict(own)


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
