"""Processing with acknowledgement on Spark: what KmqSpark offers of it.

Executors take messages before they process them (`kmqpy.spark.task`); the driver ends them when Spark
says that the sink has the micro-batch (`kmqpy.spark.acknowledge`). A message without end marker is
redelivered by the tracker, whatever happened.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, get_args

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegralType, StringType, StructField, StructType

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import MIN_LEASE_MS, Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin import stats
from kmqpy.kafka.client.settings_mirror import check_topics
from kmqpy.kafka.message_headers import DELIVER_AT, ORIGINAL_OFFSET, ORIGINAL_PARTITION
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.spark.acknowledge import Acknowledger
from kmqpy.spark.checkpoint import Remembered, bind_checkpoint, one_line
from kmqpy.spark.decode import check_columns, header_bytes, header_text, number, redelivery_count
from kmqpy.spark.failures import FailurePolicy
from kmqpy.spark.frame_function import Frames
from kmqpy.spark.records import check_options, own_partition, stream_topic
from kmqpy.spark.report import REPORTS
from kmqpy.spark.row_function import Rows
from kmqpy.spark.session import enlarge_arrow_batches
from kmqpy.spark.source import MAX_ATTEMPTS
from kmqpy.spark.take import MESSAGE, TakeTask, only_ok, with_taken, without_own_columns
from kmqpy.spark.taker import MarkersFormat, for_executors
from kmqpy.spark.task import REPORT, ProcessTask

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Start = Literal["committed", "earliest", "latest"]

NEEDED = ("topic", "partition", "offset", "attempts", "deliver_at_ms")
"""Columns of read_stream() that process() can't do without."""

MAX_OFFSETS_PER_TRIGGER = 500_000
DEFAULT_LEASE_S = 300.0
_BACKOFF = Backoff(jitter=0)  # so that what fails together is one range marker
_IDENTITY = "kmq"
"""The file in a checkpoint that says of which queue it is."""


def parsed(spark: SparkSession, schema: StructType | str) -> StructType:
    """A schema that Python workers can return; raises ConfigError."""
    try:
        found = spark.createDataFrame([], schema).schema if isinstance(schema, str) else schema
        if not isinstance(found, StructType):
            raise ConfigError(f"schema: {type(schema).__name__} is neither text nor a StructType")
        to_arrow_schema(found, timezone="UTC")
    except (PySparkException, Py4JError) as error:
        raise ConfigError(
            f"schema: {schema!r} is none; write it like 'id long, total double' ({one_line(error)})"
        ) from None
    return found


