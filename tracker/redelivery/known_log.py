"""What a tracker knows of the log of a queue partition, to notice that it was cut back. Pure: no I/O.

Each record keeps the leader epoch in which it was written, and epochs ascend along a log. A message that
existed while the partition had an epoch has that epoch or a lower one. So a record of a higher epoch that
stands where the message stood was written behind a cut (rule R39 of docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.entry import Entry
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts, offset_of
from tracker.redelivery.redelivery_plan import Original

_MAX_EPOCHS = 100
"""Of more epochs, the first are forgotten; messages of that time count as being of the next ones."""


@dataclass(frozen=True, slots=True)
class LastSeen:
    """A record with leader epoch `epoch` is known to have stood at `offset`; -1: none is.

    claim_id  if the record is a copy: the claim that it names
    is_sure   False: the epoch is that of clients that write ticks, but another kind of client, which may meet
              higher ones, perhaps took the record
    """

    offset: int
    epoch: int
    claim_id: bytes = b""
    is_sure: bool = True


class CopySearch(NamedTuple):
    """A search for messages whose copies were cut away from offset `start` on; see redeliver_lost_copies().

    last  nobody has told a cut, and the highest copy before `start` stands at this offset: if it can be read,
          there are none
    """

    start: int
    last: int | None = None


@dataclass(frozen=True, slots=True)
class KnownLog:
    """The log of a queue partition, as far as a tracker knows it.

    cuts    those that ticks have told
    epochs  pairs of a markers offset and a leader epoch, ascending: the messages whose takes stand before the
            markers offset existed while the partition had this epoch or a former one. Kafka told the epoch
            after the takes were written: what it told before says nothing, since the log may have been cut
            back between, and a new message taken
    epoch   no cut but these had happened when the partition's latest leader epoch was this; -1: not known
    whole   False: a job looks whether copies were cut away, or aborted after their commit
    """

    cuts: LogCuts = NO_CUTS
    epochs: tuple[tuple[int, int], ...] = ()
    epoch: int = -1
    whole: bool = True

    def told(self, below: int, epoch: int) -> KnownLog:
        """With this epoch, which was asked for when the takes before markers offset `below` were written."""
        before = self.epochs
        if epoch < 0 or (before and below <= before[-1][0]):
            return self
        if before and before[-1][1] == epoch:
            before = before[:-1]
        return replace(self, epochs=(*before, (below, epoch))[-_MAX_EPOCHS:])

    @property
    def last_epoch(self) -> int:
        """The epoch that was told last; -1: none was."""
        return self.epochs[-1][1] if self.epochs else -1

    def epoch_of(self, entry: Entry) -> int:
        """The highest leader epoch that the record of this message in flight can have; -1: not known."""
        return next((epoch for below, epoch in self.epochs if entry.taken_at < below), -1)

    def originals(
        self, entries: Iterable[Entry], found: dict[int, Original]
    ) -> Iterator[tuple[Entry, Original | None]]:
        """The messages whose offsets are among those of `found`, and their records; None: it is another's.

        `found` is by offset; an Original that is returned has the number of its message instead. For a take
        behind the tick that told the cut, by a client which knows no cuts, the record that stands there now
        is the message that it took.
        """
        lowest = self.epochs[0][1] if self.epochs else INT64_MAX
        for entry in entries:
            original = found.get(offset_of(entry.offset))
            if original is None:
                continue
            if (
                original.epoch > lowest
                and 0 <= self.epoch_of(entry) < original.epoch
                and self.cuts.is_current(entry.offset)
            ):
                yield entry, None
            elif original.offset == entry.offset:
                yield entry, original
            else:
                yield entry, original._replace(offset=entry.offset)

    def last_seen(self, entry: Entry) -> LastSeen | None:
        """What is known of the record of this message in flight, where its epoch is known."""
        epoch = self.epoch_of(entry)
        if epoch < 0 or not self.cuts.is_current(entry.offset):
            return None
        return LastSeen(offset_of(entry.offset), epoch)
