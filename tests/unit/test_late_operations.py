"""Late acknowledgements: what is read from the markers, and what a copy's header says."""

from itertools import pairwise

import pytest
from confluent_kafka import Message

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.markers import codec, late_operations
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.late_operations import (
    PLANNED_AT,
    CopyHeaders,
    LateOperations,
    planned_at_header,
    read_planned_at,
)
from kmqpy.kafka.markers.lineage import RecordPlace, ancestors_header

QUEUE, PARTITION = "jobs", 3
HOUR_MS = 3_600_000


class Log:
    """A markers partition that is read as it is written."""

    def __init__(self, begin=100):
        self.acks = LateOperations(QUEUE, PARTITION, begin)
        self.records = []
        self.ms = 1_000
        self.ancestors = {}
        self._begin = begin

    def write(self, key, value, headers=None):
        at, ms = self._begin + len(self.records), self.ms
        self.records.append(
            Message(
                key=key,
                value=value,
                headers=headers or None,
                partition=PARTITION,
                offset=at,
                timestamp=(2, ms),
            )
        )
        self.acks.read(self.records[-1:])

    def mark(self, *markers):
        for marker in markers:
            self.write(*codec.encode(marker))

    def end(self, *offsets):
        self.mark(*(Marker(PARTITION, offset, Op.END) for offset in offsets))

    def claim(self, *offsets):
        self.write(*naming_tick(PARTITION, CLAIM, offsets))

    def copy(self, copies, *, ranges=False, to=QUEUE, partition=PARTITION):
        """Claims and ends messages; `copies`: the offset of each and that of its copy."""
        self.claim(*copies)
        self.end_copied(copies, ranges=ranges, to=to, partition=partition)

    def end_copied(self, copies, *, ranges=False, to=QUEUE, partition=PARTITION):
        places = {one: (partition, copy) for one, copy in copies.items()}
        for one, copy in copies.items():
            self.ancestors[copy] = [*self.ancestors.get(one, ()), one]
        for record in end_markers(QUEUE, PARTITION, places, copy_topic=to, ranges=ranges):
            self.write(record.key, record.value, list(record.headers))

    def asked(self, copy):
        """The late operations that apply to a copy: which, and what is left of them now."""
        return [
            (operation.op, operation.left_ms(self.acks.now_ms, HOUR_MS))
            for operation in self.operations(copy)
        ]

    def operations(self, copy):
        return self.acks.operations(copy, self._headers(copy))

    def acknowledged(self, *offsets):
        return [offset for offset in offsets if self.acks.acknowledged(offset, self._headers(offset))]

    def _headers(self, copy):
        """What the copy says of itself: its ancestors are those that were claimed last."""
        named = ",".join(f"{PARTITION}:{one}" for one in self.ancestors.get(copy, ()))
        return CopyHeaders(self._begin, named.encode() or None)


@pytest.fixture
def log():
    return Log()


@pytest.mark.parametrize("ranges", [False, True])
def test_an_end_behind_the_claim_ends_the_copy_and_the_copies_of_that(log, ranges):
    log.copy({1: 10, 2: 11, 3: 12, 7: 13}, ranges=ranges)
    assert log.acknowledged(10, 11, 12, 13) == []
    log.end(2, 7)
    assert log.acknowledged(1, 2, 3, 10, 11, 12, 13) == [11, 13]
    log.copy({11: 20, 12: 21}, ranges=ranges)
    assert log.acknowledged(20, 21) == [20]


def test_an_end_between_the_claim_and_the_end_of_the_tracker_counts(log):
    log.claim(1, 2)
    log.end(1)
    log.end_copied({1: 10, 2: 11})
    assert log.acknowledged(10, 11) == [10]


def test_an_end_before_the_claim_counts_not(log):
    log.end(1)  # the tracker drops such a message; if it is claimed later, somebody has taken it again
    log.copy({1: 10})
    assert log.acknowledged(10) == []


