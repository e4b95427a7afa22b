"""What test_connect.py runs, in a process of its own: a process has one kind of session for good.

connect_job.py <bootstrap> <queue> <example> [argument of the example ...]

Prints what it found; the server that the example has started serves others until the standard input ends.
"""

import json
import runpy
import sys
import tempfile

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.session import SparkSession

from kmqpy.spark import KmqSpark


def main(bootstrap: str, queue: str, example: str, *arguments: str) -> None:
    stop, SparkSession.stop = SparkSession.stop, lambda _: None  # the frames use its session as well
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")
    spark = SparkSession.getActiveSession()
    kmq = KmqSpark(spark, bootstrap, queue)
    states = {(row["partition"], row["offset"]): row["state"] for row in kmq.messages().collect()}
    stream = kmq.markers(stream=True).writeStream.format("memory").queryName("seen")
    stream.trigger(availableNow=True).start().awaitTermination(120)
    print(
        json.dumps(
            {
                "session": type(spark).__module__,
                "states": sorted([*place, state] for place, state in states.items()),
                "depth": [row.asDict() for row in kmq.depth().drop("oldest_pending").collect()],
                "undelivered": kmq.undelivered().count(),
                "latency": kmq.latency([0.5]).count(),
                "taken": take(spark, kmq),
                "markers": sorted(row["op"] for row in spark.table("seen").collect()),
                "port": DefaultChannelBuilder.default_port(),
            }
        ),
        flush=True,
    )
    sys.stdin.read()
    stop(spark)


def take(spark: SparkSession, kmq: KmqSpark) -> list[str]:
    """Take what is pending, and acknowledge what is ok: the bodies that the sink has got."""
    with kmq, tempfile.TemporaryDirectory() as checkpoint:
        out = kmq.take(kmq.read_stream()).selectExpr("kmq_message", "cast(value AS string) AS body")
        writer = kmq.write_stream(out, checkpoint, ok=F.col("body") == "any", reason="body")
        query = writer.format("memory").queryName("taken").trigger(availableNow=True).start()
        kmq.await_termination(query, 120)
    return [row["body"] for row in spark.table("taken").collect()]


if __name__ == "__main__":
    main(*sys.argv[1:])
