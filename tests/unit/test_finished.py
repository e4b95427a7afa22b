"""Which messages were ended and may be taken late (R30): bounded, forgetful at will, never wrong."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_offset
from kmqpy.kafka.markers import codec, finished
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.finished import MAX_WINDOWS, WINDOW, FinishedMessages, StoredFinished
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.settings import QueueSettings
from tracker.partition.start_position import StartPosition, start_position

T0 = 1_700_000_000_000
QUEUE = QueueSettings(name="q")


def read(state, *markers):
    for marker in markers:
        state.apply(marker, state.position, T0)
    return state


def take(offset):
    return Marker(0, offset, Op.TAKE, 1_000)


def end(offset, **fields):
    return Marker(0, offset, Op.END, **fields)


def assigned(takes_from, again=False):
    return codec.assignment_tick(0, takes_from, again=again)


def late(state):
    return sorted(state.taken_late(state))


# --- what a tracker knows ---------------------------------------------------------------------------------


def test_r30_a_message_that_is_in_flight_again_after_its_end_was_taken_late():
    state = read(InFlight(), assigned(3), take(3), take(4), end(3))
    assert late(state) == []
    read(state, take(3))
    assert late(state) == [3]
    assert 3 in state, "it is in flight all the same, as other readers of the markers see it"
    read(state, end(3), take(3))
    assert late(state) == [3]


def test_r30_what_a_tracker_holds_back_meanwhile_was_taken_late_all_the_same():
    """It has decided that before the end was written (R44)."""
    held = Marker(0, 3, Op.NACK, 1_000, by_tracker=True)
    assert late(read(InFlight(), assigned(3), take(3), end(3), take(3), held)) == [3]


@pytest.mark.parametrize("by_tracker", [False, True])
def test_r30_whoever_ended_it(by_tracker):
    assert late(read(InFlight(), assigned(3), take(3), end(3, by_tracker=by_tracker), take(3))) == [3]


def test_r30_ranges_count_as_what_they_name():
    taken = Marker(0, 3, Op.TAKE, 1_000, runs=((3, 2), (6, 3)))
    ended = Marker(0, 4, Op.END, runs=((4, 4),))
    state = read(InFlight(), assigned(0), taken, ended, taken)
    assert late(state) == [4, 6, 7], "5 had not been taken, so it was not ended"


def test_r30_the_end_of_a_message_that_nobody_has_says_nothing():
    """It may be an end marker of a message of an earlier topic (R24), or a lie."""
    assert late(read(InFlight(), assigned(3), end(3), take(3))) == []


def test_r30_where_no_assignment_says_where_it_begins_everything_is_as_it_was():
    """JVM clients, and older versions: also a group that was set back is served as before."""
    assert late(read(InFlight(), take(3), end(3), take(3))) == []


def test_r30_messages_below_the_assignment_are_not_noted():
    assert late(read(InFlight(), assigned(4), take(3), end(3), take(3))) == []


def test_r30_a_group_that_was_set_back_takes_messages_again():
    state = read(InFlight(), assigned(0), *map(take, range(6)), *map(end, range(6)), assigned(3, again=True))
    read(state, take(2), take(3), take(5))
    assert late(state) == [2], "3 and 5 are redelivered if their consumer dies"
    read(state, end(3), take(3))
    assert late(state) == [2, 3]


def test_r30_a_rebalance_that_goes_back_a_little_opens_nothing():
    """Its client skips what was started; who was paused does not."""
    state = read(InFlight(), assigned(0), take(3), end(3), assigned(2), take(3))
    assert late(state) == [3]


@pytest.mark.parametrize("again", [False, True])
def test_r30_the_tick_of_an_assignment_is_a_tick_to_others(again):
    key, value, headers = codec.encode(assigned(7, again))
    assert codec.decode(key, value, headers) == assigned(7, again)
    assert codec.decode(key, value) == codec.decode(*codec.encode(codec.tick(0))[:2])
    assert codec.encode(codec.tick(0))[2][0] in headers, (
        "so that no tracker counts it as an ack that came late"
    )


@pytest.mark.parametrize("value", [b"", b"-1", b"1.5", b"x", b"9" * 19, b"1" * 20, None])
def test_r30_a_tick_that_can_not_be_read_says_nothing(value):
    key, end_value, headers = codec.encode(codec.tick(0))
    found = codec.decode(key, end_value, [*headers, ("kmq-takes-from", value), ("kmq-takes-again", b"1")])
    assert found == codec.tick(0)


# --- takeover ---------------------------------------------------------------------------------------------

offsets = st.integers(0, 30)
markers = st.one_of(
    st.builds(take, offsets),
    st.builds(end, offsets),
    st.builds(
        lambda first, count: Marker(0, first, Op.END, runs=((first, count),)), offsets, st.integers(1, 9)
    ),
    st.builds(assigned, offsets, st.booleans()),
)


@given(st.lists(markers, max_size=60), st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=300)
def test_r30_a_successor_knows_what_its_predecessor_knew(log, stored_at, rows):
    """From the safe offset and what was stored with it, wherever the predecessor was when it stored that."""
    first = InFlight()
    stored = StoredOffset(0, "M", 0)
    for at, marker in enumerate([*log, assigned(0)]):
        if at == min(stored_at, len(log)):
            offset, now_ms, snapshot = first.snapshot(rows)
            stored = StoredOffset(
                offset,
                "M",
                now_ms,
                in_flight=tuple(snapshot),
                finished=first.finished.stored(),
                markers_read=first.position,
                markers_epoch=0,
            )
        first.apply(marker, at, T0)
    successor = StartPosition(decode_offset("", stored.to_json())).state()
    for at, marker in enumerate([*log, assigned(0)]):
        successor.apply(marker, at, T0)
    assert {*successor} == {*first}
    # It may know of ends that the other had read before the first assignment.
    assert successor.taken_late(successor) >= first.taken_late(first)
    ended_again = {entry.offset for entry in first if was_ended(log, entry.offset)}
    assert successor.taken_late(successor) <= ended_again


def test_r30_what_was_finished_after_a_group_was_set_back_stays_finished_for_a_successor():
    """The tick of the assignment stands behind the safe offset, and the take before it (seed 77260)."""
    log = [assigned(0), take(5), take(9), assigned(3, again=True), end(5)]
    first = read(InFlight(), *log)
    offset, now_ms, _ = first.snapshot(0)
    assert offset == 2, "that of the take of 9: the take of 5 stands before"
    stored = StoredOffset(
        offset, "M", now_ms, finished=first.finished.stored(), markers_read=5, markers_epoch=0
    )
    successor = StartPosition(decode_offset("", stored.to_json())).state()
    for at, marker in [*enumerate(log)][offset:]:
        successor.apply(marker, at, T0)
    for state in (first, successor):
        state.apply(take(5), 5, T0)
        assert late(state) == [5]


def was_ended(log, offset):
    """Whether it was in flight and ended, and no assignment after that may take it again."""
    in_flight = ended = False
    for marker in log:
        if marker.takes_from is not None:
            ended = ended and not (marker.takes_again and marker.takes_from <= offset)
        elif offset in marker.offsets():
            ended = ended or (marker.op is Op.END and in_flight)
            in_flight = marker.op is Op.TAKE
    return ended


def test_r30_what_does_not_exist_was_not_ended():
    """Offsets of a queue that lost some of its end are those of other messages later."""
    state = FinishedMessages()
    state.assigned(0, again=False)
    state.add_all(OffsetRuns([(0, 10)]), 0, 10)
    begin = StartPosition(StoredOffset(5, "M", 0, finished=state.stored()))
    assert begin.highest == 9
    kept = begin.corrected(0, QUEUE, 7, 5_000)
    assert kept.at.finished.runs == ((0, 7),)
    assert kept.problem
    assert begin.corrected(0, QUEUE, 10, 5_000) == begin


def test_r30_where_markers_are_lost_nothing_is_known_to_be_ended():
    stored = StoredOffset(5, "M", 0, finished=StoredFinished((0,), ((0, 3),)))
    assert start_position(stored, "M", 5, 9).at.finished == stored.finished
    assert start_position(stored, "M", 6, 9).at.finished == StoredFinished()
    assert start_position(stored, "other", 5, 9).at.finished == StoredFinished()


# --- bounds -----------------------------------------------------------------------------------------------


def size(noted):
    blocks = noted._offsets._blocks
    return sys.getsizeof(blocks) + sum(map(sys.getsizeof, blocks)) + sum(map(sys.getsizeof, blocks.values()))


def test_r30_memory_is_bounded_whatever_is_ended(monkeypatch):
    window = 1 << 14
    monkeypatch.setattr(finished, "WINDOW", window)
    noted = FinishedMessages()
    for assignment in range(2 * MAX_WINDOWS):
        first = assignment * 2 * window
        noted.assigned(first, again=False)
        for offset in range(first, first + 2 * window, 2):
            noted.add(offset)
    assert len(noted) == MAX_WINDOWS * window // 2
    assert size(noted) < 0.3 * MAX_WINDOWS * window, "bytes of every message in a window, ended or not"
    assert first + window not in noted
    assert first in noted
    assert (first - 2 * window) in noted
    assert 0 not in noted


def test_r30_only_what_lies_in_a_window_is_noted(monkeypatch):
    monkeypatch.setattr(finished, "WINDOW", 10)
    noted = FinishedMessages()
    noted.assigned(100, again=False)
    noted.add_all(OffsetRuns([(95, 8), (108, 5)]), 95, 18)
    noted.assigned(200, again=False)
    noted.add_all(OffsetRuns([(109, 92)]), 109, 92)
    for offset in (99, 105, 110, 150, 205, 210):
        noted.add(offset)
    assert noted.stored().runs == ((100, 3), (105, 1), (108, 2), (200, 1), (205, 1))


def test_r30_assignments_close_to_each_other_share_a_window():
    noted = FinishedMessages()
    noted.assigned(0, again=False)
    for first in range(1_000_000, 1_000_000 + 20 * MAX_WINDOWS, 10):
        noted.assigned(first, again=False)
        assert noted.touches(first + WINDOW // 2 - 1, 1)
    assert noted.stored().windows == (0, 1_000_000)


def test_r30_what_is_stored_is_small_and_the_latest_counts_most(monkeypatch):
    monkeypatch.setattr(finished, "_MAX_STORED_RUNS", 5)
    noted = FinishedMessages()
    for first in (0, 10 * WINDOW):
        noted.assigned(first, again=False)
        noted.add_all(OffsetRuns((offset, 1) for offset in range(first, first + 8, 2)), first, 8)
    latest = 10 * WINDOW
    assert noted.stored().runs == ((0, 1), *((latest + at, 1) for at in (0, 2, 4, 6)))


def test_r30_a_busy_partition_stores_few_bytes():
    state = InFlight()
    read(state, assigned(5_000_000))
    state.apply_takes([(5_000_000, 300_000, T0)], 1_000, state.position)
    state.apply_ends([(5_000_000, 300_000, T0)], state.position)
    stored = StoredOffset(1, "M", 1, finished=state.finished.stored())
    assert len(stored.to_json()) - len(StoredOffset(1, "M", 1).to_json()) < 100


# --- text -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, INT64_MAX), max_size=MAX_WINDOWS),
    st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, WINDOW)), max_size=20),
)
def test_what_is_stored_is_read(windows, gaps):
    runs, at = [], 0
    for gap, count in gaps:
        runs.append((at + gap, count))
        at += gap + count
    stored = StoredOffset(5, "M", 7, finished=StoredFinished(tuple(windows), tuple(runs)))
    assert decode_offset("q", stored.to_json()) == stored


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "x",
        {},
        {"windows": [1], "runs": [1]},
        {"windows": [-1], "runs": []},
        {"windows": [1.5], "runs": []},
        {"windows": [True], "runs": []},
        {"windows": [0] * (MAX_WINDOWS + 1), "runs": []},
        {"windows": [], "runs": [0, 0]},
        {"windows": [], "runs": [0, INT64_MAX]},
        {"windows": [], "runs": [INT64_MAX, 1]},
        {"windows": [], "runs": [1, 1] * 2_001},
    ],
)
def test_what_is_damaged_is_refused_and_the_offset_counts_as_absent(damaged):
    values = json.loads(StoredOffset(5, "M", 7).to_json())
    assert decode_offset("q", json.dumps(values).encode()) is not None
    assert decode_offset("q", json.dumps({**values, "finished": damaged}).encode()) is None
