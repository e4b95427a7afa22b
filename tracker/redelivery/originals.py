"""Reads originals, the records of a queue topic that are to be redelivered, and also markers by offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.settings import KafkaConnection
from tracker.redelivery.redelivery_plan import Original

_FETCH_TIMEOUT_S = 5.0
"""fetch() ends when it has found no further original for this long."""
_MAX_GAP = 500
"""If the next original is more than this many offsets away, the consumer seeks instead of reading on."""
_MAX_FETCH_BYTES = 32_000_000
"""fetch() ends when the keys and values of the originals that it has found are this large together."""
_MAX_CONSUMED_RECORDS = 1_000
"""One call of consume() returns at most this many records."""


@dataclass
class FetchResult:
    """The result of one fetch(). Offsets that are in none of its attributes were not reached in time.

    found         originals by offset
    gone          offsets whose records Kafka does not have any more
    out_of_reach  offsets that can't be read now: Kafka reports an error, or says that its readable log ends
                  before them (an open transaction, or a broker that lags)
    end           the last stable offset, when the fetch began
    """

    found: dict[int, Original] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    out_of_reach: list[int] = field(default_factory=list)
    end: int = INT64_MAX


class OriginalsReader:
    """Reads records of queue topics and markers topics by offset. For one thread at a time."""

    def __init__(self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._connection = connection
        self._clock = clock
        self._consumer = self._new_consumer()

    def _new_consumer(self) -> Consumer:
        return librdkafka.new_consumer(
            self._connection,
            {
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                # Later requests wait for a fetch that finds nothing, even if it is for another partition.
                "fetch.wait.max.ms": 2,
                "queued.max.messages.kbytes": 32_768,
                # librdkafka decompresses a whole fetch at once: 1 MB of compressed zeros can be 1 GB.
                "fetch.message.max.bytes": 131_072,
            },
        )

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> FetchResult:
        """Read the records at these ascending offsets, as far as they can be read now.

        A record is gone (rule R14 of docs/rules.md) when its offset is below the log start, or when a read
        from there or from before gave a higher offset without an error. Raises KafkaException.
        """
        with self._renewed_after_errors():
            return self._fetch(topic, partition, offsets)

    @contextmanager
    def _renewed_after_errors(self) -> Iterator[None]:
        # A broker that has just lost its controller may say that a partition is unknown. A consumer believes
        # that for minutes, so a new one replaces it.
        try:
            yield
        except KafkaException:
            self._consumer.close()
            self._consumer = self._new_consumer()
            raise

    def _fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> FetchResult:
        low, end = self.bounds(topic, partition)
        fetched = FetchResult(end=end)
        fetched.gone = [offset for offset in offsets if offset < low]
        wanted = list(offsets[len(fetched.gone) :])
        if not wanted:
            return fetched
        self._consumer.assign([TopicPartition(topic, partition, wanted[0])])
        try:
            self._read(topic, partition, wanted, fetched)
        finally:
            self._consumer.unassign()
        return fetched

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset of the partition, and its last stable offset. Raises KafkaException."""
        try:
            return librdkafka.watermarks(self._consumer, topic, partition, _FETCH_TIMEOUT_S)
        except KafkaException as exception:
            if not librdkafka.refresh_partition(self._consumer, topic, partition, exception):
                raise
            return librdkafka.watermarks(self._consumer, topic, partition, _FETCH_TIMEOUT_S)

    def read_between(
        self,
        topic: str,
        partition: int,
        begin: int,
        end: int,
        timeout_s: float,
        visit: Callable[[list[Any]], None],
    ) -> None:
        """Call `visit` with lists of the committed records from offset `begin` to before `end`.

        Waits until every transaction with records there has ended. Raises KafkaException, even when the
        reading takes longer than `timeout_s`; it may have passed some of the records to `visit` by then. If
        retention has deleted the records at `begin`, reads from the log start on.
        """
        with self._renewed_after_errors():
            try:
                self._read_up_to(TopicPartition(topic, partition, begin), end, timeout_s, visit)
            except KafkaException as exception:
                error = kafka_errors.error_of(exception)
                if error is None or error.code() != KafkaError._AUTO_OFFSET_RESET:
                    raise
                # Retention has deleted the record at `begin`.
                low, _ = librdkafka.watermarks(self._consumer, topic, partition, timeout_s)
                first = TopicPartition(topic, partition, max(begin, low))
                self._read_up_to(first, end, timeout_s, visit)

    def _read_up_to(
        self, begin: TopicPartition, end: int, timeout_s: float, visit: Callable[[list[Any]], None]
    ) -> None:
        if begin.offset >= end:
            return
        deadline = self._clock.monotonic() + timeout_s
        self._consumer.assign([begin])
        try:
            while self._clock.monotonic() < deadline:
                # consume(1000, …) would wait until it has 1000 records.
                records = self._consumer.consume(1, 0.1)
                if records:
                    records += self._consumer.consume(_MAX_CONSUMED_RECORDS, 0)
                found: list[Any] = []
                position = begin.offset
                for record in records:
                    error = record.error()
                    position = record.offset()  # type: ignore[assignment]
                    if error is None:
                        if position < end:
                            found.append(record)
                        position += 1
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                if found:
                    visit(found)
                if position >= end:
                    return
        finally:
            self._consumer.unassign()
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _read(self, topic: str, partition: int, wanted: list[int], fetched: FetchResult) -> None:
        found, index, size = fetched.found, 0, 0
        deadline = self._clock.monotonic() + _FETCH_TIMEOUT_S
        while index < len(wanted) and size < _MAX_FETCH_BYTES and self._clock.monotonic() < deadline:
            for record in self._consumer.consume(min(len(wanted) - index, _MAX_CONSUMED_RECORDS), 0.1):
                error = record.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if not index:
                        raise KafkaException(error)
                    fetched.out_of_reach = wanted[index:]
                    return  # the originals before the error are good
                position: int = record.offset()  # type: ignore[assignment]
                # Offsets below a record that was read, or below the readable end, have no record.
                while wanted[index] < position:
                    fetched.gone.append(wanted[index])
                    index += 1
                    if index == len(wanted):
                        return
                if error is not None:
                    fetched.out_of_reach = wanted[index:]
                    return  # these offsets are beyond the last stable offset: try again later
                if wanted[index] == position:
                    found[position] = original = original_of(record)
                    size += len(original.value or b"") + len(original.key or b"")
                    index += 1
                    if index == len(wanted):
                        return
                    deadline = self._clock.monotonic() + _FETCH_TIMEOUT_S
                if wanted[index] - position > _MAX_GAP:
                    self._consumer.seek(TopicPartition(topic, partition, wanted[index]))
                    break


def original_of(record: Any) -> Original:
    """Convert a record of the queue topic to the parts that a copy needs."""
    epoch = record.leader_epoch()
    return Original(
        record.offset(),
        record.timestamp()[1],
        record.key(),
        record.value(),
        message_headers(record),
        -1 if epoch is None else epoch,
    )
