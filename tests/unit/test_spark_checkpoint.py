"""The reason of a query's failure, as a dead letter tells it."""

import pytest

from kmqpy.errors import ConfigError
from kmqpy.spark import checkpoint
from kmqpy.spark.checkpoint import cause

PYTHON = """org.apache.spark.sql.streaming.StreamingQueryException: [FOREACH_BATCH] An error
Return Message: Traceback (most recent call last):
  File "a.py", line 1, in f
    raise ValueError("x")

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
    raise b.OddError("y")
b.c.OddError: [ODD] The value 'y' is odd: see there

\tat py4j.Protocol.getReturnValue(Protocol.java:476)
"""
JAVA = """org.apache.spark.SparkException: Job aborted\n\tat x.Y
Caused by: a.Outer: one\n\tat x.Z
Caused by: org.postgresql.util.PSQLException: ERROR: value too long\n\tat x.Z\n\t... 3 more
"""
WORKER = """Return Message: Traceback (most recent call last):
  File "a.py", line 1, in f
py4j.protocol.Py4JJavaError: An error occurred while calling o1.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 8.0 failed 1 times, \
most recent failure: Lost task 0.0 in stage 8.0 (TID 8) (host executor 1): a.SparkException: Worker exited
\tat org.apache.spark.A
Caused by: java.io.EOFException
"""


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (PYTHON, "OddError: [ODD] The value 'y' is odd: see there"),
        (WORKER, "SparkException: Worker exited"),
        (JAVA, "PSQLException: ERROR: value too long"),
        ("java.io.IOException: no space: left", "IOException: no space: left"),
        ("[STREAM_FAILED] something", "[STREAM_FAILED] something"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_the_cause(failure, expected):
    assert cause(failure) == expected


def test_the_file_of_a_lane_that_cant_be_read(monkeypatch):
    monkeypatch.setattr(checkpoint, "_noted", lambda *_: {"queue": None, "topic_id": None})
    with pytest.raises(ConfigError, match="its file 'kmq__priority1' can't be read"):
        checkpoint.bind_checkpoint(None, "folder", "q__priority1", "id", "q")
