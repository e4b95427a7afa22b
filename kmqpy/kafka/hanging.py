"""Finds transactions that nobody ends, and that hold back readers of committed records for ever.

Kafka ends a transaction that lasts longer than its time-out. It does not end one that the transaction's
coordinator has forgotten or takes for ended, for example because a broker did not write a commit's control
record to one partition (Kafka's issue KAFKA-20734), or because a record came after the abort. The last stable
offset of the partition then stays at the first record of this transaction, and readers of committed records
get neither that record nor any after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.log_ends import LogEnds, TopicPlace
from kmqpy.kafka.markers.claim_headers import CLAIM
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.partition_reader import KeptConsumers
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topics import Topics
from kmqpy.message import Headers

_log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
"""The time limit of each request. A partition that does not answer is looked at the next time."""

LOOK_EVERY_S = 30.0
"""The seconds between two looks of a tracker or client for hanging transactions."""
_KAFKAS_DEFAULT_MS = 15 * 60_000
"""For how long a transaction may last where Kafka does not tell its transaction.max.timeout.ms."""
_GRACE_MS = 60_000
"""More time for Kafka, which looks for transactions over their time-outs every 10 s, and for clocks that
differ."""


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that has been open for longer than any transaction may last.

    offset            the offset of its first record in the partition: the last stable offset
    waiting           how many offsets there are from that record to the end of the log: about as many wait
    since_ms          when that record was appended, or when the transaction was first seen
    headers           those of that record
    told_by_producer  True if since_ms is a time of its producer's choice: the transaction may be a new one
    """

    topic: str
    partition: int
    offset: int
    waiting: int
    since_ms: int
    headers: Headers
    told_by_producer: bool = False

    @property
    def ours(self) -> bool:
        """Return True if a tracker or redrive of kmqpy has written the transaction."""
        return _is_ours(self.headers)

    @property
    def place(self) -> TopicPlace:
        """Topic and partition."""
        return self.topic, self.partition

    def lasts_s(self, clock: Clock) -> int:
        """For how many seconds the transaction has been open."""
        return max(0, clock.wall_ms() - self.since_ms) // 1000


@dataclass(slots=True)
class _Standstill:
    """A last stable offset below the end of the log.

    since_ms          when the transaction there was begun, as far as it is known
    headers           those of its first record; None before it was read, which may change `since_ms`
    told_by_producer  True if `since_ms` is what a producer has written into that record
    """

    offset: int
    since_ms: int
    headers: Headers | None = None
    told_by_producer: bool = False


