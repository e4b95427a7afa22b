"""Builds the life of a message: what happened to it, from its records and their markers. Pure: no I/O.

The records of a message are the one that was sent and its copies: redeliveries, dead letters and redriven
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kmqpy.kafka.markers.codec import ACKNOWLEDGED, Marker, Op
from kmqpy.kafka.markers.lineage import RecordPlace
from kmqpy.kafka.markers.log_cuts import offset_of


class LifeEventKind(StrEnum):
    """Kinds of events in the life of a message."""

    SENT = "sent"
    LOOKED_AT = "not due yet"
    """A client met the message before its delay was over."""
    TAKEN = "taken"
    EXTENDED = "extended"
    GIVEN_BACK = "given back"
    HELD = "held back"
    """A tracker lets the record wait for as long as the queue's `retry_delays` says (rule R44)."""
    REJECTED = "rejected"
    """A client asked for the message to be dead-lettered."""
    ACKNOWLEDGED = "acknowledged"
    """A client acknowledged the record; or a tracker ended it, because a consumer of an earlier delivery has
    acknowledged the message (rule R32 of docs/rules.md)."""
    REDELIVERED = "redelivered"
    DEAD_LETTERED = "dead-lettered"
    REDRIVEN = "redriven"
    ENDED = "ended"
    """A tracker, redrive or purge ended the record, and its end marker names no copy that is known. Either
    there is no copy (the record was deleted, purged or taken late, rule R30), or an old version of kmqpy,
    which did not write the names of copies, wrote the end marker."""


