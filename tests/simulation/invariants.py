"""The invariants of spec/Delivery.tla, judged from the logs that a run of the simulation has left.

A `ModelState` holds what the model's variables hold: which record is a copy of which, which transaction made
it, where in the markers a message was taken, acknowledged and claimed. It is read from the logs alone, and
each function below is the invariant of that name. What they forbid stays in the logs for good (a transaction
that was committed, a marker at its offset), so the end of a run shows what was wrong after any of its steps.

Three things differ, where the model is stricter or smaller than kmqpy (see spec/README.md):

- kmqpy's trackers do not look for acknowledgements of ancestors, so `ack_holds` counts those of the
  message itself, and only since it was taken last: who takes a message again (R30) begins anew. A transaction
  that a late request has ended may not have looked for them yet.
- A tracker that can't read the markers in time makes a dead letter whatever was acknowledged, and says so.
- `ProcessedOnce` is of clients' transactions, which kmqpy does not have.

Runs in which the topics were recreated, logs were cut back, the group was set back or markers were deleted
before their time are not judged (`is_of_the_model`): the model has no such steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kmqpy import message as m
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.settings import QueueSettings

from .model import Broker, Record, Txn, decoded

if TYPE_CHECKING:
    from .history import History


class Place(NamedTuple):
    """A message: its partition and offset in the queue's topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


