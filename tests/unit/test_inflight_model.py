"""In-flight state, two properties: it equals a naive model that scans the whole log again, and a restart
from the safe offset gives the same state.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from inflight_log import LEASE, T0, Log

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import codec, entry_groups, inflight, lazy_min_heap, snapshot
from kmqpy.kafka.markers import packed as packed_module
from kmqpy.kafka.markers.codec import Marker, Op, tick
from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun
from kmqpy.kafka.markers.inflight import InFlight

OPENING = (Op.TAKE, Op.DELAY)


@dataclass
class Read:
    """A marker, where it stands, and the partition's now once it was read."""

    marker: Marker
    at: int
    now_ms: int

    @property
    def op(self):
        return self.marker.op


def naive_entry(offset, history, *, missed_markers=False):
    """The entry of one queue offset by scanning all markers of it that were read, or None."""
    life = history
    while any(read.op is Op.END for read in life):
        life = life[1:]
    while life and not (missed_markers or life[0].op in OPENING):
        life = life[1:]
    if not life:
        return None
    death = next((read for read in life if read.op is Op.DEAD_LETTER), None)
    if death is not None:
        life = life[: life.index(death)]
    taken = max((i for i, read in enumerate(life) if read.op in OPENING), default=0)
    opening, *operations = life[taken:] or [death]
    decisive, state = opening, inflight._STATES[opening.op]
    for read in operations:
        if read.op is Op.NACK or state is EntryState.LEASED:
            decisive, state = read, {Op.NACK: EntryState.RELEASED, Op.EXTEND: EntryState.LEASED}[read.op]
    if death is not None:
        decisive, state = death, EntryState.DEAD
    after = 0 if death is not None else max(0, decisive.marker.redeliver_after_ms)
    return Entry(
        offset,
        opening.at,
        opening.now_ms,
        min(decisive.now_ms + after, INT64_MAX),
        state,
        decisive.marker.counts,
        decisive.marker.reason,
        opening.marker.holder,
    )


OFFSETS = st.integers(0, 5)
random_markers = st.builds(
    Marker,
    st.just(0),
    OFFSETS,
    # Takes and ends often, so that lives are short and many.
    st.sampled_from([*Op, Op.TAKE, Op.END, Op.END]),
    st.one_of(st.integers(0, 60), st.sampled_from([0, -1, INT64_MAX])),
    counts=st.booleans(),
    reason=st.sampled_from([None, "a", "b"]),
    holder=st.sampled_from([None, "v", "w"]),
)
timestamp_steps = st.integers(-40, 40)


HIGHEST = 40
range_markers = st.builds(
    lambda offsets, op, after, holder: codec.ranges(
        0, op, sorted(offsets), redeliver_after_ms=0 if op is Op.END else after, holder=holder
    )[0],
    st.one_of(
        st.sets(st.integers(0, HIGHEST), min_size=1),
        st.builds(lambda first, count: set(range(first, first + count)), OFFSETS, st.integers(1, 30)),
    ),
    st.sampled_from([Op.TAKE, Op.END]),
    st.integers(0, 60),
    st.sampled_from([None, "v"]),
)


