"""What a tracker knows of messages, and what of it is dropped when ticks tell that the log was cut back."""

import json

import pytest
from confluent_kafka import Message as Record

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka import group_commits
from kmqpy.kafka.admin.registry_entries import StoredOffset, parse_offset
from kmqpy.kafka.client.assigned_partition import StartsFound
from kmqpy.kafka.client.crash_recovery import _last_started, _read_marker
from kmqpy.kafka.group_commits import KnownRecord
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, DROPPED, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op, assignment_tick, tick
from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun
from kmqpy.kafka.markers.finished import StoredFinished
from kmqpy.kafka.markers.inflight import CutAway, InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut
from kmqpy.kafka.markers.named_copies import NamedCopy
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.replay import ALL_EXIST, Applied, QueueEnd, replay_markers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.partition.start_position import StartPosition
from tracker.redelivery.known_log import KnownLog, LastSeen
from tracker.redelivery.redelivery_plan import Original

CUT = Cut(3, 10, 2)
ONCE = NO_CUTS.with_cut(CUT)
AGAIN = ONCE.with_cut(Cut(7, 15, 6))
NEW = CUT.base
END = QueueEnd(20, 0, epoch=3)


class Markers:
    """A markers partition and the state read from it."""

    def __init__(self, state: InFlight | None = None) -> None:
        self.state = InFlight() if state is None else state
        self.written = 0
        self.records: list[Record] = []

    def read(self, *markers: Marker, end: QueueEnd = ALL_EXIST, touched: OffsetRuns | None = None) -> Applied:
        return self.read_encoded(*map(codec.encode, markers), end=end, touched=touched)

    def read_encoded(
        self, *encoded: tuple, end: QueueEnd = ALL_EXIST, touched: OffsetRuns | None = None
    ) -> Applied:
        records = [
            Record(
                topic="m",
                partition=0,
                offset=self.written + index,
                key=key,
                value=value,
                headers=headers or None,
                timestamp=(2, 1_000),
            )
            for index, (key, value, headers) in enumerate(encoded)
        ]
        self.records += records
        applied = replay_markers(self.state, 0, records, end, touched)
        self.written += applied.records
        return applied

    def take(self, *numbers: int, end: QueueEnd = ALL_EXIST) -> Applied:
        return self.read(*takes(*numbers), end=end)

    def in_flight(self) -> list[int]:
        return sorted(entry.offset for entry in self.state)


def takes(*numbers: int) -> list[Marker]:
    return [Marker(0, number, Op.TAKE, 300) for number in numbers]


def test_r39_what_was_in_flight_behind_a_cut_is_dropped() -> None:
    markers = Markers()
    markers.take(*range(8, 14))
    taken = Marker(0, 14, Op.TAKE, 300, runs=((14, 40),))
    markers.read(taken, Marker(0, 2, Op.DEAD_LETTER), Marker(0, 2, Op.TAKE, 300))
    handed_out = markers.state.take_due(100)
    assert handed_out == []
    applied = markers.read(tick(0, ONCE))
    assert applied.cut_away == [CutAway((CUT,), 44, 54)]
    assert markers.in_flight() == [2, 8, 9]
    assert markers.state.cuts == ONCE
    assert markers.read(tick(0, ONCE), assignment_tick(0, NEW + 10, cuts=ONCE)).cut_away == []
    markers.take(NEW + 10, NEW + 11)
    assert markers.read(tick(0, AGAIN)).cut_away == [CutAway((Cut(7, 15, 6),), 0, 15)]
    assert markers.in_flight() == [2, 8, 9, NEW + 10, NEW + 11]


def test_r39_messages_that_are_being_redelivered_are_dropped_too() -> None:
    markers = Markers()
    markers.take(9, 10, 11)
    markers.state.now_ms = 10_000
    assert len(markers.state.take_due(3)) == 3
    markers.read(tick(0, ONCE))
    assert markers.in_flight() == [9]
    markers.state.retry(10, 100)
    assert markers.in_flight() == [9]


