"""Writes markers for messages that a query left in flight: taken, and not finished when the query ended.

`kmqpy.spark.isolation` has the rules by which a message that makes queries fail is alone after some restarts.
All state is in the markers, except the memory that isolation.remember() returns.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from kmqpy.core.backoff import Backoff
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.message_headers import redelivery_count
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.message import Headers
from kmqpy.spark import isolation
from kmqpy.spark.checkpoint import RememberedFailures
from kmqpy.spark.failures import Failure, FailurePolicy, nacks
from kmqpy.spark.isolation import FAILED_PREFIX
from kmqpy.spark.lanes import Lanes, LaneWriter, first_record
from kmqpy.spark.taker import read_taken
from kmqpy.worker.outcome import shortened

_log = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 10.0
"""How long split() waits for Kafka to confirm the nacks; then it raises Unavailable."""
_EVEN_CHANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leftovers:
    """The messages that queries have taken, and that are neither finished nor given back.

    taken     their entries; their leases may be over
    now_ms    by partition, the partition's now: the largest timestamp read from its markers
    progress  see isolation
    """

    taken: Mapping[Place, Entry]
    now_ms: Mapping[int, int]
    progress: int


class LeftoverMessages:
    """Writes markers for messages that queries of one queue left in flight: extensions, then nacks.

    The methods raise Unavailable.
    """

    def __init__(self, queue: QueueSettings, connection: KafkaConnection, writer: LaneWriter) -> None:
        self._queue = queue
        self._lanes = Lanes(queue)
        self._connection = connection
        self._writer = writer

    def spare(self, failure: str | None) -> None:
        """Write, for messages that an ended query left in flight, that their redelivery is no attempt.

        failure  the error with which the query failed, which becomes the reason of the messages; None if the
                 query was stopped

        The leases of a failed query's messages become at least isolation.MIN_RERUN_WAIT_MS long.
        """
        left = self._read_leftovers()
        wait_ms = 0 if failure is None else isolation.MIN_RERUN_WAIT_MS
        reason = None if failure is None else shortened(FAILED_PREFIX + failure)

        @cache
        def extension(lease_ms: int) -> Failure:
            return Failure(op=Op.EXTEND, delay_ms=lease_ms, counts=False, reason=reason)

        extensions = {
            place: extension(max(0, entry.due_ms - left.now_ms[place[0]], wait_ms))
            for place, entry in left.taken.items()
        }
        self._writer.put(nacks(self._queue, extensions))

    def split(self, backoff: Backoff, remembered: RememberedFailures) -> None:
        """Give messages back that the first micro-batch of a restarted query should not hand out.

        backoff     how long a message that has failed alone waits for its redelivery
        remembered  loads and saves the memory of failed messages

        Raises ConfigError when the memory can't be saved.
        """
        left = self._read_leftovers()
        failed = {  # those of failed queries, not of stopped ones
            place: entry.reason
            for place, entry in left.taken.items()
            if not entry.counts and entry.reason and entry.reason.startswith(FAILED_PREFIX)
        }
        if not failed:
            return
        found: dict[Place, Headers] = {}
        if len(failed) <= isolation.MAX_REMEMBERED_BATCH:
            found = self._read_headers(failed)
        first_copies = {place: self._first_record(place, headers) for place, headers in found.items()}
        before = remembered.load()
        memory = isolation.remember(first_copies.values(), left.progress, before)
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
        try:
            attempts = redelivery_count(found[place], self._queue.redelivery_count_header) + 1
        except DecodeError:
            attempts = 1
        pays = isolation.counts_as_attempt(first_copies[place], left.progress, memory)
        policy = FailurePolicy(queue=self._queue, backoff=backoff)
        self._give_back({place: policy.given_back(reason, attempts, counts=pays)})
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

    def _read_headers(self, places: Iterable[Place]) -> dict[Place, Headers]:
        """The headers of these messages, none of those that are gone."""
        found: dict[Place, Headers] = dict.fromkeys(places, ())
        of_lanes: dict[int, list[Place]] = {}
        for number, offset in found:
            _, partition = self._lanes.place(number)
            of_lanes.setdefault(number - partition, []).append((partition, offset))
        for base, lane in self._lanes.bases():
            if wanted := of_lanes.get(base):
                records = partition_reader.read_at(self._connection, lane.name, wanted)
                found |= {(base + p, offset): message_headers(one) for (p, offset), one in records.items()}
        return found

    def _first_record(self, place: Place, headers: Headers) -> Place:
        lane, partition = self._lanes.place(place[0])
        return first_record(headers, lane, (partition, place[1])) or place

    def _read_leftovers(self) -> _Leftovers:
        taken: dict[Place, Entry] = {}
        now_ms: dict[int, int] = {}
        progress = 0
        for base, lane in self._lanes.bases():
            topics = Topics(self._connection).check(lane)
            commits = group_commits(self._connection, lane, range(topics.partitions), topics.ids)
            with closing(RepeatedReader(self._connection, lane.markers_topic)) as markers:
                for partition in range(topics.partitions):
                    commit = commits.get(partition, Commit(0, 0))
                    first, at = commit.offset, commit.markers_offset or 0
                    found = read_taken(lane, self._connection, markers, partition, first, at)
                    for entry in found.state:
                        if entry.state is EntryState.LEASED and entry.offset >= first:
                            taken[base + partition, entry.offset] = entry
                    now_ms[base + partition] = found.now_ms
            progress += sum(commit.offset for commit in commits.values())
        return _Leftovers(taken=taken, now_ms=now_ms, progress=progress)
