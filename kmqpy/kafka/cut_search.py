"""Finds out whether the log of a partition was cut back, and where (rule R39 of docs/rules.md).

Leader epochs ascend along a log, and each record keeps the epoch in which it was written. So a log was cut if
it has no record any more where one was known to be, or one with a higher epoch. It was written anew behind
the last record whose epoch is not higher.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.markers.claim_headers import CLAIM_ID
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.log_cuts import Cut, offset_of
from kmqpy.kafka.markers.records import read_headers, read_marker
from kmqpy.kafka.settings import KafkaConnection

_POLL_S = 0.1
"""Seconds of one wait for a record."""
_SHORT_END_CONFIRMED_S = 3.0
"""Seconds for which Kafka must say that the log ends before a known record, if it names no higher epoch. A
broker that was paused answers as leader for a while, and does not know what its successor has written."""
_RECHECK_S = 0.5
"""The pause between two requests during this time."""


class _Log(NamedTuple):
    """The first offset of a log, its end, and its latest leader epoch (-1: Kafka names none)."""

    start: int
    end: int
    epoch: int


def find_cut(
    connection: KafkaConnection,
    topic: str,
    partition: int,
    *,
    offset: int,
    epoch: int,
    may_be_control: bool = False,
    claim_id: bytes = b"",
    starts: int | None = None,
    timeout_s: float | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Cut | None:
    """The cut that took away the record which is known to have stood at `offset`, with this leader epoch.

    Returns None if the record is still there, or if it is below the log start: retention has deleted it. Also
    if the log ends before it, and nobody was elected leader since: then it never was there. The cut's start
    is the offset after the last record whose epoch is not above `epoch`, or the log start if there is none;
    so no message stands between it and the first record behind the cut, whose epoch the cut has. If no record
    is there yet, it has the latest epoch of the partition; `epoch + 1` where Kafka names none.

    may_be_control  True: the record may be one that ends a transaction. Readers don't see those, so that none
                    is seen at `offset` proves nothing, unless one of a higher epoch stands before it
    claim_id        the record is a copy that names this claim: then it is still there, whatever its epoch is;
                    a transaction that was aborted after an election may have written it
    starts          the record is the start marker of the message at this queue offset, perhaps with a higher
                    epoch: its writer does not know in which epoch Kafka wrote it

    Raises Unavailable when Kafka does not answer for `timeout_s` seconds, TopicError when the topic is gone.
    """
    doing = f"look for a cut in the log of {topic}, partition {partition}"
    search = _Search(connection, topic, partition, timeout_s, clock)
    try:
        with kafka_errors.translating(doing, connection):
            return search.find(offset, epoch, may_be_control=may_be_control, claim_id=claim_id, starts=starts)
    finally:
        search.close()


class _Search:
    """Reads single records of a partition, uncommitted ones included."""

    def __init__(
        self, connection: KafkaConnection, topic: str, partition: int, timeout_s: float | None, clock: Clock
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._partition = partition
        self._timeout_s = connection.timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._consumer: Consumer = librdkafka.new_consumer(
            connection,
            {
                "isolation.level": "read_uncommitted",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 20,
                "fetch.message.max.bytes": 65_536,
                "queued.min.messages": 1,
            },
        )

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def find(
        self, offset: int, epoch: int, *, may_be_control: bool, claim_id: bytes, starts: int | None
    ) -> Cut | None:
        """See find_cut(). Raises KafkaException, Unavailable."""
        log = self._ask()
        confirmed_at = self._clock.monotonic() + _SHORT_END_CONFIRMED_S
        while log.end <= offset and log.epoch <= epoch and self._clock.monotonic() < confirmed_at:
            self._clock.sleep(_RECHECK_S)
            log = self._ask()
        if offset < log.start or (log.end <= offset and 0 <= log.epoch <= epoch):
            return None
        found, is_gap = None, False
        if offset < log.end:
            found = self._first_from(offset, log)
            if found is None or found.offset() != offset:
                if (log.epoch if found is None else _epoch_of(found)) <= epoch:
                    return None  # a gap that no cut has made: behind one, epochs are higher
                is_gap = True
            elif (
                _epoch_of(found) <= epoch
                or (claim_id and (CLAIM_ID, claim_id) in read_headers(found)[0])
                or (starts is not None and _starts(found, starts))
            ):
                return None
        cut = self._cut_before(min(offset, log.end), found, epoch, log)
        if is_gap and may_be_control:
            first = self._first_from(cut.start, log)
            return cut if first is not None and first.offset() < offset else None
        return cut

    def _cut_before(self, end: int, behind: Any, epoch: int, log: _Log) -> Cut:
        """The cut at or before offset `end`; `behind` is the first record from `end` on, None without one."""
        low = log.start
        while low < end:
            middle = (low + end) // 2
            record = self._first_from(middle, log)
            if record is not None and _epoch_of(record) <= epoch:
                low = record.offset() + 1
            else:
                end, behind = middle, record
        if behind is not None and 0 <= log.epoch < _epoch_of(behind):
            raise Unavailable(  # some of the records may be of the log before a second cut
                f"{self._topic}, partition {self._partition}: a leader was elected meanwhile; try again"
            )
        return Cut(max(log.epoch, epoch + 1) if behind is None else _epoch_of(behind), low, max(0, epoch))

    def _ask(self) -> _Log:
        start = kafka_errors.retrying(
            partial(librdkafka.watermarks, self._consumer, self._topic, self._partition),
            self._timeout_s,
            self._connection,
            also=partial(librdkafka.refresh_partition, self._consumer, self._topic, self._partition),
            clock=self._clock,
        )[0]
        # Only with its answer to this request does Kafka name an epoch; see LogEnds.
        place = kafka_errors.retrying(self._ask_end, self._timeout_s, self._connection, clock=self._clock)
        return _Log(start, place.offset, -1 if place.leader_epoch is None else place.leader_epoch)

    def _ask_end(self, try_s: float) -> TopicPartition:
        wanted = TopicPartition(self._topic, self._partition, OFFSET_END)
        (place,) = self._consumer.offsets_for_times([wanted], timeout=try_s)
        if place.error is not None:
            raise KafkaException(place.error)
        if place.offset < 0:
            raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
        return place

    def _first_from(self, offset: int, log: _Log) -> Any:
        """The first record at or behind `offset`; None if only control records, or none, follow."""
        deadline = self._clock.monotonic() + self._timeout_s
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])
        try:
            while self._clock.monotonic() < deadline:
                for record in self._consumer.consume(1, _POLL_S):
                    error = record.error()
                    if error is None:
                        return record
                    if error.code() != KafkaError._PARTITION_EOF:
                        if not kafka_errors.is_retriable(error):
                            raise KafkaException(error)
                    elif (record.offset() or 0) >= log.end:
                        return None
                    # Otherwise a leader that does not know yet how far its log is replicated.
        finally:
            self._consumer.unassign()
        raise Unavailable(
            f"{self._topic}, partition {self._partition}: Kafka at {self._connection.bootstrap} sends no "
            f"record from offset {offset} on; try again"
        )


def _starts(record: Any, offset: int) -> bool:
    """Return True if the record is a start marker, and the last message that it names stands at `offset`."""
    try:
        marker = read_marker(record)
    except DecodeError:
        return False
    return marker.op in (Op.TAKE, Op.DELAY) and offset_of(marker.highest) == offset


def _epoch_of(record: Any) -> int:
    epoch = record.leader_epoch()
    return -1 if epoch is None else int(epoch)
