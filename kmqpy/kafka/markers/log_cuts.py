"""Numbers the messages of a partition so that a number never names two messages. Pure: no I/O.

The log of a partition can be cut back: after a power cut of all replicas, or an unclean election, it ends
earlier than before, and Kafka gives the offsets behind the cut once more (rule R39 of docs/rules.md). So
kmqpy names a message by a number, which is its offset in a log that was never cut. Behind a cut it is

    number = epoch << 44 | offset

where `epoch` is the leader epoch of the first record that was written behind the cut. Kafka raises a
partition's leader epoch with each election, and each record keeps the epoch in which it was written, so the
epoch of a cut is above those of all records that the log had before. Whatever names a message of the former
log names a number that no message has any more. What lies below the cut keeps its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_OFFSET_BITS = 44
"""Offsets are below 2^44: 17 million million messages in a partition."""
_MAX_OFFSET = (1 << _OFFSET_BITS) - 1
_MAX_EPOCH = (1 << 63 - _OFFSET_BITS) - 1
"""Numbers are below 2^63. In a partition with more elections than this, a cut gets no number: it is not told,
and messages behind it are taken for those that stood there before."""
_MAX_CUTS = 100
"""A text with more cuts is refused; of more that are found, the first are forgotten."""
_CUT = r"[0-9]{1,6}<[0-9]{1,6}@[0-9]{1,14}"
_TEXT = re.compile(f"{_CUT}(,{_CUT})*")


class Cut(NamedTuple):
    """From offset `start` on, the log was written anew; the record there has the leader epoch `epoch`.

    The cut took away a record of epoch `above` or lower, which is how somebody knows of it. If somebody else
    finds the same cut after another election, and no record stands behind it yet, he gives it a higher epoch;
    `above` tells that from another cut, which takes away what was written behind this one.
    """

    epoch: int
    start: int
    above: int

    @property
    def base(self) -> int:
        """What is added to the offsets behind the cut."""
        return self.epoch << _OFFSET_BITS


_UNCUT = Cut(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LogCuts:
    """The cuts of a partition's log, as far as they are known, ascending by epoch and by start."""

    cuts: tuple[Cut, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def knows(self, cut: Cut) -> bool:
        """Return True if this cut, or a later one that lies lower, is known, or if it can't be numbered."""
        can_be_new = cut.above < cut.epoch <= _MAX_EPOCH and 0 <= cut.start <= _MAX_OFFSET
        return not can_be_new or any(
            one.epoch == cut.epoch or (one.start <= cut.start and one.epoch > cut.above) for one in self.cuts
        )

    def with_cut(self, cut: Cut) -> LogCuts:
        """These cuts and `cut`, unless it is known; those that it has cut away are left out."""
        if self.knows(cut):
            return self
        kept = (one for one in self.cuts if one.start < cut.start or one.epoch > cut.epoch)
        return LogCuts(tuple(sorted((*kept, cut)))[-_MAX_CUTS:])

    def up_to(self, epoch: int) -> LogCuts:
        """Those of a log whose latest leader epoch is this; others are lies."""
        return LogCuts(tuple(cut for cut in self.cuts if cut.epoch <= epoch))

    def new_in(self, other: LogCuts) -> tuple[Cut, ...]:
        """The cuts in `other` that are not known here."""
        return tuple(cut for cut in other.cuts if not self.knows(cut))

    def merged(self, other: LogCuts) -> LogCuts:
        """These cuts, and those in `other` that are not known."""
        found = self
        for cut in other.cuts:
            found = found.with_cut(cut)
        return found

    def base_at(self, offset: int) -> int:
        """What is added to this offset of the log to have the number of its message."""
        return next((cut.base for cut in reversed(self.cuts) if cut.start <= offset), 0)

    def number_of(self, offset: int) -> int:
        """The number of the message at this offset of the log."""
        return offset + self.base_at(offset) if self.cuts else offset

    def number_in(self, epoch: int | None, number: int) -> int:
        """The number of the record that was called `number` while the log had this leader epoch.

        It may have been written behind a cut that nobody had told yet. None: the epoch is not known.
        """
        offset = offset_of(number)
        known = (cut for cut in reversed(self.cuts) if epoch is not None and cut.epoch <= epoch)
        return next((cut.base + offset for cut in known if cut.start <= offset), number)

    def numbers_of(self, offsets: Sequence[int]) -> Sequence[int]:
        """The numbers of the messages at these offsets, which ascend."""
        if not self.cuts or not offsets:
            return offsets
        base = self.base_at(offsets[0])
        if base != self.base_at(offsets[-1]):
            return [self.number_of(offset) for offset in offsets]
        if isinstance(offsets, range):
            return range(offsets.start + base, offsets.stop + base)
        return [offset + base for offset in offsets] if base else offsets

    def is_current(self, number: int) -> bool:
        """Return True unless the message with this number stood behind a cut, in the former log.

        A number behind a cut that is not known counts as one of the former log, too, but not as long as no
        cut is known at all.
        """
        return not self.cuts or self.number_of(offset_of(number)) == number

    def current_runs(self, runs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
        """Yield the parts of runs (first, count) of numbers that did not stand behind a later cut."""
        for first, count in runs:
            offset = offset_of(first)
            limit = min((cut.start for cut in self.cuts if cut.base > first - offset), default=offset + count)
            if limit > offset:
                yield first, min(count, limit - offset)

    def cut_of(self, number: int) -> Cut | None:
        """The cut behind which the message with this number stands.

        Cut(0, 0, 0) stands for the log before the first cut; None: no known cut has given this number.
        """
        base = number - offset_of(number)
        if not base:
            return _UNCUT
        return next((cut for cut in self.cuts if cut.base == base and number >= base + cut.start), None)

    def existing(self, runs: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
        """What of these runs (first, count) of numbers lies below the log's end, behind no unknown cut."""
        for first, count in runs:
            cut = _UNCUT if first < end else self.cut_of(first)
            if cut is not None and first < cut.base + end:
                yield first, min(count, cut.base + end - first)

    def __str__(self) -> str:
        return ",".join(f"{cut.above}<{cut.epoch}@{cut.start}" for cut in self.cuts)

    @classmethod
    def parse(cls, text: str) -> LogCuts:
        """The cuts in a text that str() gave; raises ValueError for any other."""
        if not text:
            return NO_CUTS
        if not _TEXT.fullmatch(text):
            raise ValueError("cuts: not of the form above<epoch@start,above<epoch@start,...")
        found = NO_CUTS
        parts = text.split(",")
        for part in parts:
            above, epoch, start = map(int, re.split("[<@]", part))
            found = found.with_cut(Cut(epoch, start, above))
        if len(found.cuts) != len(parts) or len(parts) > _MAX_CUTS or str(found) != text:
            raise ValueError("cuts: too many, not ascending, or out of range")
        return found


NO_CUTS = LogCuts()
"""A log that was never cut back, as far as anybody knows."""


def cuts_behind(number: int) -> LogCuts:
    """Cuts by which the message at the offset of this number has this number."""
    offset = offset_of(number)
    epoch = number >> _OFFSET_BITS
    return NO_CUTS if offset == number else LogCuts((Cut(epoch, offset, epoch - 1),))


def offset_of(number: int) -> int:
    """The offset at which the message with this number stands, or stood."""
    return number & _MAX_OFFSET if number > _MAX_OFFSET else number
