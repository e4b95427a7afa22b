"""Keeps redrives and purges from moving dead letters that others have finished meanwhile.

A redrive first reads which dead letters wait, and then moves them in transactions. In between, others may
finish some of these dead letters: a redrive of another queue with the same dead-letter topic, or a client
that acknowledges dead letters. As in a tracker's redelivery, each transaction begins with a claim (a record
that names the messages which the transaction may end). Every end marker before the claim counts, and the
transaction leaves out the dead letters that such a marker ends (rule R27 of docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka.copies.copy_transaction import NewRecord, TransactionCancelled
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, naming_tick
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection

_RETRY_PAUSE_S = 0.01
"""Seconds between two attempts to read up to a claim, while another transaction before the claim is open."""


class FinishedDeadLetters:
    """Collects which dead letters have end markers; reads each markers partition once, in pieces.

    `positions`: by partition, the markers offset at which the reading begins.
    """

    def __init__(
        self, connection: KafkaConnection, markers_topic: str, positions: Mapping[int, int], clock: Clock
    ) -> None:
        self._topic = markers_topic
        self._positions = dict(positions)
        self._clock = clock
        self._finished = {partition: OffsetRuns() for partition in positions}
        self._reader = RepeatedReader(connection, markers_topic, clock=clock)

    def ended_before(self, position: int, partition: int, within_s: float) -> OffsetRuns:
        """Return the dead letters with an end marker before markers offset `position`, that of a claim.

        Waits until every transaction that began before `position` has ended. Raises TransactionCancelled if
        one of them is still open after `within_s` seconds, or if the markers can't be read.
        """
        deadline = self._clock.monotonic() + within_s
        while self._positions[partition] < position:
            try:
                reached = self._reader.scan({partition: self._positions[partition]}, self._read)[partition]
            except KmqError as error:
                raise TransactionCancelled(f"markers before a claim can't be read: {error}") from error
            # The transaction of the claim is open, so no record after the claim can be read.
            self._positions[partition] = reached.position
            if reached.end < position:
                if self._clock.monotonic() > deadline:
                    raise TransactionCancelled(f"{self._topic}: somebody's transaction stays open")
                self._clock.sleep(_RETRY_PAUSE_S)
        return self._finished[partition]

    def close(self) -> None:
        """Release the connection."""
        self._reader.close()

    def _read(self, partition: int, records: Sequence[Any]) -> bool:
        for record in records:
            try:
                marker = read_marker(record)
            except DecodeError:
                continue
            if marker.op is Op.END and marker.offset >= 0:
                self._finished[partition].add_runs(marker.offset_runs)
        return False


class RedriveClaim:
    """The claim of one transaction of a redrive or purge; see TransactionClaim for what its methods are for.

    numbers  those of the dead letters, see log_cuts
    epoch    they have this leader epoch or a lower one; None: not known
    cuts     those of the dead letters' log
    dropped  once decide() has returned: the dead letters of the claim that others finished before the claim
    """

    def __init__(
        self,
        partition: int,
        numbers: Sequence[int],
        finished: FinishedDeadLetters,
        within_s: float,
        *,
        epoch: int | None,
        cuts: LogCuts,
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self._partition = partition
        self._numbers = numbers
        self._epoch = epoch
        self._cuts = cuts
        self._finished_letters = finished
        self._within_s = within_s

    @property
    def record(self) -> NewRecord:
        """The claim: the record with which the transaction begins; it names all `numbers`."""
        tick = naming_tick(self._partition, CLAIM, self._numbers, self._epoch, self._cuts)
        return NewRecord(self._partition, *tick)

    def decide(self, position: int) -> list[NewRecord]:
        """Find out which dead letters others finished before the claim, which has markers offset `position`.

        Returns a record that names these dead letters, or no record if there are none; see Claim.decide.
        """
        ended = self._finished_letters.ended_before(position, self._partition, self._within_s)
        self.dropped = frozenset(number for number in self._numbers if number in ended)
        if not self.dropped:
            return []
        named = naming_tick(self._partition, DROPPED, sorted(self.dropped))
        return [NewRecord(self._partition, *named)]
