"""Which dead letters of a partition have end markers, even where their log was cut back. Pure: no I/O."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.claim_headers import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.log_cuts import NO_CUTS, offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_headers


class EndedLetters:
    """Reads the markers of one partition of the dead letters, in any order.

    cuts     the cuts of the dead letters' log that are known (rule R39 of docs/rules.md); markers name dead
             letters by numbers, see log_cuts
    claimed  by leader epoch, the highest offset of a dead letter that a claim names: it had this epoch, or a
             lower one. Claims of older versions name no epoch
    """

    def __init__(self) -> None:
        self.cuts = NO_CUTS
        self.claimed: dict[int, int] = {}
        self._numbers = OffsetRuns()

    def read(self, marker: Marker, record: Any) -> None:
        """Take in a marker; `record` is that of the marker."""
        if marker.op is not Op.END:
            return
        if marker.offset >= 0:
            self._numbers.add_runs(marker.offset_runs)
            return
        self.cuts = self.cuts.merged(marker.cuts)
        if marker.epoch is not None and marker.takes_from is None:
            with suppress(DecodeError):  # each record is judged alone (rule R21)
                if names := named_offsets(read_headers(record)[0], CLAIM, marker.partition):
                    highest = max(offset_of(names.highest), self.claimed.get(marker.epoch, -1))
                    self.claimed[marker.epoch] = highest

    def offsets(self) -> OffsetRuns:
        """The offsets of the dead letters with an end marker, in the log as it is."""
        if not self.cuts:
            return self._numbers
        current = self.cuts.current_runs(self._numbers.runs())
        return OffsetRuns((offset_of(first), count) for first, count in current)