def test_r39_a_tracker_that_did_not_know_the_cut_redelivers_no_other_message() -> None:
    """It has found that the copy of 12 was cut away, and does not know yet that 12 was, too."""
    markers = Markers()
    gone, there = (Marker(0, number, Op.DELAY, reason="copy cut away", by_tracker=True) for number in (12, 2))
    markers.read(tick(0, ONCE), gone)
    assert markers.in_flight() == []
    markers.read(there, Marker(0, 13, Op.DELAY, 100))
    assert markers.in_flight() == [2, 13]  # a client that knows no cuts means what stands there now


def test_r39_what_was_only_given_back_was_not_taken() -> None:
    """Its start marker had failed. Clients go by start markers, and tell no cut that took it away."""
    markers = Markers()
    markers.take(8)
    markers.read(Marker(0, 9, Op.NACK, 0), Marker(0, 10, Op.DELAY, 300), Marker(0, 11, Op.EXTEND, 300))
    assert markers.state.highest_taken == 10


def test_r39_who_knows_no_cuts_takes_by_offsets() -> None:
    """Their messages are in flight beside those with numbers, and end by themselves."""
    markers = Markers()
    markers.take(12)
    markers.read(tick(0, ONCE))
    markers.take(12, NEW + 12)
    assert markers.in_flight() == [12, NEW + 12]
    markers.read(Marker(0, 12, Op.END))
    assert markers.in_flight() == [NEW + 12]


def test_r39_what_was_finished_behind_a_cut_is_forgotten() -> None:
    markers = Markers()
    markers.read(assignment_tick(0, 5))
    markers.take(8, 12)
    markers.read(Marker(0, 8, Op.END), Marker(0, 12, Op.END))
    markers.read(assignment_tick(0, 200_000))
    markers.read(tick(0, ONCE))
    finished = markers.state.finished
    assert finished.stored() == StoredFinished((5,), ((8, 1),))
    markers.read(assignment_tick(0, NEW + 10, cuts=ONCE))
    markers.take(NEW + 12)
    ended = Marker(0, NEW + 12, Op.END, runs=((NEW + 12, 1),))
    markers.read(ended)
    assert finished.stored() == StoredFinished((5, NEW + 10), ((8, 1), (NEW + 12, 1)))
    assert StoredFinished.from_json(finished.stored().to_json()) == finished.stored()
    markers.take(NEW + 12, 12)
    assert markers.state.taken_late(markers.state) == {NEW + 12, 12}


def test_r39_claims_forget_messages_behind_a_cut() -> None:
    markers = Markers()
    markers.take(9, 12)

    def claim(name: bytes, *numbers: int) -> tuple:
        key, value, headers = naming_tick(0, CLAIM, numbers)
        return key, value, [*headers, (CLAIM_ID, name), (COPIES_TO, b"q")]

    markers.read_encoded(claim(b"both", 9, 12), claim(b"gone", 12))
    markers.read(tick(0, ONCE))
    markers.read_encoded(claim(b"new", 9, NEW + 12), naming_tick(0, DROPPED, [9]))
    markers.state.claims.end_all()
    torn = {claim.id: list(claim.offsets) for claim in markers.state.claims.torn()}
    assert torn == {b"both": [9], b"new": [NEW + 12]}


def test_r39_what_is_asked_for_a_message_that_was_cut_away_brings_it_not_back() -> None:
    """Where markers were missed, a take may be among these, so other operations count as takes."""
    state = InFlight(cuts=ONCE, missed_markers=True)
    for at, number in enumerate((9, 12, NEW + 12)):
        state.apply(Marker(0, number, Op.NACK, 300), at, 1_000)
    assert [entry.offset for entry in state] == [9, NEW + 12]


def test_r39_messages_behind_a_cut_exist_by_their_offsets() -> None:
    markers = Markers(InFlight(cuts=ONCE))
    assert markers.take(*range(NEW + 10, NEW + 20), 9, end=END).records == 11
    assert markers.take(NEW + 20, end=END).records == 0, "waits: it may be sent later"
    decided = QueueEnd(20, INT64_MAX, epoch=3)
    forged = [NEW + 20, NEW + 9, (5 << 44) + 12, 20]
    applied = markers.take(*forged, NEW + 12, end=decided)
    assert [at for at, _ in applied.skipped] == [11, 12, 13, 14]
    run = Marker(0, NEW + 20, Op.TAKE, 300, runs=((NEW + 20, 6),))
    assert len(markers.read(run, end=decided).skipped) == 1
    assert markers.in_flight() == [9, *range(NEW + 10, NEW + 20)]