def test_range_markers_of_clients_count(log):
    log.copy({offset: offset + 100 for offset in range(50)}, ranges=True)
    log.mark(*codec.ranges(PARTITION, Op.END, range(10, 20)))
    assert log.acknowledged(*range(100, 150)) == list(range(110, 120))


def test_an_end_of_the_copy_itself_counts(log):
    log.copy({1: 10})
    log.end(10)
    assert log.acknowledged(10) == [10]


@pytest.mark.parametrize("op", [Op.TAKE, Op.DELAY, Op.EXTEND, Op.NACK, Op.DEAD_LETTER])
def test_other_markers_acknowledge_nothing(log, op):
    log.copy({1: 10})
    log.mark(Marker(PARTITION, 1, op, 500))
    assert log.acknowledged(10) == []


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("op", [Op.EXTEND, Op.NACK, Op.DEAD_LETTER])
def test_what_a_client_asks_for_behind_the_claim_applies_to_the_copy_and_its_copies(log, op, ranges):
    log.copy({1: 10, 2: 11}, ranges=ranges)
    log.mark(Marker(PARTITION, 2, op, 500, reason="why"))
    log.copy({10: 20, 11: 21}, ranges=ranges)
    assert [log.asked(copy) for copy in (1, 2, 10, 20)] == [[], [], [], []]
    reason = "why" if op is Op.DEAD_LETTER else None
    for copy in (11, 21):
        assert log.operations(copy) == [(op, 1_000, 500, reason)]


def test_range_markers_of_clients_ask_for_many(log):
    log.copy({offset: offset + 100 for offset in range(50)}, ranges=True)
    log.mark(*codec.ranges(PARTITION, Op.NACK, range(10, 20), redeliver_after_ms=500, counts=False))
    asked = [copy for copy in range(100, 150) if log.asked(copy)]
    assert asked == list(range(110, 120))


def test_what_is_left_is_counted_from_the_marker_to_the_end_of_the_log(log):
    log.copy({1: 10})
    log.mark(Marker(PARTITION, 1, Op.EXTEND, 500))
    log.ms += 200
    log.mark(Marker(PARTITION, 10, Op.TAKE, 100))
    assert log.asked(10) == [(Op.EXTEND, 300)]
    log.ms += 400
    log.mark(Marker(PARTITION, 10, Op.TAKE, 100))
    assert log.asked(10) == [(Op.EXTEND, 0)]


def test_what_is_left_is_never_more_than_the_queue_allows_nor_than_was_asked_for(log):
    log.copy({1: 10, 2: 11})
    log.mark(Marker(PARTITION, 1, Op.EXTEND, INT64_MAX))
    log.ms += 10**15  # somebody's clock
    log.mark(Marker(PARTITION, 2, Op.EXTEND, 500))
    log.ms = 1_000
    log.end(99)
    assert log.asked(10) == [(Op.EXTEND, HOUR_MS)]
    assert log.asked(11) == [(Op.EXTEND, 500)]


def test_what_was_asked_for_before_the_claim_is_known_to_the_tracker(log):
    log.mark(Marker(PARTITION, 1, Op.NACK, 500))
    log.claim(1)  # and then the transaction is aborted
    log.mark(Marker(PARTITION, 1, Op.NACK, 500))
    log.copy({1: 10})
    assert log.asked(10) == []


def test_a_nack_of_a_copy_is_not_late_before_that_is_claimed(log):
    log.copy({1: 10})
    log.mark(Marker(PARTITION, 10, Op.NACK, 500))
    log.copy({10: 20})
    assert log.asked(20) == []
    log.mark(Marker(PARTITION, 10, Op.NACK, 500))
    assert log.asked(20) == [(Op.NACK, 500)]


@pytest.mark.parametrize(
    ("asked", "applies"),
    [
        ((Op.EXTEND, Op.NACK), Op.NACK),
        ((Op.NACK, Op.EXTEND), Op.NACK),  # nobody holds it any more
        ((Op.DEAD_LETTER, Op.NACK), Op.DEAD_LETTER),
        ((Op.EXTEND, Op.DEAD_LETTER, Op.EXTEND), Op.DEAD_LETTER),
    ],
)
def test_the_last_that_would_count_applies(log, asked, applies):
    log.copy({1: 10})
    log.mark(*(Marker(PARTITION, 1, op, 500) for op in asked))
    assert [operation.op for operation in log.operations(10)] == [applies]


