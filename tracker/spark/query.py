"""The query of the tracker on Spark: a turn of each partition in every batch."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessor, StatefulProcessorHandle

from tracker.spark.report import Report
from tracker.spark.turn import Task, executor_for

_TYPES = {int: "BIGINT", bool: "BOOLEAN", str: "STRING", float: "DOUBLE", list[float]: "ARRAY<DOUBLE>"}
_HINTS = typing.get_type_hints(Report)
_SCHEMA = ", ".join(f"{field.name} {_TYPES[_HINTS[field.name]]}" for field in fields(Report))
COUNTERS = (
    "undecodable_markers",
    "unsupported_markers",
    "undecodable_counts",
    "redelivered",
    "dead_lettered",
    "late_acks",
    "lost_to_retention",
    "markers_lost",
    "failures",
    "ticks",
    "takeovers",
    "markers",
)
"""Of a report, and of the same name in the metrics."""

SESSION = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Nothing is ever read of an older batch than the last.
    "spark.sql.streaming.minBatchesToRetain": "10",
}
"""Settings of the session that runs it."""


def reports(session: SparkSession, task: Task, partitions: int, tasks: int) -> DataFrame:
    """A stream with a row for each turn, as Report has it; in every batch one for each partition.

    Every task does the turns of its share of the partitions, at the same time as the others.
    """
    keys = _keys(session, tasks)
    rows = (
        session.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", tasks)
        .option("numPartitions", 1)
        .load()
    )
    # Numbers that follow each other: each share once in every batch.
    key = sf.get(sf.array(*map(sf.lit, keys)), sf.col("value") % tasks)
    shares = {key: range(number, partitions, tasks) for number, key in enumerate(keys)}
    found = (
        rows.select(key.alias("share"))
        .groupBy("share")
        .transformWithState(_Turns(task, shares), _SCHEMA, "Update", "None")
    )
    return found.observe("kmq", *(sf.sum(name).alias(name) for name in (*COUNTERS, "in_flight")))


def _keys(session: SparkSession, tasks: int) -> list[int]:
    """A number for each task that Spark's hash partitioning gives to it and to no other."""
    # As the literals that these become: a bigint of the same value has another hash.
    number = sf.col("id").cast("int")
    task = sf.pmod(sf.hash(number), sf.lit(tasks))
    numbers = session.range(64 * tasks)
    found = numbers.groupBy(task.alias("task")).agg(sf.min(number).alias("key")).orderBy("task").collect()
    return [row["key"] for row in found]


class _Turns(StatefulProcessor):
    """The turns of a share of the partitions; the state store of its key is their Store."""

    def __init__(self, task: Task, shares: Mapping[int, Sequence[int]]) -> None:
        self._task = task
        self._shares = shares

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state: once for each task and batch."""
        self._heads = handle.getMapState("heads", "partition INT", "text STRING")
        self._buckets = handle.getMapState("buckets", "partition INT, number BIGINT", "text STRING")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        """One row in, and out the report of each partition."""
        for _ in rows:
            pass
        stores = {
            partition: _StateStore(partition, self._heads, self._buckets)
            for partition in self._shares[int(key[0])]
        }
        for report in executor_for(self._task).turns(stores):
            yield Row(**report.values())


class _StateStore:
    """Spark's state of one partition, as turns see it."""

    def __init__(self, partition: int, heads: MapState, buckets: MapState) -> None:
        self._partition = partition
        self._heads = heads
        self._buckets = buckets

    def head(self) -> str | None:
        found = self._heads.getValue((self._partition,))
        return found[0] if found else None

    def set_head(self, text: str) -> None:
        self._heads.updateValue((self._partition,), (text,))

    def load(self, bucket: int) -> str | None:
        found = self._buckets.getValue((self._partition, bucket))
        return found[0] if found else None

    def save(self, bucket: int, text: str | None) -> None:
        if text is None:
            self._buckets.removeKey((self._partition, bucket))
        else:
            self._buckets.updateValue((self._partition, bucket), (text,))

    def clear(self) -> None:
        self._heads.removeKey((self._partition,))
        for partition, bucket in list(self._buckets.keys()):
            if partition == self._partition:
                self._buckets.removeKey((partition, bucket))
