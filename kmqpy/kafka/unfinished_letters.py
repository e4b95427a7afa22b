"""Which dead letters of a partition are not finished, as the end markers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from kmqpy.errors import DecodeError
from kmqpy.kafka.ended_letters import EndedLetters
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.open_claims import OpenClaims

_MAX_READ_GAP = 1_000
"""A reader skips a gap of more finished dead letters than this by a seek, and reads a shorter one."""


class UnfinishedLetters:
    """The unfinished offsets of one partition of the dead-letter topic.

    offsets  once settle() was called: the offsets from `first` to before `end` without an end marker; not all
             of them hold a message
    read_to  the markers offset up to which end markers were read
    ended    the dead letters with end markers
    claims   the claims of redrives and purges whose transactions may be torn (rule R37 of docs/rules.md)
    """

    def __init__(self, partition: int, first: int, end: int) -> None:
        self.read_to = 0
        self.partition = partition
        self.first = first
        self.end = end
        self.claims = OpenClaims()
        self.ended = EndedLetters()
        self.offsets = OffsetRuns()

    def settle(self) -> None:
        """Find out which offsets are not finished, by the markers that were read and the cuts of the log."""
        self.claims.end_all()
        cuts = self.ended.cuts
        if cuts:
            self.claims.drop(lambda number: not cuts.is_current(number))
        if self.first < self.end:
            self.offsets = OffsetRuns([(self.first, self.end - self.first)]) - self.ended.offsets()

    def read(self, marker: Marker, record: Any) -> None:
        """Take in an end marker; `record` is that of the marker."""
        self.ended.read(marker, record)
        if marker.by_tracker:
            with suppress(DecodeError):  # each record is judged alone (rule R21)
                self.claims.read(marker, record, now_ms=0)

    def discard(self, start: int, stop: int) -> None:
        """Remove the offsets from `start` to before `stop`; others than `first` to `end` are ignored."""
        start, stop = max(start, self.first), min(stop, self.end)
        if start < stop:
            self.offsets.discard_runs([(start, stop - start)])

    def keep(self, offsets: Iterable[int]) -> None:
        """Remove all offsets but these."""
        kept = OffsetRuns()
        for offset in offsets:
            kept.add(offset)
        self.offsets &= kept

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield pieces of the log, (start, stop), that hold all unfinished offsets and no long gap."""
        start = stop = None
        for first, count in self.offsets.runs():
            if start is not None and stop is not None and first - stop > _MAX_READ_GAP:
                yield start, stop
                start = None
            start = first if start is None else start
            stop = first + count
        if start is not None and stop is not None:
            yield start, stop
