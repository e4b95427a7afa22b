"""Spark's source `format("kmq")`: reads a queue with librdkafka in Python workers, without any jar.

    kmqpy.spark.register(spark)
    df = spark.readStream.format("kmq").option("bootstrap", "host:9092").option("queue", "orders").load()

Its columns are those of `KmqSpark.read_stream`, so `KmqSpark.process` takes such a frame, too. Options:

    queue, bootstrap         as for KmqClient
    root                     of the queue's stored settings, if it is not /kmq; they say which lanes it has
    start                    where a query without a checkpoint begins: committed (at the offsets that the
                             group has committed), earliest or latest; a batch begins at the earliest message
    max_offsets_per_trigger  about how many messages a micro-batch has at most; each lane of a queue has an
                             equal part of them, and what one leaves over, others have
    redelivery_count_header  if the queue has another one than the default
    kafka.…                  librdkafka settings, security for example
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, DecodeError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka, partition_reader
from kmqpy.kafka.markers.records import have_headers, message_headers
from kmqpy.kafka.message_headers import DELIVER_AT, int_header, redelivery_count
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import settings_of
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.spark.lanes import Lanes, base_of, by_base, first_record
from kmqpy.spark.records import committed_starts
from kmqpy.spark.taker import for_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

_ARROW_SCHEMA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "attempts": pa.int32(),
        "original_partition": pa.int32(),
        "original_offset": pa.int64(),
        "deliver_at_ms": pa.int64(),
    }
)
_OPTIONS = ("bootstrap", "queue", "root", "start", "max_offsets_per_trigger", "redelivery_count_header")
_STARTS = ("committed", "earliest", "latest")
MAX_ATTEMPTS = 2**31 - 1
"""The largest number that fits in the column `attempts`, which stands for all larger ones, too."""
_MAX_RECORDS_PER_BATCH = 10_000
"""The most records of one Arrow batch; further records come in further batches."""
_POLL_TIMEOUT_S = 0.1
_SILENCE_TIMEOUT_S = 30.0
"""A task raises Unavailable when Kafka has sent it no record for this long, in seconds."""

Position = dict[str, Any]
"""A position in the form of Spark's checkpoint: {"queue": …, "topic_id": …, "offsets": {"0": 17, …}}.

Partitions of lanes are numbered as in kmqpy.spark.lanes; "lanes" has the topic ids of those beside the main
one, by their names, if there are any."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of the source, checked and as settings of kmqpy."""

    queue: QueueSettings
    connection: KafkaConnection
    start: str
    max_rows: int | None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> _Options:
        """Check the options that the user gave; raises ConfigError."""
        for name in given:
            if name.lower() not in _OPTIONS and not name.lower().startswith("kafka."):
                raise ConfigError(f"option {name}: unknown{nearest(name, _OPTIONS)}")
        if not given.get("queue"):
            raise ConfigError('option queue: must be given, for example .option("queue", "orders")')
        kafka = {name.lower(): value for name, value in given.items() if name.lower().startswith("kafka.")}
        settings = {name.removeprefix("kafka."): value for name, value in kafka.items()}
        start = given.get("start", "committed")
        if start not in _STARTS:
            raise ConfigError(f"option start: unknown value {start!r}: use {', '.join(_STARTS)}")
        limit = given.get("max_offsets_per_trigger")
        if limit is not None and not (limit.isascii() and limit.isdigit() and int(limit)):
            raise ConfigError(
                f"option max_offsets_per_trigger: must be a whole number above 0, not {limit!r}"
            )

        def told(*names: str) -> dict[str, Any]:
            return {name: given[name] for name in names if given.get(name) is not None}

        queue = QueueSettings(name=given["queue"], **told("redelivery_count_header"))
        connection = for_executors(KafkaConnection(**told("bootstrap", "root"), kafka=settings))
        return cls(
            queue=settings_of(queue, connection),
            connection=connection,
            start=start,
            max_rows=None if limit is None else int(limit),
        )


def register(spark: SparkSession) -> None:
    """Make `format("kmq")` known to a session.

    Args:
        spark: The session.
    """
    spark.dataSource.register(KmqDataSource)


