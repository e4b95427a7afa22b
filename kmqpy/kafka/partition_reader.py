"""Reads parts of topics: from an offset or a time to the end, or single records. Joins no consumer group.

The functions return committed records only, unless `uncommitted` is given. They read each partition to its
last stable offset at the time when the function is called. So they wait neither for an open transaction, nor
for a record after the control records (those of commits and aborts) with which a log may end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.log_ends import LogEnds
from kmqpy.kafka.settings import KafkaConnection

_BATCH_RECORDS = 10_000
"""A reader takes at most this many records from librdkafka at once, after the first of them."""
_POLL_S = 0.1
"""Seconds that a reader waits for a record before it checks whether `timeout_s` is over."""
_FIRST_ASKS_S = (0.2, 1.3)
"""The time limits of a reader's first questions. Librdkafka may ask it on a connection that it is about to
close (one in a hundred times, more under load), and repeats it by itself only 0.7 s later. After a
second one that fails it is known whether Kafka refuses us."""
_ASK_S = 1.0
"""The most seconds of a question for all partitions, before each is asked for by itself."""
_MAX_READ_GAP = 1_000
"""read_at() skips a gap of more offsets than this between two wanted records; it reads a shorter gap."""


@dataclass(slots=True)
class ReadPosition:
    """How far a partition was read.

    low       the first offset of the log
    position  the next offset to read
    end       the last stable offset when the reading began (`uncommitted`: the end of the log); records from
              this offset on are not read
    """

    low: int
    position: int
    end: int

    @property
    def done(self) -> bool:
        """Return True if everything below `end` was read."""
        return self.position >= self.end


def bounds(
    connection: KafkaConnection | KeptConsumers,
    topic: str,
    partitions: Iterable[int],
    timeout_s: float | None = None,
    *,
    uncommitted: bool = False,
) -> dict[int, tuple[int, int]]:
    """First offset and last stable offset of each partition; raises Unavailable, TopicError.

    `uncommitted`: the end of the log instead of the last stable offset.

    Asks with a consumer, because the first list_offsets of an AdminClient takes 3 s now and then.
    """
    with _Reader(connection, topic, timeout_s, uncommitted=uncommitted) as reader:
        return reader.bounds(partitions)


def scan(
    connection: KafkaConnection | KeptConsumers,
    topic: str,
    starts: Mapping[int, int],
    visit: Callable[[Any], None],
    *,
    limit: int | None = None,
    uncommitted: bool = False,
    timeout_s: float | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[int, ReadPosition]:
    """Call `visit` with each record of each partition, from the partition's offset in `starts` to the end.

    limit        the most records of each partition
    uncommitted  read records of open and aborted transactions, too, up to the end of the log

    A start before or after the log counts as the first offset or the end. Raises Unavailable when Kafka sends
    nothing for `timeout_s` seconds, TopicError when the topic is gone.
    """
    with _Reader(connection, topic, timeout_s, clock, uncommitted=uncommitted) as reader:
        reached = reader.open(starts)
        left = dict.fromkeys(reached, limit)
        for record, place in reader.records(reached):
            visit(record)
            remaining = left[record.partition()]
            if remaining is not None:
                left[record.partition()] = remaining - 1
                if remaining <= 1:
                    reader.leave(record.partition())
            place.position = record.offset() + 1
        return reached


def scan_batches(
    connection: KafkaConnection | KeptConsumers,
    topic: str,
    starts: Mapping[int, int],
    visit: Callable[[int, list[Any]], None],
) -> None:
    """Like scan(), but calls `visit` with a partition and a list of its next records."""
    with _Reader(connection, topic) as reader:
        reader.visit(reader.open(starts), visit)


def scan_since(
    connection: KafkaConnection | KeptConsumers,
    topic: str,
    times_ms: Mapping[int, int],
    visit: Callable[[int, list[Any]], bool],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Like scan_batches(), from each partition's first record with this or a later time (ms since 1970).

    Reads no more of a partition for which `visit` has returned True.
    """
    with _Reader(connection, topic, clock=clock) as reader:
        reader.visit(reader.open(reader.offsets_at(times_ms)), visit)


