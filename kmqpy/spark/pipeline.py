"""The data pipeline: a queue through a function into files (or any sink of Spark), message by message.

    run_pipeline(spark, "orders", connection, schema="id long, total double", out="/data/orders", drain=True)

Rows that the function returns for a message are written, then the message is acknowledged. A tracker
redelivers messages that fail and dead-letters those that keep failing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration
from kmqpy.errors import ConfigError, Unfinished
from kmqpy.kafka.admin import stats
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.checkpoint import one_line
from kmqpy.spark.process import DEFAULT_LEASE_S, parsed
from kmqpy.spark.progress import Progress, ProgressWatch, finish_batch
from kmqpy.spark.queue import KmqSpark
from kmqpy.spark.taking import MarkersFormat
from kmqpy.spark.task import ERROR, REJECT, Frames

ORIGIN = ("original_partition", "original_offset", "original_row")
"""Columns that name a row of output for good: whatever is written twice has them twice."""

VIEW = "rows"
"""The name of a count of rows in an aggregate."""

CHECKPOINT = "_kmq_checkpoint"
"""The checkpoint's folder inside the output folder; readers of files skip names that begin with `_`."""

_PATIENCE_S = 120.0
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Where the rows go: a path, a format of Spark, and its options; `trigger_s`: how often, if not once."""

    path: str
    format: str = "parquet"
    options: Mapping[str, str] | None = None
    trigger_s: float = 1.0


def run_pipeline(
    spark: SparkSession,
    queue: str | QueueSettings,
    connection: KafkaConnection,
    *,
    schema: str,
    sink: Sink,
    function: Frames | None = None,
    drain: bool = False,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    lease: Duration = DEFAULT_LEASE_S,
    markers: MarkersFormat = "range",
    clock: Clock = SYSTEM_CLOCK,
) -> bool:
    """Process what the queue holds now, and acknowledge what was written; returns False if it was stopped.

    schema    of the rows, as `id long, total double`; the columns ORIGIN are added
    function  see KmqSpark.process; without one, bodies are JSON objects, and the columns their fields
    drain     go on until the queue is empty: also what comes meanwhile, or again. Needs a tracker
    follow    go on until it is stopped
    stop      asked every second; True ends it when the micro-batch that it is in has ended
    progress  told every second how far it is

    Raises ConfigError for a schema that is none, Unfinished when with `drain` nothing has moved for two
    minutes, and what KmqSpark.process raises.
    """
    fields = parsed(spark, schema)
    wanted = _with_origin(fields)
    work = WithOrigin(function or JsonFields(fields.names))
    checkpoint = f"{sink.path.rstrip('/')}/{CHECKPOINT}"
    stopped = stop or (lambda: False)
    with KmqSpark(spark, connection, queue, markers=markers) as kmq:
        watch = ProgressWatch(connection, kmq.queue, progress, clock)
        while True:
            out = kmq.process(kmq.read_stream(), work, wanted, lease=lease)
            writer = kmq.write_stream(out, checkpoint).format(sink.format).options(**(sink.options or {}))
            if follow:
                writer = writer.trigger(processingTime=f"{sink.trigger_s} seconds")
            else:
                writer = writer.trigger(availableNow=True)
            query = writer.start(sink.path)
            try:
                while not kmq.await_termination(query, timeout=1):
                    watch.look(query)
                    if stopped():
                        finish_batch(query, clock)
                        break
                watch.look(query)
            finally:
                query.stop()
            if stopped():
                return False
            if not drain or not _more_comes(connection, kmq.queue, stopped, clock):
                return not stopped()


def written(spark: SparkSession, sink: Sink, schema: str) -> DataFrame:
    """The rows of this schema that pipelines have written to a sink of files, each once."""
    read = spark.read.format(sink.format).options(**(sink.options or {}))
    return read.schema(_with_origin(parsed(spark, schema))).load(sink.path).dropDuplicates(list(ORIGIN))


def check_aggregate(spark: SparkSession, schema: str, sql: str) -> None:
    """Raise ConfigError unless `sql` says something of rows of this schema; better now than at the end."""
    try:
        spark.createDataFrame([], _with_origin(parsed(spark, schema))).createOrReplaceTempView(VIEW)
        assert spark.sql(sql).columns
    except PySparkException as error:
        raise ConfigError(f"aggregate: {sql!r} can't be run: {one_line(error)}") from None


def write_aggregate(spark: SparkSession, sink: Sink, schema: str, sql: str) -> str:
    """Write what `sql` makes of the view `rows`, each row once; returns the path."""
    written(spark, sink, schema).createOrReplaceTempView(VIEW)
    path = f"{sink.path.rstrip('/')}-aggregate"
    result = spark.sql(sql).write.mode("overwrite").format(sink.format)
    result.options(**(sink.options or {})).save(path)
    return path


@dataclass(frozen=True)
class JsonFields:
    """Reads bodies as JSON objects, and these fields of them; a body that is none is rejected."""

    names: Sequence[str]

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        """For KmqSpark.process."""
        rows: list[dict[str, object]] = []
        errors: list[str | None] = []
        for body in frame["value"]:
            error = None
            try:
                row = json.loads(body or b"")
            except (ValueError, RecursionError) as problem:
                row, error = {}, f"not JSON: {problem}"
            if not isinstance(row, dict):
                row, error = {}, f"not a JSON object but {type(row).__name__}"
            rows.append({name: row.get(name) for name in self.names})
            errors.append(error)
        found = pd.DataFrame(rows, index=frame.index, columns=list(self.names), dtype=object)
        found[ERROR] = errors
        found[REJECT] = found[ERROR].notna()
        return found


@dataclass(frozen=True)
class WithOrigin:
    """Adds the columns ORIGIN to what `function` returns."""

    function: Frames

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        """For KmqSpark.process."""
        partition, offset, row = ORIGIN
        origin = frame[[partition, offset]].copy()
        found = self.function(frame)
        if not isinstance(found, pd.DataFrame) or (len(found) and found.index.name != frame.index.name):
            return found  # which process() refuses with a better word
        if not len(found):  # all have failed
            return found.reindex(columns=[*found.columns, *ORIGIN])
        origin = origin.reindex(found.index)
        return found.assign(
            **{
                partition: origin[partition],
                offset: origin[offset],
                row: found.groupby(level=0).cumcount(),
            }
        )


def _with_origin(fields: StructType) -> StructType:
    kinds = (IntegerType(), LongType(), LongType())
    return StructType([*fields.fields, *map(StructField, ORIGIN, kinds)])


def _more_comes(
    connection: KafkaConnection, queue: QueueSettings, stopped: Callable[[], bool], clock: Clock
) -> bool:
    """Wait until something can be processed; False when the queue is empty, or it is stopped."""
    before: tuple[int, int] | None = None
    deadline = clock.monotonic()
    while not stopped():
        found = stats.queue_stats(connection, queue)
        ready = found.depth - found.delayed
        if ready or not (found.depth or found.in_flight):
            return bool(ready)
        left = found.depth, found.in_flight
        if left != before:
            before, deadline = left, clock.monotonic() + _PATIENCE_S
        if clock.monotonic() > deadline:
            raise Unfinished(
                f"queue {queue.name!r}: {found.in_flight} messages in flight and {found.delayed} delayed, "
                f"and nothing moved for {_PATIENCE_S:.0f} s; is a tracker running (kmq tracker)? "
                "What was written is acknowledged: run this again for the rest"
            )
        clock.sleep(_POLL_S)
    return False
