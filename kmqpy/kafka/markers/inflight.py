"""Computes which messages of one queue partition are in flight, from its markers. Pure: no I/O, no clock.

The state depends only on the markers, in the order of their log. A take (a start marker) opens an entry (the
record of a message in flight), and an end marker removes the entry. So all processes that read the same
markers have the same state. The safe offset is the markers offset from which another process must read to
have this state: that of the oldest take in flight.

A start marker may follow the end marker of the same message, when its client paused between fetching the
message and writing the start marker, and other clients took and acknowledged the message meanwhile. This
late take opens an entry like any other take. `InFlight.finished` remembers that the message had ended, so
taken_late() can tell the entry from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import packed
from kmqpy.kafka.markers.codec import Marker, Op, Runs
from kmqpy.kafka.markers.entry import Entry, EntryState, SnapshotRow, TakenRun
from kmqpy.kafka.markers.finished import FinishedMessages
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts, offset_of
from kmqpy.kafka.markers.named_copies import NamedCopies
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.open_claims import OpenClaims
from kmqpy.kafka.markers.packed import PackedEntries

_STATES = {
    Op.TAKE: EntryState.LEASED,
    Op.DELAY: EntryState.DELAYED,
    Op.EXTEND: EntryState.LEASED,
    Op.NACK: EntryState.RELEASED,
    Op.DEAD_LETTER: EntryState.DEAD,
}


MarkerRun = tuple[int, int, int]
"""Consecutive markers that differ only in their keys, for consecutive messages: (queue offset of the first
message, number of markers, their common timestamp in ms)."""


class CutAway(NamedTuple):
    """A tick has told that the log of the queue partition was cut back.

    cuts      the cuts that were not known before
    messages  how many messages in flight were dropped: they stood behind the cuts in the former log
    end       the offset behind the last of these; the cut's start if there is none
    """

    cuts: tuple[Cut, ...]
    messages: int
    end: int


class InFlight:
    """Holds the messages of one partition that are in flight, and applies markers to them.

    now_ms              the partition's now: the largest timestamp read so far, which only set_back() lowers
    latest_ms           a larger timestamp counts as this one (rule R23 of docs/rules.md)
    highest_clamped_ms  the largest timestamp above `latest_ms` that was read
    max_lease_ms        a longer lease counts as this long (rule R5)
    max_delay_ms        a longer delay counts as this long
    has_retries         True: a nack that counts and has no delay makes a message FAILED. For trackers: to
                        others it is RELEASED as after any nack
    missed_markers      True: some markers before `position` were never read, so a take may be missing, and
                        any operation but an end opens an entry (rule R2). The stored offset keeps this flag,
                        so that the partition's next tracker sets it, too: else the operation at the safe
                        offset would not open the entry again
    position            the next markers offset to read
    finished            the finished messages that a client may take late (rule R30)
    finished_read       those restored into `finished` are as they were before this markers offset was read
    claims              the claims of transactions that may be torn (rule R37); replay_markers() reads them.
                        The safe offset is at or before the oldest
    cuts                the cuts of the queue partition's log that ticks have told (rule R39). Messages are
                        named by numbers (see log_cuts), which are offsets in a log that was never cut
    cut_away            what those ticks have dropped; for the caller to read and to clear
    highest_taken       the highest message that is known to have been taken; -1: none
    takes_epoch         the highest leader epoch of the messages that clients take now, as their assignment
                        ticks tell; -1: not known, as with clients of other versions
    copies              the highest copy that trackers have written; replay_markers() reads it
    topic               the topic_tag() of the queue topic, by which markers of former topics are told
                        (rule R24); None: not known, and none is told

    The caller may change `latest_ms` and the limits at any time; they apply to markers read later.
    """

    def __init__(
        self,
        *,
        now_ms: int = 0,
        position: int = 0,
        missed_markers: bool = False,
        max_lease_ms: int = INT64_MAX,
        max_delay_ms: int = INT64_MAX,
        has_retries: bool = False,
        cuts: LogCuts = NO_CUTS,
        topic: bytes | None = None,
    ) -> None:
        self.topic = topic
        self.now_ms = now_ms
        self.missed_markers = missed_markers
        self.max_lease_ms = max_lease_ms
        self.max_delay_ms = max_delay_ms
        self.has_retries = has_retries
        self.latest_ms = INT64_MAX
        self.highest_clamped_ms = 0
        self._position = position
        self._pinned_at: tuple[int, int] | None = None  # markers offset, and the partition's now
        self._entries = PackedEntries()
        self.finished = FinishedMessages()
        self.finished_read = 0
        self.claims = OpenClaims()
        self.cuts = cuts
        self._cuts_told = [(position - 1 if cuts else -1, cuts)]
        """The cuts known from each tick on that told new ones: its markers offset, and the cuts."""
        self.cut_away: list[CutAway] = []
        self.highest_taken = -1
        self.takes_epoch = -1
        self.copies = NamedCopies()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, offset: int) -> bool:
        return self._entries.get(offset) is not None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def in_order(self) -> Iterator[Entry]:
        """The entries in the order of their takes; the first few cost little."""
        return self._entries.in_order()

    def count(self, until_ms: int) -> tuple[Counter[EntryState], int]:
        """The number of entries in each state, and the number of entries that are due at `until_ms`."""
        return self._entries.count(until_ms)

    def get(self, offset: int) -> Entry | None:
        """The entry of a queue offset, or None when it is not in flight."""
        return self._entries.get(offset)

    def observe(self, at: int, timestamp_ms: int) -> bool:
        """Note that the record at markers offset `at` was read; False when it was read before."""
        if at < self._position:
            return False
        self._position = at + 1
        if timestamp_ms > self.now_ms:
            self._advance(timestamp_ms)
        return True

    def _advance(self, timestamp_ms: int) -> None:
        if timestamp_ms > self.latest_ms:
            self.highest_clamped_ms = max(self.highest_clamped_ms, timestamp_ms)
            timestamp_ms = self.latest_ms
        self.now_ms = max(self.now_ms, timestamp_ms)

    def set_back(self, now_ms: int) -> None:
        """Set the partition's now back to `now_ms`; each lease and delay keeps what remains of it."""
        by_ms, self.now_ms = self.now_ms - now_ms, now_ms
        self._entries.set_back(by_ms)
        self.claims.set_back(by_ms)
        if self._pinned_at is not None:
            self._pinned_at = (self._pinned_at[0], max(0, self._pinned_at[1] - by_ms))

    def pin(self, at: int) -> None:
        """Keep the safe offset at or before markers offset `at`, whose marker could not be applied.

        A newer version has written the marker (rule R3), or kmqpy has a bug. Only the first call counts.
        """
        if self._pinned_at is None:
            self._pinned_at = (at, self.now_ms)

    @property
    def pinned(self) -> bool:
        """True once a marker was not applied; see pin()."""
        return self._pinned_at is not None

    def apply(self, marker: Marker, at: int, timestamp_ms: int) -> int:
        """Apply the marker read at markers offset `at`; returns of how many messages it changed the state.

        A marker that was read before changes nothing. Only a take or a delay changes a message that is not in
        flight (but see `missed_markers`), only an end a message that is to be dead-lettered. An extension
        changes leased messages only.
        """
        if not self.observe(at, timestamp_ms):
            return 0
        if marker.op is Op.END:
            if marker.cuts:
                self._cut(marker.cuts, at)
            if marker.takes_from is not None:
                self.takes_epoch = -1 if marker.epoch is None else max(marker.epoch, self.takes_epoch)
                self.finished.assigned(
                    marker.takes_from, again=marker.takes_again, before_restored=at < self.finished_read
                )
                return 0
            return self._end_range(marker.runs) if marker.runs else self._end(marker.offset)
        if marker.op in (Op.TAKE, Op.DELAY):
            self.highest_taken = max(self.highest_taken, marker.highest)
        if marker.op is Op.TAKE and marker.counts and marker.reason is None:
            due_ms = self._deadline(marker)
            if marker.runs:
                return self._take_range(marker.runs, due_ms, marker.holder, at)
            return self._take(marker.offset, due_ms, marker.holder, at)
        return sum(self._operate_on(offset, marker, at) for offset in marker.offsets())

    def apply_takes(
        self, series: Iterable[MarkerRun], redeliver_after_ms: int, at: int, holder: str | None = None
    ) -> None:
        """Apply single start markers with one lease and one holder, the first at markers offset `at`."""
        after_ms = min(max(0, redeliver_after_ms), self.max_lease_ms)
        for first, count, taken_at in self._new_runs(series, at):
            due_ms = min(self.now_ms + after_ms, INT64_MAX)
            if first + count > self.highest_taken:
                self.highest_taken = first + count - 1
            if count < packed.MIN_RUN or self._entries.has_any(((first, count),)):
                for index in range(count):
                    self._take(first + index, due_ms, holder, taken_at + index)
            else:
                all_bits = (1 << count) - 1
                self._entries.put_together(
                    TakenRun(first, all_bits, taken_at, 1, self.now_ms, due_ms, holder)
                )

    def apply_ends(self, series: Iterable[MarkerRun], at: int) -> int:
        """Apply single end markers, the first at markers offset `at`; returns how many changed the state."""
        ended = 0
        for first, count, _ in self._new_runs(series, at):
            ended += self._end(first) if count == 1 else self._end_range(((first, count),))
        return ended

    def taken_late(self, entries: Iterable[Entry]) -> frozenset[int]:
        """The offsets of the entries whose messages clients took late, as far as `finished` remembers.

        Also those of the former log, taken since it was cut back, where others have taken the new message at
        their offset by its number. If nobody has, their takers may know no cuts, and mean the new message.
        """
        return frozenset(
            entry.offset
            for entry in entries
            if entry.offset in self.finished or (self.cuts and self._is_superseded(entry.offset))
        )

    def _is_superseded(self, number: int) -> bool:
        present = self.cuts.number_of(offset_of(number))
        return number != present <= self.highest_taken

    def _new_runs(self, series: Iterable[MarkerRun], at: int) -> Iterator[tuple[int, int, int]]:
        """Yield first message, count and markers offset of new markers, and note that they were read."""
        for first, count, timestamp_ms in series:
            following = at + count
            if at < self._position:
                read_before = min(self._position - at, count)
                first, count, at = first + read_before, count - read_before, at + read_before
            if count:
                self._position = following
                if timestamp_ms > self.now_ms:
                    self._advance(timestamp_ms)
                yield first, count, at
            at = following

    def take_due(self, limit: int) -> list[Entry]:
        """Hand out up to `limit` entries that are due, the longest overdue first.

        An entry counts as in redelivery, and is not handed out again, until its end marker is read, or until
        retry() or retry_all() is called for it.
        """
        return self._entries.hand_out(self.now_ms, limit)

    def retry(self, offset: int, delay_ms: int) -> None:
        """Let a message whose redelivery failed be due again `delay_ms` from now.

        The message is due later if a marker that was read meanwhile says so.
        """
        if offset not in self._entries.handed_out:
            return
        entry = self._entries.get(offset)
        assert entry is not None
        self._entries.discard(offset)
        due_ms = max(entry.due_ms, min(self.now_ms + delay_ms, INT64_MAX))
        self._entries.put(entry._replace(due_ms=due_ms))

    def retry_all(self) -> None:
        """Let all messages in redelivery be due again now; see retry()."""
        for offset in list(self._entries.handed_out):
            self.retry(offset, 0)

    @property
    def awaits_ends(self) -> bool:
        """True while messages are in redelivery; see take_due()."""
        return bool(self._entries.handed_out)

    def next_due_ms(self) -> int | None:
        """When the next entry is due, compared with `now_ms`; None if no entry waits."""
        return self._entries.next_due_ms()

    def safe_offset(self) -> int:
        """The markers offset from which another tracker must read to have this state."""
        return self._safe_position()[0]

    def safe_now_ms(self) -> int:
        """The partition's now at the safe offset.

        A tracker that begins at the safe offset with this `now_ms` has the same deadlines, too. With the
        present `now_ms`, each restart would prolong the leases, and trackers that restart often enough would
        redeliver nothing. With 0, out-of-order timestamps could shorten leases.
        """
        return self._safe_position()[1]

    def _safe_position(self) -> tuple[int, int]:
        oldest = self.oldest()
        return self._held_back(
            (self._position, self.now_ms) if oldest is None else (oldest.taken_at, oldest.since_ms)
        )

    def _held_back(self, safe: tuple[int, int]) -> tuple[int, int]:
        """Return `safe`, or the markers offset and now of the pinned marker or the oldest claim if lower."""
        return min(bound for bound in (safe, self._pinned_at, self.claims.oldest()) if bound is not None)

    def oldest(self) -> Entry | None:
        """The entry with the lowest `taken_at`, or None."""
        return self._entries.oldest()

    @property
    def position(self) -> int:
        """The next markers offset to read."""
        return self._position

    def snapshot(self, max_rows: int) -> tuple[int, int, list[SnapshotRow]]:
        """Export the state for another tracker: markers offset to read from, now in ms, rows for restore().

        The rows are at most `max_rows`, those with the oldest takes. The markers offset is that of the oldest
        take that is in no row, or of the pinned marker or the oldest claim if that is lower. So the other
        tracker reads some markers that the rows contain already. To apply these again changes nothing: the
        last operation on a message decides.
        """
        rows = self._entries.first_rows(max_rows + 1)
        safe = (self._position, self.now_ms)
        if len(rows) > max_rows:
            left_out = rows.pop()
            safe = (left_out.taken_at, left_out.since_ms)
        return *self._held_back(safe), rows

    def restore(self, rows: Iterable[SnapshotRow]) -> None:
        """Add the rows of a snapshot; to be called before the markers of their messages are applied.

        Messages whose takes stand at `position` or later are left out. Their takes are still to be read, and
        an operation that stands before such a take must not find the message in flight.
        """
        for row in sorted(rows, key=lambda row: row.taken_at):
            if row.taken_at >= self._position:
                return
            bits = row.bits if isinstance(row, TakenRun) else 1
            self.highest_taken = max(self.highest_taken, row[0] + bits.bit_length() - 1)
            if isinstance(row, Entry):
                is_failed = row.state is EntryState.FAILED and not self.has_retries
                self._entries.put(row._replace(state=EntryState.RELEASED) if is_failed else row)
                continue
            bits = row.bits
            if row.stride:
                read = -((row.taken_at - self._position) // row.stride)
                if read < bits.bit_length():  # else a number of as many bits would be made
                    bits &= (1 << read) - 1
            self._entries.put_together(row._replace(bits=bits), min_run=1)

    def cuts_before(self, at: int) -> LogCuts | None:
        """The cuts that ticks before markers offset `at` have told; None: not known.

        Who begins to read there must know these and no others: a tick that tells cuts which are new to a
        reader drops what that reader has read of messages which stood behind them. They are not known before
        the markers offset from which the markers were applied to this state, if there were some by then.
        """
        return next((cuts for told_at, cuts in reversed(self._cuts_told) if told_at < at), None)

    def _cut(self, cuts: LogCuts, at: int) -> None:
        """Drop all that is known of messages which stood behind cuts that were not known."""
        new = self.cuts.new_in(cuts)
        if not new:
            return
        self.cuts = self.cuts.merged(cuts)
        self._cuts_told.append((at, self.cuts))
        start = min(cut.start for cut in new)
        self.highest_taken = min(self.highest_taken, self.cuts.number_of(start - 1) if start else -1)

        def is_gone(number: int) -> bool:
            return offset_of(number) >= start and not self.cuts.is_current(number)

        gone = [entry.offset for entry in self._entries if is_gone(entry.offset)]
        for number in gone:
            self._entries.discard(number)
        self.finished.drop(is_gone)
        self.claims.drop(is_gone)
        self.copies.drop(is_gone)
        end = max((offset_of(number) + 1 for number in gone), default=start)
        self.cut_away.append(CutAway(new, len(gone), end))

    def _end(self, offset: int) -> int:
        if not self._entries.discard(offset):
            return 0
        self.finished.add(offset)
        return 1

    def _end_range(self, runs: Runs) -> int:
        """End the messages of a range marker; returns how many of them were in flight."""
        first = runs[0][0]
        count = sum(runs[-1]) - first
        if not self.finished.touches(first, count):
            return self._entries.discard_range(runs)
        removed = OffsetRuns()
        ended = self._entries.discard_range(runs, removed)
        self.finished.add_all(removed, first, count)
        return ended

    def _take(self, offset: int, due_ms: int, holder: str | None, at: int) -> int:
        if self._entries.put_leased(offset, at, self.now_ms, due_ms, holder):
            return 1
        existing = self._entries.get(offset)
        if existing is not None and existing.state is EntryState.DEAD:
            return 0
        self._entries.replace(Entry(offset, at, self.now_ms, due_ms, EntryState.LEASED, holder=holder))
        return 1

    def _take_range(self, runs: Runs, due_ms: int, holder: str | None, at: int) -> int:
        """Take the messages of a range marker; returns how many: not those that are to be dead-lettered."""
        out = self._entries.handed_out
        apart = [
            (entry, entry.offset not in out)
            for entry in self._entries.single_entries_in(runs)
            if entry.state is EntryState.DEAD or entry.offset in out
        ]
        self._entries.discard_range(runs)
        self._entries.put_range(runs, at, self.now_ms, due_ms, holder)
        taken = sum(count for _, count in runs)
        for entry, waiting in apart:
            if entry.state is EntryState.DEAD:
                taken -= 1
            else:
                entry = Entry(entry.offset, at, self.now_ms, due_ms, EntryState.LEASED, holder=holder)
            self._entries.discard(entry.offset)
            self._entries.put(entry, waiting=waiting)
        return taken

    def _operate_on(self, offset: int, marker: Marker, at: int) -> int:
        """Apply a marker that is no end and no plain take to one message; returns 1 if its state changed."""
        entry = self.get(offset)
        if entry is not None and entry.state is EntryState.DEAD:
            return 0
        opens = marker.op in (Op.TAKE, Op.DELAY)
        if entry is None and not (opens or (self.missed_markers and self.cuts.is_current(offset))):
            return 0
        if opens and marker.by_tracker:
            if not self.cuts.is_current(offset):
                return 0  # its copy was cut away, and so was it, before the tracker knew
            self.finished.discard(offset)
        if marker.op is Op.EXTEND and entry is not None and entry.state is not EntryState.LEASED:
            return 0  # no client has the message any more, so there is no lease to extend
        state, due_ms = _STATES[marker.op], self._deadline(marker)
        if self.has_retries and marker.op is Op.NACK and marker.counts and not marker.redeliver_after_ms:
            state = EntryState.FAILED
        if entry is None or opens:
            entry = Entry(offset, at, self.now_ms, due_ms, state, marker.counts, marker.reason, marker.holder)
        else:
            entry = entry._replace(due_ms=due_ms, state=state, counts=marker.counts, reason=marker.reason)
        self._entries.replace(entry)
        return 1

    def _deadline(self, marker: Marker) -> int:
        # now_ms is already at least this marker's timestamp, so a lease is never shorter than asked.
        if marker.op is Op.DEAD_LETTER:
            return self.now_ms
        limit_ms = self.max_lease_ms if marker.op in (Op.TAKE, Op.EXTEND) else self.max_delay_ms
        return min(self.now_ms + min(max(0, marker.redeliver_after_ms), limit_ms), INT64_MAX)
