"""Runs a pipeline: messages of a queue go through a function into files, a table or a topic.

    run_pipeline(spark, "orders", connection, schema="id long, total double", sink=Sink(path="/data/orders"))

The pipeline writes the rows that the function returns for a message, then acknowledges the message. A tracker
redelivers messages that fail, and dead-letters those that keep failing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError, KmqError, Unfinished
from kmqpy.kafka.admin import stats
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.settings import RETRY_SUFFIX, KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.spark import json_rows
from kmqpy.spark.acknowledge import OnSkipped
from kmqpy.spark.checkpoint import error_line, identity_of
from kmqpy.spark.functions import FrameFunction
from kmqpy.spark.lanes import Lanes
from kmqpy.spark.portable import portable
from kmqpy.spark.process import DEFAULT_LEASE_S, MAX_OFFSETS_PER_TRIGGER, NEEDED_COLUMNS, parse_schema
from kmqpy.spark.queue import KmqSpark
from kmqpy.spark.sinks import checkpoint_of, target_of
from kmqpy.spark.sinks.files import text_options
from kmqpy.spark.sinks.limits import Limit
from kmqpy.spark.sinks.origin import MESSAGE_COLUMNS, WithOrigin, with_copy, with_origin
from kmqpy.spark.sinks.target import Sink

__all__ = ["Sink", "check_aggregate", "dead_letters", "run_pipeline", "write_aggregate", "written"]

VIEW = "rows"
"""The name, in an aggregate, of a view of the rows in the sink."""

_STALL_TIMEOUT_S = 120.0
"""With `drain`, Unfinished is raised when the counts of the queue have not changed for this long."""
_POLL_S = 0.5
_BATCH_POLL_S = 0.05
_COUNT_INTERVAL_S = 5.0
"""Seconds from one count of the queue's messages to the next: a count reads markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run of the pipeline: messages processed, and messages left.

    messages      that this run has processed, failed ones included
    per_s         messages per second in the last micro-batch
    behind        messages waiting or in flight; None if they could not be counted
    dead_letters  of the queue, neither redriven nor purged; None if they could not be counted
    """

    messages: int = 0
    per_s: float = 0.0
    behind: int | None = None
    dead_letters: int | None = None


class ProgressWatch:
    """Follows the queries of one run, one after the other, and calls `tell` with the Progress of the run."""

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        tell: Callable[[Progress], None] | None,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._tell = tell
        self._clock = clock
        self._messages = 0
        self._per_s = 0.0
        self._seen_batch_id = -1
        self._counts: tuple[int | None, int | None] = None, None
        self._count_at = 0.0

    def look(self, query: StreamingQuery) -> None:
        """Add the micro-batches that `query` has finished since the last look, and call `tell`."""
        if self._tell is None:
            return
        for batch in query.recentProgress:
            if batch["batchId"] > self._seen_batch_id:
                self._seen_batch_id = batch["batchId"]
                self._messages += batch["numInputRows"]
                self._per_s = batch["processedRowsPerSecond"]
        if self._clock.monotonic() >= self._count_at:
            self._counts = None, None
            with suppress(KmqError):  # the run goes on: its query raises what is wrong
                found = stats.queue_stats(self._connection, self._queue)
                self._counts = found.depth + found.in_flight, found.dead_letters
            self._count_at = self._clock.monotonic() + _COUNT_INTERVAL_S
        behind, dead_letters = self._counts
        self._tell(
            Progress(messages=self._messages, per_s=self._per_s, behind=behind, dead_letters=dead_letters)
        )


def finish_batch(query: StreamingQuery, clock: Clock) -> None:
    """Wait until the micro-batch of `query` that runs now has ended; returns at once if none runs.

    If the query were stopped in the middle of it, its messages would stay in flight until their leases end.
    """

    def last_batch_id() -> int | None:
        found = query.lastProgress
        return None if found is None else int(found["batchId"])

    before = last_batch_id()
    while query.isActive and query.status["isTriggerActive"] and last_batch_id() == before:
        clock.sleep(_BATCH_POLL_S)


def run_pipeline(
    spark: SparkSession,
    queue: str | QueueSettings,
    connection: KafkaConnection,
    *,
    schema: str,
    sink: Sink,
    function: FrameFunction | None = None,
    drain: bool = False,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_skipped: OnSkipped | None = None,
    trigger: Duration = 1.0,
    max_batch: int = MAX_OFFSETS_PER_TRIGGER,
    lease: Duration = DEFAULT_LEASE_S,
    clock: Clock = SYSTEM_CLOCK,
) -> bool:
    """Process the messages that the queue holds now, and acknowledge those whose rows were written.

    Args:
        spark: A session made ready by configure_spark_with_kmq.
        queue: The queue's name, or its settings.
        connection: Kafka.
        schema: Of the rows, as `id long, total double`; kmqpy adds the columns original_partition,
            original_offset and original_row.
        sink: Where the rows go.
        function: See KmqSpark.process; without one, bodies are JSON objects with the columns as fields.
        drain: Go on until the queue is empty, with messages that arrive or are redelivered meanwhile. Needs a
            tracker.
        follow: Go on until the pipeline is stopped.
        stop: Called every second; when it returns True, the pipeline ends after the present micro-batch.
        progress: Called every second with the Progress.
        on_skipped: See KmqSpark: the pipeline goes on behind messages that were deleted before it read them.
        trigger: With `follow`: the time from one micro-batch to the next, by default in seconds; a longer one
            makes fewer, larger files.
        max_batch: Most messages of a micro-batch, which must be written within the lease.
        lease: See KmqSpark.process.
        clock: For tests.

    Returns:
        False if the pipeline was stopped.

    Raises:
        ConfigError: The schema is invalid, or the sink can't hold its rows.
        Unfinished: With `drain`, the counts of the queue have not changed for two minutes.
    """
    fields, trigger_ms = parse_schema(spark, schema), duration_ms(trigger, "trigger")
    wanted, target, checkpoint = with_origin(fields), target_of(sink, connection), checkpoint_of(sink)
    if function is None:
        json_rows.check_readable(spark, fields)
    stopped = stop or (lambda: False)
    with portable(spark), KmqSpark(spark, connection, queue, on_skipped=on_skipped) as kmq:
        lanes = Lanes(kmq.queue).bases()
        target.check(spark, wanted)
        for _, lane in lanes:
            ending = lane.name.removeprefix(kmq.queue.name)
            if ending != RETRY_SUFFIX:  # no message is sent first to the retry lane
                target.bind(lane.name, Topics(connection).check(lane).ids.queue, ending)
        run: str | None = None
        watch = ProgressWatch(connection, kmq.queue, progress, clock)
        while True:
            out = _rows(kmq, fields, target.limits(fields), function, lease, max_batch)
            writer = kmq.write_stream(out, checkpoint)
            if run is None:  # once, and only after write_stream() has accepted the checkpoint
                run = identity_of(spark, checkpoint)
                target.take_over(run)
            writer = writer.foreachBatch(partial(target.write, run=run))
            pace = {"processingTime": f"{trigger_ms} milliseconds"} if follow else {"availableNow": True}
            query = writer.trigger(**pace).start()
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
            if not drain or not _wait_for_more(connection, kmq.queue, stopped, clock):
                return not stopped()


def written(spark: SparkSession, sink: Sink, schema: str, connection: KafkaConnection) -> DataFrame:
    """The rows of this schema that pipelines have written to a sink.

    Args:
        spark: The session.
        sink: Where pipelines wrote.
        schema: The columns of the rows.
        connection: Where Kafka is, for a sink there.

    Raises:
        ConfigError: The schema or the sink is invalid.
        NotSupported: What is in a sink of this format can't be read.
    """
    return target_of(sink, connection).read(spark, with_origin(parse_schema(spark, schema)))


def dead_letters(connection: KafkaConnection, queue: QueueSettings) -> int:
    """Count the dead letters of the queue, and the messages that a tracker is about to dead-letter."""
    there = stats.queue_stats(connection, queue).dead_letters
    in_flight = [one for lane in queue.lanes() for one in stats.open_entries(connection, lane).values()]
    return there + sum(entry.state is EntryState.DEAD for one in in_flight for entry in one.in_order())


def check_aggregate(spark: SparkSession, schema: str, sql: str) -> None:
    """Raise ConfigError unless Spark understands `sql` over rows of this schema; called before a pipeline."""
    try:
        spark.createDataFrame([], with_origin(parse_schema(spark, schema))).createOrReplaceTempView(VIEW)
        assert spark.sql(sql).columns
    except PySparkException as error:
        raise ConfigError(f"aggregate: {sql!r} can't be run: {error_line(error)}") from None


def write_aggregate(
    spark: SparkSession, sink: Sink, schema: str, sql: str, connection: KafkaConnection
) -> str:
    """Write the result of `sql` over the view `rows` to `PATH-aggregate`, where PATH is the sink's path.

    The format is that of the sink. Returns the path of the result.
    """
    path = f"{sink.path.rstrip('/')}-aggregate"
    with portable(spark):
        written(spark, sink, schema, connection).createOrReplaceTempView(VIEW)
        result = spark.sql(sql).write.mode("overwrite").format(sink.format)
        result.options(**{**text_options(sink), **sink.options}).save(path)
    return path


def _rows(
    kmq: KmqSpark,
    schema: StructType,
    limits: tuple[Limit, ...],
    function: FrameFunction | None,
    lease: Duration,
    max_batch: int,
) -> DataFrame:
    """The queue's messages as rows of the schema, with the columns that sinks need."""
    df = kmq.read_stream(max_offsets_per_trigger=max_batch)
    if function is not None:
        return kmq.process(df, WithOrigin(function, limits), with_copy(schema), lease=lease)
    bodies = json_rows.with_refusals(df.select("value", *NEEDED_COLUMNS, *MESSAGE_COLUMNS), schema, limits)
    body_schema = with_copy(parse_schema(kmq.spark, json_rows.BODY_SCHEMA))
    out = kmq.process(bodies, WithOrigin(json_rows.PassBodies()), body_schema, lease=lease)
    return json_rows.with_fields(out, schema)


def _wait_for_more(
    connection: KafkaConnection, queue: QueueSettings, stopped: Callable[[], bool], clock: Clock
) -> bool:
    """Wait until messages can be processed; returns False if the queue is empty, or at a stop."""
    before: tuple[int, int] | None = None
    deadline = clock.monotonic()
    while not stopped():
        found = stats.queue_stats(connection, queue)
        ready = found.depth - found.delayed
        if ready or not (found.depth or found.in_flight):
            return bool(ready)
        left = found.depth, found.in_flight
        if left != before:
            before, deadline = left, clock.monotonic() + _STALL_TIMEOUT_S
        if clock.monotonic() > deadline:
            raise Unfinished(
                f"queue {queue.name!r}: {found.in_flight} messages in flight and {found.delayed} delayed, "
                f"and nothing moved for {_STALL_TIMEOUT_S:.0f} s; is a tracker running (kmq tracker)? "
                "What was written is acknowledged: run this again for the rest"
            )
        clock.sleep(_POLL_S)
    return False