def test_each_earlier_delivery_may_ask_for_something(log):
    log.copy({1: 10})
    log.copy({10: 20})
    log.mark(Marker(PARTITION, 1, Op.EXTEND, 500), Marker(PARTITION, 10, Op.NACK, 300))
    assert log.asked(20) == [(Op.NACK, 300), (Op.EXTEND, 500)]


def test_where_the_claim_was_deleted_the_end_of_the_tracker_makes_what_follows_late(log):
    log.end_copied({1: 10})
    log.mark(Marker(PARTITION, 1, Op.NACK, 500))
    assert log.asked(10) == [(Op.NACK, 500)]


def test_markers_that_prove_nothing_ask_for_nothing(log):
    log.copy({1: 10})
    log.mark(Marker(PARTITION, 1, Op.NACK, 500, by_tracker=True))
    log.mark(Marker(PARTITION + 1, 1, Op.NACK, 500))
    log.mark(Marker(PARTITION, 7, Op.NACK, 500))
    log.copy({7: 17})
    log.write(codec.encode_key(PARTITION, 1), codec.encode_start(500), [("kmq-op", b"dance")])
    log.write(codec.encode_key(PARTITION, 1), codec.encode_start(500)[:5], [("kmq-op", b"nack")])
    log.mark(Marker(PARTITION, 1, Op.TAKE, 500, holder="somebody"))
    assert (log.asked(10), log.asked(17)) == ([], [])


def test_a_reason_as_long_as_none_can_be_is_cut(log):
    log.copy({1: 10})
    log.mark(Marker(PARTITION, 1, Op.DEAD_LETTER, reason="x" * 100_000))
    assert log.operations(10)[0].reason == "x" * codec.MAX_REASON


def test_the_oldest_operations_are_forgotten_where_they_are_very_many(log, monkeypatch):
    monkeypatch.setattr("kmqpy.kafka.markers.late_operations._MAX_OPERATIONS", 2)
    log.copy({1: 10, 2: 11, 3: 12})
    for offset in (1, 2, 1, 3):
        log.mark(Marker(PARTITION, offset, Op.NACK, 500))
    assert [bool(log.asked(copy)) for copy in (10, 11, 12)] == [True, False, True]


def test_what_no_tracker_copied_is_never_acknowledged(log):
    log.copy({1: 10})
    log.end(1, 5)
    assert log.acknowledged(5, 9, 11, INT64_MAX) == []


def test_where_the_claim_was_deleted_the_end_of_the_tracker_is_enough(log):
    log.end_copied({1: 10, 2: 11})
    log.end(1)
    assert log.acknowledged(10, 11) == [10]


def test_dead_letters_and_copies_in_other_partitions_are_no_copies_here(log):
    log.copy({1: 10}, to="jobs__undelivered")
    log.copy({2: 11}, partition=PARTITION + 1)
    log.end(1, 2)
    assert log.acknowledged(10, 11) == []


def test_what_can_not_be_true_is_left_out(log):
    log.end_copied({5: 5, 6: 2, 8: 20})
    log.write(b"?", b"\x00")
    log.write(codec.encode_key(PARTITION, 8), None)
    log.write(codec.encode_key(PARTITION + 1, 8), b"\x00")
    log.write(codec.encode_key(PARTITION, 9), b"\x00", [("kmq-by", b"tracker"), ("kmq-copy", b"3:x")])
    assert log.acknowledged(2, 5, 20) == []
    log.end(5, 6, 8)
    assert log.acknowledged(2, 5, 20) == [20]


def test_copies_far_ahead_that_somebody_made_up_hide_no_others(log):
    log.end_copied({1: INT64_MAX})
    log.copy({2: 10, 3: 11})
    log.end(2)
    assert log.acknowledged(10, 11) == [10]


