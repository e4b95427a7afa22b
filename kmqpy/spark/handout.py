"""Takes the messages of an Arrow batch, for a task of Spark: decides which of them are handed out.

First the task reads from the markers which of the messages were taken before (rule R10 of docs/rules.md).
Then it writes start markers ("this message is taken, its lease begins") for the messages that it hands out.
The others are finished, or are left to a tracker, which redelivers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.codec import runs_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.places import Offsets, Place
from kmqpy.spark.report import BatchReport
from kmqpy.spark.taker import AnyTaker, TakenBefore


@dataclass(frozen=True, slots=True)
class Places:
    """The numbered partition (see kmqpy.spark.lanes) and offset of each row, as two arrays of numpy."""

    partitions: Any
    offsets: Any

    @classmethod
    def of(cls, partitions: pa.Array, offsets: pa.Array, queue: str) -> Places:
        """Make places of Arrow arrays; raises ConfigError for nulls: rows that are not of the queue."""
        if partitions.null_count or offsets.null_count:
            raise ConfigError(
                f"process, take: rows that are not of queue {queue!r}; give them what read_stream() of the "
                "same queue returns"
            )
        return cls(partitions.to_numpy(), offsets.to_numpy())

    def place(self, row: int) -> Place:
        """The partition and offset of one row."""
        return int(self.partitions[row]), int(self.offsets[row])

    def where(self, mask: Any) -> Places:
        """The rows for which `mask` is True."""
        return Places(self.partitions[mask], self.offsets[mask])

    def by_partition(self) -> dict[int, Sequence[int]]:
        """The offsets of each partition, ascending; raises ConfigError when an offset is there twice."""
        found: dict[int, Sequence[int]] = {}
        for partition in np.unique(self.partitions).tolist():
            ones = np.sort(self.offsets[self.partitions == partition])
            low, high = int(ones[0]), int(ones[-1])
            if (np.diff(ones) == 0).any():
                raise ConfigError(
                    f"partition {partition} has a message more than once between the offsets {low} and "
                    f"{high}; join, union or explode behind process() or take(), not before it"
                )
            found[partition] = range(low, high + 1) if high - low + 1 == len(ones) else ones.tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """The messages of a batch: which are handed out, and which are not; by partition.

    rows    a mask of numpy: True where the message was taken and is handed out
    taken   the messages that are handed out
    left    messages that must not be acknowledged: given back, overdue, to be dead-lettered, not yet due, or
            (if Handout withholds these) deadly
    deadly  deadly messages (see SortedOut), which the caller gives back
    next    see BatchReport
    """

    rows: Any
    taken: Offsets
    left: Mapping[int, set[int]]
    deadly: Sequence[Place]
    next: Mapping[int, Place]

    def report(self, failed: Iterable[Place] = ()) -> BatchReport:
        """The report that all messages handed out are done, except those in `failed`."""
        left = {partition: set(offsets) for partition, offsets in self.left.items()}
        for partition, offset in failed:
            left.setdefault(partition, set()).add(offset)
        done: dict[int, OffsetRuns] = {}
        for partition, offsets in self.taken.items():
            runs = OffsetRuns(runs_of(offsets))
            for offset in left.get(partition, ()):
                runs.discard(offset)
            if runs:
                done[partition] = runs
        left_runs = {p: OffsetRuns(runs_of(sorted(ones))) for p, ones in left.items() if ones}
        return BatchReport(done=done, left=left_runs, next=self.next)


class Handout:
    """Takes the messages of one task; with `withholds_deadly`, none that is deadly (see SortedOut)."""

    def __init__(self, taker: AnyTaker, lease_ms: int, *, withholds_deadly: bool) -> None:
        self._taker = taker
        self._lease_ms = lease_ms
        self._withholds_deadly = withholds_deadly
        self._known: dict[int, TakenBefore] = {}

    def read_markers(self, places: Places) -> None:
        """Read which messages were taken before, in partitions where it is unknown. Raises Unavailable."""
        for partition, offsets in places.by_partition().items():
            known = self._known.get(partition)
            if known is None or known.first > offsets[0]:
                self._known[partition] = self._taker.taken_before(partition, offsets[0])

    def was_taken(self, place: Place) -> bool:
        """Return True if the message was taken before, and no marker says that the worker survived that."""
        partition, offset = place
        return self._known[partition].takes(offset) > 0

    def taken_again(self, taken: Offsets) -> list[Place]:
        """Return which of `taken` had been taken before."""
        return [
            (partition, offset)
            for partition, offsets in taken.items()
            for offset in self._known[partition].taken(offsets)
        ]

    def take(self, places: Places, deliver_at_ms: pa.Array) -> HandedOut:
        """Write start markers for messages that can be handed out, and wait until they are confirmed.

        Messages that are not yet due get markers of their delay instead. Raises Unavailable, ConfigError.
        """
        everything = places.by_partition()
        rows = np.ones(len(places.offsets), dtype=bool)
        left: dict[int, set[int]] = {}
        deadly: list[Place] = []
        for partition, offsets in everything.items():
            sorted_out = self._known[partition].sort_out(offsets)
            left[partition] = sorted_out.left
            if self._withholds_deadly:
                left[partition] |= sorted_out.deadly
                deadly += [(partition, offset) for offset in sorted(sorted_out.deadly)]
            if withheld := sorted_out.finished | left[partition]:
                here = places.partitions == partition
                rows &= ~(here & np.isin(places.offsets, list(withheld)))
        delays = _delays(places, deliver_at_ms, rows)
        for partition, offset in delays:
            left[partition].add(offset)
        taken = everything if rows.all() else places.where(rows).by_partition()
        after = self._taker.take(taken, delays, self._lease_ms)
        # Where messages at higher offsets were taken before (by a consumer, or a query that began later), a
        # reader must read from where this task has read.
        next_: dict[int, Place] = {}
        for partition, markers_offset in after.items():
            known, last = self._known[partition], everything[partition][-1]
            next_[partition] = last + 1, markers_offset if known.highest <= last else known.start
        self._taker.remember(next_)
        return HandedOut(rows=rows, taken=taken, left=left, deadly=deadly, next=next_)


def _delays(places: Places, deliver_at_ms: pa.Array, rows: Any) -> dict[Place, int]:
    """Messages that are not yet due, with the ms until each one is; sets them to False in `rows`."""
    if deliver_at_ms.null_count == len(deliver_at_ms):
        return {}
    # Times before 1970 count as 1970, so that the subtraction can't overflow.
    due_ms = np.maximum(deliver_at_ms.fill_null(0).to_numpy(zero_copy_only=False), 0)
    waits = due_ms - SYSTEM_CLOCK.wall_ms()
    early = np.flatnonzero(rows & (waits > 0))
    rows[early] = False
    return {places.place(row): min(int(waits[row]), 2**62) for row in early.tolist()}
