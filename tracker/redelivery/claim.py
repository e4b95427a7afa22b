"""Decides, inside the transaction of a redelivery, which messages are still copied.

A claim is the first record of the transaction, a marker. It names all messages that the transaction may end:
with a copy, with a dead letter, or with neither (rules R27 and R28 of docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import KafkaException

from kmqpy.kafka import kafka_errors
from kmqpy.kafka.copies.copy_transaction import NewRecord, TransactionCancelled
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, naming_tick
from kmqpy.kafka.markers.late_operations import CopyHeaders
from tracker.redelivery.last_attempts import PartitionAttempts
from tracker.redelivery.markers_since_plan import MarkersSincePlan


class Claim:
    """The claim of one transaction, and what it decides. `decide` sets the first three attributes.

    dropped       messages that the transaction leaves alone: a marker between the plan (the choice of the
                  messages) and the claim has finished them, given them more time, or asked for a dead letter
    acknowledged  messages that get an end marker and no dead letter: they are copies, and a consumer of an
                  earlier delivery has acknowledged them (rule R32)
    unread        how many copies become dead letters although it was not known in time whether they are
                  acknowledged
    last_copies   by offset of a copy that is to become a dead letter: what its headers say
    taken_late    messages that were finished before a client took them, by the plan. If a marker follows the
                  plan, the message may have been taken again on purpose since (rule R30), so it is dropped
    epoch         the copies have this leader epoch or a lower one; -1: not known
    holds         True: the transaction ends nothing, it only gives messages back for later (rule R44). So the
                  record names none
    timeout_s     how long `decide` waits for markers before the claim; for acknowledgements half as long

    The main loop reads the same markers later, and redelivers dropped messages once they are due again.
    """

    def __init__(
        self,
        partition: int,
        offsets: Collection[int],
        since_plan: MarkersSincePlan,
        last_attempts: PartitionAttempts | None,
        timeout_s: float,
        last_copies: Mapping[int, CopyHeaders],
        taken_late: frozenset[int] = frozenset(),
        epoch: int = -1,
        *,
        unsure: bool = False,
        holds: bool = False,
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self.acknowledged: frozenset[int] = frozenset()
        self.unread = 0
        self._last_copies = last_copies
        self._taken_late = taken_late
        self._epoch = epoch if epoch >= 0 else None
        self._unsure = unsure
        self._partition = partition
        self._holds = holds
        self._offsets = sorted(offsets)
        self._since_plan = since_plan
        self._last_attempts = last_attempts
        self._timeout_s = timeout_s

    @property
    def not_copied(self) -> frozenset[int]:
        """The offsets of messages that get no copy: dropped or acknowledged."""
        return self.dropped | self.acknowledged

    @property
    def record(self) -> NewRecord:
        """The record of the claim, for the markers topic."""
        offsets = [] if self._holds else self._offsets
        tick = naming_tick(self._partition, CLAIM, offsets, self._epoch, unsure=self._unsure)
        return NewRecord(self._partition, *tick)

    def decide(self, position: int) -> list[NewRecord]:
        """Read the markers before the claim, which has the markers offset `position`, and decide.

        Returns a record that names the dropped messages, or no record if none is dropped. Raises
        TransactionCancelled if markers before the claim can't be read, or if an earlier transaction stays
        open for too long.
        """
        try:
            self._since_plan.read_to(position, self._timeout_s)
        except KafkaException as exception:
            raise TransactionCancelled(
                f"markers before a claim can't be read: {kafka_errors.error_name(exception)}"
            ) from exception
        self.dropped = self._since_plan.not_due(self._offsets)
        self.dropped |= self._since_plan.named(self._taken_late.intersection(self._offsets))
        copies = {one: copy for one, copy in self._last_copies.items() if one not in self.dropped}
        if copies and self._last_attempts is not None:
            checked = self._last_attempts.examine(copies, self._timeout_s / 2)
            self.acknowledged = frozenset(offset for _, offset in checked.acknowledged)
            self.unread = len(checked.unread)
        return [self._named(sorted(self.dropped))] if self.dropped and not self._holds else []

    def _named(self, dropped: Sequence[int]) -> NewRecord:
        return NewRecord(self._partition, *naming_tick(self._partition, DROPPED, dropped))
