"""The query of the tracker on Spark: a turn of each partition in every batch."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tracker.report import Report
from tracker.turn import Task, executor_for

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


def reports(session: SparkSession, task: Task, partitions: int) -> DataFrame:
    """A stream with a row for each turn, as Report has it; in every batch one for each partition."""
    rows = (
        session.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", partitions)
        .option("numPartitions", 1)
        .load()
    )
    # Numbers that follow each other: each partition once in every batch.
    numbers = rows.select((sf.col("value") % partitions).alias("partition"))
    found = numbers.groupBy("partition").transformWithState(_Turns(task), _SCHEMA, "Update", "None")
    return found.observe("kmq", *(sf.sum(name).alias(name) for name in (*COUNTERS, "in_flight")))


class _Turns(StatefulProcessor):
    """A turn of the partition that is the key; the state store of that key is its Store."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state: once for each task and batch."""
        self._store = _StateStore(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        """One row in, one row out: the report."""
        for _ in rows:
            pass
        report = executor_for(self._task).turn(int(key[0]), self._store)
        yield Row(**report.values())


class _StateStore:
    """Spark's state of one key, as turns see it."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._head = handle.getValueState("head", "text STRING")
        self._buckets = handle.getMapState("buckets", "number BIGINT", "text STRING")

    def head(self) -> str | None:
        found = self._head.get()
        return found[0] if found else None

    def set_head(self, text: str) -> None:
        self._head.update((text,))

    def load(self, bucket: int) -> str | None:
        found = self._buckets.getValue((bucket,))
        return found[0] if found else None

    def save(self, bucket: int, text: str | None) -> None:
        if text is None:
            self._buckets.removeKey((bucket,))
        else:
            self._buckets.updateValue((bucket,), (text,))

    def clear(self) -> None:
        self._head.clear()
        self._buckets.clear()
