"""In-flight state: an example for each rule, and two properties.

The properties: it equals a naive model that scans the whole log again, and a restart from the safe
offset gives the same state.
"""

import itertools
import tracemalloc
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import codec, entry_groups, inflight, lazy_min_heap, snapshot
from kmqpy.kafka.markers import packed as packed_module
from kmqpy.kafka.markers.codec import TICK_OFFSET, Marker, Op, tick
from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun
from kmqpy.kafka.markers.inflight import InFlight

LEASE = 30_000
T0 = 1_700_000_000_000
OPENING = (Op.TAKE, Op.DELAY)


class Log:
    """A markers partition and the state read from it; time moves only when told."""

    def __init__(self, **state):
        self.state = InFlight(**state)
        self.at = 0
        self.now = T0

    def add(self, op, offset, after=LEASE, *, later=0, timestamp=None, **fields):
        self.now += later
        marker = Marker(0, offset, op, after, **fields)
        changed = self.state.apply(marker, self.at, self.now if timestamp is None else timestamp)
        self.at += 1
        return changed

    def take(self, offset, after=LEASE, **fields):
        return self.add(Op.TAKE, offset, after, **fields)

    def extend(self, offset, after=LEASE, **fields):
        return self.add(Op.EXTEND, offset, after, **fields)

    def nack(self, offset, after=0, **fields):
        return self.add(Op.NACK, offset, after, **fields)

    def dead_letter(self, offset, **fields):
        return self.add(Op.DEAD_LETTER, offset, 0, **fields)

    def delay(self, offset, after, **fields):
        return self.add(Op.DELAY, offset, after, counts=False, **fields)

    def end(self, offset, **fields):
        return self.add(Op.END, offset, 0, **fields)

    def wait(self, ms):
        """Time passes; a tick says so."""
        return self.add(Op.END, TICK_OFFSET, 0, later=ms)

    def due(self, limit=100):
        return [entry.offset for entry in self.state.take_due(limit)]


@pytest.fixture
def log():
    return Log()


class TestTakeAndEnd:
    def test_nothing(self, log):
        assert len(log.state) == 0
        assert list(log.state) == []
        assert log.state.safe_offset() == 0
        assert log.state.next_due_ms() is None
        assert log.state.oldest() is None
        assert log.due() == []

    def test_a_take_opens(self, log):
        assert log.take(7, holder="w1")
        entry = Entry(7, 0, T0, T0 + LEASE, EntryState.HELD, counts=True, reason=None, holder="w1")
        assert 7 in log.state
        assert 8 not in log.state
        assert log.state.get(7) == log.state.oldest() == entry
        assert list(log.state) == [entry]
        assert log.state.next_due_ms() == T0 + LEASE

    def test_an_end_closes(self, log):
        log.take(7)
        assert log.end(7)
        assert 7 not in log.state
        assert log.state.next_due_ms() is None
        assert log.state.oldest() is None

    def test_an_end_for_what_is_not_in_flight(self, log):
        assert not log.end(7)
        log.take(7)
        log.end(7)
        assert not log.end(7)

    def test_a_take_after_the_end_opens_again(self, log):
        log.take(7)
        log.end(7)
        assert log.take(7, later=5)
        assert log.state.get(7).taken_at == 2
        assert log.state.get(7).since_ms == T0 + 5

    def test_a_second_take_replaces_everything_and_moves_the_place(self, log):
        log.take(7, counts=False, reason="a", holder="w1")
        log.take(8)
        assert log.state.safe_offset() == 0
        assert log.take(7, 1_000, later=10, holder="w2")
        assert log.state.get(7) == Entry(7, 2, T0 + 10, T0 + 1_010, EntryState.HELD, counts=True, holder="w2")
        assert log.state.safe_offset() == 1
        log.end(8)
        assert log.state.safe_offset() == 2

    def test_a_delayed_message(self, log):
        assert log.delay(7, 60_000)
        assert log.state.get(7) == Entry(7, 0, T0, T0 + 60_000, EntryState.DELAYED, counts=False)
        log.wait(60_000)
        assert log.due() == [7]

    def test_a_tick_changes_only_the_time(self, log):
        log.take(7)
        before = log.state.get(7)
        assert not log.state.apply(tick(0), log.at, T0 + 5)
        assert log.state.now_ms == T0 + 5
        assert log.state.get(7) == before