def test_records_are_read_once():
    log = Log()
    log.claim(1)
    log.end(1)
    log.acks.read(log.records)  # again, as after a seek of librdkafka
    log.end_copied({1: 10})
    assert (log.acks.begin, log.acks.end) == (100, 103)
    assert log.acknowledged(10) == [10]


def test_a_bulk_redelivery_takes_little_memory(log):
    log.copy({offset: offset + 1_000_000 for offset in range(20_000)}, ranges=False)
    assert len(log.acks._copies._copies) == 1


def test_the_header_is_read_where_it_was_written():
    name, data = planned_at_header(QUEUE, PARTITION, 77)
    assert (name, data) == (PLANNED_AT, b"jobs:3:77")
    assert read_planned_at([(name, data)], PARTITION, [QUEUE]) == {QUEUE: 77}
    assert read_planned_at([(name, data)], PARTITION + 1, [QUEUE]) == {}
    assert read_planned_at([(name, data)], PARTITION, ["others"]) == {}


@pytest.mark.parametrize("data", [None, b"", b"jobs:3:", b"jobs:3:-1", b"jobs:3:9" + b"9" * 18, b"\xff:3:7"])
def test_invalid_headers_say_nothing(data):
    assert read_planned_at([(PLANNED_AT, data)], PARTITION, [QUEUE]) == {}


def test_forged_markers_cannot_have_more_watched_than_there_is_memory_for(log, monkeypatch):
    monkeypatch.setattr(late_operations, "_MAX_WATCHED_BLOCKS", 3)
    log.copy({5: 9})
    log.claim(*range(0, 60_000, 1_024))
    assert log.acks._watched.block_count == 59
    log.claim(*range(2**40, 2**40 + 60_000, 1_024))
    log.end_copied({2**50: 2**50 + 1})
    assert log.acks._watched.block_count == 59
    log.end(5)
    assert log.acknowledged(9) == [9]


def test_copies_are_known_whatever_the_order_in_which_they_are_named(log):
    log.copy({5: 90})
    log.copy({6: 80})
    log.copy({7: 85})
    log.copy({8: 85})  # what is known stays
    log.ancestors[85] = [7]
    log.copy({4: 70, 5: 71}, ranges=True)
    assert len(log.acks._copies._copies) == 1, "where others stand behind, no run is inserted"
    log.end(5, 6, 7)
    assert log.acknowledged(70, 71, 80, 85, 90) == [71, 80, 85, 90]


def test_only_the_reason_that_is_handed_on_is_kept(log):
    log.copy({5: 9, 6: 10})
    log.mark(
        Marker(PARTITION, 5, Op.NACK, 5, reason="x" * 1_000_000),
        Marker(PARTITION, 6, Op.DEAD_LETTER, reason="x" * 1_000_000),
    )
    assert [one.reason for copy in (9, 10) for one in log.operations(copy)] == [None, "x" * 1_000]


def test_r33_an_aborted_copy_that_was_cut_away_is_no_ancestor_of_what_stands_there_now(log):
    """Simulation seed 307571 with cut logs. Who reads the markers of open transactions reads aborted ones."""
    log.claim(2, 3)
    log.end(2, 3)
    log.end_copied({2: 10, 3: 11})
    del log.ancestors[10]  # the record at 10 is another message now, and that at 11 a copy of message 4
    log.copy({4: 11, 10: 20})
    log.mark(Marker(PARTITION, 2, Op.DEAD_LETTER), Marker(PARTITION, 3, Op.DEAD_LETTER))
    assert log.acknowledged(20, 11) == []
    assert log.operations(20) == log.operations(11) == []
    log.end(10)
    assert log.acknowledged(20) == [20]


