"""A Spark driver in a process of its own: processes a queue into Parquet files until nothing is left.

    driver.py <connection> <queue settings> <Spark settings> <folder> process|take

A file in <folder>/seen tells of each frame that was processed, <folder>/written.json of what was written.
"""

import argparse
import json
import sys
import time
import uuid
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.kafka.admin import stats
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark, configure_spark_with_kmq

LEASE_S = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("connection")
    parser.add_argument("queue")
    parser.add_argument("spark")
    parser.add_argument("folder", type=Path)
    parser.add_argument("how", choices=["process", "take"])
    options = parser.parse_args()
    queue = QueueSettings.from_json(options.queue.encode())
    connection = KafkaConnection(**json.loads(options.connection))
    seen = str(options.folder / "seen")

    def body(values: pd.Series) -> pd.Series:
        Path(seen, uuid.uuid4().hex).write_text("\n".join(value.decode() for value in values))
        time.sleep(0.05)
        return values.str.decode("utf-8")

    builder = SparkSession.builder.config(map=json.loads(options.spark)).config(
        "spark.sql.execution.arrow.maxRecordsPerBatch", 50
    )
    spark = configure_spark_with_kmq(builder.master("local[2]")).getOrCreate()
    with KmqSpark(spark, connection, queue, markers="range") as kmq:
        df = kmq.read_stream(max_offsets_per_trigger=300)
        if options.how == "process":
            out = kmq.process(
                df, lambda frame: frame.assign(body=body(frame["value"])), "body string", lease=LEASE_S
            )
        else:
            out = kmq.take(df, lease=LEASE_S).select(F.pandas_udf(body, "string")("value").alias("body"))
        writer = kmq.write_stream(out, str(options.folder / "checkpoint"))
        query = (
            writer.format("parquet")
            .trigger(processingTime="50 milliseconds")
            .start(str(options.folder / "out"))
        )
        while query.isActive:
            found = stats.queue_stats(connection, queue)
            if (found.depth, found.in_flight) == (0, 0):
                break
            time.sleep(0.5)  # to count takes more CPU than to process
        query.stop()
        kmq.await_termination(query)
    # Spark knows which of the files count.
    written = [row.body for row in spark.read.parquet(str(options.folder / "out")).collect()]
    (options.folder / "written.json").write_text(json.dumps(written))
    spark.stop()


if __name__ == "__main__":
    sys.exit(main())