class TestLateOperations:
    """R2, F14: only a take opens an entry."""

    @pytest.mark.parametrize("op", [Op.EXTEND, Op.NACK, Op.DEAD_LETTER])
    @pytest.mark.parametrize("taken_before", [True, False])
    def test_they_do_not_open(self, log, op, taken_before):
        if taken_before:
            log.take(7)
            log.end(7)
        assert not log.add(op, 7)
        assert 7 not in log.state
        assert log.state.next_due_ms() is None
        assert log.state.safe_offset() == log.at

    @pytest.mark.parametrize(
        ("op", "state"),
        [
            (Op.EXTEND, EntryState.HELD),
            (Op.NACK, EntryState.RELEASED),
            (Op.DEAD_LETTER, EntryState.DEAD),
            (Op.TAKE, EntryState.HELD),
            (Op.DELAY, EntryState.DELAYED),
        ],
    )
    def test_they_open_when_markers_were_missed(self, op, state):
        log = Log(missed_markers=True)
        assert log.add(op, 7, 1_000, counts=False, reason="r", holder="w")
        due_ms = T0 if op is Op.DEAD_LETTER else T0 + 1_000
        assert log.state.get(7) == Entry(7, 0, T0, due_ms, state, counts=False, reason="r", holder="w")
        assert log.state.safe_offset() == 0

    def test_an_end_never_opens(self):
        log = Log(missed_markers=True)
        assert not log.end(7)
        assert 7 not in log.state


class TestExtend:
    """F11: it replaces the deadline."""

    @pytest.mark.parametrize("after", [60_000, 10, 0, -5])
    def test_later_or_earlier(self, log, after):
        log.take(7)
        assert log.extend(7, after, later=100)
        due_ms = T0 + 100 + max(0, after)
        assert log.state.get(7).due_ms == log.state.next_due_ms() == due_ms
        log.wait(max(0, after) - 1)
        assert log.due() == ([] if after > 0 else [7])
        log.wait(1)
        assert log.due() == ([7] if after > 0 else [])

    def test_the_first_deadline_is_void(self, log):
        log.take(7)
        log.extend(7, 2 * LEASE)
        log.wait(LEASE)
        assert log.due() == []

    def test_it_keeps_its_place_its_begin_and_its_holder(self, log):
        log.take(7, holder="w1")
        log.take(8)
        log.extend(7, later=10)
        entry = log.state.get(7)
        assert (entry.taken_at, entry.since_ms, entry.holder) == (0, T0, "w1")
        assert log.state.safe_offset() == 0

    def test_nothing_to_extend_after_a_nack(self, log):
        log.take(7)
        log.nack(7, 1_000, reason="busy")
        before = log.state.get(7)
        assert not log.extend(7)
        assert log.state.get(7) == before

    def test_nothing_to_extend_of_a_delayed_message(self, log):
        log.delay(7, 1_000)
        assert not log.extend(7)
        assert log.state.get(7).state is EntryState.DELAYED
        assert log.state.next_due_ms() == T0 + 1_000

    def test_a_retake_after_a_nack_can_be_extended(self, log):
        log.take(7)
        log.nack(7, 1_000)
        log.take(7)
        assert log.extend(7, 5)
        assert log.state.get(7).state is EntryState.HELD


class TestNack:
    def test_due_now(self, log):
        log.take(7)
        assert log.nack(7, reason="busy")
        assert log.state.get(7)[3:7] == (T0, EntryState.RELEASED, True, "busy")
        assert log.due() == [7]

    def test_with_a_delay(self, log):
        log.take(7)
        assert log.nack(7, 2 * LEASE, counts=False)
        assert not log.state.get(7).counts
        log.wait(LEASE)
        assert log.due() == []
        log.wait(LEASE)
        assert log.due() == [7]

    def test_the_last_one_counts(self, log):
        log.take(7)
        log.nack(7, 10, reason="a")
        log.nack(7, 20, reason="b")
        assert (log.state.get(7).due_ms, log.state.get(7).reason) == (T0 + 20, "b")

    def test_it_keeps_its_place(self, log):
        log.take(7)
        log.take(8)
        log.nack(7, LEASE)
        assert log.state.safe_offset() == 0


class TestDeadLetter:
    def test_due_now_whatever_the_marker_says(self, log):
        log.take(7)
        assert log.add(Op.DEAD_LETTER, 7, LEASE, reason="bad")
        assert log.state.get(7)[3:7] == (T0, EntryState.DEAD, True, "bad")
        assert log.due() == [7]

    @pytest.mark.parametrize("op", [op for op in Op if op is not Op.END])
    def test_it_is_sticky(self, log, op):
        log.take(7)
        log.dead_letter(7, reason="bad")
        before = log.state.get(7)
        assert not log.add(op, 7, reason="other")
        assert log.state.get(7) == before
        assert log.state.safe_offset() == 0

    def test_it_ends(self, log):
        log.take(7)
        log.dead_letter(7)
        assert log.end(7)
        assert 7 not in log.state
        assert log.take(7)
        assert log.state.get(7).state is EntryState.HELD


