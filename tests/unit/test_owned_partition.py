"""Where a takeover begins to read markers, and what times a tracker tells of a partition."""

import pytest

from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.partition.owned_partition import OwnedPartition
from tracker.partition.start_position import StartPosition, start_position
from tracker.redelivery.redeliverer import Redeliverer
from tracker.settings import TrackerSettings

STORED = StoredOffset(50, "id", now_ms=7_000)


@pytest.mark.parametrize(
    ("stored", "markers_id", "log_start", "end", "begins_at", "markers_lost"),
    [
        (None, "id", 3, 90, 3, False),
        (STORED, "id", 50, 50, 50, False),
        (STORED, "id", 51, 90, 51, True),  # markers below the log start were never read
        (STORED, "id", 3, 49, 3, False),
        (STORED, "another", 3, 90, 3, False),
    ],
)
def test_where_reading_begins(stored, markers_id, log_start, end, begins_at, markers_lost):
    begin = start_position(stored, markers_id, log_start, end)
    assert (begin.at.offset, begin.at.markers_id, begin.markers_lost) == (begins_at, markers_id, markers_lost)
    assert (begin.problem is None) == (stored is None or begins_at == stored.offset)


@pytest.mark.parametrize("log_start", [50, 51])
def test_r2_an_operation_counts_as_a_take_only_where_markers_were_deleted_unread(log_start):
    begin = start_position(STORED, "id", log_start, end=90)
    assert begin.at.missed_markers == (log_start > STORED.offset)
    state = begin.state()
    state.apply(Marker(0, 8, Op.EXTEND, 1_000), at=log_start, timestamp_ms=8_000)
    assert (8 in state) == (log_start > STORED.offset)


def test_r2_that_markers_were_missed_before_is_not_forgotten():
    stored = StoredOffset(50, "id", now_ms=7_000, missed_markers=True)
    assert start_position(stored, "id", log_start=3, end=90).at.missed_markers


def test_what_is_delayed_and_overdue_goes_by_the_time_carried_forward():
    queue = QueueSettings(name="q")
    part = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    part.start_reading(InFlight(), now=100.0)
    part.state.apply(Marker(0, 1, Op.TAKE, 2_000), at=5, timestamp_ms=10_000)
    part.state.apply(Marker(0, 2, Op.DELAY, 9_000), at=6, timestamp_ms=10_000)
    part.read(6, 0, now=100.0)
    assert [part.delayed_and_overdue(100.0 + s) for s in (0, 1.9, 2, 9)] == [(1, 0), (1, 0), (1, 1), (1, 2)]


def test_r39_what_is_in_flight_is_found_by_its_offset():
    """Behind a cut, a client of kmqpy has taken 4, and one that knows no cuts 5."""
    queue, cuts = QueueSettings(name="q"), LogCuts.parse("2@4")
    part = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    part.start_reading(InFlight(cuts=cuts), now=100.0)
    for at, number in enumerate((1, cuts.number_of(4), 5)):
        part.state.apply(Marker(0, number, Op.TAKE, 2_000), at, 10_000)
    assert [offset for offset in range(8) if part.has_taken(offset)] == [1, 4, 5]


def test_lateness_and_age_are_seconds_and_go_on_without_markers():
    queue = QueueSettings(name="q")
    redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings())
    part = OwnedPartition(("q", 0), 1, queue, redeliverer)
    part.start_reading(InFlight(), now=100.0)
    part.state.apply(Marker(0, 1, Op.TAKE, 2_000), at=5, timestamp_ms=10_000)
    part.read(5, 0, now=100.0)
    entry = part.state.get(1)
    times = entry.since_ms, entry.due_ms
    assert [part.clock.seconds_since(ms, 100.0) for ms in times] == [0, 0]
    assert [part.clock.seconds_since(ms, 103.5) for ms in times] == [3.5, 1.5]
    now_before_ms = part.state.now_ms
    part.state.apply(Marker(0, 2, Op.TAKE, 2_000), at=6, timestamp_ms=16_000)
    part.read(6, now_before_ms, now=104.0)
    assert [part.clock.seconds_since(ms, 104.0) for ms in times] == [6, 4]


@pytest.mark.parametrize(
    ("since_ms", "due_ms", "left_ms"),
    [
        (3_598_000, 3_599_000, -1_000),  # overdue, by the clock that was ahead
        (3_598_000, 3_605_000, 5_000),
        (-1_000, 3_605_000, 5_000),
        (-2_000, -1_000, -1_000),  # taken and overdue before that
        (-1_000, 4_000, 4_000),
    ],
)
def test_r23_what_remains_of_stored_leases_is_kept_when_the_stored_time_was_ahead(since_ms, due_ms, left_ms):
    now_ms, ahead_ms = 1_700_000_000_000, 3_600_000
    row = Entry(0, 7, now_ms + since_ms, now_ms + due_ms, EntryState.LEASED)
    begin = StartPosition(StoredOffset(50, "id", now_ms + ahead_ms, in_flight=(row,)))
    (kept,) = begin.corrected(now_ms, QueueSettings(name="q"), 10, 5_000).at.in_flight
    assert kept.due_ms - now_ms == left_ms
