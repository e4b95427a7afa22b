"""Computes from which markers offset, and with which in-flight state, a takeover begins to read. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers.entry import Entry, SnapshotRow, TakenRun
from kmqpy.kafka.markers.finished import StoredFinished
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, offset_of
from kmqpy.kafka.settings import QueueSettings


class StartPosition(NamedTuple):
    """Where a takeover begins to read markers.

    at            the offset to begin at, with the messages in flight and the finished messages known there
    problem       what was wrong with the stored offset, or with its snapshot; None: nothing
    markers_lost  True if Kafka has deleted markers from the stored offset on
    markers_cut   True if markers that had been read were cut away (rule R40)
    ahead_s       by how many seconds the stored time was ahead of the broker's clock; 0 if that is allowed
    taken         the highest message in flight in the snapshot as it was stored, there or not; -1: none
    untold        a cut of the queue's log that nobody is to tell, because the clients' commits and markers
                  are lost, too: they have taken messages behind it, and named them by their offsets. Who
                  reads of the cut would take these names for those of the former messages
    lost          how many messages in flight that cut has taken away
    """

    at: StoredOffset
    problem: str | None = None
    markers_lost: bool = False
    markers_cut: bool = False
    ahead_s: float = 0.0
    taken: int = -1
    untold: Cut | None = None
    lost: int = 0

    def corrected(self, now_ms: int, queue: QueueSettings, queue_end: int, lead_ms: int) -> StartPosition:
        """Return this position, corrected by the broker's time `now_ms` and by the end of the queue.

        If the stored time is more than `lead_ms` ahead, it becomes `now_ms`. Deadlines that a clock ahead has
        set move back by the same time, so that each lease keeps its remaining time (rule R23 of
        docs/rules.md). No deadline is later than `now_ms` plus the queue's longest lease or delay. Messages
        at or beyond `queue_end` don't exist and are left out (rule R22).
        """
        at, problem = self.at, self.problem
        ahead_ms = at.now_ms - now_ms
        latest_ms = now_ms + queue.longest_ms
        rows: list[SnapshotRow] = []
        beyond, taken = False, -1
        for row in at.in_flight:
            if ahead_ms > lead_ms:
                # A clock that was ahead has set this deadline if the lease had not ended at the stored time,
                # or if it began after the broker's time now.
                set_ahead = row.due_ms >= at.now_ms or row.since_ms > now_ms
                due_ms = row.due_ms - ahead_ms if set_ahead else row.due_ms
                row = row._replace(since_ms=min(row.since_ms, now_ms), due_ms=due_ms)
            row = row._replace(due_ms=min(row.due_ms, latest_ms))
            bits = row.bits if isinstance(row, TakenRun) else 1
            if at.cuts.cut_of(row[0]) is not None:
                taken = max(taken, row[0] + bits.bit_length() - 1)
            existing = dict(at.cuts.existing([(row[0], bits.bit_length())], queue_end)).get(row[0], 0)
            if isinstance(row, TakenRun) and 0 < existing < bits.bit_length():
                beyond = True
                row = row._replace(bits=bits & ((1 << existing) - 1))
            if existing:
                rows.append(row)
        finished = at.finished.below(queue_end, at.cuts)
        if beyond or len(rows) < len(at.in_flight) or finished != at.finished:
            problem = "the stored snapshot names messages that don't exist; they are left out"
        if ahead_ms > lead_ms:
            problem = f"the stored time was {ahead_ms / 1000:g} s ahead of the broker's; set back"
            at = replace(at, now_ms=now_ms)
        ahead_s = ahead_ms / 1000 if ahead_ms > lead_ms else 0.0
        at = replace(at, in_flight=tuple(rows), finished=finished)
        return self._replace(at=at, problem=problem, ahead_s=ahead_s, taken=taken)

    def without_takes_behind(self, cut: Cut) -> StartPosition:
        """Return this position without what was known of messages behind a cut; see `untold`."""
        at, lost = self.at, 0
        rows: list[SnapshotRow] = []
        for row in at.in_flight:
            bits = row.bits if isinstance(row, TakenRun) else 1
            left = dict(at.cuts.existing([(row[0], bits.bit_length())], cut.start)).get(row[0], 0)
            kept = bits & ((1 << left) - 1)
            lost += (bits ^ kept).bit_count()
            if kept:
                rows.append(row._replace(bits=kept) if isinstance(row, TakenRun) else row)
        finished = at.finished.below(cut.start, at.cuts)
        at = replace(at, in_flight=tuple(rows), finished=finished, told_below=0)
        return self._replace(at=at, untold=cut, lost=lost)

    @property
    def highest(self) -> int:
        """The highest message offset that the stored offset names; -1 if it names no message."""
        named = [
            row.first + row.bits.bit_length() - 1 if isinstance(row, TakenRun) else row.offset
            for row in self.at.in_flight
        ]
        named += [first + count - 1 for first, count in self.at.finished.runs]
        return max(map(offset_of, named), default=-1)

    def state(self, *, has_retries: bool = False) -> InFlight:
        """Build the in-flight state to which markers from this position on are applied."""
        at = self.at
        state = InFlight(
            now_ms=at.now_ms,
            position=at.offset,
            missed_markers=at.missed_markers,
            has_retries=has_retries,
            cuts=at.cuts,
        )
        state.takes_epoch = at.takes_epoch
        state.restore(at.in_flight)
        state.highest_taken = max(state.highest_taken, self.taken)  # it may have been cut away
        state.finished.restore(at.finished)
        if at.copy is not None and at.cuts.is_current(at.copy.number):
            state.copies.restore(at.copy)
        state.finished_read = at.markers_read
        return state


def start_position(
    stored: StoredOffset | None, markers_id: str, log_start: int, end: int, cut: Cut | None = None
) -> StartPosition:
    """Compute the start position from the offset that is stored in ZooKeeper; None: no offset is.

    markers_id  the id of the markers topic
    log_start   the first markers offset that Kafka still has
    end         the markers offset of the tick that the takeover has written
    cut         a cut of the markers since the offset was stored (rule R40)
    """
    fresh = StoredOffset(log_start, markers_id, now_ms=0)
    if stored is None:
        return StartPosition(fresh)
    if stored.markers_id != markers_id:
        return StartPosition(fresh, "markers topic was recreated; reading all of it")
    if cut is not None:
        return StartPosition(
            _in_what_is_left(stored, log_start),
            f"the log of the markers was cut back: those from markers offset {cut.start} to before "
            f"{stored.markers_read} are lost; messages whose start markers are lost are taken again",
            markers_cut=True,
        )
    if stored.offset > end:
        return StartPosition(fresh, "stored offset is beyond the end; reading all markers")
    if stored.offset < log_start:
        return StartPosition(
            # The lost markers may have told from where clients take messages again on purpose.
            replace(stored, offset=log_start, missed_markers=True, finished=StoredFinished()),
            "markers were deleted before they were read; raise the markers topic's retention",
            markers_lost=True,
        )
    return StartPosition(stored)


def _in_what_is_left(stored: StoredOffset, log_start: int) -> StoredOffset:
    """The stored offset for a markers log that was cut back: all that is left of it is read again.

    What the snapshot takes for finished may be lost: of end markers that were cut away, the copies may be
    gone, too. What it has in flight stays, because its start markers may be lost. Its takes count as older
    than all that is read. Behind cuts of the queue's log, clients take again what was lost.
    """
    last = max(0, log_start - 1)
    below = min((cut.start for cut in stored.cuts.cuts), default=INT64_MAX)
    rows: list[SnapshotRow] = []
    for row in stored.in_flight:
        if isinstance(row, Entry):
            rows.append(row._replace(taken_at=min(row.taken_at, last)))
        else:
            rows.append(row._replace(taken_at=min(row.taken_at, last), stride=0))
    return replace(
        stored,
        offset=log_start,
        in_flight=tuple(row for row in rows if row[0] < below),
        missed_markers=True,
        finished=StoredFinished(),
        cuts=NO_CUTS,
        takes_epoch=-1,
        told_below=0,  # takes of later epochs stand at these markers offsets now
    )
