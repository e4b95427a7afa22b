"""The claim of a redelivery: decides inside the transaction which messages are still to be copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import KafkaException

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies.copy_transaction import NewRecord, TransactionCancelled
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, naming_tick
from tracker.redelivery.last_attempts import PartitionAttempts
from tracker.redelivery.markers_since_plan import MarkersSincePlan


class Claim:
    """Names the messages of one transaction, before anything else of the transaction is written.

    dropped       messages that are left alone: a marker between the plan and the claim has finished them,
                  given them more time, or asked for a dead letter
    acknowledged  copies that get an end marker and no dead letter: a consumer of an earlier delivery has
                  acknowledged them (rule R32)
    unread        copies of which that could not be found out in time: they become dead letters

    The tracker reads such markers later, as any other, and plans again what is due then.

    `last_copies`: copies that are to become dead letters, and from which markers offset to look for their
    acknowledgements.
    """

    def __init__(
        self,
        partition: int,
        offsets: Collection[int],
        since_plan: MarkersSincePlan,
        last_attempts: PartitionAttempts | None,
        timeout_s: float,
        last_copies: Mapping[int, int],
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self.acknowledged: frozenset[int] = frozenset()
        self.unread = 0
        self._last_copies = last_copies
        self._partition = partition
        self._offsets = sorted(offsets)
        self._since_plan = since_plan
        self._last_attempts = last_attempts
        self._timeout_s = timeout_s

    @property
    def not_copied(self) -> frozenset[int]:
        """The offsets that get no copy: dropped from the plan, or acknowledged."""
        return self.dropped | self.acknowledged

    @property
    def record(self) -> NewRecord:
        """The claim itself."""
        return NewRecord(self._partition, *naming_tick(self._partition, CLAIM, self._offsets))

    def decide(self, position: int) -> list[NewRecord]:
        """Read the markers before the claim, which stands at `position`; returns a record of what is dropped.

        The list is empty if nothing is dropped. Raises TransactionCancelled if markers before the claim
        can't be read, or a transaction before it stays open for too long.
        """
        try:
            self._since_plan.read_to(position, self._timeout_s)
        except KafkaException as exception:
            raise TransactionCancelled(
                f"markers before a claim can't be read: {librdkafka.error_name(exception)}"
            ) from exception
        self.dropped = self._since_plan.not_due(self._offsets)
        copies = {offset: at for offset, at in self._last_copies.items() if offset not in self.dropped}
        if copies and self._last_attempts is not None:
            checked = self._last_attempts.examine(copies, self._timeout_s / 2)
            self.acknowledged = frozenset(offset for _, offset in checked.acknowledged)
            self.unread = len(checked.unread)
        return [self._named(sorted(self.dropped))] if self.dropped else []

    def _named(self, dropped: Sequence[int]) -> NewRecord:
        return NewRecord(self._partition, *naming_tick(self._partition, DROPPED, dropped))
