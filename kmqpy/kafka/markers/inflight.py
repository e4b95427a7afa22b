"""The in-flight state of one queue partition, computed from its markers. Pure: no I/O, no clock.

The state is a function of the markers in log order, nothing else: an entry is opened by a take and
leaves when its end marker is read, so whoever reads the same markers has the same state. A message that is
taken after its end is in flight again, like any other; that it was taken late is known beside that, see
`finished`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import packed
from kmqpy.kafka.markers.codec import Marker, Op, Runs
from kmqpy.kafka.markers.entry import Entry, EntryState, SnapshotRow, TakenRun
from kmqpy.kafka.markers.finished import FinishedMessages
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.packed import PackedEntries

_STATES = {
    Op.TAKE: EntryState.LEASED,
    Op.DELAY: EntryState.DELAYED,
    Op.EXTEND: EntryState.LEASED,
    Op.NACK: EntryState.RELEASED,
    Op.DEAD_LETTER: EntryState.DEAD,
}


MarkerRun = tuple[int, int, int]
"""Equal markers that follow one another, of messages that follow one another: the first message's offset,
how many, and the timestamp in ms."""


class InFlight:
    """The messages of one partition that were taken and not acknowledged.

    `now_ms` is the largest timestamp read so far: the partition's clock, which only set_back() turns back.
    Timestamps above `latest_ms` count as `latest_ms` (rule R23); `highest_clamped_ms` is the highest of them.
    Leases longer than `max_hold_ms`, and delays longer than `max_delay_ms`, count as these (rule R5). The
    caller may change these limits at any time.
    `missed_markers`: some markers below `position` were never read, so that a take may be missing; any
    operation opens an entry then (rule R2). A successor that begins at the safe offset of such a state must
    set it, too.
    `position`: the next markers offset to read.
    `finished`: messages that are finished, as far as they may be taken late (rule R30).
    """

    def __init__(
        self,
        *,
        now_ms: int = 0,
        position: int = 0,
        missed_markers: bool = False,
        max_hold_ms: int = INT64_MAX,
        max_delay_ms: int = INT64_MAX,
    ) -> None:
        self.now_ms = now_ms
        self.missed_markers = missed_markers
        self.max_hold_ms = max_hold_ms
        self.max_delay_ms = max_delay_ms
        self.latest_ms = INT64_MAX
        self.highest_clamped_ms = 0
        self._position = position
        self._pinned: tuple[int, int] | None = None  # markers offset, now in ms
        self._entries = PackedEntries()
        self.finished = FinishedMessages()

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
        """How many entries there are in each state, and how many are due at `until_ms`."""
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
        """Turn the partition's clock back to `now_ms`; each lease keeps what remains of it."""
        by_ms, self.now_ms = self.now_ms - now_ms, now_ms
        self._entries.set_back(by_ms)
        if self._pinned is not None:
            self._pinned = (self._pinned[0], max(0, self._pinned[1] - by_ms))

    def pin(self, at: int) -> None:
        """Keep the safe offset from passing a marker that was not applied: a newer one (R3), or a bug."""
        if self._pinned is None:
            self._pinned = (at, self.now_ms)

    @property
    def pinned(self) -> bool:
        """True once a marker was not applied; see pin()."""
        return self._pinned is not None

    def apply(self, marker: Marker, at: int, timestamp_ms: int) -> int:
        """Take in the marker read at markers offset `at`.

        Returns of how many messages it changed the state: 0 when it was read before, or came too
        late, for messages that are not in flight any more or are to be dead-lettered.
        """
        if not self.observe(at, timestamp_ms):
            return 0
        if marker.op is Op.END:
            if marker.takes_from is not None:
                self.finished.assigned(marker.takes_from, again=marker.takes_again)
                return 0
            return self._end_range(marker.runs) if marker.runs else self._end(marker.offset)
        if marker.op is Op.TAKE and marker.counts and marker.reason is None:
            due_ms = self._deadline(marker)
            if marker.runs:
                return self._take_range(marker.runs, due_ms, marker.holder, at)
            return self._take(marker.offset, due_ms, marker.holder, at)
        return sum(self._operate_on(offset, marker, at) for offset in marker.offsets())

    def apply_takes(
        self, series: Iterable[MarkerRun], redeliver_after_ms: int, at: int, holder: str | None = None
    ) -> None:
        """Take in start markers with one lease and holder, that stand from markers offset `at` on."""
        after_ms = min(max(0, redeliver_after_ms), self.max_hold_ms)
        for first, count, taken_at in self._unread(series, at):
            due_ms = min(self.now_ms + after_ms, INT64_MAX)
            if count < packed.MIN_RUN or self._entries.has_any(((first, count),)):
                for index in range(count):
                    self._take(first + index, due_ms, holder, taken_at + index)
            else:
                every = (1 << count) - 1
                self._entries.put_together(TakenRun(first, every, taken_at, 1, self.now_ms, due_ms, holder))

    def apply_ends(self, series: Iterable[MarkerRun], at: int) -> int:
        """Take in end markers, as apply_takes() takes in starts; returns how many changed the state."""
        ended = 0
        for first, count, _ in self._unread(series, at):
            ended += self._end(first) if count == 1 else self._end_range(((first, count),))
        return ended

    def taken_late(self, entries: Iterable[Entry]) -> frozenset[int]:
        """Offsets of those of these entries that were in flight before, and ended (rule R30)."""
        return frozenset(entry.offset for entry in entries if entry.offset in self.finished)

    def _unread(self, series: Iterable[MarkerRun], at: int) -> Iterator[tuple[int, int, int]]:
        """First message, count and markers offset of what was not read before, which is then read."""
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
        """Up to `limit` entries whose time is up, the longest overdue first.

        They count as in redelivery until their end marker is read, or until `retry` or `retry_all`
        gives them back; they are not returned again before that.
        """
        return self._entries.hand_out(self.now_ms, limit)

    def retry(self, offset: int, delay_ms: int) -> None:
        """Let a message whose redelivery failed be due again `delay_ms` from now.

        Later where a marker that was read meanwhile asked for that.
        """
        if offset not in self._entries.handed_out:
            return
        entry = self._entries.get(offset)
        assert entry is not None
        self._entries.discard(offset)
        due_ms = max(entry.due_ms, min(self.now_ms + delay_ms, INT64_MAX))
        self._entries.put(entry._replace(due_ms=due_ms))

    def retry_all(self) -> None:
        """Let all messages in redelivery be due again now."""
        for offset in list(self._entries.handed_out):
            self.retry(offset, 0)

    @property
    def in_redelivery(self) -> int:
        """How many entries `take_due` has handed out that are neither ended nor given back."""
        return len(self._entries.handed_out)

    def next_due_ms(self) -> int | None:
        """When the next entry is due, in the partition's time; None when nothing is waiting."""
        return self._entries.next_due_ms()

    def safe_offset(self) -> int:
        """The markers offset from which a successor must read to have this same state."""
        return self._safe()[0]

    def safe_now_ms(self) -> int:
        """The partition's now at the safe offset.

        A successor that begins at the safe offset with this `now_ms` has the same deadlines too.
        With today's `now_ms` every restart would prolong the leases, and a tracker that restarts
        often enough would redeliver nothing; with none, out-of-order timestamps could shorten them.
        """
        return self._safe()[1]

    def _safe(self) -> tuple[int, int]:
        oldest = self.oldest()
        safe = (self._position, self.now_ms) if oldest is None else (oldest.taken_at, oldest.since_ms)
        return safe if self._pinned is None else min(safe, self._pinned)

    def oldest(self) -> Entry | None:
        """The entry whose take is the oldest, or None."""
        return self._entries.oldest()

    @property
    def position(self) -> int:
        """The markers offset that is read next."""
        return self._position

    def snapshot(self, max_rows: int) -> tuple[int, int, list[SnapshotRow]]:
        """Export the state for a successor: markers offset to read from, now in ms, rows to `restore`.

        The rows are what was taken first, at most `max_rows`; the markers offset is that of the first
        take that is not among them. Reading from there repeats markers that the rows know already,
        and that changes nothing: the last operation on a message decides, as it did before.
        """
        rows = self._entries.first_rows(max_rows + 1)
        safe = (self._position, self.now_ms)
        if len(rows) > max_rows:
            left_out = rows.pop()
            safe = (left_out.taken_at, left_out.since_ms)
        if self._pinned is not None:
            safe = min(safe, self._pinned)
        return *safe, rows

    def restore(self, rows: Iterable[SnapshotRow]) -> None:
        """Begin with the rows of a snapshot; to be called before the first marker is read.

        Messages that were taken from this reader's position on are left out: their markers are read, and an
        operation that came before its take must not find it.
        """
        for row in sorted(rows, key=lambda row: row.taken_at):
            if row.taken_at >= self._position:
                return
            if isinstance(row, Entry):
                self._entries.put(row)
                continue
            bits = row.bits
            if row.stride:
                read = -((row.taken_at - self._position) // row.stride)
                if read < bits.bit_length():  # else a number of as many bits would be made
                    bits &= (1 << read) - 1
            self._entries.put_together(row._replace(bits=bits), min_run=1)

    def _end(self, offset: int) -> int:
        if not self._entries.discard(offset):
            return 0
        self.finished.add(offset)
        return 1

    def _end_range(self, runs: Runs) -> int:
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
        out = self._entries.handed_out
        apart = [
            (entry, entry.offset not in out)
            for entry in self._entries.rows_in(runs)
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
        entry = self.get(offset)
        if entry is not None and entry.state is EntryState.DEAD:
            return 0
        opens = marker.op in (Op.TAKE, Op.DELAY)
        if entry is None and not (opens or self.missed_markers):
            return 0
        if marker.op is Op.EXTEND and entry is not None and entry.state is not EntryState.LEASED:
            return 0  # nobody has it any more, so there is no lease to extend
        state, due_ms = _STATES[marker.op], self._deadline(marker)
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
        limit_ms = self.max_hold_ms if marker.op in (Op.TAKE, Op.EXTEND) else self.max_delay_ms
        return min(self.now_ms + min(max(0, marker.redeliver_after_ms), limit_ms), INT64_MAX)
