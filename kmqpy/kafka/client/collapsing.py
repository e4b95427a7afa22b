"""Hands out one of equal messages that wait in a partition, in queues with the setting `collapse` (rule R41).

Senders put equal messages into one partition (`partition_of` in `sender`), so one client takes them. When it
takes a message, it asks Kafka how far the log of the partition reaches. An equal message that it reads later
from below that end, a *twin*, waited when the first was taken: its start marker is written with those of the
others, then its end marker, and nobody is handed it. Only offsets decide, never clocks. Copies of messages
(redelivered, redriven or delayed ones) are no twins and have none: somebody may have been handed the message.

What a client knows of a partition is dropped when it gives up the partition, when the log was cut back or the
topic recreated, and when start markers fail. Then twins of what was taken before come, too: nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.assigned_partition import AssignedPartition
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.cut_off import Client
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers, records_by_partition
from kmqpy.kafka.places import Offsets
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.queue.canonical import body_digest

_log = logging.getLogger(__name__)

MAX_DIGESTS = 100_000
"""So many messages are remembered by a client at most; of those taken first, twins come then."""
_MAX_TWINS = 10_000
"""A receive() reads on behind twins until it has met this many."""
_ENDS_TIMEOUT_S = 0.5
"""If Kafka does not tell in this time where the logs end, only messages that were read count as waiting."""


class Polled(NamedTuple):
    """Records to hand out; the numbers of these and of their twins, by partition; and those of the twins."""

    records: list[Any]
    offsets: Offsets
    twins: Offsets = MappingProxyType({})


class _PolledPartition:
    """What was polled of one partition."""

    def __init__(self, assigned: AssignedPartition) -> None:
        self.assigned = assigned
        self.records: list[Any] = []
        self.numbers: list[int] = []
        self.twins: list[int] = []


class Collapsing:
    """Tells the twins among the records that a client polls. One thread at a time uses it."""

    def __init__(self, connection: KafkaConnection, queue: QueueSettings) -> None:
        self._connection = connection
        self._queue = queue
        self._taken: dict[int, AssignedPartition] = {}
        """The partitions of the messages last polled."""
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

    def poll(self, member: GroupMember, max_records: int, wait_s: float) -> Polled:
        """Return up to `max_records` records that have no twin before them, and the twins met on the way.

        note_ends() must follow before any of them is handed out.
        """
        self._taken = {}
        polled: dict[int, _PolledPartition] = {}
        kept = twins = 0
        while True:
            records, offsets = member.poll(max_records - kept, wait_s)
            if any(one.assigned is not member.assigned(number) for number, one in polled.items()):
                # Lost, or begun anew, in this last poll: nobody may take what came before.
                polled = {n: one for n, one in polled.items() if one.assigned is member.assigned(n)}
            self._sort(member, records, offsets, polled)
            kept = sum(len(one.records) for one in polled.values())
            before, twins = twins, sum(len(one.twins) for one in polled.values())
            wait_s = 0.0
            if not records or twins <= before or kept >= max_records or twins >= _MAX_TWINS:
                break
        self._taken = {number: one.assigned for number, one in polled.items()}
        return Polled(
            [record for one in polled.values() for record in one.records],
            {number: one.numbers for number, one in polled.items()},
            {number: one.twins for number, one in polled.items() if one.twins},
        )

    def note_ends(self) -> None:
        """Ask where the logs end now: what stands below waited when the messages last polled were taken."""
        if not self._taken:
            return
        places = [TopicPartition(self._queue.name, number, OFFSET_END) for number in self._taken]
        ends: dict[int, int] = {}
        try:
            for place in self._consumer.offsets_for_times(places, timeout=_ENDS_TIMEOUT_S):
                if place.error is None:
                    ends[place.partition] = place.offset
        except KafkaException as exception:
            _log.warning(
                "equal messages that wait may be handed out: Kafka does not say where the queue ends",
                extra={"queue": self._queue.name, "error": librdkafka.error_name(exception)},
            )
        most = MAX_DIGESTS // len(self._taken)
        for number, assigned in self._taken.items():
            assigned.twins.note_end(max(assigned.position, ends.get(number, 0)), assigned.position, most)

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _sort(
        self, member: GroupMember, records: list[Any], offsets: Offsets, into: dict[int, _PolledPartition]
    ) -> None:
        for number, ones in records_by_partition(records).items():
            assigned, numbers = member.assigned(number), offsets[number]
            assert assigned is not None
            one = into.setdefault(number, _PolledPartition(assigned))
            for record, own, is_copy in zip(ones, numbers, self._are_copies(ones), strict=True):
                one.numbers.append(own)
                if is_copy or assigned.twins.is_first(body_digest(record.value() or b""), record.offset()):
                    one.records.append(record)
                else:
                    one.twins.append(own)

    def _are_copies(self, records: Sequence[Any]) -> Iterable[bool]:
        """Whether each record is a copy, or a delayed message: send() lets nobody else write such headers."""
        count = self._queue.redelivery_count_header
        for record, headers in zip(records, headers_of_each(records), strict=True):
            readable = read_headers(record)[0] if headers is UNREADABLE else headers or ()
            yield any(name == count or name.startswith("kmq-") for name, _ in readable)
