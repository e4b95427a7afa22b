"""The methods of KmqSpark that process the messages of a queue, and acknowledge each message by itself.

Executors take messages (write start markers) before they process them: `kmqpy.spark.task`. The driver
acknowledges messages (writes end markers) when Spark reports that the sink has committed their micro-batch:
`kmqpy.spark.acknowledge`. A tracker redelivers each message that has no end marker when its lease is over.
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
from kmqpy.kafka.message_headers import DELIVER_AT, ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import check_topics
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.spark.acknowledge import Acknowledger, OnSkipped, SkippedMessages
from kmqpy.spark.checkpoint import RememberedFailures, bind_checkpoint, error_line
from kmqpy.spark.decode import check_columns, header_bytes, header_text, number, redelivery_count
from kmqpy.spark.failures import DEFAULT_BACKOFF, FailurePolicy
from kmqpy.spark.functions import FrameFunction, RowFunction
from kmqpy.spark.lanes import Lanes, first_record_columns, numbered_partition
from kmqpy.spark.records import check_options, committed_starts, stream_topics
from kmqpy.spark.report import REPORTS
from kmqpy.spark.session import enlarge_arrow_batches
from kmqpy.spark.source import MAX_ATTEMPTS
from kmqpy.spark.take import MESSAGE, TakeTask, only_ok, with_taken, without_own_columns
from kmqpy.spark.taker import for_executors
from kmqpy.spark.task import REPORT, ProcessTask

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Start = Literal["committed", "earliest", "latest"]

NEEDED_COLUMNS = ("topic", "partition", "offset", "attempts", "deliver_at_ms")
"""Columns of read_stream() that process() and take() need."""

MAX_OFFSETS_PER_TRIGGER = 500_000
"""The most messages of a micro-batch by default; the next micro-batch has the others."""
DEFAULT_LEASE_S = 300.0


def parse_schema(spark: SparkSession, schema: StructType | str) -> StructType:
    """The schema as a StructType; raises ConfigError unless Python workers can return its columns."""
    try:
        found = spark.createDataFrame([], schema).schema if isinstance(schema, str) else schema
        if not isinstance(found, StructType):
            raise ConfigError(f"schema: {type(schema).__name__} is neither text nor a StructType")
        to_arrow_schema(found, timezone="UTC")
    except (PySparkException, Py4JError) as error:
        raise ConfigError(
            f"schema: invalid schema {schema!r}: write it like 'id long, total double' ({error_line(error)})"
        ) from None
    return found


class Processing:
    """The part of KmqSpark that takes messages into Spark and acknowledges each one by itself.

        with KmqSpark(spark, "host:9092", queue="orders") as kmq:
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
        on_skipped: OnSkipped | None = None,
    ) -> None:
        self.spark = spark
        self.connection = connection
        self.queue = queue
        self.options = options
        self._acknowledger: Acknowledger | None = None
        self._on_skipped = on_skipped

    def read_stream(
        self,
        *,
        start: Start = "committed",
        max_offsets_per_trigger: int | None = MAX_OFFSETS_PER_TRIGGER,
        options: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """The queue as a stream, read by Spark's Kafka connector (committed records only).

        Columns: key, value (binary), headers, topic, partition, offset, timestamp, attempts (deliveries so
        far, this one included), original_partition and original_offset (where the message was first sent:
        together they identify a message across redeliveries), deliver_at_ms (not to be delivered before).

        The stream has all lanes that the queue has when KmqSpark is made; original_partition says the lane,
        too, see kmqpy.spark.lanes.

        A query goes on behind messages that Kafka has deleted before it has read them (a purge, retention),
        and logs an error that says which. The option failOnDataLoss="true" has it fail instead.

        Args:
            start: Where a query without a checkpoint begins: at the offsets that the group has committed
                ("committed"), or at an end of the log ("earliest", "latest").
            max_offsets_per_trigger: Most messages of a micro-batch, which must be done within their leases.
            options: Of Spark's `kafka` source; they take precedence over those made here.

        Raises:
            ConfigError: An argument is invalid.
        """
        if start not in get_args(Start):
            raise ConfigError(f"start: unknown value {start!r}: use {', '.join(get_args(Start))}")
        check_options(options)
        given = {**self.options, **(options or {})}
        if (most := max_offsets_per_trigger) is not None:
            if not isinstance(most, int) or isinstance(most, bool) or not 0 < most < 2**63:
                raise ConfigError(f"max_offsets_per_trigger: must be a whole number above 0, not {most!r}")
            given["maxOffsetsPerTrigger"] = str(most)
        starting: str = start
        if start == "committed":
            topics = self._lane_topics()
            starts = {
                lane.name: committed_starts(self.connection, lane, topics[lane.name])
                for _, lane in Lanes(self.queue).bases()
            }
            starting = json.dumps(starts)
        names = [lane.name for _, lane in Lanes(self.queue).bases()]
        return self._with_columns(stream_topics(self.spark, given, names, starting))

    def process(
        self,
        df: DataFrame,
        function: FrameFunction,
        schema: StructType | str,
        *,
        lease: Duration = DEFAULT_LEASE_S,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> DataFrame:
        """Have `function` process the messages of `df`, an Arrow batch at a time as a pandas frame.

        The frame has the columns of `df` without `topic`; `partition` is numbered as original_partition is.
        Fewer columns are faster: drop the columns of
        read_stream() that you don't use, except topic, partition, offset, attempts and deliver_at_ms, which
        process() needs. `function` returns a frame with the columns of `schema`, and the index (`kmq_row`) of
        the frame that it was given. The index says which message each row belongs to. A message has

        - succeeded, when there is at least one row for it, and none of them says that it failed;
        - failed, when there is no row for it, or when one of its rows has a text in the column `kmq_error`.
          The message is given back with that text as the reason, and redelivered after `kmq_delay` seconds
          where that column has a number, else after `backoff`. True in a column `kmq_reject` dead-letters the
          message at once.

        When `function` raises, it is called again with each half of the messages, down to single messages, so
        that only those messages fail that make it raise. To drop messages that are done, filter the result.

        Args:
            df: A stream of messages: read_stream().
            function: Called on executors.
            schema: The columns of the result.
            lease: Seconds until a message that was taken and not acknowledged is redelivered. It must be
                longer than a micro-batch takes, with its sink.
            backoff: How long a failed message waits; by default as long as the queue's `retry_delays` say, if
                it has any.

        Raises:
            ConfigError: `df` is not a stream or lacks columns of read_stream(), or an argument is invalid.
        """
        return self._process(df, function, schema, lease, backoff, by_row=False)

    def process_rows(
        self,
        df: DataFrame,
        function: RowFunction,
        schema: StructType | str,
        *,
        lease: Duration = DEFAULT_LEASE_S,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> DataFrame:
        """Like process(), but call `function` with one message at a time, a Row.

        `function` returns a row (a dict or Row with every field of `schema`, or a tuple), several rows (a
        list), or None: the message is done and has no rows. If it raises, the message has failed: `Reject`
        dead-letters the message at once, `Retry` says when it is redelivered, any other error becomes the
        reason with which it is given back.

        Args:
            df: A stream of messages: read_stream().
            function: Called on executors.
            schema: The columns of the result.
            lease: As for process().
            backoff: As for process().

        Raises:
            ConfigError: As for process().
        """
        return self._process(df, function, schema, lease, backoff, by_row=True)

    def take(self, df: DataFrame, *, lease: Duration = DEFAULT_LEASE_S) -> DataFrame:
        """Take the messages of `df`; any expressions of Spark may follow.

        A message whose rows are filtered out is done, too. A message that becomes several rows is done when
        all of them are ok. An expression that raises ends the query: use try_cast() and the like.

        Args:
            df: A stream of messages: read_stream().
            lease: As for process().

        Returns:
            The rows of `df` whose messages are handed out, with one more column, `kmq_message`. It says which
            message a row belongs to: keep it for write_stream(ok=…). Payloads stay in the JVM.

        Raises:
            ConfigError: `df` is not a stream, or lacks columns of read_stream().
        """
        lease_ms = self._lease_ms(df, lease, "take")
        task = TakeTask(queue=self.queue, connection=for_executors(self.connection), lease_ms=lease_ms)
        enlarge_arrow_batches(df.sparkSession)
        return with_taken(df, task, self._watched_metric())

    def write_stream(
        self,
        out: DataFrame,
        checkpoint: str,
        *,
        ok: Column | str | None = None,
        reason: Column | str | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> DataStreamWriter:
        """Return `out.writeStream` with this checkpoint, which must be of this queue, or new.

        If a query has failed more than once, half of the messages that it left in flight are given back, so
        that further runs find the message that makes it fail: see docs/spark.md.

        Args:
            out: What process() or take() has returned, and what was made of it. Columns named kmq_… are not
                written.
            checkpoint: The folder of Spark's checkpoint.
            ok: After take(), an expression or the name of a column: rows for which it is not true are not
                written. Their messages are given back when the sink has committed the other rows.
            reason: Likewise: why the message of such a row has failed; a dead letter keeps it.
            backoff: How long such a message waits, or a message that made a query fail alone.

        Raises:
            ConfigError: The checkpoint is of another queue, or of a topic that was deleted since: the offsets
                in it would mean other messages. Or an argument is invalid.
        """
        _check_backoff(backoff)
        if ok is None and reason is not None:
            raise ConfigError("write_stream: reason without ok; ok says which rows have failed")
        for lane_name, topics in self._lane_topics().items():
            bind_checkpoint(self.spark, checkpoint, lane_name, topics.queue.topic_id, self.queue.name)
        if self._acknowledger is not None:
            if self._acknowledger.skipped is not None:
                self._acknowledger.skipped.look()
            self._acknowledger.leftovers.split(backoff, RememberedFailures(self.spark, checkpoint))
        if ok is not None:
            policy = FailurePolicy(queue=self.queue, backoff=backoff)
            out = only_ok(out, ok, reason, self._watched_metric(policy))
        elif MESSAGE in out.columns:
            out = without_own_columns(out)
        return out.writeStream.option("checkpointLocation", checkpoint)

    def await_termination(self, query: StreamingQuery, timeout: int | None = None) -> bool:
        """Wait until `query` has ended, and the messages that it has written are acknowledged.

        Args:
            query: A query on what write_stream() has returned.
            timeout: Seconds, a whole number, as Spark requires; None waits for the end.

        Returns:
            False if the query still runs after `timeout` seconds.

        Raises:
            ConfigError: The query was refused: its plan has stateful operators.
            StreamingQueryException: The query failed.
        """
        try:
            ended = query.awaitTermination(timeout) if timeout is not None else query.awaitTermination()
        finally:
            if self._acknowledger is not None and not query.isActive:
                self._acknowledger.wait_for_end(str(query.runId))
        return ended is not False

    def flush(self) -> None:
        """Wait until Kafka has confirmed the end markers written so far; raises Unavailable."""
        if self._acknowledger is not None:
            self._acknowledger.flush()

    def close(self) -> None:
        """Write the last end markers, and stop listening: messages of running queries are not acknowledged.

        Raises:
            ConfigError: A query was refused, and await_termination() has not raised that error.
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
        function: FrameFunction | RowFunction,
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
        wanted = self._checked_schema(schema)
        task = ProcessTask(
            queue=self.queue,
            connection=for_executors(self.connection),
            lease_ms=lease_ms,
            backoff=backoff,
            schema=wanted,
            function=function,
            by_row=by_row,
        )
        enlarge_arrow_batches(df.sparkSession)
        both = StructType([*wanted.fields, StructField(REPORT, StringType())])
        return (
            df.withColumn("partition", numbered_partition(self.queue))
            .drop("topic")
            .mapInArrow(task, both)
            .observe(self._watched_metric(), F.collect_list(REPORT).alias(REPORTS))
            .where(F.col(REPORT).isNull())
            .drop(REPORT)
        )

    def _lease_ms(self, df: DataFrame, lease: Duration, what: str) -> int:
        """The lease in ms; raises ConfigError unless `df` is a stream of messages and `lease` in range."""
        try:
            check_columns(df, NEEDED_COLUMNS, what)
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
        for name in NEEDED_COLUMNS[1:]:
            if not isinstance(kind := df.schema[name].dataType, IntegralType):
                raise ConfigError(f"{what}: column {name!r} is {kind.simpleString()}, not a whole number")
        lease_ms = duration_ms(lease, "lease")
        if not MIN_LEASE_MS <= lease_ms <= self.queue.max_lease_ms:
            raise ConfigError(
                f"lease: {lease_ms} ms is not from {MIN_LEASE_MS} to max_lease, {self.queue.max_lease_ms} ms"
            )
        return lease_ms

    def _watched_metric(self, policy: FailurePolicy | None = None) -> str:
        """The name of a new metric, for df.observe(), to which the acknowledger listens."""
        if self._acknowledger is None:
            topics = self._lane_topics()
            for lane in self.queue.lanes():
                check_topics(lane, topics[lane.name], self.connection)
            partitions = topics[self.queue.name].partitions
            skipped = SkippedMessages(self.connection, self.queue, partitions, self._on_skipped)
            ids = {name: one.ids for name, one in topics.items()}
            self._acknowledger = Acknowledger(self.spark, self.queue, self.connection, ids, skipped)
        name = f"kmq-{self.queue.name}-{uuid.uuid4().hex[:8]}"
        self._acknowledger.watch(name, policy)
        return name

    def _lane_topics(self) -> dict[str, QueueTopics]:
        """The topics of each lane by its name; those of the main lane come first."""
        topics = Topics(self.connection)
        return {lane.name: topics.check(lane) for _, lane in Lanes(self.queue).bases()}

    def _with_columns(self, records: DataFrame) -> DataFrame:
        """Records of the queue topic with the columns of read_stream()."""
        count = redelivery_count(header_bytes(self.queue.redelivery_count_header))
        partition, offset, due = (
            number(header_text(name)) for name in (ORIGINAL_PARTITION, ORIGINAL_OFFSET, DELIVER_AT)
        )
        partition, offset = first_record_columns(self.queue, partition, offset, header_text(ORIGINAL_TOPIC))
        return records.select(
            *("key", "value", "headers", "topic", "partition", "offset", "timestamp"),
            F.least(count + 1, F.lit(MAX_ATTEMPTS)).cast("int").alias("attempts"),
            partition.alias("original_partition"),
            offset.alias("original_offset"),
            due.alias("deliver_at_ms"),
        )

    def _checked_schema(self, schema: StructType | str) -> StructType:
        schema = parse_schema(self.spark, schema)
        names = [name.lower() for name in schema.fieldNames()]  # as Spark compares them
        for name in names:
            if name.startswith("kmq_"):
                raise ConfigError(f"schema: a column must not be named {name!r}; kmq_… are kmqpy's own")
            if names.count(name) > 1:
                raise ConfigError(f"schema: there is more than one column {name!r}")
        # Nullable: a report is a row without values, and nothing looks for nulls within the values of a row.
        return schema.toNullable()


def _check_backoff(backoff: Backoff) -> None:
    if not isinstance(backoff, Backoff):
        raise ConfigError(f"backoff: must be a Backoff, not {backoff!r}")
