"""The claim of a redelivery: decides inside the transaction which messages are still to be copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaException

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies.copy_transaction import NewRecord, TransactionCancelled
from kmqpy.kafka.markers.claims import CLAIM, DROPPED, naming_tick, offsets_with_markers
from tracker.redelivery.last_attempts import PartitionAttempts
from tracker.redelivery.originals import OriginalsReader


class MarkersRead(NamedTuple):
    """The markers that a plan was made from: those of `topic` before markers offset `position`.

    `reader` can read those that follow; `last_attempts` knows which copies were acknowledged.
    """

    reader: OriginalsReader
    topic: str
    position: int
    last_attempts: PartitionAttempts | None = None


class Claim:
    """Names the messages of one transaction, before anything else of the transaction is written.

    dropped       messages that are left alone: a marker that the plan did not know stands before the claim
    acknowledged  copies that get an end marker and no dead letter: a consumer of an earlier delivery has
                  acknowledged them (rule R32)
    unread        copies of which that could not be found out in time: they become dead letters

    A marker that the plan did not know may be an end, or it may give the message a longer lease. The tracker
    reads it later, as any other, and plans again what is still due.

    `last_copies`: copies that are to become dead letters, and from which markers offset to look for their
    acknowledgements.
    """

    def __init__(
        self,
        partition: int,
        offsets: Collection[int],
        known: MarkersRead,
        timeout_s: float,
        last_copies: Mapping[int, int],
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self.acknowledged: frozenset[int] = frozenset()
        self.unread = 0
        self._last_copies = last_copies
        self._partition = partition
        self._offsets = sorted(offsets)
        self._known = known
        self._timeout_s = timeout_s

    @property
    def not_copied(self) -> frozenset[int]:
        """The offsets that get no copy: dropped from the plan, or acknowledged."""
        return self.dropped | self.acknowledged

    @property
    def record(self) -> NewRecord:
        """The claim itself."""
        return NewRecord(self._partition, *naming_tick(self._partition, CLAIM, self._offsets))

    def settle(self, position: int) -> list[NewRecord]:
        """Read up to the claim, which stands at `position`; returns a record that names what is dropped.

        The list is empty where nothing is dropped. Raises TransactionCancelled when not everything before the
        claim is decided in time, or can be read.
        """
        reader, topic, begin, last_attempts = self._known
        try:
            records = reader.read_between(topic, self._partition, begin, position, self._timeout_s)
        except KafkaException as exception:
            raise TransactionCancelled(
                f"markers before a claim can't be read: {librdkafka.error_name(exception)}"
            ) from exception
        self.dropped = offsets_with_markers(records, self._offsets)
        copies = {offset: at for offset, at in self._last_copies.items() if offset not in self.dropped}
        if copies and last_attempts is not None:
            checked = last_attempts.examine(copies, self._timeout_s / 2)
            self.acknowledged = frozenset(offset for _, offset in checked.acknowledged)
            self.unread = len(checked.unread)
        return [self._named(sorted(self.dropped))] if self.dropped else []

    def _named(self, dropped: Sequence[int]) -> NewRecord:
        return NewRecord(self._partition, *naming_tick(self._partition, DROPPED, dropped))
