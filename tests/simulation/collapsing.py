"""A queue that collapses: which messages are equal, what clients pass over, and what must hold of that.

Bodies differ, so that each message is known by its own; clients are told that some of them are equal.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from kmqpy.kafka.message_headers import ORIGINAL_OFFSET

from .connection import Connection
from .journal import Written
from .kafka import Module
from .model import Broker, Record
from .stepwise import stepwise
from .surroundings import records

SHARE = 0.1
"""In so many of the seeds without a control the queue collapses."""
_KINDS = 3


def digest(body: bytes) -> bytes:
    """What equal messages share."""
    return b"%d" % (int(body.rpartition(b"-")[2]) % _KINDS)


_collapsing = stepwise(
    "kmqpy.kafka.client.collapsing",
    {"poll", "note_ends"},
    librdkafka=Module,
    body_digest=digest,
    records_by_partition=records.records_by_partition,
)


@dataclass
class Collapses:
    """What clients passed over, and when each message was handed out."""

    twins: set[Record] = field(default_factory=set)
    """What some client took for a twin; whoever read it later may have handed it out."""
    deliveries: dict[bytes, int] = field(default_factory=dict)
    """By body, how long the journal was when the message was last handed out, as itself or as a copy."""
    committed: Callable[[int], int] = lambda _: 0
    """Up to where the group has come in a partition."""

    def has(self, record: Record) -> bool:
        """Whether the group has passed over this message, if nobody has taken it."""
        return record in self.twins and record.at < self.committed(record.partition())


class Collapsing(_collapsing.Collapsing):
    """The client's Collapsing, which tells what it passes over."""

    def __init__(self, connection: Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._process = connection.process

    def _sort(self, member: Any, polled: list[Record], offsets: Any) -> int:
        passed: int = super()._sort(member, polled, offsets)
        kept = {record for one in self._polled.values() for record in one.records}
        for record in polled:
            if record not in kept:
                world = self._process.world
                world.trace(self._process.name, f"passes over {record.partition()}@{record.at}")
                world.history.collapses.twins.add(record)
        return passed


def problems(
    broker: Broker, collapses: Collapses, passed: Collection[Record], gone: Collection[bytes]
) -> list[str]:
    """Rule R41: of what was passed over, an equal message came to somebody after it was sent.

    gone  what need not come: dead letters, and what was deleted
    """
    if not passed:
        return []
    written = {
        event.record: index for index, event in enumerate(broker.world.journal) if isinstance(event, Written)
    }
    gone = {*gone, *(record.value() for record in written if record.is_cut)}
    found = []
    for record in passed:
        firsts = [
            one.value()
            for one in broker.logs[record.topic(), record.partition()].records
            if one.is_data and one.at < record.at and not _is_copy(one)
            if digest(one.value()) == digest(record.value())
        ]
        if _is_copy(record):
            found.append(f"R41: {record.value()!r} was passed over, a copy")
        elif not any(one in gone or collapses.deliveries.get(one, -1) > written[record] for one in firsts):
            found.append(f"R41: {record.value()!r} was passed over, and sent when {firsts} had come")
    return found


def _is_copy(record: Record) -> bool:
    """Whether this is a copy, or has the headers of one."""
    return any(name == ORIGINAL_OFFSET for name, _ in record.headers())
