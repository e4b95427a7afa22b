"""Hands out one of equal messages that wait in a partition, in queues with the setting `collapse` (rule R41).

Senders put equal messages into one partition (`partition_of` in `sender`), so one client takes them. When it
takes a message, it asks Kafka where the log of the partition ends. An equal message that it reads later from
below that end, a *twin*, waited when the first was taken, so the client passes it over: it has no start
marker, and the next commit leads behind it. Only offsets decide, never clocks. Copies (redelivered, redriven,
and delayed messages) are no twins and have none: somebody may have been handed the message.

A twin is not ended by an end marker, because a client that has lost the partition and does not know it could
then end a message that its successor has taken. Its commit is refused.

What a client knows of a partition is dropped when it gives up the partition, when the log was cut back or the
topic recreated, and when start markers fail. Then twins of what was taken before come, too: nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.assigned_partition import AssignedPartition
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.cut_off import Client
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers, records_by_partition
from kmqpy.kafka.places import Offsets
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.queue.canonical import body_digest
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

MAX_DIGESTS = 100_000
"""So many messages are remembered by a client at most; of those taken first, twins come then."""
_MAX_TWINS = 10_000
"""A receive() reads on behind twins until it has met this many."""
_ENDS_TIMEOUT_S = 0.5
"""If Kafka does not tell in this time where the logs end, only messages that were read count as waiting."""


class _PolledPartition:
    """What was polled of one partition: records without twins, and their numbers."""

    def __init__(self, assigned: AssignedPartition) -> None:
        self.assigned = assigned
        self.records: list[Any] = []
        self.numbers: list[int] = []


class Collapsing:
    """Tells the twins among the records that a client polls. One thread at a time uses it."""

    def __init__(self, connection: KafkaConnection, queue: QueueSettings, telemetry: Telemetry) -> None:
        self._connection = connection
        self._queue = queue
        self._telemetry = telemetry
        self._polled: dict[int, _PolledPartition] = {}
        self._consumer = self._new_consumer()

    def _new_consumer(self) -> Any:
        # Uncommitted: messages behind an open transaction wait, too.
        return librdkafka.new_consumer(self._connection, {"isolation.level": "read_uncommitted"})

    @property
    def consumer(self) -> Client:
        """The consumer of librdkafka, for CutOffCheck."""
        return self._consumer  # type: ignore[no-any-return]

    def replace(self, cut_off: Collection[Client]) -> None:
        """Ask with a new consumer if this one is cut off."""
        if self._consumer in cut_off:
            self._consumer = self._new_consumer()

    def poll(self, member: GroupMember, max_records: int, wait_s: float) -> tuple[list[Any], Offsets]:
        """Return up to `max_records` records that are no twins, and their numbers by partition.

        Reads on behind twins. note_ends() must follow before any of the messages is handed out.
        """
        self._polled = {}
        left, twins = max_records, 0
        while True:
            records, offsets = member.poll(left, wait_s)
            # Who lost a partition in this poll, or began it anew, does not take what came of it before.
            self._polled = {
                number: one for number, one in self._polled.items() if one.assigned is member.assigned(number)
            }
            passed = self._sort(member, records, offsets)
            left, twins = max_records - sum(len(one.records) for one in self._polled.values()), twins + passed
            if not passed or not left or twins >= _MAX_TWINS:
                break
            wait_s = 0.0
        if twins:
            self._telemetry.finished(self._queue.name, "collapse", twins)
        return (
            [record for one in self._polled.values() for record in one.records],
            {number: one.numbers for number, one in self._polled.items() if one.numbers},
        )

    def note_ends(self) -> None:
        """Ask where the logs end now: what stands below waited when the messages last polled were taken."""
        places = [TopicPartition(self._queue.name, number, OFFSET_END) for number in self._polled]
        ends: dict[int, int] = {}
        try:
            for place in self._consumer.offsets_for_times(places, timeout=_ENDS_TIMEOUT_S):
                if place.error is None:
                    ends[place.partition] = place.offset
        except KafkaException as exception:
            _log.warning(
                "equal messages that wait may be handed out: Kafka does not say where the queue ends",
                extra={"queue": self._queue.name, "error": kafka_errors.error_name(exception)},
            )
        most = MAX_DIGESTS // len(self._polled)
        for number, one in self._polled.items():
            one.assigned.twins.note_end(ends.get(number, 0), one.assigned.position, most)

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _sort(self, member: GroupMember, records: list[Any], offsets: Offsets) -> int:
        """Keep the records that are no twins, and pass over the others; returns how many those are."""
        passed = 0
        for number, ones in records_by_partition(records).items():
            assigned = member.assigned(number)
            assert assigned is not None
            kept = self._polled.setdefault(number, _PolledPartition(assigned))
            before = len(kept.records)
            for record, own, is_copy in zip(ones, offsets[number], self._are_copies(ones), strict=True):
                if is_copy or assigned.twins.is_first(body_digest(record.value() or b""), record.offset()):
                    kept.records.append(record)
                    kept.numbers.append(own)
            twins = len(ones) - (len(kept.records) - before)
            if twins:
                assigned.commits.pass_over(twins, ones[-1].offset())
            passed += twins
        return passed

    def _are_copies(self, records: Sequence[Any]) -> Iterable[bool]:
        """Whether each record is a copy, or a delayed message: send() lets nobody else write such headers."""
        count = self._queue.redelivery_count_header
        for record, headers in zip(records, headers_of_each(records), strict=True):
            readable = read_headers(record)[0] if headers is UNREADABLE else headers or ()
            yield any(name == count or name.startswith("kmq-") for name, _ in readable)