class Processing:
    """The part of KmqSpark that takes messages into Spark and acknowledges each one by itself.

        with KmqSpark(spark, "host:9092", queue="orders", markers="range") as kmq:
            out = kmq.process(kmq.read_stream(), enrich, "id long, total double")
            query = kmq.write_stream(out, checkpoint="/data/ck").format("parquet").start("/data/orders")
            kmq.await_termination(query)

    At least once: a message whose micro-batch was written, but whose end marker was not, is redelivered.
    The methods raise QueueNotFound, TopicError, Unavailable.
    """

    def __init__(
        self,
        spark: SparkSession,
        connection: KafkaConnection,
        queue: QueueSettings,
        options: Mapping[str, str],
        markers: MarkersFormat,
    ) -> None:
        if markers not in ("jvm", "range"):
            raise ConfigError(f"markers: {markers!r} is neither 'jvm' nor 'range'")
        self.spark = spark
        self.connection = connection
        self.queue = queue
        self.options = options
        self._markers = markers
        self._acknowledger: Acknowledger | None = None

    def read_stream(
        self,
        *,
        start: Start = "committed",
        max_offsets_per_trigger: int | None = MAX_OFFSETS_PER_TRIGGER,
        options: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """The queue as a stream, read by Spark's Kafka connector (committed records only).

        Columns: key, value (binary), headers, topic, partition, offset, timestamp, attempts (deliveries so
        far, this one included), original_partition and original_offset (of the first copy: together
        they name a message across redeliveries), deliver_at_ms (not to be delivered before).

        start                    without a checkpoint: behind what the group has committed ("committed"),
                                 or at an end of the log
        max_offsets_per_trigger  messages of a micro-batch, which must be done within its leases
        options                  of Spark's `kafka` source, over those made here
        """
        if start not in get_args(Start):
            raise ConfigError(f"start: {start!r} is none of {', '.join(get_args(Start))}")
        check_options(options)
        given = {**self.options, **(options or {})}
        if max_offsets_per_trigger is not None:
            whole = isinstance(max_offsets_per_trigger, int) and not isinstance(max_offsets_per_trigger, bool)
            if not whole or not 0 < max_offsets_per_trigger < 2**63:
                raise ConfigError(
                    f"max_offsets_per_trigger: {max_offsets_per_trigger!r} is no whole number above 0"
                )
            given["maxOffsetsPerTrigger"] = str(max_offsets_per_trigger)
        read = stream_topic(self.spark, given, self.queue.name, self._starting_offsets(start))
        return self._described(read)

    def process(
        self,
        df: DataFrame,
        function: Frames,
        schema: StructType | str,
        *,
        lease: Duration = DEFAULT_LEASE_S,
        backoff: Backoff = _BACKOFF,
    ) -> DataFrame:
        """Have `function` process the messages of `df`, an Arrow batch at a time as a pandas frame.

        The frame has the columns of `df` without `topic`. The fewer, the faster: drop those of
        read_stream() that neither you nor process() needs, which is topic, partition, offset, attempts
        and deliver_at_ms.
        It returns a frame with the columns of `schema`, and the index (`kmq_row`) of the frame it was
        given: that says which messages its rows are of. A message has

        - succeeded, when there is at least one row for it;
        - failed, when there is none, or when one of its rows has a text in the column `kmq_error`: it is
          given back with that reason, for `kmq_delay` seconds where that column has a number, else for
          `backoff`. True in a column `kmq_reject` dead-letters it now.

        When `function` raises, it is called again with the halves, down to single messages, so that
        those fail alone that make it raise. To drop messages that are done, filter the result.

        lease    seconds until a message that was taken and not acknowledged is redelivered. It must
                 outlast the micro-batch with its sink
        backoff  how long a failed message waits

        Raises ConfigError when `df` is no stream, or lacks columns of read_stream().
        """
        return self._process(df, function, schema, lease, backoff, by_row=False)

    def process_rows(
        self,
        df: DataFrame,
        function: Rows,
        schema: StructType | str,
        *,
        lease: Duration = DEFAULT_LEASE_S,
        backoff: Backoff = _BACKOFF,
    ) -> DataFrame:
        """Like process(), a message at a time: `function` is called with a Row.

        It returns a row (a dict or Row with every field of `schema`, or a tuple), several (a list), or None:
        done, nothing to hand on. What it raises has failed: `Reject` dead-letters it now, `Retry` says
        when it is redelivered, anything else gives it back with the error as reason.
        """
        return self._process(df, function, schema, lease, backoff, by_row=True)

    def take(self, df: DataFrame, *, lease: Duration = DEFAULT_LEASE_S) -> DataFrame:
        """Take the messages of `df`, which then may go through any expressions of Spark.

        The rows of `df` whose messages are handed out, with a column `kmq_message` more, which says of
        which message a row is: keep it for write_stream(ok=…). Their payloads stay in the JVM.

        A message whose rows were filtered away is done, too; one that became several rows is done when
        all of them are ok. An expression that raises ends the query: use try_cast() and the like.

        lease  as for process()

        Raises ConfigError when `df` is no stream, or lacks columns of read_stream().
        """
        lease_ms = self._lease_ms(df, lease, "take")
        task = TakeTask(
            queue=self.queue,
            connection=for_executors(self.connection),
            markers=self._markers,
            lease_ms=lease_ms,
        )
        enlarge_arrow_batches(df.sparkSession)
        return with_taken(df, task, self._watched_metric())

    def write_stream(
        self,
        out: DataFrame,
        checkpoint: str,
        *,
        ok: Column | str | None = None,
        reason: Column | str | None = None,
        backoff: Backoff = _BACKOFF,
    ) -> DataStreamWriter:
        """`out.writeStream` with that checkpoint, which must be this queue's, or a new one.

        ok       of what take() has taken: rows for which it is not true are not written, and their messages
                 are given back, when the sink has the others
        reason   why, for the dead letter
        backoff  how long they wait, and one with which alone a query has failed

        Of what a query that failed has left, it gives half back, so that the next run finds the message
        which was the cause: see docs/spark.md.

        `ok` and `reason` are expressions, or names of columns. Columns named kmq_… are not written.

        Raises ConfigError for a checkpoint of another queue, or of a topic that was deleted since: its
        offsets would mean other messages.
        """
        _check_backoff(backoff)
        if ok is None and reason is not None:
            raise ConfigError("write_stream: reason without ok; ok says which rows have failed")
        topic = Topics(self.connection).check(self.queue).queue
        bind_checkpoint(self.spark, checkpoint, _IDENTITY, self.queue.name, {"topic_id": topic.topic_id})
        if self._acknowledger is not None:
            self._acknowledger.split_failed(backoff, Remembered(self.spark, checkpoint))
        if ok is not None:
            policy = FailurePolicy(queue=self.queue, backoff=backoff)
            out = only_ok(out, ok, reason, self._watched_metric(policy))
        elif MESSAGE in out.columns:
            out = without_own_columns(out)
        return out.writeStream.option("checkpointLocation", checkpoint)

    def await_termination(self, query: StreamingQuery, timeout: int | None = None) -> bool:
        """Wait until `query` has ended and everything it wrote is acknowledged.

        False when it still runs after `timeout` seconds (a whole number, as Spark has it).

        Raises what the query failed with.
        """
        try:
            ended = query.awaitTermination(timeout) if timeout is not None else query.awaitTermination()
        finally:
            if self._acknowledger is not None and not query.isActive:
                self._acknowledger.wait_for_end(str(query.runId))
        return ended is not False

    def flush(self) -> None:
        """Wait until the end markers of what Spark has told of are confirmed; raises Unavailable."""
        if self._acknowledger is not None:
            self._acknowledger.flush()

    def close(self) -> None:
        """Acknowledge what Spark has told of, and stop listening. Queries that still run end nothing more.

        Raises ConfigError when a query was refused, and await_termination() has not said so.
        """
        acknowledger, self._acknowledger = self._acknowledger, None
        if acknowledger is not None:
            acknowledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:
                raise

    # --------------------------------------------------------------------------------------------------

    def _process(
        self,
        df: DataFrame,
        function: Frames | Rows,
        schema: StructType | str,
        lease: Duration,
        backoff: Backoff,
        *,
        by_row: bool,
    ) -> DataFrame:
        if not callable(function):
            raise ConfigError(f"function: {type(function).__name__} can't be called")
        _check_backoff(backoff)
        lease_ms = self._lease_ms(df, lease, "process")
        wanted = self._schema(schema)
        task = ProcessTask(
            queue=self.queue,
            connection=for_executors(self.connection),
            markers=self._markers,
            lease_ms=lease_ms,
            backoff=backoff,
            schema=wanted,
            function=function,
            by_row=by_row,
        )
        enlarge_arrow_batches(df.sparkSession)
        name = self._watched_metric()
        both = StructType([*wanted.fields, StructField(REPORT, StringType())])
        return (
            df.withColumn("partition", own_partition(self.queue.name))
            .drop("topic")
            .mapInArrow(task, both)
            .observe(name, F.collect_list(REPORT).alias(REPORTS))
            .where(F.col(REPORT).isNull())
            .drop(REPORT)
        )

    def _lease_ms(self, df: DataFrame, lease: Duration, what: str) -> int:
        """The lease in ms; raises ConfigError when `df` is no stream of messages, or the lease is none."""
        try:
            check_columns(df, NEEDED, what)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Give it what read_stream() returns, which reads committed records only; settings "
                "of your own for Spark's Kafka source: kmq.read_stream(options=…)"
            ) from None
        if not df.isStreaming:
            raise ConfigError(
                f"{what}: not a stream; for what is there now, and no more, use read_stream() and "
                ".trigger(availableNow=True)"
            )
        for name in NEEDED[1:]:
            if not isinstance(kind := df.schema[name].dataType, IntegralType):
                raise ConfigError(f"{what}: column {name!r} is {kind.simpleString()}, not a whole number")
        lease_ms = duration_ms(lease, "lease")
        if not MIN_LEASE_MS <= lease_ms <= self.queue.max_hold_ms:
            raise ConfigError(
                f"lease: {lease_ms} ms is not from {MIN_LEASE_MS} to max_hold, {self.queue.max_hold_ms} ms"
            )
        return lease_ms

    def _watched_metric(self, policy: FailurePolicy | None = None) -> str:
        """The name of a metric, for df.observe(), that the acknowledger listens to."""
        if self._acknowledger is None:
            topics = Topics(self.connection).check(self.queue)
            check_topics(self.queue, topics, self.connection)
            self._acknowledger = Acknowledger(
                self.spark, self.queue, self.connection, self._markers, topics.ids
            )
        name = f"kmq-{self.queue.name}-{uuid.uuid4().hex[:8]}"
        self._acknowledger.watch(name, policy)
        return name

    def _described(self, records: DataFrame) -> DataFrame:
        """Records of the queue topic with the columns of read_stream()."""
        count = redelivery_count(header_bytes(self.queue.redelivery_count_header))
        partition, offset, due = (
            number(header_text(name)) for name in (ORIGINAL_PARTITION, ORIGINAL_OFFSET, DELIVER_AT)
        )
        return records.select(
            "key",
            "value",
            "headers",
            "topic",
            "partition",
            "offset",
            "timestamp",
            F.least(count + 1, F.lit(MAX_ATTEMPTS)).cast("int").alias("attempts"),
            F.coalesce(partition.try_cast("int"), "partition").alias("original_partition"),
            F.coalesce(offset, "offset").alias("original_offset"),
            due.alias("deliver_at_ms"),
        )

    def _schema(self, schema: StructType | str) -> StructType:
        schema = parsed(self.spark, schema)
        names = [name.lower() for name in schema.fieldNames()]  # as Spark compares them
        for name in names:
            if name.startswith("kmq_"):
                raise ConfigError(f"schema: a column must not be named {name!r}; kmq_… are kmqpy's own")
            if names.count(name) > 1:
                raise ConfigError(f"schema: there is more than one column {name!r}")
        # A report is a row without values; and nobody looks for nulls within the values of others.
        return schema.toNullable()

    def _starting_offsets(self, start: Start) -> str:
        if start != "committed":
            return start
        topics = Topics(self.connection).check(self.queue)
        partitions = topics.partitions
        commits = stats.committed_offsets(self.connection, self.queue, range(partitions), topics.ids)
        logs = partition_reader.bounds(self.connection, self.queue.name, range(partitions))
        # A purge may have deleted what is behind a commit.
        offsets = {str(p): max(commits.get(p, (low, None))[0], low) for p, (low, _) in logs.items()}
        return json.dumps({self.queue.name: offsets})


def _check_backoff(backoff: Backoff) -> None:
    if not isinstance(backoff, Backoff):
        raise ConfigError(f"backoff: {backoff!r} is no Backoff")