class LifeState(StrEnum):
    """The state of a message after the last marker that was read."""

    WAITING = "waiting"
    DELAYED = "delayed"
    IN_FLIGHT = "in flight"
    RELEASED = "released"
    """A client gave the record back with a nack; the record waits for its redelivery."""
    REJECTED = "rejected"
    ACKNOWLEDGED = "acknowledged"
    DEAD_LETTER = "dead letter"
    ENDED = "ended"
    """A tracker, redrive or purge ended the record, see LifeEventKind.ENDED."""
    LOST = "lost"
    """The log was cut back (rule R39): the record is gone, and it was not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEvent:
    """One thing that happened to a message.

    at_ms        when, by the clock of the log's broker, or of the sender (ms since 1970)
    what         what happened
    record       the record to which it happened, as `partition:offset` or, in another topic than the queue's,
                 `topic:partition:offset`; with ` (lost)` behind it if it is one of MessageLife.lost
    by           the client that took the record last, if it gave a name: only start markers name their
                 writer. None where a tracker wrote the marker
    for_ms       the lease that was taken or asked for, or the delay
    counts       False: this delivery is not an attempt
    reason       the reason that the client gave; of a copy `expired`, `nack: …`, `rejected: …`, `refused: …`
                 or `delay over`; of an acknowledgement that a tracker has found `by an earlier taker`; else
                 the reason in the tracker's end marker
    copy         the record that was appended as a copy
    late         True: the record was finished already, or nobody had taken it, so this changed nothing
    """

    at_ms: int
    what: LifeEventKind
    record: str
    by: str | None = None
    for_ms: int | None = None
    counts: bool = True
    reason: str | None = None
    copy: str | None = None
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLife:
    """Everything that the logs tell about a message.

    Attributes:
        queue: The name of its queue.
        records: The message and its copies, in order, written as in LifeEvent.
        deleted: The records that are no longer in their topics.
        key: The key as text, bytes that are not UTF-8 replaced; None without a key, or if the first record is
            deleted.
        state: The state of the last record.
        events: What happened to the records, in the order of time.
        lost: The records that are gone because their log was cut back (rule R39 of docs/rules.md); another
            message may stand at the offset now.
    """

    queue: str
    records: tuple[str, ...]
    deleted: tuple[str, ...]
    key: str | None
    state: LifeState
    events: tuple[LifeEvent, ...]
    lost: tuple[str, ...] = ()


class SeenMarker(NamedTuple):
    """A marker of a record of the message: its markers offset, its timestamp, and the copy that it names."""

    at: int
    timestamp_ms: int
    marker: Marker
    copy: RecordPlace | None


class RecordFacts(NamedTuple):
    """What was read of a record of the message; `reason`: why it became a dead letter, if it is one."""

    timestamp_ms: int
    key: bytes | None = None
    reason: str | None = None


_OPERATIONS = {
    Op.TAKE: (LifeEventKind.TAKEN, LifeState.IN_FLIGHT),
    Op.DELAY: (LifeEventKind.LOOKED_AT, LifeState.DELAYED),
    Op.EXTEND: (LifeEventKind.EXTENDED, LifeState.IN_FLIGHT),
    Op.NACK: (LifeEventKind.GIVEN_BACK, LifeState.RELEASED),
    Op.DEAD_LETTER: (LifeEventKind.REJECTED, LifeState.REJECTED),
}
_BY_EARLIER_TAKER = "by an earlier taker"
_OPENING_OPS = (Op.TAKE, Op.DELAY)
_OPEN_STATES = {LifeState.DELAYED, LifeState.IN_FLIGHT, LifeState.RELEASED, LifeState.REJECTED}
_UNFINISHED_STATES = _OPEN_STATES | {LifeState.WAITING}
_LOST = " (lost)"


def build_life(
    queue: str,
    chain: Sequence[RecordPlace],
    facts: Mapping[RecordPlace, RecordFacts],
    markers: Mapping[RecordPlace, Iterable[SeenMarker]],
    lost: Collection[RecordPlace] = (),
    lanes: Collection[str] = (),
) -> MessageLife:
    """Build the life of the message whose records are `chain`: the first one sent, then its copies in order.

    The offset in the place of a record is its number; see log_cuts.

    facts    by record, for the records that are still in their topics
    markers  by record, in the order of the log
    lost     the records that stood behind a cut, in the former log
    lanes    the queue's topics of messages, if it has more than one; records in other topics are dead letters
    """

    def text(place: RecordPlace) -> str:
        return shown(queue, place) + (_LOST if place in lost else "")

    events: list[LifeEvent] = []
    state = LifeState.WAITING
    known = frozenset(chain)
    for place in chain:
        one = _RecordLife(place, facts, known, text, lanes or (queue,))
        if place == chain[0] and place in facts:
            at_ms = facts[place].timestamp_ms
            events.append(LifeEvent(at_ms=at_ms, what=LifeEventKind.SENT, record=text(place)))
        events.extend(map(one.event, markers.get(place, ())))
        state = LifeState.LOST if place in lost and one.state in _UNFINISHED_STATES else one.state
    first = facts.get(chain[0])
    return MessageLife(
        queue=queue,
        records=tuple(map(text, chain)),
        deleted=tuple(text(place) for place in chain if place not in facts and place not in lost),
        lost=tuple(text(place) for place in chain if place in lost),
        key=None if first is None or first.key is None else first.key.decode("utf-8", "replace"),
        state=state,
        # In each partition, the order of the log is the order of time. Sorting is stable.
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
    )


def shown(queue: str, place: RecordPlace) -> str:
    """The place of a record as text, without its topic if that is the queue topic."""
    text = f"{place.partition}:{offset_of(place.offset)}"
    return text if place.topic == queue else f"{place.topic}:{text}"


class _RecordLife:
    """Follows one record through its markers; `known` holds all records of the message.

    `text` returns the place of a record as text, and `lanes` are the queue's topics of messages.
    """

    def __init__(
        self,
        place: RecordPlace,
        facts: Mapping[RecordPlace, RecordFacts],
        known: frozenset[RecordPlace],
        text: Callable[[RecordPlace], str],
        lanes: Collection[str],
    ) -> None:
        self.state = LifeState.WAITING if place.topic in lanes else LifeState.DEAD_LETTER
        self._lanes = lanes
        self._place = place
        self._facts = facts
        self._known = known
        self._text = text
        self._holder: str | None = None
        self._copy_reason = "expired"

    def event(self, seen: SeenMarker) -> LifeEvent:
        """Apply the next marker of the record, and return the event."""
        if seen.marker.op is Op.END:
            return self._end_event(seen)
        marker = seen.marker
        what, state = _OPERATIONS[marker.op]
        late = marker.op not in _OPENING_OPS and self.state not in _OPEN_STATES
        if marker.op in _OPENING_OPS:
            self._holder = marker.holder
        is_held = marker.op is Op.NACK and marker.by_tracker
        if not late and self.state is not LifeState.REJECTED:
            self.state = state
            if not is_held:
                self._copy_reason = _reason_of_copy(marker)
        return LifeEvent(
            at_ms=seen.timestamp_ms,
            what=LifeEventKind.HELD if is_held else what,
            record=self._text(self._place),
            by=None if is_held else marker.holder or self._holder,
            for_ms=None if marker.op is Op.DEAD_LETTER else marker.redeliver_after_ms,
            counts=marker.counts,
            reason=marker.reason,
            late=late,
        )

    def _end_event(self, seen: SeenMarker) -> LifeEvent:
        late = self.state in (LifeState.ACKNOWLEDGED, LifeState.ENDED)
        copy = seen.copy if seen.copy in self._known else None
        what, reason = LifeEventKind.ACKNOWLEDGED, None
        if copy is not None:
            what, reason = self._kind_and_reason(copy)
        elif seen.marker.by_tracker and seen.marker.reason == ACKNOWLEDGED and seen.copy is None:
            reason = _BY_EARLIER_TAKER
        elif seen.marker.by_tracker:
            what, reason = LifeEventKind.ENDED, seen.marker.reason
        if not late:
            is_acknowledged = what is LifeEventKind.ACKNOWLEDGED
            self.state = LifeState.ACKNOWLEDGED if is_acknowledged else LifeState.ENDED
        return LifeEvent(
            at_ms=seen.timestamp_ms,
            what=what,
            record=self._text(self._place),
            by=None if seen.marker.by_tracker else self._holder,
            reason=reason,
            copy=None if copy is None else self._text(copy),
            late=late,
        )

    def _kind_and_reason(self, copy: RecordPlace) -> tuple[LifeEventKind, str | None]:
        if self._place.topic not in self._lanes:
            return LifeEventKind.REDRIVEN, None
        if copy.topic in self._lanes:
            return LifeEventKind.REDELIVERED, self._copy_reason
        known = self._facts.get(copy)
        return (
            LifeEventKind.DEAD_LETTERED,
            self._copy_reason if known is None or known.reason is None else known.reason,
        )


def _reason_of_copy(marker: Marker) -> str:
    words = {Op.DELAY: "delay over", Op.NACK: "nack", Op.DEAD_LETTER: "rejected"}
    word = words.get(marker.op, "expired")
    return f"{word}: {marker.reason}" if marker.reason and marker.op in (Op.NACK, Op.DEAD_LETTER) else word