class AgainstTheNaiveModel(RuleBasedStateMachine):
    """Ranges mean what the single markers would mean in their place: that is the oracle (rule R15)."""

    missed_markers = False

    def __init__(self):
        super().__init__()
        # So that what is cleaned lazily is compacted at every turn, and a few messages make a run.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lazy_min_heap, "_STALE_ALLOWANCE", 0)
        self.patch.setattr(entry_groups, "BLOCK", 8)
        self.patch.setattr(packed_module, "MIN_RUN", 2)
        self.patch.setattr(packed_module, "_MAX_ROWS", 4)
        self.patch.setattr(packed_module, "_TOO_FEW_ROWS", 1)
        self.state = InFlight(missed_markers=self.missed_markers)
        self.histories = defaultdict(list)  # offset -> its markers that were read
        self.position = self.now_ms = self.last_safe_offset = 0
        self.pinned = None
        self.in_redelivery = set()
        self.postponed = {}  # offset -> due_ms, until a marker says otherwise

    def teardown(self):
        self.patch.undo()

    def entry(self, offset):
        entry = naive_entry(offset, self.histories[offset], missed_markers=self.missed_markers)
        if entry is not None and offset in self.postponed:
            return entry._replace(due_ms=self.postponed[offset])
        return entry

    def entries(self):
        return {o: entry for o in sorted(self.histories) if (entry := self.entry(o)) is not None}

    def waiting(self):
        return [entry for o, entry in self.entries().items() if o not in self.in_redelivery]

    @rule(
        op=st.sampled_from([Op.TAKE, Op.END]),
        first=OFFSETS,
        count=st.integers(1, 20),
        after=st.integers(-1, 60),
        holder=st.sampled_from([None, "v"]),
        step=timestamp_steps,
        read_before=st.integers(0, 3),
    )
    def read_a_series(self, op, first, count, after, holder, step, read_before):
        """Markers alike, of messages that follow each other; the first may have been read before."""
        read_before = min(read_before, self.position, count)
        offsets = range(first + read_before, first + count)
        before = [entry for offset in offsets if (entry := self.entry(offset))]
        at, timestamp = self.position - read_before, self.now_ms + step
        if offsets:
            self.now_ms = max(self.now_ms, timestamp)
        for offset in offsets:
            marker = Marker(0, offset, op, max(0, after), holder=holder)
            self.histories[offset].append(Read(marker, self.position, self.now_ms))
            self.position += 1
        if op is Op.TAKE:
            self.state.apply_takes([(first, count, timestamp)], after, at, holder)
        else:
            assert self.state.apply_ends([(first, count, timestamp)], at) == len(before)
            self.in_redelivery.difference_update(offsets)
        dead = {entry.offset for entry in before if entry.state is EntryState.DEAD}
        for offset in offsets:
            if op is Op.END or offset not in dead:
                self.postponed.pop(offset, None)

    @rule(
        marker=st.one_of(random_markers, range_markers),
        step=timestamp_steps,
        gap=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def read_a_marker(self, marker, step, gap):
        before = {offset: self.entry(offset) for offset in marker.offsets()}
        dead = sum(entry is not None and entry.state is EntryState.DEAD for entry in before.values())
        timestamp = self.now_ms + step
        self.now_ms = max(self.now_ms, timestamp)
        at = self.position + gap
        self.position = at + 1
        changed = self.state.apply(marker, at, timestamp)
        for offset in marker.offsets():
            self.histories[offset].append(Read(marker, at, self.now_ms))
        after = {offset: self.entry(offset) for offset in marker.offsets()}
        if marker.op is Op.END:
            assert changed == sum(entry is not None for entry in before.values())
        elif marker.op is Op.TAKE:
            assert changed == len(before) - dead
        elif not changed:
            assert self.state.get(marker.offset) == before[marker.offset]
        for offset in marker.offsets():
            if marker.op is Op.END:
                self.in_redelivery.discard(offset)
            if changed and (before[offset] is None or before[offset].state is not EntryState.DEAD):
                self.postponed.pop(offset, None)
            if marker.op is Op.END:
                self.postponed.pop(offset, None)
                assert after[offset] is None

    @rule(marker=random_markers, back=st.integers(1, 5))
    def read_one_again(self, marker, back):
        assert not self.state.apply(marker, self.position - back, self.now_ms + 1_000)

    @rule(step=timestamp_steps)
    def read_garbage(self, step):
        assert self.state.observe(self.position, self.now_ms + step)
        self.position += 1
        self.now_ms = max(self.now_ms, self.now_ms + step)

    @precondition(lambda self: self.pinned is None and self.position > 10)
    @rule()
    def read_what_is_of_a_newer_version(self):
        self.pinned = self.position
        self.state.pin(self.position)
        self.state.observe(self.position, self.now_ms)
        self.position += 1

    @rule(limit=st.integers(0, 7))
    def take_due(self, limit):
        due = sorted(entry.due_ms for entry in self.waiting() if entry.due_ms <= self.now_ms)
        taken = self.state.take_due(limit)
        assert [entry.due_ms for entry in taken] == due[:limit]
        for entry in taken:
            assert entry == self.entry(entry.offset)
            assert entry.offset not in self.in_redelivery
            self.in_redelivery.add(entry.offset)

    @rule(offset=OFFSETS, delay_ms=st.integers(0, 50))
    def retry(self, offset, delay_ms):
        self.state.retry(offset, delay_ms)
        self.postpone(offset, delay_ms)

    @rule()
    def retry_all(self):
        self.state.retry_all()
        for offset in list(self.in_redelivery):
            self.postpone(offset, 0)

    def postpone(self, offset, delay_ms):
        if offset in self.in_redelivery:
            self.in_redelivery.discard(offset)
            due_ms = max(self.entry(offset).due_ms, self.now_ms + delay_ms)
            self.postponed[offset] = due_ms

    @invariant()
    def same_entries(self):
        entries = self.entries()
        assert {entry.offset: entry for entry in self.state} == entries
        assert len(self.state) == len(entries)
        assert self.state.now_ms == self.now_ms
        assert list(self.state.in_order()) == sorted(entries.values(), key=lambda e: (e.taken_at, e.offset))
        states, due = self.state.count(self.now_ms)
        assert states == Counter(entry.state for entry in entries.values())
        assert due == sum(entry.due_ms <= self.now_ms for entry in entries.values())

    @invariant()
    def same_due(self):
        assert self.state.next_due_ms() == min((e.due_ms for e in self.waiting()), default=None)

    @invariant()
    def same_safe_offset(self):
        places = [entry.taken_at for entry in self.entries().values()]
        safe = min([self.position, *places, *([] if self.pinned is None else [self.pinned])])
        assert self.state.safe_offset() == safe >= self.last_safe_offset
        self.last_safe_offset = safe
        oldest = self.state.oldest()
        assert (None if oldest is None else oldest.taken_at) == min(places, default=None)

    @invariant()
    def bounded(self):
        packed = self.state._entries
        groups = list(packed._by_take.groups())
        assert len(packed._by_take._heap) <= 2 * len(groups)
        assert len(packed._by_due._heap) <= 2 * len(groups)
        rows = [group for group in groups if isinstance(group, packed_module.EntryArray)]
        assert all(
            packed_module._TOO_FEW_ROWS < len(group) <= packed_module._MAX_ROWS
            for group in rows
            if group is not packed._open_array
        )
        assert sum(map(len, rows)) == sum(index.mask.bit_count() for index in packed._indexes.values())
        assert packed.handed_out.keys() == self.in_redelivery


class AgainstTheNaiveModelWithMissedMarkers(AgainstTheNaiveModel):
    missed_markers = True


TestAgainstTheNaiveModel = AgainstTheNaiveModel.TestCase
TestAgainstTheNaiveModel.settings = settings(deadline=None, stateful_step_count=40)
TestAgainstTheNaiveModelWithMissedMarkers = AgainstTheNaiveModelWithMissedMarkers.TestCase
TestAgainstTheNaiveModelWithMissedMarkers.settings = TestAgainstTheNaiveModel.settings


# --- Restart -----------------------------------------------------------------------------------

UNKNOWN = "a marker of a newer version"
histories = st.lists(
    st.tuples(st.one_of(*[random_markers] * 8, *[range_markers] * 4, st.just(UNKNOWN)), timestamp_steps),
    min_size=5,
    max_size=40,
)


def read(state, records):
    for marker, at, timestamp in records:
        if marker is UNKNOWN:
            state.pin(at)
            state.observe(at, timestamp)
        else:
            state.apply(marker, at, timestamp)
    return state


def with_timestamps(history):
    """(marker, markers offset, timestamp), timestamps wandering up and down."""
    records, timestamp = [], 1_000
    for at, (marker, step) in enumerate(history):
        timestamp += step
        records.append((marker, at, timestamp))
    return records


@pytest.fixture(scope="class")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_groups, "BLOCK", 8)
        patch.setattr(packed_module, "MIN_RUN", 2)
        patch.setattr(packed_module, "_MAX_ROWS", 4)
        patch.setattr(packed_module, "_TOO_FEW_ROWS", 1)
        yield