@dataclass
class ModelState:
    """The model's variables, as far as its invariants read them. Positions are offsets of markers."""

    late_acks: bool
    """The queue's clients look for acknowledgements of what they take a copy of."""
    messages: set[Place] = field(default_factory=set)
    """Those that are visible."""
    deleted: set[Place] = field(default_factory=set)
    """Those that retention took before they came to their end."""
    parent: dict[Place, Place] = field(default_factory=dict)
    copied_by: defaultdict[Place, dict[Txn, None]] = field(default_factory=lambda: defaultdict(dict))
    """The committed transactions with a copy of the message, dead letters too."""
    dead: set[Place] = field(default_factory=set)
    first_of: dict[tuple[Txn | None, int], int] = field(default_factory=dict)
    """Where the first record of a transaction stands in a partition's markers."""
    takes: defaultdict[Place, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """Where in the markers the message was taken, and by whom."""
    acks: defaultdict[Place, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Where clients ended it."""
    moved: defaultdict[Place, dict[Txn | None, int]] = field(default_factory=lambda: defaultdict(dict))
    """Where transactions of trackers ended it."""
    ended: set[Place] = field(default_factory=set)
    """Those with a committed end marker, of a client or a tracker."""
    unread: set[Place] = field(default_factory=set)
    """Those of which a tracker could not find out in time whether they were acknowledged."""
    named: dict[Place, int] = field(default_factory=dict)
    """By copy, where the end stands that names it."""
    early_claims: dict[Place, int] = field(default_factory=dict)
    """By copy whose transaction was ended by a late request, where its claim stands."""
    handed_out: list[tuple[Place, int]] = field(default_factory=list)
    """Messages that were handed out, each with the position of its take."""

    def ancestors(self, message: Place) -> Iterator[Place]:
        """Of which messages it is a copy."""
        while message in self.parent:
            message = self.parent[message]
            yield message

    def acks_of_ancestors(self, message: Place, before: int) -> Iterator[tuple[Place, int]]:
        """Which messages of which it is a copy were acknowledged before a position, and where.

        Those only that end markers name there; and no acknowledgements that stand before the claim of a copy
        whose transaction a late request has ended, since it may not have looked for them yet.
        """
        since = 0
        while message in self.parent and self.named.get(message, before) < before:
            since = max(since, self.early_claims.get(message, 0))
            message = self.parent[message]
            yield from ((message, at) for at in self.acks[message] if since <= at < before)

    def original(self, message: Place) -> Place:
        return [message, *self.ancestors(message)][-1]


def is_of_the_model(broker: Broker, history: History) -> bool:
    """Whether the run had only steps that the model has, too."""
    changed = broker.past or broker.was_cut or history.set_backs or history.markers_deleted
    changed = changed or history.collapses.twins or broker.has_lanes
    return broker.verifies and not changed


def model_state(broker: Broker, history: History, queue: QueueSettings) -> ModelState:
    """Read the logs of a run that `is_of_the_model`."""
    state = ModelState(late_acks=queue.late_acks)
    state.unread.update(Place(*place) for place in history.unread)
    for partition in range(broker.partitions):
        _read_markers(state, broker, queue, partition)
        log = broker.logs[queue.name, partition]
        for record in log.records:
            if record.is_data:
                state.messages.add(Place(partition, record.at))
                if record.value() in history.deleted:
                    state.deleted.add(Place(partition, record.at))
                _read_copy(state, record, queue)
        for record in broker.logs[queue.dead_letter_topic, partition].records:
            if record.is_data:
                _read_copy(state, record, queue)
    for _, name, partition, offset, *_ in history.handouts:
        place = Place(partition, offset)
        own = [position for position, by in state.takes[place] if by == name]
        if own:
            state.handed_out.append((place, own[0]))
    return state


def _read_copy(state: ModelState, record: Record, queue: QueueSettings) -> None:
    if not record.copied:
        return
    here = RecordPlace(record.topic(), record.partition(), record.at)
    parent = read_ancestors(m.last_header(m.headers_of(record.headers()), ANCESTORS), here)[-1]
    place = Place(parent.partition, parent.offset)
    state.copied_by[place][record.txn] = None
    if record.topic() == queue.name:
        state.parent[Place(record.partition(), record.at)] = place
        if record.txn is not None and record.txn.early:
            state.early_claims[Place(record.partition(), record.at)] = state.first_of.get(
                (record.txn, place.partition), 0
            )
    else:
        state.dead.add(place)


def _read_markers(state: ModelState, broker: Broker, queue: QueueSettings, partition: int) -> None:
    for record in broker.logs[queue.markers_topic, partition].records:
        if not record.is_data:
            continue
        state.first_of.setdefault((record.txn, partition), record.at)
        for copy in record.copies.values():
            if copy.topic() == queue.name:
                state.named[Place(partition, copy.at)] = record.at
        for marker in decoded(record):
            place = Place(partition, marker.offset)
            if marker.op is Op.TAKE:
                state.takes[place].append((record.at, record.by))
            elif marker.op is Op.END and marker.offset >= 0:
                state.ended.add(place)
                if marker.by_tracker:
                    state.moved[place][record.txn] = record.at
                else:
                    state.acks[place].append(record.at)


def one_fate(state: ModelState) -> Iterator[str]:
    """A message is redelivered, or dead-lettered, by one committed transaction at most."""
    for message, transactions in state.copied_by.items():
        if len(transactions) > 1:
            yield f"{message} was copied by {len(transactions)} transactions"


def ack_holds(state: ModelState) -> Iterator[str]:
    """R27, R28: no committed transaction redelivers what was acknowledged before its first record."""
    for message, transactions in state.copied_by.items():
        for transaction in transactions:
            if transaction.early:
                continue
            claim = state.first_of.get((transaction, message.partition), 0)
            taken = max((at for at, _ in state.takes[message] if at < claim), default=-1)
            acked = [at for at in state.acks[message] if taken < at < claim]
            if acked:
                yield f"{message}, acknowledged at {acked[0]}, was copied by what began at {claim}"


def nothing_lost(state: ModelState) -> Iterator[str]:
    """Each original, or a copy of it, is acknowledged, a dead letter, or not ended yet."""
    kept = state.messages & (state.acks.keys() | state.dead | state.deleted | (state.messages - state.ended))
    safe = {state.original(message) for message in kept}
    for message in sorted(state.messages - state.parent.keys()):
        if message not in safe:
            yield f"{message} was ended, and neither it nor a copy was acknowledged"


def no_stale_hand_out(state: ModelState) -> Iterator[str]:
    """R32: no copy is handed out whose take stands after an acknowledgement of an ancestor."""
    if not state.late_acks:
        return
    for message, taken_at in state.handed_out:
        for ancestor, at in state.acks_of_ancestors(message, taken_at):
            yield f"{message}, taken at {taken_at}, is a copy of {ancestor}, acknowledged at {at}"


def no_stale_dead_letter(state: ModelState) -> Iterator[str]:
    """R32: no copy becomes a dead letter whose claim stands after an acknowledgement of an ancestor."""
    if not state.late_acks:
        return
    for message in state.dead - state.unread:
        for transaction in state.copied_by[message]:
            claim = state.first_of.get((transaction, message.partition), 0)
            for _, at in state.acks_of_ancestors(message, claim):
                yield f"{message}, claimed at {claim}, is a copy of what was acknowledged at {at}"


INVARIANTS: Mapping[str, Callable[[ModelState], Iterator[str]]] = {
    "OneFate": one_fate,
    "AckHolds": ack_holds,
    "NothingLost": nothing_lost,
    "NoStaleHandOut": no_stale_hand_out,
    "NoStaleDeadLetter": no_stale_dead_letter,
}
"""By their names in the model."""


def violations(state: ModelState) -> list[str]:
    """What is wrong, each with the name of the invariant first."""
    return [f"{name}: {what}" for name, holds in INVARIANTS.items() for what in holds(state)]
