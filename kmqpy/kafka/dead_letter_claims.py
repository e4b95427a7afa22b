"""The claims of redrives and purges of dead letters: what somebody has finished meanwhile is left alone.

Between the moment when a redrive reads which dead letters wait and a transaction of it, others may finish
some: a redrive of another queue with the same dead-letter topic, or whoever acknowledges dead letters. As in
a tracker's redelivery, the transaction begins with a claim, and all before the claim counts (rule R27).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka.copies.copy_transaction import NewRecord, TransactionCancelled
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, naming_tick
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection

_POLL_S = 0.01


class FinishedDeadLetters:
    """Follows the end markers of dead letters, each once, from `positions` (by partition) on."""

    def __init__(
        self, connection: KafkaConnection, markers_topic: str, positions: Mapping[int, int], clock: Clock
    ) -> None:
        self._topic = markers_topic
        self._positions = dict(positions)
        self._clock = clock
        self._ended = {partition: OffsetRuns() for partition in positions}
        self._reader = RepeatedReader(connection, markers_topic, clock=clock)

    def ended_before(self, position: int, partition: int, within_s: float) -> OffsetRuns:
        """Return the dead letters that were finished before markers offset `position`.

        Waits until every transaction before that has ended; raises TransactionCancelled if one is still open
        after `within_s`.
        """
        deadline = self._clock.monotonic() + within_s
        while self._positions[partition] < position:
            try:
                reached = self._reader.scan({partition: self._positions[partition]}, self._read)[partition]
            except KmqError as error:
                raise TransactionCancelled(f"markers before a claim can't be read: {error}") from error
            # The claim is of an open transaction, so nothing behind it can be read.
            self._positions[partition] = reached.position
            if reached.end < position:
                if self._clock.monotonic() > deadline:
                    raise TransactionCancelled(f"{self._topic}: somebody's transaction stays open")
                self._clock.sleep(_POLL_S)
        return self._ended[partition]

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
                self._ended[partition].add_runs(marker.offset_runs)
        return False


class DeadLetterClaim:
    """Names the dead letters of one transaction; `dropped`: those that were finished before it."""

    def __init__(
        self, partition: int, offsets: Sequence[int], finished: FinishedDeadLetters, within_s: float
    ) -> None:
        self.dropped: frozenset[int] = frozenset()
        self._partition = partition
        self._offsets = offsets
        self._finished = finished
        self._within_s = within_s

    @property
    def record(self) -> NewRecord:
        """The claim itself."""
        return NewRecord(self._partition, *naming_tick(self._partition, CLAIM, self._offsets))

    def decide(self, position: int) -> list[NewRecord]:
        """Decide which dead letters are moved, now that the claim stands at `position`; see Claim.decide."""
        ended = self._finished.ended_before(position, self._partition, self._within_s)
        self.dropped = frozenset(offset for offset in self._offsets if offset in ended)
        if not self.dropped:
            return []
        named = naming_tick(self._partition, DROPPED, sorted(self.dropped))
        return [NewRecord(self._partition, *named)]
