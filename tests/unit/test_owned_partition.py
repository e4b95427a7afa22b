"""Where a takeover begins to read markers, which claims it finds, and what times a tracker tells."""

import pytest
from confluent_kafka import Message as Record

from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import Cut, LogCuts
from kmqpy.kafka.markers.replay import replay_markers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.partition.start_position import StartPosition, start_position
from tracker.redelivery.known_log import LastSeen
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick
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


def test_r40_markers_that_were_cut_back_are_all_read_again():
    """End markers that were cut away may name copies that are gone, too."""
    cuts = LogCuts((Cut(4, 20, 3),))
    rows = (
        Entry(7, 48, 6_000, 8_000, EntryState.LEASED),
        TakenRun(cuts.number_of(21), 0b11, 49, 1, 6_000, 8_000, None),
    )
    stored = StoredOffset(50, "id", now_ms=7_000, in_flight=rows, cuts=cuts)
    begin = start_position(stored, "id", 3, 90, Cut(2, 45, 1))
    assert begin.markers_cut
    state = begin.corrected(7_000, QueueSettings(name="q"), 1_000, 0).state()
    assert [entry.offset for entry in state.in_order()] == [7]
    state.apply(Marker(0, 5, Op.TAKE, 1_000), at=3, timestamp_ms=1_000)
    state.apply(Marker(0, 7, Op.END), at=4, timestamp_ms=1_000)
    assert (5 in state, 7 in state) == (True, False)
    state.apply(codec.tick(0, cuts), at=5, timestamp_ms=1_000)
    assert state.cut_away, "so it is looked for copies that are gone"


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
    queue, cuts = QueueSettings(name="q"), LogCuts.parse("1<2@4")
    part = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    part.start_reading(InFlight(cuts=cuts), now=100.0)
    for at, number in enumerate((1, cuts.number_of(4), 5)):
        part.state.apply(Marker(0, number, Op.TAKE, 2_000), at, 10_000)
    assert [offset for offset in range(8) if part.has_taken(offset)] == [1, 4, 5]


def test_r39_after_a_cut_nothing_is_known_of_messages_that_nobody_had_taken():
    """No client knows more: where the log is cut back below them, their offsets are numbers of new ones."""
    queue = QueueSettings(name="q")
    part = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    part.start_reading(InFlight(), now=100.0)
    part.taken_end = LogEnd(2, 0)
    part.state.apply(codec.tick(0, LogCuts.parse("0<1@12")), 0, 10_000)
    part.log_was_cut(12, 15, 0, now=100.0)
    assert part.last_known == LastSeen(1, 1)


def test_r39_who_takes_by_a_former_number_proves_nothing_of_the_new_log():
    """Its message was fetched before the cut was told; the record at this offset now may be of any epoch."""
    queue = QueueSettings(name="q")
    part = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    part.start_reading(InFlight(), now=100.0)
    part.state.apply(codec.tick(0, cuts := LogCuts.parse("0<1@0")), 0, 10_000)
    part.log_was_cut(0, 3, 0, now=100.0)
    part.epoch_told(1, 5, highest_taken=4)
    assert part.last_known == LastSeen(-1, 1)
    part.epoch_told(1, 6, highest_taken=cuts.number_of(2))
    assert part.last_known == LastSeen(2, 1)


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


class Takeovers:
    """A partition that is taken over, and the claims that were read since."""

    def __init__(self):
        queue = QueueSettings(name="q")
        redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings())
        self.part = OwnedPartition(("q", 0), 1, queue, redeliverer)
        self.part.start_reading(InFlight(), now=100.0)
        self.at = 0

    def begin(self, tick_at):
        self.part.catch_up_to(Tick(tick_at, 1_000, 0.0), LogEnd(100))

    def read(self, encoded):
        key, value, headers = encoded
        record = Record(
            topic="m",
            partition=0,
            offset=self.at,
            key=key,
            value=value,
            headers=headers,
            timestamp=(2, 1_000),
        )
        replay_markers(self.part.state, 0, [record])
        self.part.read(self.at, 0, now=100.0)
        self.at += 1

    def claim(self, name, offset):
        key, value, headers = naming_tick(0, CLAIM, [offset])
        self.read((key, value, [*headers, (CLAIM_ID, name), (COPIES_TO, b"q")]))

    def tick(self):
        self.read(codec.encode(codec.tick(0)))

    def torn(self):
        return [one.id for one in self.part.state.claims.torn()]


def test_r37_at_the_end_of_a_takeover_claims_of_its_predecessors_are_torn_and_others_are_not_believed():
    taken = Takeovers()
    taken.begin(tick_at=1)
    taken.claim(b"predecessor", 1)
    assert (taken.part.phase, taken.torn()) == (TrackingPhase.CATCHING_UP, [])
    taken.tick()
    assert (taken.part.phase, taken.torn()) == (TrackingPhase.ACTIVE, [b"predecessor"])
    taken.claim(b"forged", 2)
    assert taken.torn() == [b"predecessor"]
    # Another tracker may have been the owner before the next takeover.
    taken.begin(tick_at=4)
    taken.claim(b"other", 3)
    taken.tick()
    assert taken.torn() == [b"predecessor", b"other"]


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
