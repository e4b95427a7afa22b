"""Looks whether copies that a client has taken were acknowledged meanwhile (rules R32, R33).

The lease of a message may end while its consumer is still at work. A tracker copies it then, and the
acknowledgement comes when the copy waits already. Whoever takes the copy finds that acknowledgement in the
markers, before its own start marker, and hands the copy out to nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.late_acks import PLANNED_AT, LateAcks, read_planned_at
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
"""How long the markers are read before the copies that need them are given back; what was read is kept."""
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
    unread        nobody knows: the markers can't be read now
    """

    acknowledged: list[Place] = field(default_factory=list)
    unread: list[Place] = field(default_factory=list)


class LateAckCheck:
    """Reads the markers of a queue's copies, each marker once. For one thread at a time."""

    def __init__(self, connection: KafkaConnection, queue: QueueSettings, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._known: dict[int, LateAcks] = {}
        # Uncommitted: the transaction that made a copy is done, and one that is open must not hold us up.
        self._reader = partition_reader.RepeatedReader(
            connection, queue.markers_topic, uncommitted=True, timeout_s=_TIMEOUT_S, clock=clock
        )

    def copies_among(self, records: Sequence[Any]) -> Copies:
        """Those of these records of the queue that a tracker made, as far as their headers tell."""
        found: dict[int, dict[int, int]] = {}
        for record, headers in zip(records, headers_of_each(records), strict=True):
            if not headers:
                continue
            readable = read_headers(record)[0] if headers is UNREADABLE else headers
            for name, data in readable:
                if name == PLANNED_AT:
                    partition = record.partition()
                    planned_at = read_planned_at(data, self._queue.name, partition)
                    if planned_at is not None:
                        found.setdefault(partition, {})[record.offset()] = planned_at
        return found

    def examine(self, copies: Copies, within_s: float) -> CheckedCopies:
        """Find those of `copies`, whose start markers are confirmed, that are not to be handed out.

        within_s  after this time what is still to be read counts as unread; at most 2 s are waited

        Where retention has deleted markers that are wanted, those that are left decide.
        """
        until = self._clock.monotonic() + min(within_s, _TIMEOUT_S)
        starts = {p: self._known_from(p, min(planned_at.values())).end for p, planned_at in copies.items()}
        # Each time to the end of the log, which lies behind the start markers of all these copies.
        unread = self._read(starts, until)
        checked = CheckedCopies()
        for partition, planned_at in copies.items():
            known = self._known[partition]
            for offset in planned_at:
                if known.acknowledged(offset):
                    checked.acknowledged.append((partition, offset))
                elif partition in unread:
                    checked.unread.append((partition, offset))
        return checked

    def forget(self) -> None:
        """Forget all that was read: the topics are other ones."""
        self._known.clear()

    def close(self) -> None:
        """Release the connection."""
        self._reader.close()

    def _known_from(self, partition: int, planned_at: int) -> LateAcks:
        known = self._known.get(partition)
        if known is not None and known.begin <= planned_at <= known.end + _SKIPPED:
            middle = (known.begin + known.end) // 2
            if known.end - known.begin <= _SPAN or planned_at <= middle:
                return known
        known = self._known[partition] = LateAcks(self._queue.name, partition, planned_at)
        return known

    def _read(self, starts: Mapping[int, int], until: float) -> frozenset[int]:
        """Read these partitions to their ends; returns those of which something is left to read."""
        try:
            reached = self._reader.scan(starts, partial(self._visit, until))
        except KmqError as error:
            _log.warning(
                "late acknowledgements can't be looked for; copies are given back",
                extra={"queue": self._queue.name, "error": str(error)},
            )
            return frozenset(starts)
        return frozenset(partition for partition, place in reached.items() if not place.done)

    def _visit(self, until: float, partition: int, records: list[Any]) -> bool:
        self._known[partition].read(records)
        return self._clock.monotonic() > until
