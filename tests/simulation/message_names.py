"""Which message each number of a partition names: as those meant it who wrote start markers and handed out.

Where logs are cut back, an offset names one message after the other, so the checker goes by the records
themselves. A number that names two messages, or a message with two numbers, is a fault by itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.log_cuts import offset_of

from .model import decoded

if TYPE_CHECKING:
    from .model import Record
    from .world import Process

Number = tuple[int, int]
"""A partition, and the number of a message there."""


class MessageNames:
    """Filled while a seed runs in which logs may be cut back."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._records: dict[Number, Record] = {}
        self._numbers: dict[Record, int] = {}
        self._halted: defaultdict[tuple[Number, Record], set[str]] = defaultdict(set)
        """What clients took when they had stood still and lost the partition, perhaps from a log that was cut
        back since, and who did: a gap of rule R39."""
        self._gone: defaultdict[tuple[Number, Record], list[Record]] = defaultdict(list)
        """What clients took that they had fetched before it was cut away, and by which start markers: another
        gap."""
        self._starts: defaultdict[tuple[Number, Record], list[Record]] = defaultdict(list)
        """The start markers by which a message had this number, while it was there."""

    def meant_by(self, marker: Record, process: Process, decoded: Any) -> None:
        """Keep with a start marker that is about to be sent which messages its client means."""
        for one in decoded:
            record = process.taking.get((marker.part, offset_of(one.offset)))
            if one.op in (Op.TAKE, Op.DELAY) and record is not None:  # None: a tracker has written it
                marker.meant[one.offset] = record

    def taken(self, marker: Record) -> None:
        """A start marker is written."""
        by = f"{marker.by}, who stood still," if marker.is_of_halted else marker.by
        for number, record in marker.meant.items():
            place = marker.part, number
            (self._gone if record.is_cut else self._starts)[place, record].append(marker)
            if marker.is_of_halted:
                self._halted[place, record].add(marker.by)
            self.note(place, record, by)

    def note(self, place: Number, record: Record, by: str) -> None:
        """Somebody calls this message by this number."""
        known = self._records.get(place)
        if known is not None and known is not record:
            if self._is_of_former(place, record):
                return
            if self._is_of_former(place, known) or self._is_forgotten(place, known):
                known = None
        if known is not None and known is not record:
            self._tell(f"{_shown(place)} is {record.value()!r} to {by}, and was {known.value()!r} before")
            return
        self._records[place] = record
        number = self._numbers.setdefault(record, place[1])
        if number != place[1]:
            if not self._lacks_ticks((place[0], number), record):  # else a cut was told that was none
                self._tell(f"{record.value()!r} is {_shown(place)} to {by}, and was {number} before")
            self._numbers[record] = place[1]

    def _is_of_former(self, place: Number, record: Record) -> bool:
        return record.is_cut and (place, record) in self._halted

    def _is_forgotten(self, place: Number, record: Record) -> bool:
        """Whether nobody can know that there was such a message, and of which epoch.

        Its start markers were deleted, or the assignment ticks before them.
        """
        return record.is_cut and self._lacks_ticks(place, record)

    def _lacks_ticks(self, place: Number, record: Record) -> bool:
        """Whether the assignment ticks before all start markers that give a message this number are deleted.

        Then nobody can know which epoch it has; who goes by an older commit takes it for one of that epoch.
        """
        # Later ones may mean what stands there since.
        starts = self._starts[place, record] or self._gone.get((place, record), [])[:1]
        return bool(starts) and all(_tick_before(one) < one.log.start for one in starts)

    def meant_former(self, place: Number, by: str, bodies: set[bytes]) -> bool:
        """Whether this client stood still, and took one of the former log that has one of these bodies."""
        return any(
            at == place and by in takers and record.is_cut and record.value() in bodies
            for (at, record), takers in self._halted.items()
        )

    def is_hidden(self, record: Record) -> bool:
        """Whether somebody stood still, and took the one of the former log that had this one's offset."""
        place = record.part, record.at
        return any((at[0], offset_of(at[1])) == place and one.is_cut for at, one in self._halted)

    def was_gone(self, place: Number, record: Record) -> bool:
        """Whether somebody took this message by this number when it was cut away already."""
        return (place, record) in self._gone

    def of(self, place: Number) -> Record | None:
        """The message that this number names; None if nobody took one of that number."""
        return self._records.get(place)

    def copied(self, place: Number, copy: Record, by: str) -> None:
        """An end marker calls a copy by this number; by another once a cut is told before which it stands."""
        known = self._records.get(place)
        was_renamed = self._numbers.get(copy, place[1]) != place[1]
        if known is not None and self._is_of_former(place, known) and not self._starts[place, known]:
            known = None  # nobody took it by this number until it was gone
        if known is not None and known is not copy and not (known.is_cut and was_renamed):
            self._tell(f"{_shown(place)} is a copy of {copy.value()!r} to {by}, and is {known.value()!r}")

    def knows(self, record: Record) -> bool:
        """Whether somebody took this message."""
        return self.number_of(record) is not None

    def number_of(self, record: Record) -> int | None:
        """The number that a message had last; None if nobody took it."""
        return self._numbers.get(record)

    def _tell(self, problem: str) -> None:
        self.problems.append(f"R39: {problem}")


def _tick_before(start: Record) -> int:
    """Where the assignment tick stands that tells the epoch of what a start marker names."""
    before = (one for one in reversed(start.log.records[: start.at]) if one.is_data)
    return next((one.at for one in before if any(tick.takes_from is not None for tick in decoded(one))), -1)


def _shown(place: Number) -> str:
    partition, number = place
    offset = offset_of(number)
    return f"{partition}@{offset}" if number == offset else f"{partition}@{offset} ({number >> 44})"
