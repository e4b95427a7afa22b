"""KmqSpark: the state of a queue as DataFrames. Its base class Processing processes the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, TopicError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import settings_of
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import Topics
from kmqpy.spark import state
from kmqpy.spark.acknowledge import OnSkipped
from kmqpy.spark.decode import decode_markers
from kmqpy.spark.process import Processing
from kmqpy.spark.records import Bounds, kafka_options, read_topic, stream_topics, take_snapshot
from kmqpy.spark.session import check_version
from kmqpy.spark.state import State
from kmqpy.spark.state_folder import LANES
from kmqpy.spark.state_table import LaneTables, StateTable


class KmqSpark(Processing):
    """One queue: `KmqSpark(spark, "host:9092", queue="jobs").depth().show()`.

    A frame of the queue's state shows the queue as it was when the method was called, whenever and however
    often the frame is evaluated. Reading the state joins no consumer group and writes nothing. The methods
    raise QueueNotFound, TopicError, Unavailable, and ConfigError when the session lacks the Kafka connector.

    Frames of a queue with lanes have the messages, or markers, of all of them, and one more column, `lane`:
    the name of the topic. The lanes are read one after the other, and a message that is redelivered meanwhile
    may be in two of them. Streams and state tables are of all lanes that the queue has now.

    Args:
        spark: A session made ready by configure_spark_with_kmq, which may be one of Spark Connect.
        bootstrap: Kafka, `host:port[,host:port]`, or a KafkaConnection, which has settings of security.
        queue: The queue's name, or QueueSettings; fields that you leave out come from the queue's stored
            settings, and fields that contradict them raise ConfigError. One of QueueSettings.lanes_apart()
            has frames of that lane, and no queries.
        options: For Spark's Kafka source, untouched: `{"minPartitions": "64"}`, or `kafka.…` for its client.
        on_skipped: Called, in a thread of Spark's listeners, with the number of offsets that a query of
            read_stream() has skipped, because Kafka had deleted their messages (a purge, retention).
        clock: For tests.

    Raises:
        ConfigError: Another version of Spark, or invalid settings.
        Unavailable: Kafka does not answer.
    """

    def __init__(
        self,
        spark: SparkSession,
        bootstrap: str | KafkaConnection,
        queue: str | QueueSettings,
        *,
        options: Mapping[str, str] | None = None,
        on_skipped: OnSkipped | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_version(spark.version, "Spark")
        connection = (
            bootstrap if isinstance(bootstrap, KafkaConnection) else KafkaConnection(bootstrap=bootstrap)
        )
        settings = settings_of(queue, connection)
        super().__init__(spark, connection, settings, kafka_options(connection, options), on_skipped)
        self._clock = clock
        # The retry lane comes last: what goes there meanwhile is read twice rather than never.
        lanes = settings.lanes_apart()[::-1] if len(settings.lanes()) > 1 else ()
        self._lanes = [KmqSpark(spark, connection, lane, options=options, clock=clock) for lane in lanes]

    def messages(self) -> DataFrame:
        """A row for each message in the queue topic.

        A copy, which a tracker has appended to redeliver a message, is a message and has a row of its own.
        The clock of this machine decides what is `overdue`. JVM trackers don't mark their end markers as
        theirs: messages that they redeliver or dead-letter are `processed` here.

        Returns:
            A frame with the columns

            - partition, offset
            - timestamp: when it was appended
            - first_enqueued: when the message was first sent
            - state: pending, in_flight, overdue, processed, redelivered, dead (kmqpy.spark.State)
            - attempts: deliveries so far, those of earlier copies included
            - in_flight_state: while it is in flight: leased, delayed, released (given back) or dead (to be
              dead-lettered); the state of a `delayed` message is pending until its delay is over
            - taken_at: when it was last taken
            - due_at: while it is in flight: when its lease or delay is over; null: never
            - ended_at: when it was acknowledged, redelivered or dead-lettered
        """
        if self._lanes:
            return self._of_lanes(KmqSpark.messages)
        snapshot = take_snapshot(self.connection, self.queue)
        dead = snapshot.topics.dead_letters
        found = state.outcomes(
            self._read(self.queue.name, snapshot.queue),
            decode_markers(
                self._read(self.queue.markers_topic, snapshot.markers), with_cuts=bool(snapshot.cuts)
            ),
            None
            if dead is None
            else state.own_dead_letters(self._read(dead.name, snapshot.dead_letters), self.queue),
            count_header=self.queue.redelivery_count_header,
            ends=snapshot.ends,
            max_lease_ms=self.queue.max_lease_ms,
            max_delay_ms=self.queue.max_delay_ms,
            cuts=snapshot.cuts,
        )
        return state.described(found, self._clock.wall_ms(), snapshot.committed)

    def read(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        state: State | str | Iterable[State | str] | None = None,
    ) -> DataFrame:
        """The messages in the queue topic, acknowledged or not, with their bodies; a batch frame.

        Takes no message and writes no marker.

        Args:
            since: Only messages that were appended then or later; a datetime with a time zone.
            until: Only messages that were appended before; a datetime with a time zone.
            state: Only messages in this state, or in one of these (kmqpy.spark.State).

        Returns:
            The columns of read_stream(), and `state` if that is given: then the markers are read, too.

        Raises:
            ConfigError: An argument is invalid.
        """
        for name, moment in (("since", since), ("until", until)):
            if moment is not None and (not isinstance(moment, datetime) or moment.tzinfo is None):
                raise ConfigError(f"{name}: must be a datetime with a time zone, not {moment!r}")
        states = [state] if isinstance(state, str) else list(state or ())
        for one in states:
            if one not in list(State):
                raise ConfigError(f"state: unknown state {one!r}: use {', '.join(State)}")
        if self._lanes:
            return self._of_lanes(lambda lane: lane.read(since=since, until=until, state=states or None))
        topics = Topics(self.connection).check(self.queue)
        found = self._with_columns(
            self._read(self.queue.name, self._bounds(self.queue.name, topics.partitions))
        )
        if since is not None:
            found = found.where(F.col("timestamp") >= _timestamp(since))
        if until is not None:
            found = found.where(F.col("timestamp") < _timestamp(until))
        if state is None:
            return found
        known = (
            self.messages()
            .select("partition", "offset", "state")
            .where(F.col("state").isin([State(one).value for one in states]))
        )
        return found.join(known, ["partition", "offset"]).select(*found.columns, "state")

    def state_table(self, path: str) -> StateTable | LaneTables:
        """The state of the queue as a table of Parquet files, which StateTable.update() brings up to date.

        This method reads and writes nothing yet.

        Args:
            path: A folder for this table alone: a path, or a URI that Arrow reaches (`s3://`, `gs://`,
                `hdfs://`).

        Raises:
            ConfigError: Arrow can't reach the place.
        """
        if not self._lanes:
            return StateTable(self.spark, self.connection, self.queue, self.options, path, self._clock)
        tables: dict[str, StateTable] = {}
        for lane in self._lanes:  # the main lane first
            folder = f"{path.rstrip('/')}/{LANES}/{lane.queue.lane_ending}" if tables else path
            of_lane = StateTable(self.spark, self.connection, lane.queue, self.options, folder, self._clock)
            tables[lane.queue.name] = of_lane
        return LaneTables(tables)

    def depth(self, messages: DataFrame | None = None) -> DataFrame:
        """Count the messages of each partition by state, and tell when the oldest pending one was appended.

        Args:
            messages: The frame of messages() (the default) or StateTable.messages(); here and below. Persist
                a frame that you give to several methods.
        """
        partitions = Topics(self.connection).check(self.queue).partitions
        numbers = self.spark.range(partitions).select(F.col("id").cast("int").alias("partition"))
        found = state.depth(self.messages() if messages is None else messages, numbers)
        return found.orderBy("partition")

    def attempts(self, messages: DataFrame | None = None) -> DataFrame:
        """Count the messages of each state by their number of deliveries: state, attempts, messages.

        Args:
            messages: What `messages` returned; default: read anew.
        """
        found = self.messages() if messages is None else messages
        counted = found.groupBy("state", "attempts").agg(F.count("*").alias("messages"))
        return counted.orderBy("state", "attempts")

    def latency(
        self, quantiles: Iterable[float] = (0.5, 0.95, 0.99), messages: DataFrame | None = None
    ) -> DataFrame:
        """Times of processed messages: a row for each quantile, no row if no message is processed.

        Args:
            quantiles: Each 0 to 1.
            messages: What `messages` returned; default: read anew.

        Returns:
            A frame with the columns quantile and

            - waiting_ms: from when the message, or its last copy, was appended until it was taken
            - processing_ms: from then until it was acknowledged
            - total_ms: from when the message was first sent until it was acknowledged

            Times are the broker's, in ms. The rank of a percentile is off by at most 1 in 10,000. A column
            leaves out messages of which a time that it needs is not known, because Kafka has deleted their
            markers, or they were taken late. A column without any known time is null. No row has only nulls.
        """
        return state.latency(self.messages() if messages is None else messages, quantiles)

    def undelivered(self, *, stream: bool = False) -> DataFrame:
        """The dead letters that are neither redriven nor purged.

        Args:
            stream: True: as a stream, all of them as they arrive.

        Returns:
            A frame with the columns

            - partition, offset: in the dead-letter topic; its id for `kmq dlq redrive` is "partition-offset"
            - key, body, headers
            - origin_topic, origin_partition, origin_offset: where its last copy was in the queue
            - attempts, reason, first_enqueued, dead_since

        Raises:
            QueueNotFound: There is no such queue.
            TopicError: A topic of its dead letters is missing.
        """
        dead = dead_letter_queue(self.queue)
        if stream:
            letters = stream_topics(self.spark, self.options, [dead.name])
            return state.dead_letters_of(state.own_dead_letters(letters, self.queue, of_all_lanes=True))
        topics = Topics(self.connection)
        found = topics.describe([dead.name, dead.markers_topic])
        for name in (dead.name, dead.markers_topic):
            if name not in found:
                topics.check(self.queue)  # raises QueueNotFound where the queue itself is missing
                raise TopicError(
                    f"queue {self.queue.name!r}: its topic {name!r} does not exist; "
                    f"create it with: kmq queue create {self.queue.name}"
                )
        markers = self._bounds(dead.markers_topic, found[dead.markers_topic].partitions)
        bounds = self._bounds(dead.name, found[dead.name].partitions)
        letters = state.own_dead_letters(self._read(dead.name, bounds), self.queue, of_all_lanes=True)
        letters = state.dead_letters_of(letters)
        ends = [(partition, end) for partition, (_, end) in bounds.items()]
        finished = state.finished(self._read(dead.markers_topic, markers), ends)
        return letters.join(finished, ["partition", "offset"], "left_anti")

    def markers(self, *, stream: bool = False) -> DataFrame:
        """All markers, a row for each; kmqpy.spark.decode.decode_markers describes the columns.

        Markers that can't be decoded have rows, too, with the reason in `problem`:
        `kmq.markers().filter("problem is not null").count()`.

        Args:
            stream: True: as a stream, all of them as they arrive.
        """
        if self._lanes:
            return self._of_lanes(lambda lane: lane.markers(stream=stream))
        name = self.queue.markers_topic
        if stream:
            return decode_markers(stream_topics(self.spark, self.options, [name]))
        topics = Topics(self.connection).check(self.queue)
        return decode_markers(self._read(name, self._bounds(name, topics.partitions)))

    def _of_lanes(self, read: Callable[[KmqSpark], DataFrame]) -> DataFrame:
        """The frames of all lanes as one, with the column `lane`."""
        frames = [read(lane).withColumn("lane", F.lit(lane.queue.name)) for lane in self._lanes]
        return reduce(DataFrame.unionByName, frames)

    def _read(self, topic: str, bounds: Bounds) -> DataFrame:
        return read_topic(self.spark, self.options, topic, bounds)

    def _bounds(self, topic: str, partitions: int) -> Bounds:
        return partition_reader.bounds(self.connection, topic, range(partitions))


def _timestamp(moment: datetime) -> Column:
    return F.timestamp_micros(F.lit(round(moment.astimezone(UTC).timestamp() * 1_000_000)))