def read_at(
    connection: KafkaConnection | KeptConsumers,
    topic: str,
    places: Iterable[tuple[int, int]],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[tuple[int, int], Any]:
    """The records with these (partition, offset), as far as they exist.

    Raises Unavailable when Kafka sends nothing in time, TopicError when the topic is gone.
    """
    wanted: dict[int, list[int]] = {}
    for partition, offset in sorted(set(places), reverse=True):
        wanted.setdefault(partition, []).append(offset)  # descending, so that pop() takes the lowest
    found: dict[tuple[int, int], Any] = {}
    with _Reader(connection, topic, clock=clock) as reader:
        reached = reader.open({partition: offsets[-1] for partition, offsets in wanted.items()})
        for record, place in reader.records(reached):
            partition, offset = record.partition(), record.offset()
            offsets = wanted[partition]
            while offsets and offsets[-1] <= offset:
                if offsets.pop() == offset:
                    found[partition, offset] = record
            place.position = offset + 1
            if not offsets:
                reader.leave(partition)
            elif offsets[-1] - offset > _MAX_READ_GAP:
                place.position = offsets[-1]
                reader.seek(partition, offsets[-1])
    return found


class KeptConsumers(Closeable):
    """Keeps what readers ask Kafka with, for the next one. For one thread at a time.

    The functions of this module take it instead of a connection. Else each call has a consumer of its own,
    with three connections to Kafka.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self.connection = connection
        self._kept = ExitStack()
        self._idle: dict[bool, Consumer] = {}
        self._ends: LogEnds | None = None

    @property
    def ends(self) -> LogEnds:
        """Tells where logs end, open transactions included."""
        if self._ends is None:
            self._ends = self._kept.enter_context(closing(LogEnds(self.connection)))
        return self._ends

    def take(self, *, uncommitted: bool) -> Consumer | None:
        """Return one that was given back, if there is one."""
        return self._idle.pop(uncommitted, None)

    def give_back(self, consumer: Consumer, *, uncommitted: bool) -> None:
        """Keep a consumer that fetches nothing."""
        if uncommitted in self._idle:  # two were in use at the same time
            consumer.close()
        else:
            self._idle[uncommitted] = consumer

    def close(self) -> None:
        """Release the connections."""
        with self._kept:  # whatever one of them raises
            while self._idle:
                self._kept.callback(self._idle.popitem()[1].close)
        self._ends = None


class RepeatedReader:
    """Reads parts of one topic many times over one connection. For one thread at a time."""

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        *,
        uncommitted: bool = False,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kept = KeptConsumers(connection)
        self._new_reader = partial(_Reader, self._kept, topic, timeout_s, clock, uncommitted=uncommitted)

    def scan(
        self, starts: Mapping[int, int], visit: Callable[[int, list[Any]], bool]
    ) -> dict[int, ReadPosition]:
        """Like scan_batches(), but reads no more of a partition for which `visit` has returned True."""
        with self._new_reader() as reader:
            reached = reader.open(starts)
            reader.visit(reached, visit)
        return reached

    def close(self) -> None:
        """Release the connection."""
        self._kept.close()


class _Reader(Closeable):
    """Reads partitions of one topic to their ends with one consumer.

    open() says what to read, batches() or records() yields the records, leave() and seek() skip records.
    """

    def __init__(
        self,
        connection: KafkaConnection | KeptConsumers,
        topic: str,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        uncommitted: bool = False,
    ) -> None:
        self._kept = connection if isinstance(connection, KeptConsumers) else None
        self._connection = connection.connection if isinstance(connection, KeptConsumers) else connection
        self._topic = topic
        self._timeout_s = self._connection.timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._unread: set[int] = set()
        self._uncommitted = uncommitted
        consumer = self._kept.take(uncommitted=uncommitted) if self._kept else None
        self._first_asks_s = iter(_FIRST_ASKS_S if consumer is None else ())
        self._consumer: Consumer = consumer or librdkafka.new_consumer(
            self._connection,
            {
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
                "queued.min.messages": _BATCH_RECORDS,
                "queued.max.messages.kbytes": 16_384,
                "isolation.level": "read_uncommitted" if uncommitted else "read_committed",
            },
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kept is None or error is not None:
            self.close()
            return
        try:
            self.stop_fetching()
        except BaseException as unusable:
            with suppress(KafkaException):
                self.close()
            if not isinstance(unusable, KafkaException):
                raise
        else:
            self._kept.give_back(self._consumer, uncommitted=self._uncommitted)

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def bounds(self, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """First offset and last stable offset (or end of the log) of each partition."""
        wanted, told = list(partitions), {}
        with kafka_errors.translating(f"read {self._topic}", self._connection):
            if len(wanted) > 2:
                told[wanted[0]] = self._bounds(wanted[0])  # it shows whether Kafka answers, and lets us in
                told |= self._bounds_at_once(wanted[1:])
            return {partition: told.get(partition) or self._bounds(partition) for partition in wanted}

    def _bounds_at_once(self, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """All of them by two requests to each broker; none or a part if one can't be had."""
        found: list[dict[int, int]] = []
        for where in (OFFSET_BEGINNING, OFFSET_END):  # as timestamps they stand for these offsets
            places = [TopicPartition(self._topic, partition, where) for partition in partitions]
            try:
                told = self._consumer.offsets_for_times(places, timeout=min(_ASK_S, self._timeout_s))
            except KafkaException:
                return {}
            found.append({one.partition: one.offset for one in told if one.error is None and one.offset >= 0})
        lows, ends = found
        return {partition: (lows[partition], ends[partition]) for partition in lows.keys() & ends.keys()}

    def _bounds(self, partition: int) -> tuple[int, int]:
        def ask(try_s: float) -> tuple[int, int]:
            limit_s = min(try_s, next(self._first_asks_s, try_s))
            try:
                return librdkafka.watermarks(self._consumer, self._topic, partition, limit_s)
            except KafkaException as exception:
                if not self._unread:
                    self._consumer.poll(0)  # it reports why it can't connect
                told = kafka_errors.error_of(exception)
                if kafka_errors.is_unknown_topic(told):  # librdkafka says so of topics that we may not see
                    found = self._consumer.list_topics(self._topic, try_s).topics.get(self._topic)
                    told = (found and found.error) or told
                raise KafkaException(told) from exception

        # librdkafka reports a partition as unknown if it is new, or if its broker is slow.
        exists = partial(librdkafka.refresh_partition, self._consumer, self._topic, partition)
        return kafka_errors.retrying(ask, self._timeout_s, self._connection, also=exists, clock=self._clock)

    def offsets_at(self, times_ms: Mapping[int, int]) -> dict[int, int]:
        """The offset of each partition's first record with this or a later time; INT64_MAX without one."""
        wanted = [TopicPartition(self._topic, partition, max(0, ms)) for partition, ms in times_ms.items()]

        def ask(try_s: float) -> list[TopicPartition]:
            found = self._consumer.offsets_for_times(wanted, timeout=try_s)
            for place in found:
                if place.error is not None:
                    raise KafkaException(place.error)
            return found

        with kafka_errors.translating(f"read {self._topic}", self._connection):
            found = kafka_errors.retrying(ask, self._timeout_s, self._connection, clock=self._clock)
        return {place.partition: place.offset if place.offset >= 0 else INT64_MAX for place in found}

    def open(self, starts: Mapping[int, int]) -> dict[int, ReadPosition]:
        """Begin to read the partitions that have records from their starts on; returns all positions."""
        reached = {
            partition: ReadPosition(low, min(max(starts[partition], low), max(end, low)), end)
            for partition, (low, end) in self.bounds(starts).items()
        }
        with kafka_errors.translating(f"read {self._topic}", self._connection):
            self._unread = {partition for partition, place in reached.items() if not place.done}
            self._consumer.assign(
                [
                    TopicPartition(self._topic, partition, reached[partition].position)
                    for partition in self._unread
                ]
            )
        return reached

    def stop_fetching(self) -> None:
        """Fetch nothing until the next open()."""
        if places := self._consumer.assignment():
            self._consumer.unassign()
            self._consumer.resume(places)  # a paused partition would still be paused after the next assign()

    def leave(self, partition: int) -> None:
        """Read no more of `partition`."""
        if partition in self._unread:
            self._unread.discard(partition)
            if self._unread:
                self._consumer.pause([TopicPartition(self._topic, partition)])

    def seek(self, partition: int, offset: int) -> None:
        """Continue to read `partition` at `offset`."""
        self._consumer.seek(TopicPartition(self._topic, partition, offset))

    def visit(
        self, reached: Mapping[int, ReadPosition], visit: Callable[[int, list[Any]], bool | None]
    ) -> None:
        """Call `visit` with what batches() yields; leave partitions for which it returns True."""
        for partition, records in self.batches(reached):
            if visit(partition, records):
                self.leave(partition)
            reached[partition].position = records[-1].offset() + 1

    def records(self, reached: Mapping[int, ReadPosition]) -> Iterator[tuple[Any, ReadPosition]]:
        """Yield (record, its partition's ReadPosition) until every partition is read or left.

        The caller sets `position` after each record.
        """
        for partition, records in self.batches(reached):
            place = reached[partition]
            for record in records:
                # The caller may have left the partition, or skipped records with seek().
                if partition in self._unread and record.offset() >= place.position:
                    yield record, place

    def batches(self, reached: Mapping[int, ReadPosition]) -> Iterator[tuple[int, list[Any]]]:
        """Yield (partition, its next records) until every partition is read or left.

        The caller sets `position` of the partition to the offset after the records that it has processed.
        Raises Unavailable when Kafka sends nothing for `timeout_s` seconds.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        while self._unread:
            if self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"read {self._topic}: Kafka at {self._connection.bootstrap} sends nothing, "
                    f"{len(self._unread)} partitions are not read to their ends"
                )
            # consume(n, t) with n > 1 waits for the whole of t, even when records are there.
            fetched = self._consumer.consume(1, _POLL_S)
            batches: dict[int, list[Any]] = {}
            ended: set[int] = set()
            for record in fetched and fetched + self._consumer.consume(_BATCH_RECORDS, 0):
                partition, offset = record.partition(), record.offset() or 0
                if partition not in self._unread or record.topic() != self._topic:
                    continue
                place = reached[partition]
                error = record.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    self._check(partition, error)
                elif offset >= place.end:
                    # librdkafka reports the end of a log as an event, whose offset is after control records.
                    ended.add(partition)
                elif error is None and offset >= place.position:  # lower offsets were fetched before a seek
                    batches.setdefault(partition, []).append(record)
                # Otherwise a replica that lags behind its leader has reported an end before `place.end`.
            del fetched
            for partition, records in batches.items():
                yield partition, records
            for partition in ended & self._unread:
                reached[partition].position = reached[partition].end
            if batches or ended:
                deadline = self._clock.monotonic() + self._timeout_s
            for partition in [partition for partition in self._unread if reached[partition].done]:
                self.leave(partition)

    def _check(self, partition: int, error: KafkaError) -> None:
        if not kafka_errors.is_retriable(error):
            doing = f"read {self._topic}, partition {partition}"
            with kafka_errors.translating(doing, self._connection):
                raise KafkaException(error)
