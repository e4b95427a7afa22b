"""What users of a simulation saw: what clients handed out, acknowledged, and were told."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kmqpy.kafka.receipt import Receipt

from .collapsing import Collapses
from .journal import Acked, HandedOut
from .message_names import MessageNames
from .model import Broker, Log, part_of
from .world import Process


class SetBack(NamedTuple):
    """The group was set back, and the next client got the partition: messages from `offset` on come again."""

    number: int
    partition: int
    offset: int
    markers_end: int


@dataclass
class History:
    """What users saw. Offsets are numbers of messages where logs may be cut back."""

    set_backs: list[SetBack] = field(default_factory=list)
    taking_again: dict[int, set[str]] = field(default_factory=dict)
    """By partition, clients that it was assigned to after it was set back."""

    attempted: set[bytes] = field(default_factory=set)
    sent: set[bytes] = field(default_factory=set)
    poison: set[bytes] = field(default_factory=set)
    asked: set[tuple[int, str, int, int]] = field(default_factory=set)
    """Who gave back or rejected what: the number of the topics, name, partition, offset."""
    lost: Counter[str] = field(default_factory=Counter)
    """How many messages clients were told to be lost."""
    delivered: Counter[bytes] = field(default_factory=Counter)
    handouts: list[tuple[int, str, int, int, int, int, int]] = field(default_factory=list)
    """Who was given what: the number of the topics, name, partition, offset, the end of the markers it had
    read, the broker's time, how long the journal was then."""
    waits: list[tuple[int, str, int, int, int]] = field(default_factory=list)
    """Who was told that an end marker is written: the number of the topics, name, partition, offset, the end
    of the markers then."""
    acked: set[tuple[int, str, int, int]] = field(default_factory=set)
    """Who acknowledged what: the number of the topics, name, partition, offset."""
    acked_as: defaultdict[tuple[str, int, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """What that was, by name, partition and offset."""
    names: MessageNames = field(default_factory=MessageNames)
    """Where logs may be cut back."""
    sent_to: dict[bytes, int] = field(default_factory=dict)
    """The number of the topics to which a message was sent."""
    plans: defaultdict[tuple[str, int, int], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By the id of the markers topic, partition and offset, when a tracker planned to redeliver a message:
    the end of the markers then, and how far the tracker had read them."""
    collapses: Collapses = field(default_factory=Collapses)
    unread: set[tuple[int, int]] = field(default_factory=set)
    """Partition and offset of copies of which a tracker could not find out whether they were acknowledged."""
    problems: list[str] = field(default_factory=list)
    """What was wrong when it happened."""
    deleted: set[bytes] = field(default_factory=set)
    markers_deleted: bool = False
    clock_jumped: bool = False
    clock_lead_ms: int = 0
    """How much earlier than it should a lease may end, since timestamps lie."""
    broker: Broker | None = None

    def handed_out(self, process: Process, message: Any) -> None:
        """A client gives a message to its user."""
        self.delivered[message.body] += 1
        self.collapses.deliveries[message.body] = len(process.world.journal)
        assert self.broker is not None
        offset = self._offset_of(message)
        if process.world.cut_logs:
            self.names.note((message._record.part, offset), message._record, process.name)
        place = f"{message.partition}@{message.offset}"
        if process.world.tracing:
            process.world.trace(
                process.name, f"hands out {place} {message.body!r}, attempt {message.attempts}"
            )
        part = _part(message)
        number, of = _number(message), int(message._context.topic_id.rpartition("-")[2])
        if number < self.broker.number:
            if max(process.topics_of, of) > number:
                self.problems.append(
                    f"R24: {process.name} was given {place} of topics that it knew to be gone"
                )
            return
        log, recovered = process.recovered.get(part, (None, 0))
        # Until it knows the topics, it can read the markers of the one from a place in the other.
        if log is None or log.number != number or of != number:
            recovered = 0
        process.world.journal.append(HandedOut(process.name, part, offset, recovered))
        self.handouts.append(
            (
                number,
                process.name,
                part,
                offset,
                recovered,
                self.broker.time_ms(),
                len(process.world.journal),
            )
        )

    def acks(self, process: Process, message: Any) -> None:
        """A message is acknowledged; of which topics it is, its client may not know yet."""
        offset = self._offset_of(message)
        part = _part(message)
        process.world.journal.append(Acked(process.name, part, offset))
        self.acked.add((_number(message), process.name, part, offset))
        self.acked_as[process.name, part, offset].add(message.body)

    def asks(self, process: Process, message: Any) -> None:
        """A user gives a message back, extends its lease, or rejects it."""
        offset = self._offset_of(message)
        self.asked.add((_number(message), process.name, _part(message), offset))

    def written(self, process: Process, message: Any) -> None:
        """An ack that waits for its marker has come back."""
        assert self.broker is not None
        log, number = (
            self.broker.logs[f"{message._record.topic()}__markers", message.partition],
            _number(message),
        )
        if log.number == number:
            offset = self._offset_of(message)
            self.waits.append((number, process.name, _part(message), offset, log.end))

    def _offset_of(self, message: Any) -> int:
        """The offset of a message, or its number where logs may be cut back."""
        assert self.broker is not None
        if not self.broker.world.cut_logs:
            return message._record.at  # type: ignore[no-any-return]
        return Receipt.parse(message.receipt).offset

    def deletes(self, queue: Log, up_to: int) -> None:
        """Retention removes what lies below `up_to`: the sends in it are excused."""
        self.deleted.update(record.value() for record in queue.records[queue.start : up_to] if record.is_data)


def _number(message: Any) -> int:
    """Of which topics a message is, whatever its client believes; see Broker.number."""
    number: int = message._record.log.number
    return number


def _part(message: Any) -> int:
    return part_of(message._record.topic(), message.partition)