def test_r39_of_a_range_that_was_cut_back_what_is_there_is_in_flight() -> None:
    """Else nobody would redeliver the messages below the cut, which were taken by the same marker."""
    taken = Marker(0, 6, Op.TAKE, 300, runs=((6, 1), (8, 4)))
    markers = Markers()
    assert markers.read(taken, end=QueueEnd(10, 0, epoch=1)).records == 0, "a broker may say so that lags"
    applied = markers.read(taken, end=QueueEnd(10, 1, epoch=1))
    assert (applied.records, applied.skipped) == (1, [])
    assert markers.in_flight() == [6, 8, 9]
    assert markers.state.highest_taken == 9
    assert len(markers.read(taken, end=QueueEnd(6, 2, epoch=1)).skipped) == 1
    lie = Markers().read(taken, end=QueueEnd(10, 1, epoch=0))
    assert len(lie.skipped) == 1, "no leader was elected"
    found = StartsFound()
    _read_marker(markers.records[-1], 0, 8, 1, found, lambda: 10)
    assert list(found.by_epoch[None].runs()) == list(found.in_flight.runs()) == [(8, 2)]


def test_r39_what_was_taken_before_a_tick_has_no_epoch_of_it() -> None:
    """Of takes soon behind the end some message may have been cut away; others are forged."""
    found = StartsFound(epoch=1)
    markers = Markers()
    markers.read(
        Marker(0, 8, Op.TAKE, 300, runs=((8, 3),)),
        Marker(0, 9_999, Op.TAKE, 300),
        assignment_tick(0, 6, epoch=3),
        *takes(6),
    )
    for record in markers.records:
        _read_marker(record, 0, 0, 3, found, lambda: 9)
    assert {epoch: list(numbers) for epoch, numbers in found.by_epoch.items()} == {1: [8], 3: [6]}
    assert {epoch: list(numbers) for epoch, numbers in found.beyond.items()} == {1: [9, 10]}


def test_r39_of_messages_that_are_not_there_those_below_and_behind_known_cuts_tell() -> None:
    """The highest may be known to be gone, by a cut that was told; a second cut took lower ones away."""
    found = StartsFound(epoch=1)
    markers = Markers()
    markers.read(*takes(9, 12), *takes(NEW + 10), *takes(11))
    for record in markers.records:
        _read_marker(record, 0, 0, 2, found, lambda: 9)
    beyond = list(found.beyond[1].runs())
    assert beyond == [(9, 1), (11, 2), (NEW + 10, 1)]
    assert list(ONCE.current_runs(beyond)) == [(9, 1), (NEW + 10, 1)]
    assert _last_started(ONCE, OffsetRuns([(4, 2)]), found.beyond[1]) == 10
    found.beyond[1].discard(NEW + 10)
    assert _last_started(ONCE, OffsetRuns([(4, 2)]), found.beyond[1]) == 9, "the highest was gone before"
    assert _last_started(ONCE, OffsetRuns([(4, 2)]), OffsetRuns([(11, 2)])) == 5, "all of them were"


def test_r39_a_tick_of_a_leader_that_was_elected_since_is_noted() -> None:
    """What is taken behind it may have its epoch: then the ends that were asked for before say nothing."""
    for latest, newer in ((2, True), (3, False)):
        found, markers = StartsFound(epoch=1), Markers()
        markers.read(assignment_tick(0, 6, epoch=3))
        _read_marker(markers.records[0], 0, 0, latest, found, lambda: 9)
        assert (found.newer, found.epoch) == (newer, 1 if newer else 3)


