"""The claim of a redelivery: decides inside the transaction which messages are still to be copied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaException

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies.copy_transaction import NewRecord, Withdrawn
from kmqpy.kafka.markers.claims import CLAIM, DROPPED, naming_tick, offsets_with_markers
from tracker.redelivery.originals import OriginalsReader


class MarkersRead(NamedTuple):
    """The markers that a plan was made from: those of `topic` before markers offset `position`.

    `reader` can read those that follow.
    """

    reader: OriginalsReader
    topic: str
    position: int


class Claim:
    """Names the messages of one transaction, before anything else of the transaction is written.

    dropped  messages that are left alone: a marker that the plan did not know stands before the claim

    Such a marker may be an end, or it may give the message a longer lease. The tracker reads it later, as any
    other, and plans again what is still due.
    """

    def __init__(
        self, partition: int, offsets: Collection[int], known: MarkersRead, timeout_s: float
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self._partition = partition
        self._offsets = sorted(offsets)
        self._known = known
        self._timeout_s = timeout_s

    @property
    def record(self) -> NewRecord:
        """The claim itself."""
        return NewRecord(self._partition, *naming_tick(self._partition, CLAIM, self._offsets))

    def settle(self, position: int) -> list[NewRecord]:
        """Read up to the claim, which stands at `position`; returns a record that names what is dropped.

        The list is empty where nothing is dropped. Raises Withdrawn when not everything before the claim is
        decided in time, or can be read.
        """
        reader, topic, begin = self._known
        try:
            records = reader.read_between(topic, self._partition, begin, position, self._timeout_s)
        except KafkaException as exception:
            raise Withdrawn(
                f"markers before a claim can't be read: {librdkafka.error_name(exception)}"
            ) from exception
        self.dropped = offsets_with_markers(records, self._offsets)
        return [self._named(sorted(self.dropped))] if self.dropped else []

    def _named(self, dropped: Sequence[int]) -> NewRecord:
        return NewRecord(self._partition, *naming_tick(self._partition, DROPPED, dropped))
