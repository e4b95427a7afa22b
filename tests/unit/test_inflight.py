"""In-flight state: an example for each rule."""

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inflight_log import LEASE, T0, Log

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import lazy_min_heap
from kmqpy.kafka.markers import packed as packed_module
from kmqpy.kafka.markers.codec import AT_ONCE_MS, TICK_OFFSET, Marker, Op, tick
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.snapshot import pack, unpack

OPENING = (Op.TAKE, Op.DELAY)


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
        entry = Entry(7, 0, T0, T0 + LEASE, EntryState.LEASED, counts=True, reason=None, holder="w1")
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
        assert log.state.get(7) == Entry(
            7, 2, T0 + 10, T0 + 1_010, EntryState.LEASED, counts=True, holder="w2"
        )
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
            (Op.EXTEND, EntryState.LEASED),
            (Op.NACK, EntryState.RELEASED),
            (Op.DEAD_LETTER, EntryState.DEAD),
            (Op.TAKE, EntryState.LEASED),
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
        assert log.state.get(7).state is EntryState.LEASED


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

    def test_r44_what_failed_without_a_delay_is_told_from_what_has_one(self):
        log = Log(has_retries=True)
        for offset in range(6):
            log.take(offset)
        log.nack(0)
        log.nack(1, AT_ONCE_MS)
        log.nack(2, 500)
        log.nack(3, counts=False)
        log.nack(4)
        log.nack(4, 500, by_tracker=True, reason="expired")
        states = [EntryState.FAILED, *[EntryState.RELEASED] * 4, EntryState.LEASED]
        assert [log.state.get(offset).state for offset in range(6)] == states
        assert [log.state.get(offset).due_ms - T0 for offset in range(5)] == [0, 0, 500, 0, 500]
        rows = log.state.snapshot(10)[2]
        for has_retries, state in ((True, EntryState.FAILED), (False, EntryState.RELEASED)):
            restored = InFlight(position=log.at, has_retries=has_retries)
            restored.restore(unpack(pack(rows)))
            assert restored.get(0).state is state

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
        assert log.state.get(7).state is EntryState.LEASED


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
        assert log.in_redelivery == 2
        assert log.due(2) == [1]
        assert log.due(2) == []
        assert log.state.next_due_ms() == T0 + 900

    def test_none_asked(self, log):
        log.take(1, 0)
        assert log.due(0) == []
        assert log.in_redelivery == 0

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
        assert log.in_redelivery == 0
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
        assert log.in_redelivery == 1
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
        assert log.in_redelivery == 0
        assert sorted(log.due()) == [1, 2, 3, 4]
        assert log.due() == []

    @pytest.mark.parametrize("again", ["extend", "nack", "take", "dead_letter"])
    def test_a_marker_meanwhile_does_not_hand_it_out_twice(self, log, again):
        log.take(1, 0)
        assert log.due() == [1]
        getattr(log, again)(1, **({} if again == "dead_letter" else {"after": 0}))
        assert log.in_redelivery == 1
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
        return len(state), *map(len, heaps), len(packed._indexes), len(packed._runs), len(packed.handed_out)

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
        assert len(log.state._entries._by_take._at_least) <= held / packed_module._TOO_FEW_ROWS + 1
        assert [entry.offset for entry in sorted(log.state)] == list(range(0, self.FINISHED // 10, 100))

    def test_compaction_leaves_out_what_is_in_redelivery(self, log, monkeypatch):
        monkeypatch.setattr(lazy_min_heap, "_STALE_ALLOWANCE", 0)
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
        states, due = log.state.count(T0 + LEASE + 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [entry.offset for entry in oldest] == [0, 2, 4, 6, 8]
    assert (states, due) == ({EntryState.LEASED: 20_000}, 51)
    assert peak < 20_000 * 20  # bytes; an entry has 250


# --- R39: the log of the queue was cut back ---------------------------------------------------------------


def test_r39_who_reads_on_from_a_safe_offset_drops_what_was_cut_away():
    """The tick that tells of the cut stands behind it, because of an older message in flight."""
    cuts = LogCuts.parse("2<3@10")
    log = [Marker(0, offset, Op.TAKE, 60_000) for offset in (9, 15)]
    log += [tick(0, cuts), Marker(0, cuts.number_of(15), Op.TAKE, 60_000), tick(0, cuts)]
    first = InFlight()
    for at, marker in enumerate(log):
        first.apply(marker, at, T0)
    assert [entry.offset for entry in first] == [9, cuts.number_of(15)]
    assert (first.safe_offset(), first.cuts_before(0), first.cuts_before(3)) == (0, NO_CUTS, cuts)
    for start in (0, 3):
        successor = InFlight(position=start, cuts=first.cuts_before(start))
        for at, marker in enumerate(log[start:], start):
            successor.apply(marker, at, T0)
        assert [entry.offset for entry in successor] == [9, cuts.number_of(15)][start > 0 :]
        assert successor.cuts_before(start) == first.cuts_before(start)
    assert successor.cuts_before(2) is None, "the tick that told the cut stands before what it has read"