class TestDeadlines:
    """R5: never shorter than asked, whatever the timestamps; R16: nothing overflows."""

    def test_a_marker_with_an_old_timestamp(self, log):
        log.wait(60_000)
        log.take(7, timestamp=T0)
        assert log.state.get(7).due_ms == T0 + 60_000 + LEASE

    def test_a_marker_from_a_fast_clock(self, log):
        log.take(7, timestamp=T0 + 60_000)
        log.take(8, timestamp=T0)
        assert log.state.get(7).due_ms == log.state.get(8).due_ms == T0 + 60_000 + LEASE

    @given(st.lists(st.tuples(st.integers(-1, 100_000), st.integers(-10, 50_000)), min_size=1))
    def test_never_shorter_than_asked(self, takes):
        state, latest = InFlight(), 0
        for at, (timestamp, after) in enumerate(takes):
            latest = max(latest, timestamp)
            state.apply(Marker(0, at, Op.TAKE, after), at, timestamp)
            assert state.get(at).due_ms == latest + max(0, after) >= timestamp + after
            assert state.now_ms == latest

    @pytest.mark.parametrize("op", [Op.TAKE, Op.EXTEND, Op.NACK, Op.DELAY])
    def test_the_longest_lease(self, log, op):
        log.take(7)
        log.add(op, 7, INT64_MAX)
        assert log.state.get(7).due_ms == log.state.next_due_ms() == INT64_MAX
        log.wait(10**15)
        assert log.due() == []

    @pytest.mark.parametrize("after", [0, -1, -(2**63)])
    def test_zero_and_negative_are_due_now(self, log, after):
        log.take(7, after)
        assert log.state.get(7).due_ms == T0
        assert log.due() == [7]

    def test_now_never_goes_back(self, log):
        """F12."""
        log.take(7, 100)
        log.wait(60_000)
        log.take(8, timestamp=T0 - 60_000)
        assert log.state.now_ms == T0 + 60_000
        assert log.due() == [7]
        log.add(Op.END, TICK_OFFSET, timestamp=-1)
        assert log.state.now_ms == T0 + 60_000

    def test_due_at_its_very_millisecond(self, log):
        log.take(7)
        log.wait(LEASE - 1)
        assert log.due() == []
        log.wait(1)
        assert log.due() == [7]


class TestReading:
    def test_a_record_read_twice_changes_nothing(self, log):
        log.take(7)
        log.end(7)
        assert not log.state.apply(Marker(0, 7, Op.TAKE, LEASE), 0, T0 + 99)
        assert not log.state.apply(Marker(0, 7, Op.TAKE, LEASE), 1, T0 + 99)
        assert 7 not in log.state
        assert log.state.now_ms == T0
        assert log.state.safe_offset() == 2

    def test_observe(self):
        state = InFlight()
        assert state.observe(5, T0)
        assert not state.observe(5, T0 + 1)
        assert not state.observe(4, T0 + 1)
        assert (state.now_ms, state.safe_offset()) == (T0, 6)
        assert state.observe(9, T0 - 1), "gaps are transaction markers"
        assert (state.now_ms, state.safe_offset()) == (T0, 10)

    def test_it_begins_where_told(self):
        state = InFlight(now_ms=T0, position=100)
        assert state.safe_offset() == 100
        assert state.safe_now_ms() == T0
        assert not state.observe(99, T0)
        assert state.observe(100, T0)


class TestPin:
    """R3: what only a newer version understands holds the safe offset back."""

    def test_it_holds_the_safe_offset(self, log):
        log.take(7)
        log.end(7)
        assert not log.state.pinned
        log.state.pin(log.at)
        log.state.observe(log.at, T0)
        log.at += 1
        assert log.state.pinned
        log.take(8)
        log.end(8)
        assert log.state.safe_offset() == 2

    def test_the_first_one_holds(self, log):
        log.state.pin(3)
        log.state.pin(5)
        log.state.observe(9, T0)
        assert log.state.safe_offset() == 3

    def test_an_older_take_holds_more(self, log):
        log.take(7)
        log.state.pin(1)
        assert log.state.safe_offset() == 0

    def test_a_pin_at_offset_zero(self, log):
        log.state.pin(0)
        log.wait(5)
        assert log.state.pinned
        assert log.state.safe_offset() == 0


