"""Spark reads a markers topic: as it is, decoded, and into the state of each message."""

import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.children import Failed
from kmqpy.kafka import partition_reader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark, configure_spark_with_kmq
from kmqpy.spark.records import read_topic


def reading(options: dict[str, Any]) -> dict[str, float]:
    """Markers per second; the first time is not timed."""
    queue = QueueSettings.from_json(options["queue"].encode())
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", str(options["partitions"]))
    spark = configure_spark_with_kmq(builder.config("spark.driver.memory", "4g")).getOrCreate()
    kmq = KmqSpark(spark, KafkaConnection(bootstrap=options["bootstrap"]), queue)
    for _ in range(2):
        frame = _frame(kmq, options)
        began = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        seconds = time.monotonic() - began
    if options["how"] == "state":
        found = {row["state"]: row["count"] for row in kmq.messages().groupBy("state").count().collect()}
        if found != {"processed": options["messages"]}:
            raise Failed(f"processed: not {options['messages']:,}, but {found}")
    spark.stop()
    return {"markers_per_s": 2 * options["messages"] / seconds, "seconds": seconds}


def _frame(kmq: KmqSpark, options: dict[str, Any]) -> DataFrame:
    if options["how"] == "state":
        return kmq.messages()
    if options["how"] == "decode":
        return kmq.markers()
    topic = kmq.queue.markers_topic
    bounds = partition_reader.bounds(kmq.connection, topic, range(options["partitions"]))
    given = dict(kmq.options)
    if options["how"] == "read":
        del given["kafka.max.poll.records"]
    return read_topic(kmq.spark, given, topic, bounds)
