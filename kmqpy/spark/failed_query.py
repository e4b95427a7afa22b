"""Writes markers for messages that a query left in flight: taken, and not finished when the query ended.

When a query ends, the driver writes markers by which the redelivery of these messages does not count as an
attempt. The restarted query has the same micro-batch. If the query has failed again, the driver gives half of
the messages back to the queue (by nacks: a tracker redelivers them, for later micro-batches), so the next run
hands out half as many. So a message that makes queries fail is alone after some restarts.
`kmqpy.spark.isolation` has the rules. All state is in the markers, except the memory that
isolation.remember() returns: which messages failed before.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION, int_header, redelivery_count
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.spark import isolation
from kmqpy.spark.checkpoint import RememberedFailures
from kmqpy.spark.failures import Failure, FailurePolicy, alike_markers, nacks
from kmqpy.spark.isolation import FAILED_PREFIX
from kmqpy.spark.taker import read_taken
from kmqpy.worker.outcome import shortened

_log = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 10.0
"""split() waits at most this long, in seconds, until Kafka has confirmed the nacks; then it raises
Unavailable."""
_EVEN_CHANCE = 0.5
"""The probability with which the next run keeps the lower half of the messages, and not the upper half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leftovers:
    """The messages that ended queries left in flight.

    taken     by partition, the messages that queries have taken, and that are neither finished nor given
              back; their leases may be over
    now_ms    by partition, the partition's now: the largest timestamp read from its markers
    progress  the sum of the group's committed offsets: it grows when a micro-batch that took messages is done
    """

    taken: Mapping[int, list[Entry]]
    now_ms: Mapping[int, int]
    progress: int

    def failed(self) -> Iterator[tuple[Place, str]]:
        """The messages that failed queries, not stopped ones, have left; each with the query's error."""
        for partition, entries in self.taken.items():
            for entry in entries:
                if not entry.counts and entry.reason and entry.reason.startswith(FAILED_PREFIX):
                    yield (partition, entry.offset), entry.reason


class _Message(NamedTuple):
    """The place of a message's first copy, and the number of this delivery, from 1."""

    first_copy: Place
    attempts: int


class LeftoverMessages:
    """Writes markers for messages that queries of one queue left in flight: extensions, then nacks.

    The methods raise Unavailable.
    """

    def __init__(
        self,
        queue: QueueSettings,
        connection: KafkaConnection,
        writer: MarkerWriter,
    ) -> None:
        self._queue = queue
        self._connection = connection
        self._writer = writer

    def spare(self, failure: str | None) -> None:
        """Write, for messages that an ended query left in flight, that their redelivery is no attempt.

        failure  the error with which the query failed, which becomes the reason of the messages; None if the
                 query was stopped

        The leases of a failed query's messages become at least isolation.MIN_RERUN_WAIT_MS long, if the
        queue's max_lease_ms allows that.
        """
        left = self._read_leftovers()
        wait_ms = 0 if failure is None else isolation.MIN_RERUN_WAIT_MS
        reason = None if failure is None else shortened(FAILED_PREFIX + failure)
        for partition, entries in left.taken.items():
            alike: dict[int, list[int]] = {}
            for entry in entries:
                lease_ms = max(0, entry.due_ms - left.now_ms[partition], wait_ms)
                alike.setdefault(lease_ms, []).append(entry.offset)
            for lease_ms, offsets in alike.items():
                self._writer.put(
                    alike_markers(
                        self._queue,
                        partition,
                        Op.EXTEND,
                        sorted(offsets),
                        redeliver_after_ms=lease_ms,
                        counts=False,
                        reason=reason,
                    )
                )

    def split(self, backoff: Backoff, remembered: RememberedFailures) -> None:
        """Give messages back that the first micro-batch of a restarted query should not hand out.

        backoff     how long a message that has failed alone waits for its redelivery
        remembered  loads and saves the memory of failed messages

        Raises ConfigError when the memory can't be saved.
        """
        left = self._read_leftovers()
        failed = dict(left.failed())
        if not failed:
            return
        found = self._first_copies(failed) if len(failed) <= isolation.MAX_REMEMBERED_BATCH else {}
        before = remembered.load()
        memory = isolation.remember([one.first_copy for one in found.values()], left.progress, before)
        if memory != before:
            remembered.save(memory)
        if not isolation.failed_before(left.progress, before):
            return
        if len(failed) > 1:
            _, given_back = isolation.split(failed, keeps_lower=random.random() < _EVEN_CHANCE)
            self._give_back(
                {place: Failure(op=Op.NACK, counts=False, reason=failed[place]) for place in given_back}
            )
            _log.warning(
                "a micro-batch failed; it is tried again with half of its messages, the others come later",
                extra={"queue": self._queue.name, "count": len(failed), "given_back": len(given_back)},
            )
            return
        ((place, reason),) = failed.items()
        message = found[place]
        pays = isolation.counts_as_attempt(message.first_copy, left.progress, memory)
        policy = FailurePolicy(queue=self._queue, backoff=backoff)
        self._give_back({place: policy.given_back(reason, message.attempts, counts=pays)})
        _log.warning(
            "a micro-batch of one message failed",
            extra={"queue": self._queue.name, "place": place, "counts": pays},
        )

    def _give_back(self, failures: Mapping[Place, Failure]) -> None:
        self._writer.put(nacks(self._queue, failures))
        if left := self._writer.flush(_WRITE_TIMEOUT_S):
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: {left} nacks are not confirmed yet"
            )

    def _read_leftovers(self) -> _Leftovers:
        topics = Topics(self._connection).check(self._queue)
        commits = group_commits(self._connection, self._queue, range(topics.partitions), topics.ids)
        taken: dict[int, list[Entry]] = {}
        now_ms: dict[int, int] = {}
        with closing(RepeatedReader(self._connection, self._queue.markers_topic)) as markers:
            for partition in range(topics.partitions):
                commit = commits.get(partition, Commit(0, 0))
                first, at = commit.offset, commit.markers_offset or 0
                found = read_taken(self._queue, self._connection, markers, partition, first, at)
                taken[partition] = [
                    entry
                    for entry in found.state
                    if entry.state is EntryState.LEASED and entry.offset >= first
                ]
                now_ms[partition] = found.now_ms
        progress = sum(commit.offset for commit in commits.values())
        return _Leftovers(taken=taken, now_ms=now_ms, progress=progress)

    def _first_copies(self, places: Iterable[Place]) -> dict[Place, _Message]:
        records = partition_reader.read_at(self._connection, self._queue.name, places)
        return {place: self._message(place, records.get(place)) for place in places}

    def _message(self, place: Place, record: Any) -> _Message:
        headers = message_headers(record) if record is not None else ()
        try:
            partition, offset = (int_header(headers, name) for name in (ORIGINAL_PARTITION, ORIGINAL_OFFSET))
            attempts = redelivery_count(headers, self._queue.redelivery_count_header) + 1
        except DecodeError:
            return _Message(place, 1)
        return _Message(place if partition is None or offset is None else (partition, offset), attempts)
