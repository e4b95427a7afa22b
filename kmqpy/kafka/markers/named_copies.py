"""Notes the highest copies that trackers have written to a queue partition, as its markers name them.

A copy stood in the log, so if it does not any more, the log was cut back (rule R39 of docs/rules.md), unless
its transaction was aborted: who reads uncommitted markers meets such copies, too. The number of a copy is
used up, even if nobody has taken the copy. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, UNSURE
from kmqpy.kafka.markers.codec import Headers, Marker
from kmqpy.kafka.markers.lineage import COPY, last_copy_here

_MAX_LAST = 4
"""The highest copies of so many transactions are kept: those of the last ones may have been aborted after an
election, and would hide a copy before them."""


class NamedCopy(NamedTuple):
    """The copy with this number has leader epoch `epoch` or a lower one.

    claim_id  that of the claim before its end marker; empty without one
    """

    number: int
    epoch: int
    claim_id: bytes = b""


class NamedCopies:
    """Reads the end markers and ticks of one markers partition, in the order of their log.

    last  the highest copies of the last transactions whose copies have a leader epoch that is limited by the
          tick before their end markers; ascending. Trackers of older versions don't tell epochs
    """

    def __init__(self) -> None:
        self.last: list[NamedCopy] = []
        self._epoch: int | None = None
        self._claim_id = b""

    @property
    def highest(self) -> NamedCopy | None:
        """The highest copy; None: there is none."""
        return self.last[-1] if self.last else None

    @property
    def least_sure(self) -> NamedCopy | None:
        """The highest copy of those with the lowest epoch: a tracker looks whether it is still there."""
        return min(self.last, key=lambda copy: (copy.epoch, -copy.number), default=None)

    def restore(self, copy: NamedCopy) -> None:
        """Begin with the copy that was the highest when an offset was stored."""
        self.last = [copy]

    def read(self, marker: Marker, headers: Headers) -> None:
        """Take in an end marker of a tracker, or a tick."""
        named = dict(headers)
        if marker.offset >= 0:
            if copies := named.get(COPY):
                self.add(copies, marker.partition)
        elif CLAIM in named or (marker.epoch is not None and marker.takes_from is None):
            self._epoch, self._claim_id = marker.epoch, named.get(CLAIM_ID) or b""
            if CLAIM in named and UNSURE not in named and marker.epoch is not None and self.last:
                # Its tracker knew the log to be whole: what is not there any more, nobody could read.
                self.is_intact(self.last[-1].number, marker.epoch)

    def add(self, copies: bytes, partition: int) -> None:
        """Take in the header `kmq-copy` of an end marker."""
        if self._epoch is None:
            return
        number = last_copy_here(copies, partition)
        if number is None or (self.last and number <= self.last[-1].number):
            return
        if self.last and self.last[-1][1:] == (self._epoch, self._claim_id):
            self.last.pop()
        self.last.append(NamedCopy(number, self._epoch, self._claim_id))
        if len(self.last) > _MAX_LAST:
            self.last.remove(next(copy for copy in self.last if copy is not self.least_sure))

    def is_intact(self, number: int, epoch: int) -> None:
        """Note that no cut before this leader epoch took away the copies up to this number."""
        self.last = [
            copy._replace(epoch=epoch) if copy.number <= number and copy.epoch < epoch else copy
            for copy in self.last
        ]

    def drop(self, is_gone: Callable[[int], bool]) -> None:
        """Forget copies that were cut away, which is known now."""
        self.last = [copy for copy in self.last if not is_gone(copy.number)]
