"""Keeps the state of a queue in a table: an update reads only records written since the last update.

The table has a row for each message, in blocks (state_version.Block) of neighbouring offsets, a file each. An
update rewrites the blocks with messages that new markers, or new dead letters, name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.clock import Clock
from kmqpy.errors import ConfigError, TopicError, Unavailable
from kmqpy.kafka.markers.log_cuts import NO_CUTS
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import state
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.decode import decode_markers
from kmqpy.spark.log_cuts import Cuts
from kmqpy.spark.records import Bounds, Snapshot, read_topic, take_snapshot
from kmqpy.spark.sinks.files import persisted
from kmqpy.spark.state_folder import BLOCK, PARTITION, StateFolder
from kmqpy.spark.state_version import BLOCK_BITS, Block, Positions, StateVersion, blocks_between

_COLUMNS = state.OUTCOME.replace("enqueued timestamp", "enqueued_ms bigint")
"""The columns of the files. Times are in ms: no timestamp type can hold all timestamps of Kafka."""
_RECORD_COLUMNS = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUpdate:
    """The result: a version, how many markers were read, how many of the table's blocks were written."""

    version: int
    markers: int
    blocks_written: int
    blocks: int


class StateTable:
    """The table of one queue; KmqSpark.state_table makes it. One update at a time, any number of readers."""

    def __init__(
        self,
        spark: SparkSession,
        connection: KafkaConnection,
        queue: QueueSettings,
        options: Mapping[str, str],
        path: str,
        clock: Clock,
    ) -> None:
        self._spark = spark
        self._connection = connection
        self._queue = queue
        self._options = options
        self._folder = StateFolder(path)
        self._clock = clock

    def update(self, *, restart: bool = False) -> StateUpdate:
        """Bring the table up to date, or make it: then all records that Kafka keeps are read.

        An update that fails or is killed leaves the table as it was.

        Args:
            restart: Make the table anew, whatever it has.

        Raises:
            ConfigError: The table is of another queue, or of topics that were recreated since. Or Kafka has
                deleted markers before they were read: then the table can only be made anew.
            Unavailable: Spark or the file system fails; and what KmqSpark.messages raises.
        """
        before = self._folder.latest()
        if before is not None:
            self._check_queue(before)
        snapshot = take_snapshot(self._connection, self._queue)
        if before is not None and not restart:
            self._check(before, snapshot)
        base = before
        if base is None or restart:
            base = StateVersion(number=0 if before is None else before.number, queue=self._queue.name)
        with self._spark_errors():
            version, update = self._write(base, snapshot)
        now = take_snapshot(self._connection, self._queue)
        if now.topics.ids != snapshot.topics.ids:
            raise TopicError(
                f"queue {self._queue.name!r}: its topics were recreated meanwhile; nothing is changed"
            )
        lows = {partition: low for partition, (low, _) in snapshot.markers.items()}
        self._check_complete({**lows, **base.read.get("markers", {})}, now.markers)
        self._folder.commit(version)
        return update

    def messages(self) -> DataFrame:
        """The messages as KmqSpark.messages() gave them at the last update; only `overdue` is as of now.

        The table still knows markers and dead letters that Kafka has deleted after an update read them. The
        frame can be evaluated until three more updates have been made.

        Raises:
            ConfigError: There is no table, or it is of another queue.
        """
        version = self._folder.latest()
        if version is None:
            raise ConfigError(f"table: there is none at {self._folder.path!r} yet; update() makes it")
        self._check_queue(version)
        rows = self._rows(version, list(version.blocks))
        rows = rows.filter(F.col("offset") >= state.of_partition(_places(version.low), 0))
        return state.described(rows, self._clock.wall_ms(), _places(version.committed))

    @property
    def is_made(self) -> bool:
        """False before the first update."""
        return self._folder.latest() is not None

    def _write(self, base: StateVersion, snapshot: Snapshot) -> tuple[StateVersion, StateUpdate]:
        """Write the rows that change; returns the version with these rows, which is to be committed."""
        topics, queue = snapshot.topics, self._queue
        ids = {"queue": topics.ids.queue, "markers": topics.ids.markers}
        messages = _since(base, "queue", snapshot.queue)
        dead = None
        if topics.dead_letters is not None:
            ids["dead_letters"] = topics.dead_letters.topic_id
            known = base.topic_ids.get("dead_letters") == topics.dead_letters.topic_id
            letters = _since(base, "dead_letters", snapshot.dead_letters) if known else snapshot.dead_letters
            dead = state.own_dead_letters(self._read(topics.dead_letters.name, letters), queue)
        records = self._read(queue.name, messages)
        marked = self._read(queue.markers_topic, _since(base, "markers", snapshot.markers))
        new_cuts = {p: base.cuts.get(p, NO_CUTS).merged(found) for p, found in snapshot.cuts.items()}
        cuts = {**base.cuts, **new_cuts}
        with persisted(decode_markers(marked, with_cuts=bool(cuts))) as markers:
            clocks = markers.groupBy("partition").agg(
                F.max(F.unix_millis("timestamp")).alias("now_ms"), F.count("*").alias("markers")
            )
            read = {row["partition"]: (row["now_ms"], row["markers"]) for row in clocks.collect()}
            touched = self._touched(base, snapshot.ends, markers, dead, cuts)
            for partition, (first, end) in messages.items():
                touched.update(blocks_between(partition, first, end))
            rewritten = sorted(touched & base.blocks.keys())
            found = state.outcomes(
                records,
                markers,
                dead,
                count_header=queue.redelivery_count_header,
                ends=snapshot.ends,
                max_lease_ms=queue.max_lease_ms,
                max_delay_ms=queue.max_delay_ms,
                before=self._rows(base, rewritten),
                now_before=_places(base.now_ms),
                cuts=cuts,
            )
            low = {partition: first for partition, (first, _) in snapshot.queue.items()}
            # Rows that nobody asks for are dropped: of deleted messages, and of those that only a forged
            # header names.
            offset = F.col("offset")
            found = found.filter(offset >= state.of_partition(_places(low), 0))
            found = found.filter(offset < state.of_partition(snapshot.ends, 0))
            rows = self._folder.new_rows(base.number + 1)
            self._store(found, rows)
        written = self._folder.blocks_in(rows)
        blocks = {
            (partition, block): folder
            for (partition, block), folder in base.blocks.items()
            if (partition, block) not in touched and (block + 1) << BLOCK_BITS > low.get(partition, 0)
        } | dict.fromkeys(written, rows)
        version = StateVersion(
            number=base.number + 1,
            queue=queue.name,
            topic_ids=ids,
            read={
                name: {partition: end for partition, (_, end) in bounds.items()}
                for name, bounds in (
                    ("queue", snapshot.queue),
                    ("markers", snapshot.markers),
                    ("dead_letters", snapshot.dead_letters),
                )
            },
            now_ms={**base.now_ms, **_latest(base.now_ms, {p: now for p, (now, _) in read.items()})},
            low=low,
            committed=dict(snapshot.committed),
            blocks=blocks,
            cuts=cuts,
        )
        return version, StateUpdate(
            version=version.number,
            markers=sum(count for _, count in read.values()),
            blocks_written=len(written),
            blocks=len(blocks),
        )

    def _touched(
        self, base: StateVersion, ends: list[Place], markers: DataFrame, dead: DataFrame | None, cuts: Cuts
    ) -> set[Block]:
        """The blocks with messages that the markers or dead letters name."""
        if not base.blocks:
            return set()
        found = state.events(markers, ends, cuts=cuts).select("partition", "offset")
        if dead is not None:
            found = found.union(state.moved(dead, cuts).select("partition", "offset"))
        block = F.shiftright("offset", BLOCK_BITS).alias("block")
        return {
            (row["partition"], row["block"]) for row in found.select("partition", block).distinct().collect()
        }

    def _store(self, found: DataFrame, rows: str) -> None:
        named = found.withColumn("enqueued_ms", F.unix_millis("enqueued")).select(
            *(column.split()[0] for column in _COLUMNS.split(", ")),
            F.col("partition").alias(PARTITION),
            F.shiftright("offset", BLOCK_BITS).alias(BLOCK),
        )
        # One file for each block.
        named.repartition(PARTITION, BLOCK).write.partitionBy(PARTITION, BLOCK).parquet(
            self._folder.uri(rows)
        )

    def _rows(self, version: StateVersion, blocks: list[Block]) -> DataFrame:
        if not blocks:
            found = self._nothing(_COLUMNS)
        else:
            places = [self._folder.uri(version.blocks[block], block) for block in blocks]
            found = self._spark.read.schema(_COLUMNS).parquet(*places)
        return found.withColumn("enqueued", F.timestamp_millis("enqueued_ms")).drop("enqueued_ms")

    def _read(self, topic: str, bounds: Bounds) -> DataFrame:
        """The records of the topic within `bounds`."""
        some = {partition: (first, end) for partition, (first, end) in bounds.items() if first < end}
        return read_topic(self._spark, self._options, topic, some) if some else self._nothing(_RECORD_COLUMNS)

    def _nothing(self, schema: str) -> DataFrame:
        """No rows, in a form that Spark's optimizer knows to have none."""
        none = self._spark.range(1).where(F.lit(False))  # noqa: FBT003
        return none.select(F.from_json(F.lit("{}"), schema).alias("row")).select("row.*")

    def _check(self, version: StateVersion, snapshot: Snapshot) -> None:
        """Raise ConfigError unless `version` can be brought up to date."""
        ids = snapshot.topics.ids
        if (version.topic_ids["queue"], version.topic_ids["markers"]) != (ids.queue, ids.markers):
            raise ConfigError(
                f"table: {self._folder.path!r} belongs to a queue {version.queue!r} whose topics were "
                f"deleted and recreated since; {_RESTART_ADVICE}, or name another folder"
            )
        for partition, cuts in snapshot.cuts.items():
            for cut in version.cuts.get(partition, NO_CUTS).new_in(cuts):
                if cut.start < version.read["queue"].get(partition, 0):
                    raise ConfigError(
                        f"table: {self._folder.path!r} has messages of partition {partition} from offset "
                        f"{cut.start} on which are lost, because the log was cut back; {_RESTART_ADVICE}"
                    )
        self._check_complete(version.read["markers"], snapshot.markers)

    def _check_complete(self, start: Positions, bounds: Bounds) -> None:
        """Raise ConfigError if markers from `start` on are not there any more."""
        for partition, position in start.items():
            low, end = bounds.get(partition, (0, 0))
            if not low <= position <= end:
                raise ConfigError(
                    f"table: {self._folder.path!r}: it has to read the markers of partition {partition} from "
                    f"offset {position} on, and Kafka has {low} to {end}: some were deleted before they were "
                    f"read (retention, a purge); {_RESTART_ADVICE}"
                )

    def _check_queue(self, version: StateVersion) -> None:
        if version.queue != self._queue.name:
            raise ConfigError(
                f"table: {self._folder.path!r} belongs to queue {version.queue!r}, not to "
                f"{self._queue.name!r}; name another folder"
            )

    @contextmanager
    def _spark_errors(self) -> Iterator[None]:
        try:
            yield
        except (PySparkException, Py4JError) as error:
            raise Unavailable(f"table: {self._folder.path}: {error_line(error)}") from error


