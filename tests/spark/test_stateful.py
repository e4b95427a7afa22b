"""Queries whose rows stay in Spark's state: nothing of them may be acknowledged."""

import pytest
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.errors import ConfigError
from kmqpy.kafka.admin import stats
from kmqpy.spark import KmqSpark


@pytest.mark.parametrize(
    "trigger",
    [{"availableNow": True}, pytest.param({"processingTime": "100 milliseconds"}, marks=pytest.mark.breadth)],
)
def test_a_stateful_query_is_refused_and_acknowledges_nothing(spark, make_queue, tmp_path, trigger):
    queue = make_queue()
    queue.send(*[f"m{number}" for number in range(20)])
    with KmqSpark(spark, queue.connection, queue.settings) as kmq:
        out = kmq.process(kmq.read_stream(), lambda frame: frame, "value binary, timestamp timestamp")
        counted = out.withWatermark("timestamp", "1 minute").groupBy(F.window("timestamp", "1 hour")).count()
        writer = kmq.write_stream(counted, str(tmp_path / "checkpoint")).outputMode("append")
        query = writer.format("parquet").trigger(**trigger).start(str(tmp_path / "out"))
        with pytest.raises(ConfigError, match=r"stateful operators \(stateStoreSave: .*foreachBatch"):
            kmq.await_termination(query, 60)
    found = stats.queue_stats(queue.connection, queue.settings)
    assert (found.depth, found.in_flight) == (0, 20)
