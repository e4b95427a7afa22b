"""Spark reads a backlog, with and without acknowledgement, into a sink that does nothing."""

import tempfile
import threading
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from benchmarks.children import Failed
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark, configure_spark_with_kmq, register

_MICRO_BATCHES = 6
_SCHEMA = "key binary, value binary"


class _Batches(StreamingQueryListener):
    """Notes the rows and milliseconds that Spark reports of each micro-batch."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.ended = threading.Event()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        if event.progress.numInputRows:
            took = event.progress.durationMs["triggerExecution"]
            self.found.append((event.progress.numInputRows, took))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: ARG002, N802
        self.ended.set()


def processing(options: dict[str, Any]) -> dict[str, float]:
    """Measure the messages per second of all micro-batches except the first, which warms up."""
    queue = QueueSettings.from_json(options["queue"].encode())
    connection = KafkaConnection(bootstrap=options["bootstrap"])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")  # type: ignore[attr-defined]
    spark = configure_spark_with_kmq(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    batches = _Batches()
    limit = -(-options["messages"] // _MICRO_BATCHES)
    with KmqSpark(spark, connection, queue) as kmq:
        out = _frame(spark, kmq, options, limit)
        spark.streams.addListener(batches)
        with tempfile.TemporaryDirectory() as checkpoint:
            writer = out.writeStream.format("noop").option("checkpointLocation", checkpoint)
            kmq.await_termination(writer.trigger(availableNow=True).start())
        batches.ended.wait(30)
    rows, took = (sum(values) for values in zip(*batches.found[1:], strict=True))
    read = sum(count for count, _ in batches.found)
    if read != options["messages"]:
        raise Failed(f"{read:,} of {options['messages']:,} messages were read")
    spark.stop()
    return {"messages_per_s": rows / took * 1000, "seconds": sum(ms for _, ms in batches.found) / 1000}


def _frame(spark: SparkSession, kmq: KmqSpark, options: dict[str, Any], limit: int) -> DataFrame:
    how = options["how"]
    if how == "own source":
        given = {"bootstrap": options["bootstrap"], "queue": kmq.queue.name, "start": "earliest"}
        df = spark.readStream.format("kmq").options(**given, max_offsets_per_trigger=limit).load()
    else:
        df = kmq.read_stream(start="earliest", max_offsets_per_trigger=limit)
    if how == "read":
        return df.select("key", "value")
    if how == "pandas":
        return df.select("key", "value").mapInPandas(lambda frames: frames, _SCHEMA)
    needed = df.drop("headers", "timestamp", "original_partition", "original_offset")
    if how == "take":
        return kmq.take(needed).select("key", "value")
    if how == "rows":
        return kmq.process_rows(needed, lambda row: (row.key, row.value), _SCHEMA)
    return kmq.process(needed, lambda frame: frame, _SCHEMA)