class KmqDataSource(DataSource):
    """Spark's entry point to the readers of a queue; the docstring of the module has the options."""

    @classmethod
    def name(cls) -> str:
        """The name for `format()`."""
        return "kmq"

    def schema(self) -> StructType:
        """The columns."""
        return from_arrow_schema(_ARROW_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """The reader of spark.read: reads all messages that are in the queue topic now."""
        return _BatchReader(_Options.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """The reader of spark.readStream."""
        return _StreamReader(_Options.of(self.options))


class _Part(InputPartition):
    """The messages of a numbered partition from offset `first` on and below `end`: the work of one task."""

    def __init__(self, partition: int, first: int, end: int) -> None:
        super().__init__((partition, first, end))
        self.partition = partition
        self.first = first
        self.end = end


class _Reading:
    def __init__(self, options: _Options) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of a part; runs on an executor."""
        # If partitions() returned none, Spark reads a part that it made itself.
        return _read(self._options, partition) if isinstance(partition, _Part) else iter(())

    def _topics(self) -> dict[int, QueueTopics]:
        """The topics of each lane, by the number of its partition 0."""
        topics = Topics(self._options.connection)
        return {base: topics.check(lane) for base, lane in Lanes(self._options.queue).bases()}

    def _bounds(self, topics: Mapping[int, QueueTopics]) -> dict[int, tuple[int, int]]:
        return {
            base + partition: both
            for base, there in topics.items()
            for partition, both in partition_reader.bounds(
                self._options.connection, there.queue.name, range(there.partitions)
            ).items()
        }


class _BatchReader(_Reading, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        bounds = self._bounds(self._topics())
        return [_Part(partition, low, end) for partition, (low, end) in bounds.items() if end > low]


class _StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    _available_until: dict[int, int] | None = None
    """The ends of the partitions when a query with availableNow began: it reads no further."""

    def initialOffset(self) -> Position:  # noqa: N802
        topics = self._topics()
        if self._options.start == "committed":
            offsets = {
                base + partition: offset
                for base, lane in Lanes(self._options.queue).bases()
                for partition, offset in committed_starts(
                    self._options.connection, lane, topics[base]
                ).items()
            }
        else:
            end = int(self._options.start == "latest")
            offsets = {partition: both[end] for partition, both in self._bounds(topics).items()}
        return self._position(topics, offsets)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        topics = self._topics()
        begin = self._offsets(start, topics)
        there = {}
        for partition, (low, end) in self._bounds(topics).items():
            if self._available_until is not None:
                end = min(end, self._available_until.get(partition, 0))
            first = begin.get(partition, low)
            there[partition] = (first, max(end, first))
        if isinstance(limit, ReadMaxRows):
            there = _limited(there, limit.max_rows)
        return self._position(topics, {partition: end for partition, (_, end) in there.items()})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_until = {
            partition: end for partition, (_, end) in self._bounds(self._topics()).items()
        }

    def partitions(self, start: Position, end: Position) -> Sequence[InputPartition]:
        begin = self._offsets(start, None)
        return [
            _Part(partition, begin.get(partition, 0), after)
            for partition, after in self._offsets(end, None).items()
            if after > begin.get(partition, 0)
        ]

    def _position(self, topics: Mapping[int, QueueTopics], offsets: Mapping[int, int]) -> Position:
        ids = {there.queue.name: there.queue.topic_id for there in topics.values()}
        main = self._options.queue.name
        return {
            "queue": main,
            "topic_id": ids.pop(main),
            "offsets": {str(partition): offset for partition, offset in sorted(offsets.items())},
            **({"lanes": ids} if ids else {}),
        }

    def _offsets(self, position: Position, topics: Mapping[int, QueueTopics] | None) -> dict[int, int]:
        """The offsets of a position; raises ConfigError if it is of another queue, or of another topic.

        A lane that was removed was empty then: its offsets are left out.
        """
        queue = self._options.queue.name
        if position.get("queue") != queue:
            raise ConfigError(
                f"checkpoint: it belongs to queue {position.get('queue')!r}, not to {queue!r}; "
                "use a checkpoint of its own"
            )
        ids = {**position.get("lanes", {}), queue: position.get("topic_id")}
        for there in (topics or {}).values():
            name, topic_id = there.queue.name, there.queue.topic_id
            if ids.get(name, topic_id) != topic_id:
                raise ConfigError(
                    f"checkpoint: it belongs to another topic named {name!r}, which was deleted since, and "
                    "its offsets would mean other messages; use a new checkpoint"
                )
        lanes = Lanes(self._options.queue)
        offsets = {int(partition): int(offset) for partition, offset in position["offsets"].items()}
        return {number: offset for number, offset in offsets.items() if lanes.has(number)}


def _limited(there: dict[int, tuple[int, int]], rows: int) -> dict[int, tuple[int, int]]:
    """Shorten the ranges to about `rows` messages in all, by the same share in each partition of a lane.

    Each lane has an equal part of `rows`, and what others leave over, so that no backlog holds up others.
    """
    found: dict[int, tuple[int, int]] = {}
    lanes = [(sum(end - first for first, end in one.values()), one) for one in by_base(there).values()]
    lanes.sort(key=itemgetter(0))
    for left, (total, lane) in zip(range(len(lanes), 0, -1), lanes, strict=True):
        most = max(1, rows // left)
        rows -= min(total, most)
        for number, (first, end) in lane.items():
            share = end - first if total <= most else -(-(end - first) * most // total)
            found[number] = (first, first + share)
    return found


def _read(options: _Options, part: _Part) -> Iterator[pa.RecordBatch]:
    consumer = librdkafka.new_consumer(
        options.connection, {"enable.partition.eof": True, "fetch.wait.max.ms": 20}
    )
    lane, partition = Lanes(options.queue).place(part.partition)
    doing = f"read {lane.name}"
    position, heard = part.first, SYSTEM_CLOCK.monotonic()
    try:
        consumer.assign([TopicPartition(lane.name, partition, part.first)])
        while position < part.end:
            # consume(n, t) with n > 1 waits for all of t, even when records are there.
            records = consumer.consume(1, _POLL_TIMEOUT_S)
            if records:
                records += consumer.consume(_MAX_RECORDS_PER_BATCH - 1, 0)
                heard = SYSTEM_CLOCK.monotonic()
            elif SYSTEM_CLOCK.monotonic() - heard > _SILENCE_TIMEOUT_S:
                raise Unavailable(f"{doing}: Kafka at {options.connection.bootstrap} sends nothing")
            found: list[Any] = []
            for record in records:
                error = record.error()
                offset = record.offset() or 0
                if error is None and offset < part.end:
                    found.append(record)
                elif offset >= part.end and (error is None or error.code() == KafkaError._PARTITION_EOF):
                    # The end may lie behind control records, which consumers are not given.
                    position = part.end
                    break
                # A replica that lags behind its leader reports the end too early.
                elif error is not None and not (
                    kafka_errors.is_retriable(error) or error.code() == KafkaError._PARTITION_EOF
                ):
                    with kafka_errors.translating(doing, options.connection):
                        raise KafkaException(error)
            if found:
                if position == part.first < found[0].offset():
                    _log_deleted(options.connection, lane.name, partition, part.first)
                position = max(position, found[-1].offset() + 1)
                yield _as_arrow(lane, found)
    finally:
        consumer.close()


def _log_deleted(connection: KafkaConnection, topic: str, partition: int, first: int) -> None:
    """Log an error if the log begins after the offset wanted; control records leave harmless gaps, too."""
    low, _ = partition_reader.bounds(connection, topic, [partition])[partition]
    if low > first:
        _log.error(
            "messages were deleted before they were read",
            extra={"queue": topic, "partition": partition, "from": first, "to": low},
        )


def _as_arrow(queue: QueueSettings, records: list[Any]) -> pa.RecordBatch:
    size = len(records)
    partition = records[0].partition()
    offsets = list(map(Record.offset, records))
    columns: dict[str, Any] = {
        "key": list(map(Record.key, records)),
        "value": list(map(Record.value, records)),
        "headers": [None] * size,
        "topic": [queue.name] * size,
        "partition": [partition] * size,
        "offset": offsets,
        "timestamp": pa.array([record.timestamp()[1] * 1000 for record in records], pa.int64()),
        "attempts": [1] * size,
        "original_partition": [partition + (base_of(queue.name, queue) or 0)] * size,
        "original_offset": list(offsets),
        "deliver_at_ms": [None] * size,
    }
    if have_headers(records):
        for row, record in enumerate(records):
            if headers := message_headers(record):
                _add_headers(queue, headers, columns, row)
    return pa.RecordBatch.from_arrays(
        [
            values.cast(one.type) if isinstance(values, pa.Array) else pa.array(values, one.type)
            for values, one in zip(columns.values(), _ARROW_SCHEMA, strict=True)
        ],
        schema=_ARROW_SCHEMA,
    )


def _add_headers(queue: QueueSettings, headers: m.Headers, columns: dict[str, Any], row: int) -> None:
    columns["headers"][row] = [{"key": name, "value": value} for name, value in headers]
    with contextlib.suppress(DecodeError):
        count = redelivery_count(headers, queue.redelivery_count_header)
        columns["attempts"][row] = min(count + 1, MAX_ATTEMPTS)
    with contextlib.suppress(DecodeError):
        columns["deliver_at_ms"][row] = int_header(headers, DELIVER_AT)
    if place := first_record(headers, queue, (columns["partition"][row], columns["offset"][row])):
        columns["original_partition"][row], columns["original_offset"][row] = place
