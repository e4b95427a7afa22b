"""Spark reads a markers topic: as it is, decoded, into the state of each message, and into a table."""

import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.children import Failed
from kmqpy.kafka import partition_reader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark, configure_spark_with_kmq
from kmqpy.spark.records import read_topic


def reading(options: dict[str, Any]) -> dict[str, float]:
    """Measure the markers per second; the frame is evaluated twice, and only the second time counts."""
    kmq = _kmq(options)
    for _ in range(2):
        frame = _frame(kmq, options)
        began = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        seconds = time.monotonic() - began
    if options["how"] == "state":
        found = {row["state"]: row["count"] for row in kmq.messages().groupBy("state").count().collect()}
        if found != {"processed": options["messages"]}:
            raise Failed(f"processed: not {options['messages']:,}, but {found}")
    kmq.spark.stop()
    return {"markers_per_s": 2 * options["messages"] / seconds, "seconds": seconds}


def table(options: dict[str, Any]) -> dict[str, float]:
    """Measure the seconds of one update of the table: the first of its session, like that of a command."""
    kmq = _kmq(options)
    states = kmq.state_table(f"{options['folder']}/table")
    began = time.monotonic()
    update = states.update(restart=options["how"] == "restart")
    seconds = time.monotonic() - began
    if options["how"] == "update" and update.markers != options["messages"]:
        raise Failed(f"{update.markers:,} markers were read, not {options['messages']:,}")
    found = kmq.depth(states.messages()).selectExpr("sum(pending + in_flight + overdue)").collect()[0][0]
    if found:
        raise Failed(f"{found:,} messages are not processed")
    kmq.spark.stop()
    return {"seconds": seconds, "markers": update.markers, "blocks_written": update.blocks_written}


def _kmq(options: dict[str, Any]) -> KmqSpark:
    queue = QueueSettings.from_json(options["queue"].encode())
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", str(options["partitions"]))
    spark = configure_spark_with_kmq(builder.config("spark.driver.memory", "4g")).getOrCreate()
    return KmqSpark(spark, KafkaConnection(bootstrap=options["bootstrap"]), queue)


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