class TestRedelivery:
    def test_the_longest_overdue_first(self, log):
        log.take(1, 300)
        log.take(2, 100)
        log.take(3, 200)
        log.take(4, 900)
        log.wait(500)
        assert log.due(2) == [2, 3]
        assert log.state.in_redelivery == 2
        assert log.due(2) == [1]
        assert log.due(2) == []
        assert log.state.next_due_ms() == T0 + 900

    def test_none_asked(self, log):
        log.take(1, 0)
        assert log.due(0) == []
        assert log.state.in_redelivery == 0

    def test_in_redelivery_is_in_flight_still(self, log):
        log.take(1, 0)
        log.due()
        assert 1 in log.state
        assert log.state.safe_offset() == 0
        assert log.state.next_due_ms() is None

    def test_the_end_marker_of_the_redelivery(self, log):
        log.take(1, 0)
        log.due()
        log.end(1)
        assert log.state.in_redelivery == 0
        assert 1 not in log.state
        assert log.state.safe_offset() == log.at

    def test_taken_again_after_its_redelivery(self, log):
        log.take(1, 0)
        log.due()
        log.end(1)
        log.take(1, 0)
        assert log.due() == [1]

    def test_retry_with_a_back_off(self, log):
        log.take(1, 0)
        log.take(2, 0)
        log.due()
        log.state.retry(1, 500)
        assert log.state.in_redelivery == 1
        assert log.due() == []
        log.wait(500)
        assert log.due() == [1]

    def test_a_back_off_does_not_overflow(self, log):
        log.take(1, 0)
        log.due()
        log.state.retry(1, INT64_MAX)
        assert log.state.next_due_ms() == INT64_MAX

    def test_retry_of_what_is_not_in_redelivery(self, log):
        log.take(1, 10)
        log.state.retry(1, 500)
        log.state.retry(2, 500)
        assert log.state.get(1).due_ms == log.state.next_due_ms() == T0 + 10
        assert len(log.state) == 1

    def test_retry_after_the_end(self, log):
        log.take(1, 0)
        log.due()
        log.end(1)
        log.state.retry(1, 0)
        assert log.due() == []

    def test_retry_all(self, log):
        for offset in range(5):
            log.take(offset, 0)
        assert len(log.due(3)) == 3
        log.end(0)
        log.state.retry_all()
        assert log.state.in_redelivery == 0
        assert sorted(log.due()) == [1, 2, 3, 4]
        assert log.due() == []

    @pytest.mark.parametrize("again", ["extend", "nack", "take", "dead_letter"])
    def test_a_marker_meanwhile_does_not_hand_it_out_twice(self, log, again):
        log.take(1, 0)
        assert log.due() == [1]
        getattr(log, again)(1, **({} if again == "dead_letter" else {"after": 0}))
        assert log.state.in_redelivery == 1
        assert log.state.next_due_ms() is None
        assert log.due() == []
        log.end(1)
        assert 1 not in log.state

    @pytest.mark.parametrize("again", ["extend", "nack", "take"])
    def test_a_deadline_set_meanwhile_outlives_a_failed_redelivery(self, log, again):
        log.take(1, 0)
        log.due()
        getattr(log, again)(1, after=LEASE)
        log.state.retry_all()
        assert log.state.next_due_ms() == T0 + LEASE
        assert log.due() == []
        log.wait(LEASE)
        assert log.due() == [1]

    def test_dead_letter_meanwhile_outlives_a_failed_redelivery(self, log):
        log.take(1, 0)
        log.due()
        log.dead_letter(1)
        log.state.retry_all()
        assert [entry.state for entry in log.state.take_due(1)] == [EntryState.DEAD]