def test_r39_a_series_ends_where_the_numbers_of_a_cut_do() -> None:
    numbers = [8, 9, NEW + 10, NEW + 11, NEW + 9, NEW + 12]
    markers = Markers(InFlight(cuts=ONCE))
    applied = markers.take(*numbers, end=QueueEnd(20, INT64_MAX))
    assert [at for at, _ in applied.skipped] == [4]
    assert markers.in_flight() == [8, 9, NEW + 10, NEW + 11, NEW + 12]


def test_r39_touched_are_the_messages_that_exist() -> None:
    touched = OffsetRuns()
    markers = Markers(InFlight(cuts=ONCE))
    ends = [Marker(0, NEW + 15, Op.END, runs=((NEW + 15, 10),)), Marker(0, NEW + 9, Op.END)]
    markers.read(*takes(8, NEW + 10), *ends, Marker(0, 3, Op.END), end=END, touched=touched)
    assert sorted(touched) == [3, 8, NEW + 10, *range(NEW + 15, NEW + 20)]


def test_r39_a_cut_that_has_not_happened_waits_and_is_skipped() -> None:
    markers = Markers()
    markers.take(12)
    assert markers.read(tick(0, ONCE), end=QueueEnd(20, 0, epoch=2)).records == 0
    assert len(markers.read(tick(0, ONCE), end=QueueEnd(20, 9, epoch=2)).skipped) == 1
    assert not markers.state.cuts
    assert markers.read(tick(0, ONCE), end=END).cut_away
    assert not markers.in_flight()


def entry(number: int, taken_at: int = 0) -> Entry:
    return Entry(number, taken_at, 0, 0, EntryState.LEASED)


def original(offset: int, epoch: int) -> Original:
    return Original(offset, 0, None, b"v", (), epoch)


def test_r39_a_record_of_a_later_epoch_is_another_message() -> None:
    log = KnownLog().told(5, 2).told(7, 2).told(9, 4)
    assert log.epochs == ((7, 2), (9, 4))
    assert [log.epoch_of(entry(1, at)) for at in (0, 6, 7, 9)] == [2, 2, 4, -1]
    found = {1: original(1, 2), 2: original(2, 4), 3: original(3, 4), 4: original(4, 5)}
    entries = [entry(1, 0), entry(2, 0), entry(3, 7), entry(4, 8), entry(5, 9)]
    assert [(one.offset, record and record.epoch) for one, record in log.originals(entries, found)] == [
        (1, 2),
        (2, None),
        (3, 4),
        (4, None),
    ]
    assert log.last_seen(entry(2, 0)) == LastSeen(2, 2)


def test_r39_where_no_epoch_is_known_nothing_is_doubted() -> None:
    log = KnownLog().told(0, -1).told(3, 4).told(2, 5)
    assert log.epochs == ((3, 4),)
    assert [one for _, one in log.originals([entry(1, 3)], {1: original(1, 9)})] == [original(1, 9)]
    assert log.last_seen(entry(1, 3)) is None
    assert log.epoch_of(entry(1, 2)) == 4


def test_r39_originals_of_numbers_and_of_takes_that_know_no_cuts() -> None:
    log = KnownLog(ONCE).told(4, 0).told(5, 3)
    entries = [entry(12, 2), entry(NEW + 12, 4)]
    records = list(log.originals(entries, {12: original(12, 3)}))
    assert [record.offset for _, record in records] == [12, NEW + 12], "the offset is the message's number"
    assert log.last_seen(entries[0]) is None
    assert log.last_seen(entries[1]) == LastSeen(12, 3)


def test_r39_few_epochs_are_kept() -> None:
    log = KnownLog()
    for epoch in range(1_000):
        log = log.told(epoch + 1, epoch)
    assert len(log.epochs) == 100
    assert log.epoch_of(entry(1, 5)) == 900
    assert log.epoch_of(entry(1, 999)) == 999


def test_r39_late_takes_of_the_former_log_bring_back_nothing_that_others_have_taken() -> None:
    markers = Markers(InFlight(cuts=ONCE))
    markers.take(NEW + 11, 11, 12)
    assert markers.state.taken_late(markers.state) == {11}