@pytest.mark.usefixtures("small_blocks")
class TestRestart:
    """A tracker that begins at a stored safe offset has the state of one that read everything."""

    @settings(deadline=None, max_examples=200)
    @given(histories, st.booleans())
    def test_the_same_state(self, history, missed_markers):
        records = with_timestamps(history)
        first = InFlight(missed_markers=missed_markers)
        stored = [(first.safe_offset(), first.safe_now_ms())]
        for record in records:
            read(first, [record])
            stored.append((first.safe_offset(), first.safe_now_ms()))
        for safe_offset, safe_now_ms in stored:
            successor = InFlight(now_ms=safe_now_ms, position=safe_offset, missed_markers=missed_markers)
            read(successor, records[safe_offset:])
            assert {entry.offset: entry for entry in successor} == {entry.offset: entry for entry in first}
            assert successor.safe_offset() == first.safe_offset()
            assert successor.safe_now_ms() == first.safe_now_ms()
            assert successor.pinned == first.pinned
            assert successor.now_ms == first.now_ms

    @settings(deadline=None, max_examples=200)
    @given(histories)
    def test_with_a_later_now_leases_are_only_longer(self, history):
        records = with_timestamps(history)
        first = InFlight()
        stored = [(0, 0)]
        for record in records:
            read(first, [record])
            stored.append((first.safe_offset(), first.now_ms))
        for safe_offset, now_ms in stored:
            successor = read(InFlight(now_ms=now_ms, position=safe_offset), records[safe_offset:])
            assert {entry.offset for entry in successor} == {entry.offset for entry in first}
            for entry in successor:
                other = first.get(entry.offset)
                assert entry._replace(due_ms=0, since_ms=0) == other._replace(due_ms=0, since_ms=0)
                assert entry.due_ms >= other.due_ms

    @settings(deadline=None, max_examples=150)
    @given(histories, st.booleans(), st.integers(0, 8))
    def test_the_same_state_from_a_snapshot(self, history, missed_markers, max_rows):
        records = with_timestamps(history)
        first = InFlight(missed_markers=missed_markers)
        stored = []
        for record in records:
            read(first, [record])
            offset, now_ms, rows = first.snapshot(max_rows)
            assert len(rows) <= max_rows
            assert first.safe_offset() <= offset <= first.position
            stored.append((offset, now_ms, snapshot.unpack(snapshot.pack(rows))))
        for offset, now_ms, rows in stored:
            successor = InFlight(now_ms=now_ms, position=offset, missed_markers=missed_markers)
            successor.restore(rows)
            read(successor, records[offset:])
            assert {entry.offset: entry for entry in successor} == {entry.offset: entry for entry in first}
            assert successor.safe_offset() == first.safe_offset()
            assert successor.next_due_ms() == first.next_due_ms()
            assert successor.pinned == first.pinned
            # Taken up to the last message, so that the next snapshot is good as well.
            assert successor.snapshot(100) == first.snapshot(100)

    def test_a_snapshot_leaves_out_what_was_taken_last(self):
        log = Log()
        for offset in range(4):
            log.take(offset, later=10)
        log.end(1)
        offset, now_ms, rows = log.state.snapshot(2)
        assert (offset, now_ms) == (3, T0 + 40)
        assert [row.offset for row in rows] == [0, 2]
        assert log.state.snapshot(3)[0] == log.state.position == 5

    def test_what_was_taken_long_ago_is_restored_as_quickly(self):
        """Once a number of as many bits as markers since was made of it."""
        row = TakenRun(0, (1 << 1024) - 1, 5, 1, T0, T0 + LEASE, None)
        state = InFlight(position=2**60)
        state.restore([row])
        assert len(state) == 1024

    def test_restarts_do_not_prolong_leases(self):
        records = [(Marker(0, 7, Op.TAKE, LEASE), 0, T0)]
        now_ms, position = 0, 0
        for at in range(1, 10):
            records.append((tick(0), at, T0 + at * 10_000))
            state = InFlight(now_ms=now_ms, position=position)
            read(state, records[position:])
            assert state.next_due_ms() == T0 + LEASE
            now_ms, position = state.safe_now_ms(), state.safe_offset()

    def test_a_successor_of_one_that_missed_markers(self):
        log = Log(missed_markers=True)
        log.extend(7)
        successor = InFlight(position=log.state.safe_offset(), missed_markers=log.state.missed_markers)
        successor.apply(Marker(0, 7, Op.EXTEND, LEASE), 0, T0)
        assert 7 in successor