class TestMemory:
    """F9: it follows what is in flight, not what was."""

    FINISHED = 200_000
    BOUND = 3 * 1024

    def sizes(self, state):
        packed = state._entries
        heaps = packed._by_take._heap, packed._by_due._heap, packed._by_take._at_least
        return len(state), *map(len, heaps), len(packed._slots), len(packed._runs), len(packed.handed_out)

    def test_behind_one_stuck_message(self, log):
        log.take(0, 10**9)
        for offset in range(1, self.FINISHED):
            log.take(offset)
            log.end(offset)
        assert max(self.sizes(log.state)) < self.BOUND
        assert log.state.safe_offset() == 0

    def test_one_message_extended_again_and_again(self, log):
        log.take(0)
        for step in range(10_000):
            log.extend(0, LEASE, later=step % 2)
        assert max(self.sizes(log.state)) < self.BOUND

    def test_one_message_taken_again_and_again(self, log):
        log.take(0)
        for _ in range(10_000):
            log.take(1)
        assert max(self.sizes(log.state)) < self.BOUND

    def test_a_redelivery_that_fails_again_and_again(self, log):
        log.take(0, 0)
        for _ in range(10_000):
            assert log.due() == [0]
            log.state.retry_all()
        assert max(self.sizes(log.state)) < self.BOUND

    def test_after_a_burst_without_any_new_message(self, log):
        log.take(0, 10**9)
        for offset in range(1, 20_000):
            log.take(offset, 2 * 10**9)
        for offset in range(1, 20_000):
            log.end(offset)
        assert max(self.sizes(log.state)) < self.BOUND

    def test_one_of_a_hundred_is_held(self, log):
        """What is left of many groups is gathered in few."""
        for offset in range(self.FINISHED // 10):
            log.take(offset, later=1)
            if offset % 100:
                log.end(offset)
        held = self.FINISHED // 1_000
        assert len(log.state) == held
        assert len(log.state._entries._by_take._at_least) <= held / packed_module._FEW + 1
        assert [entry.offset for entry in sorted(log.state)] == list(range(0, self.FINISHED // 10, 100))

    def test_compaction_leaves_out_what_is_in_redelivery(self, log, monkeypatch):
        monkeypatch.setattr(lazy_min_heap, "_SLACK", 0)
        for offset in range(10):
            log.take(offset, 0)
        log.due(5)
        for _ in range(50):
            log.extend(9, 0)
        assert sorted(log.due()) == [5, 6, 7, 8, 9]


def test_the_oldest_and_the_counts_of_many_cost_little():
    log = Log()
    for offset in range(0, 40_000, 2):
        log.take(offset, LEASE + offset)
    tracemalloc.start()
    try:
        oldest = list(itertools.islice(log.state.in_order(), 5))
        holds, due = log.state.count(T0 + LEASE + 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [entry.offset for entry in oldest] == [0, 2, 4, 6, 8]
    assert (holds, due) == ({EntryState.HELD: 20_000}, 51)
    assert peak < 20_000 * 20  # bytes; an entry has 250


# --- The naive model ---------------------------------------------------------------------------


@dataclass
class Read:
    """A marker, where it stands, and the partition's now once it was read."""

    marker: Marker
    at: int
    now_ms: int

    @property
    def op(self):
        return self.marker.op


def naive_entry(log, offset, *, missed_markers=False):
    """The entry of one queue offset by scanning its whole history, or None."""
    life = [read for read in log if offset in read.marker.offsets()]
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
        if read.op is Op.NACK or state is EntryState.HELD:
            decisive, state = read, {Op.NACK: EntryState.RELEASED, Op.EXTEND: EntryState.HELD}[read.op]
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
        self.patch.setattr(lazy_min_heap, "_SLACK", 0)
        self.patch.setattr(entry_groups, "BLOCK", 8)
        self.patch.setattr(packed_module, "MIN_RUN", 2)
        self.patch.setattr(packed_module, "_ROWS", 4)
        self.patch.setattr(packed_module, "_FEW", 1)
        self.state = InFlight(missed_markers=self.missed_markers)
        self.log = []
        self.position = self.now_ms = self.last_safe_offset = 0
        self.pinned = None
        self.in_redelivery = set()
        self.postponed = {}  # offset -> due_ms, until a marker says otherwise

    def teardown(self):
        self.patch.undo()

    def entry(self, offset):
        entry = naive_entry(self.log, offset, missed_markers=self.missed_markers)
        if entry is not None and offset in self.postponed:
            return entry._replace(due_ms=self.postponed[offset])
        return entry

    def entries(self):
        return {o: entry for o in range(HIGHEST + 40) if (entry := self.entry(o)) is not None}

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
            self.log.append(Read(marker, self.position, self.now_ms))
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
        self.log.append(Read(marker, at, self.now_ms))
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

    @precondition(lambda self: self.pinned is None and len(self.log) > 10)
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
        assert self.state.in_redelivery == len(self.in_redelivery)
        assert self.state.now_ms == self.now_ms
        assert list(self.state.in_order()) == sorted(entries.values(), key=lambda e: (e.taken_at, e.offset))
        holds, due = self.state.count(self.now_ms)
        assert holds == Counter(entry.state for entry in entries.values())
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
            packed_module._FEW < len(group) <= packed_module._ROWS
            for group in rows
            if group is not packed._open
        )
        assert sum(map(len, rows)) == sum(slots.mask.bit_count() for slots in packed._slots.values())
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
        patch.setattr(packed_module, "_ROWS", 4)
        patch.setattr(packed_module, "_FEW", 1)
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