class LaneTables:
    """The tables of the lanes of a queue as one; has the methods of StateTable.

    The table of the main lane is in the folder itself, as without lanes. An update brings up one after the
    other: if it fails, some may be up to date. Tables of lanes that were removed are not read.

    tables  by the name of the lane, the main lane first
    """

    def __init__(self, tables: Mapping[str, StateTable]) -> None:
        self._tables = tables

    def update(self, *, restart: bool = False) -> StateUpdate:
        """See StateTable; the version is that of the main lane's table."""
        done = [table.update(restart=restart) for table in self._tables.values()]
        return StateUpdate(
            version=done[0].version,
            markers=sum(one.markers for one in done),
            blocks_written=sum(one.blocks_written for one in done),
            blocks=sum(one.blocks for one in done),
        )

    def messages(self) -> DataFrame:
        """See StateTable; with the column `lane`. A lane that was added since the last update has no rows."""
        main, *others = self._tables.items()
        there = [main, *((lane, table) for lane, table in others if table.is_made)]
        frames = [table.messages().withColumn("lane", F.lit(lane)) for lane, table in there]
        return reduce(DataFrame.unionByName, frames)


_RESTART_ADVICE = "make it anew with update(restart=True) or kmq spark-state --restart"


def _since(base: StateVersion, name: str, bounds: Bounds) -> Bounds:
    """`bounds` without the offsets that `base` has read of the topic `name`."""
    read = base.read.get(name, {})
    return {
        partition: (max(first, min(read.get(partition, first), end)), end)
        for partition, (first, end) in bounds.items()
    }


def _latest(one: Positions, other: Positions) -> Positions:
    return {partition: max(now, one.get(partition, now)) for partition, now in other.items()}


def _places(positions: Positions) -> list[Place]:
    return sorted(positions.items())