def test_r33_an_ancestor_that_has_no_place_in_the_header_of_a_copy_is_one(log):
    chain = [2**43 + 10 * n for n in range(100)]
    for one, copy in pairwise(chain):
        log.copy({one: copy})
    log.end(chain[20])
    named = [RecordPlace(QUEUE, PARTITION, one) for one in chain[:-1]]
    _, header = ancestors_header(QUEUE, named[:-1], named[-1])
    assert b"%d" % chain[20] not in header
    assert log.acks.acknowledged(chain[-1], CopyHeaders(100, header))


@pytest.mark.parametrize("header", [None, b"?", b"4:2", b"jobs:3:1"])
def test_r33_headers_that_name_no_ancestor_here(header):
    assert not CopyHeaders(0, header).names(QUEUE, PARTITION, 2)
    assert CopyHeaders(0, b"3:1,3:2").names(QUEUE, PARTITION, 2)


class Lanes:
    """The markers of the main lane and of the retry lane."""

    def __init__(self):
        lanes = ["jobs", "jobs__retry"]
        self.main, self.retry = (LateOperations(lane, PARTITION, 0, lanes=lanes) for lane in lanes)

    def write(self, lane, *records):
        for key, value, headers in records:
            read = {"key": key, "value": value, "headers": list(headers) or None, "partition": PARTITION}
            lane.read([Message(**read, offset=lane.end, timestamp=(2, 1_000))])

    def copy(self, lane, one, copy, to):
        topic = "jobs" if lane is self.main else "jobs__retry"
        self.write(lane, naming_tick(PARTITION, CLAIM, [one]))
        ends = end_markers(topic, PARTITION, {one: (PARTITION, copy)}, copy_topic=to)
        self.write(lane, *((end.key, end.value, end.headers) for end in ends))

    def end(self, lane, offset):
        self.write(lane, codec.encode(Marker(PARTITION, offset, Op.END)))

    def acknowledged(self, copy, named):
        headers = CopyHeaders(-1, named, (("jobs", 0),))
        return self.retry.acknowledged(copy, headers, [self.main])


def test_r46_an_ack_in_another_lane_ends_the_copy_and_the_copies_of_that():
    lanes = Lanes()
    lanes.copy(lanes.main, 17, 5, "jobs__retry")
    lanes.copy(lanes.main, 18, 6, "jobs__retry")
    lanes.copy(lanes.retry, 5, 9, "jobs__retry")
    assert not lanes.acknowledged(5, b"jobs:3:17")
    lanes.end(lanes.main, 17)
    assert lanes.acknowledged(5, b"jobs:3:17")
    assert lanes.acknowledged(9, b"jobs:3:17,3:5")
    assert not lanes.acknowledged(6, b"jobs:3:18")
    lanes.end(lanes.retry, 18)  # an offset of another lane
    assert not lanes.acknowledged(6, b"jobs:3:18")
    assert not lanes.acknowledged(5, b"3:17"), "which stands in the retry lane"


def test_r46_a_copy_at_the_offset_of_one_that_was_cut_away_is_another():
    lanes, number = Lanes(), 7 << 44 | 5
    lanes.copy(lanes.main, 17, 5, "jobs__retry")
    lanes.end(lanes.main, 17)
    assert not lanes.acknowledged(number, b"jobs:3:18")
    assert lanes.acknowledged(number, b"jobs:3:17"), "its tracker did not know the cut"
    lanes.copy(lanes.main, 19, 5, "jobs__retry")
    lanes.end(lanes.main, 19)
    assert lanes.acknowledged(number, b"jobs:3:19"), "the copy that stands there since is another one"


def test_r46_forged_markers_of_two_lanes_make_no_endless_lineage():
    lanes = Lanes()
    lanes.copy(lanes.main, 17, 5, "jobs__retry")
    lanes.copy(lanes.retry, 5, 17, "jobs")
    lanes.end(lanes.main, 17)
    assert not lanes.acknowledged(5, b"3:1")


def test_r46_copies_in_topics_of_others_are_none():
    lanes = Lanes()
    lanes.copy(lanes.main, 17, 5, "others")
    assert set(lanes.main._elsewhere) == {"jobs__retry"}
