"""Finds acknowledgements and other operations of earlier consumers that concern the copies a client takes.

The lease of a message may end while its consumer is still at work. A tracker copies the message then, and
the acknowledgement comes when the copy waits already. The client that takes the copy finds that
acknowledgement in the markers, before its own start marker, and hands the copy out to nobody (rules R32,
R33). A client that has handed out the copy already finds it when it extends the lease. Late nacks,
extensions and dead-letter requests apply to a copy in the same way, but only before it is taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.late_operations import PLANNED_AT, LateOperations, read_planned_at
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
"""How long the markers are read before the copies that need them are given back; what was read is kept."""
_LEAST_S = 0.1
"""How long records that have come are read although the time is over, so that each call gets further."""
_SKIPPED = 50_000
"""A gap of more markers than this, between those that were read and those that are wanted, is not read."""
_SPAN = 1_000_000
"""When more markers than this are known, and the older half is not wanted, they are read again without it."""

Copies = Mapping[int, Mapping[int, int]]
"""By partition: the offsets of copies, and the markers offset from which to look for acknowledgements."""


@dataclass(slots=True)
class CheckedCopies:
    """Copies that are not to be handed out.

    acknowledged  they, or messages of which they are copies, were acknowledged before they were taken
    rejected      an earlier consumer has asked for a dead letter of their original, for these reasons
    postponed     what remains, in ms, of a lease or delay that an earlier consumer asked for
    unread        unknown: the markers can't be read now
    """

    acknowledged: list[Place] = field(default_factory=list)
    rejected: dict[Place, str | None] = field(default_factory=dict)
    postponed: dict[Place, int] = field(default_factory=dict)
    unread: list[Place] = field(default_factory=list)

    def places(self) -> set[Place]:
        """The places of all of them."""
        return {*self.acknowledged, *self.rejected, *self.postponed, *self.unread}


class CopyCheck:
    """Reads the markers of a queue's copies, each marker once; safe to use from any thread."""

    def __init__(self, connection: KafkaConnection, queue: QueueSettings, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        # Reentrant: a handler of signals may call close() in the middle of any call.
        self._lock = threading.RLock()
        self._closed = False
        self._known: dict[int, LateOperations] = {}
        self._former: dict[int, LateOperations] = {}
        """Those for copies of another stretch of the log; swapped with `_known` when such copies come."""
        self._behind: frozenset[int] = frozenset()
        """Partitions of which what is known does not reach to the end yet."""
        # Uncommitted: the transaction that made a copy is done, and one that is open must not hold us up.
        self._reader = partition_reader.RepeatedReader(
            connection, queue.markers_topic, uncommitted=True, timeout_s=_TIMEOUT_S, clock=clock
        )

    def copies_among(self, records: Sequence[Any]) -> Copies:
        """Return the copies that trackers made among these records of the queue, going by their headers."""
        found: dict[int, dict[int, int]] = {}
        for record, headers in zip(records, headers_of_each(records), strict=True):
            if not headers:
                continue
            readable = read_headers(record)[0] if headers is UNREADABLE else headers
            planned_at = self.planned_at(readable, record.partition())
            if planned_at is not None:
                found.setdefault(record.partition(), {})[record.offset()] = planned_at
        return found

    def planned_at(self, headers: Iterable[tuple[str, bytes | None]], partition: int) -> int | None:
        """The markers offset that the headers of a copy name; None: it is no copy."""
        found = None
        for name, data in headers:
            if name == PLANNED_AT:
                found = read_planned_at(data, self._queue.name, partition)
        return found

    def examine(self, copies: Copies, within_s: float) -> CheckedCopies:
        """Find those of `copies`, whose start markers are confirmed, that are not to be handed out.

        within_s  after this time what is still to be read counts as unread; at most 2 s are waited

        Where retention has deleted markers that are wanted, those that are left decide.
        """
        checked = CheckedCopies()
        until = self._clock.monotonic() + min(within_s, _TIMEOUT_S)
        if not self._entered(until):
            checked.unread += [(partition, offset) for partition, ones in copies.items() for offset in ones]
            return checked
        try:
            known = {p: self._known_from(p, min(ones.values())) for p, ones in copies.items()}
            # Always to the end of the log: the start markers of all these copies stand before it.
            unread = self._read(known, until)
            for partition, ones in copies.items():
                for offset in ones:
                    if known[partition].acknowledged(offset):
                        checked.acknowledged.append((partition, offset))
                    elif partition in unread:
                        checked.unread.append((partition, offset))
                    else:
                        self._apply_operations(known[partition], (partition, offset), checked)
        finally:
            self._lock.release()
        return checked

    def find_acknowledged(self, copies: Copies, within_s: float) -> list[Place]:
        """Return which of `copies`, handed out before, are acknowledged by now, as far as can be read.

        Waits at most `within_s`, and 2 s. Only markers are read that were not before; what examine() has
        forgotten of copies that were taken long ago is not read again.
        """
        until = self._clock.monotonic() + min(within_s, _TIMEOUT_S)
        if not self._entered(until):
            return []
        try:
            known = {
                p: self._known.get(p) or self._known_from(p, min(ones.values())) for p, ones in copies.items()
            }
            self._read(known, until)
            return [
                (partition, offset)
                for partition, ones in copies.items()
                for offset in ones
                if known[partition].acknowledged(offset)
            ]
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Forget all that was read: the topics are other ones."""
        with self._lock:
            self._known.clear()
            self._former.clear()
            self._behind = frozenset()

    def close(self) -> None:
        """Release the connection."""
        with self._lock:
            self._closed = True
            self._reader.close()

    def _entered(self, until: float) -> bool:
        """Take the lock; False if it was not free until then, or if this is closed."""
        if not self._lock.acquire(timeout=max(0.0, until - self._clock.monotonic())):
            return False
        if self._closed:
            self._lock.release()
        return not self._closed

    def _apply_operations(self, known: LateOperations, place: Place, checked: CheckedCopies) -> None:
        left_ms = 0
        for operation in known.operations(place[1]):
            if operation.op is Op.DEAD_LETTER:
                checked.rejected[place] = operation.reason
                return
            most_ms = self._queue.max_hold_ms if operation.op is Op.EXTEND else self._queue.max_delay_ms
            left_ms = max(left_ms, operation.left_ms(known.now_ms, most_ms))
        if left_ms:
            checked.postponed[place] = left_ms

    def _known_from(self, partition: int, planned_at: int) -> LateOperations:
        known = self._known.get(partition)
        if known is not None and known.begin <= planned_at and partition in self._behind:
            return known  # what was read for older copies would have to be read again
        for found in (known, self._former.get(partition)):
            if found is not None and _serves(found, planned_at):
                break
        else:
            found = LateOperations(self._queue.name, partition, planned_at)
        if found is not known:
            if known is not None:
                self._former[partition] = known
            self._known[partition] = found
        return found

    def _read(self, known: Mapping[int, LateOperations], until: float) -> frozenset[int]:
        """Read these partitions to their ends; returns those of which something is left to read."""
        starts = {partition: one.end for partition, one in known.items()}
        stopped: set[int] = set()
        try:
            reached = self._reader.scan(starts, partial(self._visit, known, until, stopped))
            left = frozenset(stopped.union(p for p, place in reached.items() if not place.done))
        except KmqError as error:
            _log.warning(
                "late acknowledgements can't be looked for now",
                extra={"queue": self._queue.name, "error": str(error)},
            )
            left = frozenset(starts)
        self._behind = self._behind - starts.keys() | left
        return left

    def _visit(
        self,
        known: Mapping[int, LateOperations],
        until: float,
        stopped: set[int],
        partition: int,
        records: list[Any],
    ) -> bool:
        """Take in records of a partition; returns True when the time is over.

        The time is also looked at within the records: a forged claim of a megabyte takes a second.
        """
        stop_at = max(until, self._clock.monotonic() + _LEAST_S)
        if not known[partition].read(records, lambda: self._clock.monotonic() > stop_at):
            stopped.add(partition)
        return self._clock.monotonic() > until


def _serves(known: LateOperations, planned_at: int) -> bool:
    """Return True if it costs less to go on from what is known than to begin at `planned_at`."""
    if not known.begin <= planned_at <= known.end + _SKIPPED:
        return False
    middle = (known.begin + known.end) // 2
    return known.end - known.begin <= _SPAN or planned_at <= middle