class HangingTransactions:
    """Looks for hanging transactions again and again; for one thread at a time.

    trust_producers  True: believe the time of records to which a producer has given it. Otherwise, and if
                     neither Kafka nor kmqpy has given it, a transaction counts as begun when it was first
                     seen, because producers may write any time
    """

    def __init__(
        self, connection: KafkaConnection, clock: Clock = SYSTEM_CLOCK, *, trust_producers: bool = False
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._trust_producers = trust_producers
        self._seen: dict[TopicPlace, _Standstill] = {}
        self._longest_ms: int | None = None

    def look(self, places: Iterable[TopicPlace]) -> list[HangingTransaction]:
        """Return the hanging transactions in these partitions; leaves out partitions that do not answer.

        Only transactions that the last look has met in the same place count, so one look alone finds nothing.
        Asks each broker twice; reads one record of each transaction that lasts from one look to another.
        Its clients are new in each look, so they are never cut off (see kmqpy.kafka.cut_off).
        """
        now_ms = self._clock.wall_ms()
        seen, self._seen = self._seen, {}
        found = []
        for place, (stable, end) in _behind(self._connection, list(places)).items():
            known = seen.get(place)
            if known is None or known.offset != stable:
                self._seen[place] = _Standstill(stable, now_ms)
                continue
            self._seen[place] = known
            if self._hangs(place, known, now_ms):
                headers, waiting = known.headers or (), end - stable
                found.append(
                    HangingTransaction(
                        *place, stable, waiting, known.since_ms, headers, known.told_by_producer
                    )
                )
        return found

    def is_open(self, place: TopicPlace) -> bool:
        """Return True if the last look has met an open transaction in this partition, hanging or not."""
        return place in self._seen

    def stands_still_at(self, place: TopicPlace) -> int | None:
        """The offset of a transaction of a tracker or redrive that the last two looks have met, or None."""
        seen = self._seen.get(place)
        return seen.offset if seen is not None and _is_ours(seen.headers or ()) else None

    def _hangs(self, place: TopicPlace, known: _Standstill, now_ms: int) -> bool:
        if known.headers is None:
            try:
                self._read_first_record(place, known)
            except KmqError as error:  # we may not read the topic, for example
                _log.debug("not known when a transaction was begun: %s", error)
        return now_ms - known.since_ms > self._bound_ms()

    def _read_first_record(self, place: TopicPlace, known: _Standstill) -> None:
        """Read when the transaction was begun, and its headers."""
        topic, partition = place
        for record in _first_records(self._connection, topic, {partition: known.offset}, _TIMEOUT_S):
            known.headers = message_headers(record)
            kind, timestamp_ms = record.timestamp()
            by_kafka = kind == TIMESTAMP_LOG_APPEND_TIME
            trusted = by_kafka or self._trust_producers or _is_ours(known.headers)
            if trusted and timestamp_ms < known.since_ms:
                known.since_ms, known.told_by_producer = timestamp_ms, not by_kafka

    def _bound_ms(self) -> int:
        """For how long an ordinary transaction may be open."""
        return self._kafkas_longest_ms() + _GRACE_MS

    def _kafkas_longest_ms(self) -> int:
        if self._longest_ms is None:
            try:
                self._longest_ms = Topics(self._connection, _TIMEOUT_S).longest_transaction_ms()
            except KmqError as error:
                _log.debug("Kafka does not tell transaction.max.timeout.ms: %s", error)
        return self._longest_ms or _KAFKAS_DEFAULT_MS


def open_transactions(connection: KafkaConnection, places: Iterable[TopicPlace]) -> list[HangingTransaction]:
    """The transactions that are open in these partitions, whether they hang or not.

    Of each partition the first. Leaves out partitions that do not answer. Raises Unavailable, TopicError.
    """
    return [
        HangingTransaction(
            *place,
            stable,
            end - stable,
            record.timestamp()[1],
            message_headers(record),
            told_by_producer=True,
        )
        for place, (stable, end) in _behind(connection, list(places)).items()
        for record in _first_records(connection, place[0], {place[1]: stable}, _TIMEOUT_S)
        if record.offset() == stable
    ]


def _behind(connection: KafkaConnection, places: list[TopicPlace]) -> dict[TopicPlace, tuple[int, int]]:
    """Last stable offset and end of each partition in which the one is below the other."""
    with closing(LogEnds(connection, committed=True)) as asks:
        stable = _known(asks.each_of(places))
    with closing(LogEnds(connection)) as asks:
        ends = _known(asks.each_of(stable))
    return {place: (stable[place], end) for place, end in ends.items() if stable[place] < end}


def open_since_before(
    kept: KeptConsumers, topic: str, stable: Mapping[int, int], before_ms: int
) -> list[int]:
    """The partitions with a record at their last stable offset (`stable`) that is older than `before_ms`.

    That is the first record of an open transaction. Leaves out partitions whose end Kafka does not tell.
    """
    ends = _known(kept.ends.each_of((topic, partition) for partition in stable))
    behind = {p: at for p, at in stable.items() if at < ends.get((topic, p), 0)}
    found = _first_records(kept, topic, behind, kept.connection.timeout_s) if behind else []
    return [record.partition() for record in found if record.timestamp()[1] < before_ms]


def _first_records(
    connection: KafkaConnection | KeptConsumers, topic: str, starts: Mapping[int, int], timeout_s: float
) -> list[Any]:
    """The first record of each partition from these offsets on, committed or not."""
    found: list[Any] = []
    partition_reader.scan(
        connection, topic, starts, found.append, limit=1, uncommitted=True, timeout_s=timeout_s
    )
    return found


def _is_ours(headers: Headers) -> bool:
    return any(name in (ANCESTORS, CLAIM, COPY) for name, _ in headers)


def _known(ends: dict[TopicPlace, int | KmqError]) -> dict[TopicPlace, int]:
    return {place: end for place, end in ends.items() if isinstance(end, int)}
