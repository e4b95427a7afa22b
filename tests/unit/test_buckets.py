"""State in buckets: turn after turn it is the state of one tracker that never stops."""

import json

import pytest
import test_inflight as single
from hypothesis import given, settings
from hypothesis import strategies as st

from kmqpy.kafka.markers import entry_groups, packed
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from tracker.spark import buckets
from tracker.spark.buckets import BucketedState, Damaged, Head

T0 = 1_700_000_000_000


@pytest.fixture(scope="class")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_groups, "BLOCK", 4)
        patch.setattr(packed, "MIN_RUN", 2)
        patch.setattr(buckets, "SIZE", 4)
        yield


class Kept:
    """A store, and the turns that build on it."""

    def __init__(self, head):
        self.head = head.to_json()
        self.texts = {}
        self.loaded = []

    def load(self, number):
        self.loaded.append(number)
        return self.texts.get(number)

    def state(self):
        self.loaded.clear()
        return BucketedState(Head.from_json(self.head), self.load)

    def keep(self, state):
        found, texts = state.changes()
        for number, text in texts.items():
            if text is None:
                del self.texts[number]
            else:
                self.texts[number] = text
        assert found.keys() == self.texts.keys()
        self.head = Head(
            "id",
            state.position,
            state.now_ms,
            pinned=state.pinned_at,
            missed_markers=state.missed_markers,
            buckets=found,
        ).to_json()
        return texts


def the_same(state, other):
    assert len(state) == len(other)
    assert state.next_due_ms() == other.next_due_ms()
    assert state.safe_offset() == other.safe_offset()
    assert state.safe_now_ms() == other.safe_now_ms()
    assert (state.now_ms, state.position, state.pinned) == (other.now_ms, other.position, other.pinned)
    oldest = other.oldest()
    assert state.oldest_since_ms() == (None if oldest is None else oldest.since_ms)


@pytest.mark.usefixtures("small")
class TestTurns:
    @settings(deadline=None, max_examples=300)
    @given(single.histories, st.lists(st.integers(1, 12), min_size=40, max_size=40), st.booleans())
    def test_the_same_as_in_one(self, history, lengths, missed):
        records = single.with_timestamps(history)
        whole = InFlight(missed_markers=missed)
        kept = Kept(Head("id", 0, missed_markers=missed))
        while records:
            turn, records = records[: lengths[0]], records[lengths[0] :]
            lengths = lengths[1:]
            single.read(whole, turn)
            state = single.read(kept.state(), turn)
            the_same(state, whole)
            kept.keep(state)
            the_same(kept.state(), whole)
        everything = kept.state()
        assert everything.snapshot(1_000)[:2] == whole.snapshot(1_000)[:2]
        assert {e.offset: e for e in everything} == {e.offset: e for e in whole}

    @settings(deadline=None, max_examples=200)
    @given(single.histories, st.integers(0, 30_000), st.integers(0, 3))
    def test_what_is_due_is_handed_out_once_and_put_off(self, history, later, limit):
        records = single.with_timestamps(history)
        whole = single.read(InFlight(), records)
        kept = Kept(Head("id", 0))
        kept.keep(single.read(kept.state(), records))
        state = kept.state()
        for one in (whole, state):
            one.observe(one.position, one.now_ms + later)
        due = state.take_due(limit)
        assert len(due) == len(set(due)) == min(limit, len(whole.take_due(1_000)))
        for entry in due:
            state.retry(entry.offset, 5_000)
        kept.keep(state)
        again = kept.state()
        offsets = {entry.offset for entry in due}
        assert not offsets & {entry.offset for entry in again.take_due(1_000)}
        assert len(again) == len(whole)


class TestWhatIsTouched:
    @pytest.fixture
    def kept(self):
        kept = Kept(Head("id", 0))
        state = kept.state()
        for number in range(50):
            state.apply(Marker(0, number * buckets.SIZE, Op.TAKE, 10_000 + number), number, T0)
        kept.keep(state)
        return kept

    def test_a_turn_loads_and_writes_only_that(self, kept):
        state = kept.state()
        assert len(state) == 50
        assert state.next_due_ms() == T0 + 10_000
        assert kept.loaded == []
        state.apply(Marker(0, 7 * buckets.SIZE, Op.END, 0), 50, T0)
        state.apply(Marker(0, 9 * buckets.SIZE + 1, Op.TAKE, 5), 51, T0)
        state.apply(Marker(0, -1, Op.END, 0), 52, T0)
        assert sorted(kept.loaded) == [7, 9]
        texts = kept.keep(state)
        assert texts.keys() == {7, 9}
        assert texts[7] is None
        assert state.safe_offset() == 0

    def test_a_series_that_begins_with_a_tick(self, kept):
        state = kept.state()
        assert state.apply_ends([(-1, 2, T0)], 50) == 1
        assert kept.loaded == [0]
        assert 0 not in state

    def test_takes_alike(self, kept):
        state = kept.state()
        state.apply_takes([(buckets.SIZE, 2, T0 + 1), (5, 1, T0 + 2)], 7, 50, "somebody")
        assert sorted(kept.loaded) == [0, 1]
        assert state.get(buckets.SIZE + 1)[1:4] == (51, T0 + 1, T0 + 8)
        assert state.get(5)[1:4] == (52, T0 + 2, T0 + 9)

    def test_what_is_due_is_loaded(self, kept):
        state = kept.state()
        state.apply(Marker(0, -1, Op.END, 0), 50, T0 + 10_002)
        assert [entry.offset // buckets.SIZE for entry in state.take_due(100)] == [0, 1, 2]
        assert kept.loaded == [0, 1, 2]

    def test_a_bucket_of_another_process_is_not_taken_for_ours(self, kept):
        other = Kept(Head("id", 0))
        state = other.state()
        state.apply(Marker(0, 1, Op.TAKE, 5), 0, T0)
        other.keep(state)
        kept.texts[0] = other.texts[0]
        with pytest.raises(Damaged, match="bucket 0"):
            kept.state().snapshot(10)

    def test_a_bucket_that_is_missing(self, kept):
        del kept.texts[3]
        with pytest.raises(Damaged, match="bucket 3"):
            kept.state().snapshot(10)

    @pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", json.dumps({"buckets": [], "pinned": None})])
    def test_a_head_that_is_none(self, text):
        with pytest.raises(Damaged, match="head"):
            Head.from_json(text)


def test_a_snapshot_of_zookeeper_begins_it():
    first = InFlight()
    for number in range(30):
        first.apply(Marker(0, number, Op.TAKE, 100, runs=()), number, T0)
    offset, now_ms, rows = first.snapshot(1_000)
    kept = Kept(Head("id", offset, now_ms))
    state = kept.state()
    state.restore(rows)
    kept.keep(state)
    assert len(kept.state()) == 30
    assert kept.state().safe_offset() == 0
