"""Notes the highest copy that trackers have written to a queue partition, as its markers name them.

The copy stood in the log, so if it does not any more, the log was cut back (rule R39 of docs/rules.md). Its
number is used up, even if nobody has taken the copy. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID
from kmqpy.kafka.markers.codec import Headers, Marker
from kmqpy.kafka.markers.lineage import COPY, last_copy_here


class NamedCopy(NamedTuple):
    """The copy with this number has leader epoch `epoch` or a lower one.

    claim_id  that of the claim before its end marker; empty without one
    """

    number: int
    epoch: int
    claim_id: bytes = b""


class NamedCopies:
    """Reads the end markers and ticks of one markers partition, in the order of their log.

    highest  the highest copy whose leader epoch is limited by the tick before its end marker; None: there is
             none. Trackers of older versions don't tell epochs
    """

    def __init__(self) -> None:
        self.highest: NamedCopy | None = None
        self._epoch: int | None = None
        self._claim_id = b""

    def read(self, marker: Marker, headers: Headers) -> None:
        """Take in an end marker of a tracker, or a tick."""
        named = dict(headers)
        if marker.offset >= 0:
            if copies := named.get(COPY):
                self.add(copies, marker.partition)
        elif CLAIM in named or (marker.epoch is not None and marker.takes_from is None):
            self._epoch, self._claim_id = marker.epoch, named.get(CLAIM_ID) or b""

    def add(self, copies: bytes, partition: int) -> None:
        """Take in the header `kmq-copy` of an end marker."""
        if self._epoch is None:
            return
        number = last_copy_here(copies, partition)
        if number is not None and (self.highest is None or number > self.highest.number):
            self.highest = NamedCopy(number, self._epoch, self._claim_id)

    def is_intact(self, number: int, epoch: int) -> None:
        """Note that no cut before this leader epoch took away the copy, if it is at most this one."""
        if self.highest is not None and self.highest.number <= number and self.highest.epoch < epoch:
            self.highest = self.highest._replace(epoch=epoch)

    def drop(self, is_gone: Callable[[int], bool]) -> None:
        """Forget the copy if it was cut away, which is known now."""
        if self.highest is not None and is_gone(self.highest.number):
            self.highest = None