COPY_BEFORE = NamedCopy(12, 7, b"\x01\xff")
STORED = StoredOffset(5, "M", 7, cuts=AGAIN, taken_end=20, queue_epoch=7, told_below=4, copy=COPY_BEFORE)


def test_r39_a_stored_offset_names_cuts_and_the_queue() -> None:
    assert parse_offset(STORED.to_json()) == STORED
    bare = StoredOffset(5, "M", 7)
    assert not {"cuts", "taken_end", "queue_epoch", "told_below", "copy"} & json.loads(bare.to_json()).keys()
    assert parse_offset(bare.to_json()) == bare


def test_r25_of_a_stored_offset_counts_what_its_log_can_have_had() -> None:
    assert STORED.within(7) == STORED.within(-1) == STORED
    assert STORED.within(6) == StoredOffset(5, "M", 7, cuts=ONCE)


@pytest.mark.parametrize(
    "damage",
    [
        {"cuts": "6<7@15,2<3@10"},
        {"cuts": "x"},
        {"copy": 3},
        {"copy": [1, -1, ""]},
        {"copy": [1, 2**63, ""]},
        {"copy": [1, 2, "xy"]},
        {"copy": [1, 2, "", 4]},
        {"cuts": 3},
        {"cuts": None},
        {"cuts": "0<1@1," * 100_000},
        {"taken_end": -1},
        {"taken_end": "20"},
        {"queue_epoch": -1},
        {"queue_epoch": 2**63},
        {"queue_epoch": None},
        {"told_below": -1},
    ],
)
def test_r39_damaged_cuts_are_refused(damage: dict) -> None:
    values = {**json.loads(STORED.to_json()), **damage}
    with pytest.raises(ConfigError):
        parse_offset(json.dumps(values).encode())


def test_r39_what_is_stored_is_taken_over_by_numbers() -> None:
    rows = (
        Entry(4, 0, 0, 0, EntryState.LEASED),
        TakenRun(NEW + 14, 0b1111, 1, 1, 0, 0, None),
        Entry((7 << 44) + 16, 2, 0, 0, EntryState.LEASED),
        Entry((9 << 44) + 16, 2, 0, 0, EntryState.LEASED),
        Entry((7 << 44) + 17, 2, 0, 0, EntryState.LEASED),
    )
    finished = StoredFinished((0, NEW), ((3, 2), (NEW + 15, 5)))
    begin = StartPosition(StoredOffset(9, "M", 0, in_flight=rows, finished=finished, cuts=AGAIN))
    assert begin.highest == 19
    found = begin.corrected(0, QueueSettings(name="q"), 17, 0)
    assert [row[0] for row in found.at.in_flight] == [4, NEW + 14, (7 << 44) + 16]
    assert found.state().highest_taken == (7 << 44) + 17  # which shows that the log may have been cut back
    assert found.at.in_flight[1].bits == 0b111
    assert found.at.finished.runs == ((3, 2), (NEW + 15, 2))
    assert found.problem is not None
    state = found.state()
    assert state.cuts == AGAIN
    assert len(state) == 5


def test_r39_of_two_answers_that_of_the_later_leader_counts() -> None:
    assert LogEnd(20, 1).or_newer(LogEnd(10, 2)) == LogEnd(10, 2)
    assert LogEnd(20, 2).or_newer(LogEnd(10, 2)) == LogEnd(20, 2)
    assert LogEnd(20).or_newer(LogEnd(30)) == LogEnd(30)


def test_r39_who_reads_commits_looks_also_where_a_record_stands_that_nobody_reads(monkeypatch) -> None:
    """It ends a transaction, or was aborted: then the cut is found by those around it."""
    asked = []
    monkeypatch.setattr(group_commits.partition_reader, "read_at", lambda *_: {})
    monkeypatch.setattr(group_commits, "find_cut", lambda *_, **known: asked.append(known) or CUT)
    ends, known = {0: LogEnd(20, 3)}, {0: KnownRecord(12, 1)}
    found = group_commits._find_cuts(KafkaConnection(), QueueSettings(name="q"), ends, known)
    assert found == {0: CUT}
    assert [one["offset"] for one in asked] == [12]
