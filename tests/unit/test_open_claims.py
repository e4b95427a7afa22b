"""Which claims are torn (rule R37), as replayed markers say, and that nobody forgets them too early."""

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as Record

from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, DROPPED, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.replay import replay_markers


class Markers:
    """A markers partition and the state read from it."""

    def __init__(self):
        self.state = InFlight()
        self.records = []

    def write(self, key, value, headers):
        at = len(self.records)
        record = Record(
            topic="m",
            partition=0,
            offset=at,
            key=key,
            value=value,
            headers=headers or None,  # as Kafka gives them
            timestamp=(TIMESTAMP_LOG_APPEND_TIME, 1_000 + at),
        )
        self.records.append(record)
        assert replay_markers(self.state, 0, [record]).records == 1

    def take(self, *offsets):
        for offset in offsets:
            self.write(*codec.encode(Marker(0, offset, Op.TAKE, 300)))

    def claim(self, name, *offsets):
        key, value, headers = naming_tick(0, CLAIM, offsets)
        self.write(key, value, [*headers, (CLAIM_ID, name), (COPIES_TO, b"q")])

    def drop(self, *offsets):
        self.write(*naming_tick(0, DROPPED, offsets))

    def end(self, *offsets, by_tracker=True, **more):
        for offset in offsets:
            self.write(*codec.encode(Marker(0, offset, Op.END, by_tracker=by_tracker, **more)))

    def end_together(self, *offsets):
        for marker in codec.ranges(0, Op.END, offsets, by_tracker=True):
            self.write(*codec.encode(marker))

    def torn(self):
        return {claim.id: set(claim.offsets) for claim in self.state.claims.torn()}


@pytest.fixture
def markers():
    made = Markers()
    made.take(1, 2, 3)
    return made


def test_a_claim_whose_messages_are_all_ended_or_left_alone_is_over(markers):
    markers.claim(b"a", 1, 2, 3)
    assert markers.state.claims
    markers.drop(2)
    markers.end(1)
    markers.end(3, reason="taken late")
    assert not markers.state.claims
    markers.claim(b"b", 4, 5, 6)
    markers.end_together(4, 5, 6)
    markers.state.claims.end_all()
    assert markers.torn() == {}


def test_the_end_of_message_0_right_behind_a_tick_counts(markers):
    """Both by trackers, of one ms, and read together: a tick has the number before 0."""
    markers.take(0)
    markers.claim(b"a", 0)
    tick = codec.encode(Marker(0, -1, Op.END, by_tracker=True))
    end = codec.encode(Marker(0, 0, Op.END, by_tracker=True))
    at = len(markers.records)
    records = [
        Record(
            topic="m",
            partition=0,
            offset=at + index,
            key=key,
            value=value,
            headers=headers,
            timestamp=(TIMESTAMP_LOG_APPEND_TIME, 2_000),
        )
        for index, (key, value, headers) in enumerate((tick, end))
    ]
    replay_markers(markers.state, 0, records)
    markers.state.claims.end_all()
    assert markers.torn() == {}


def test_a_later_claim_or_a_takeover_says_that_the_transaction_is_over(markers):
    markers.claim(b"a", 1, 2, 3)
    markers.end(1)
    assert markers.torn() == {}  # its end markers may be on the way
    markers.claim(b"b", 4)
    assert markers.torn() == {b"a": {2, 3}}
    markers.state.claims.end_all()
    assert markers.torn() == {b"a": {2, 3}, b"b": {4}}
    markers.claim(b"c", 5)
    assert markers.torn() == {b"a": {2, 3}, b"b": {4}}
    markers.claim(b"d", 6)
    markers.end(6)  # even when the later one is over and forgotten
    assert markers.torn() == {b"a": {2, 3}, b"b": {4}, b"c": {5}}
    markers.state.claims.forget([b"a", b"b", b"c"])
    assert markers.torn() == {}


def test_what_is_seen_of_an_aborted_transaction_is_torn(markers):
    markers.state.claims.aborted = {b"b"}
    markers.claim(b"a", 1)
    assert markers.torn() == {}
    markers.claim(b"b", 2, 3)
    assert markers.torn() == {b"a": {1}, b"b": {2, 3}}


def test_what_a_transaction_leaves_alone_says_nothing_of_an_earlier_one(markers):
    """It was to be aborted, since a message was acknowledged meanwhile, and a late request committed it."""
    markers.claim(b"a", 1, 2, 3)
    markers.claim(b"b", 1, 2, 3)
    markers.drop(1, 2)
    markers.end(3)
    assert markers.torn() == {b"a": {1, 2}}


@pytest.mark.parametrize("more", [{}, {"reason": "why"}])
def test_acknowledgements_by_clients_say_nothing_of_copies(markers, more):
    """With and without headers, since markers without are applied in series."""
    markers.claim(b"a", 1, 2)
    markers.end(1, 2, by_tracker=False, **more)
    markers.state.claims.end_all()
    assert markers.torn() == {b"a": {1, 2}}


def test_end_markers_that_come_late_end_torn_claims(markers):
    markers.claim(b"a", 1, 2)
    markers.state.claims.end_all()
    markers.end(2, 1)
    assert markers.torn() == {}


def test_the_safe_offset_and_snapshots_lead_to_the_oldest_claim(markers):
    markers.end(1, 2, 3, by_tracker=False)
    markers.claim(b"a", 1, 2)
    at = len(markers.records) - 1
    markers.take(7)
    assert markers.state.safe_offset() == at
    assert markers.state.safe_now_ms() == 1_000 + at
    assert markers.state.snapshot(100)[:2] == (at, 1_000 + at)
    markers.state.claims.end_all()
    assert markers.state.safe_offset() == at
    markers.end(1, 2)
    assert markers.state.safe_offset() == at + 1
    assert markers.state.snapshot(100)[0] == len(markers.records)


def test_what_is_read_a_second_time_opens_no_claim_again(markers):
    markers.claim(b"a", 1)
    markers.state.claims.forget([b"a"])
    replay_markers(markers.state, 0, markers.records)
    assert not markers.state.claims


@pytest.mark.parametrize(
    "headers",
    [
        [(CLAIM_ID, b"a")],
        [(CLAIM, b"?"), (CLAIM_ID, b"a"), (COPIES_TO, b"q")],
        [(CLAIM, None), (CLAIM_ID, b"a"), (COPIES_TO, b"q")],
        [(DROPPED, b"?")],
        [(CLAIM_ID, None)],
    ],
)
def test_forged_headers_are_skipped(markers, headers):
    key, value, by = codec.encode(codec.tick(0))
    markers.write(key, value, [*by, *headers])
    markers.state.claims.end_all()
    assert markers.torn() == {}


def test_claims_without_a_valid_id_do_not_count(markers):
    key, value, headers = naming_tick(0, CLAIM, [1])
    markers.write(key, value, [*headers, (COPIES_TO, b"q")])
    markers.write(key, value, [*headers, (CLAIM_ID, b"a")])
    markers.write(key, value, [*headers, (CLAIM_ID, b"x" * 65), (COPIES_TO, b"q")])
    assert not markers.state.claims


def test_forged_claims_do_not_fill_the_memory(markers):
    for number in range(1_100):
        markers.claim(b"%d" % number, 1)
    assert len(markers.torn()) == 999


def test_an_owner_reads_only_its_own_claims(markers):
    markers.state.claims.expects = b"own".__eq__
    markers.claim(b"forged", 1)
    assert not markers.state.claims
    markers.claim(b"own", 2)
    assert markers.state.safe_offset() == 0  # of the take of message 1
    markers.claim(b"forged too", 3)
    assert markers.torn() == {}
    markers.state.claims.end_all()
    assert markers.torn() == {b"own": {2}}


def test_claims_follow_the_time_when_it_is_set_back(markers):
    markers.end(1, 2, 3, by_tracker=False)
    markers.claim(b"a", 1)
    markers.state.set_back(100)
    assert markers.state.safe_now_ms() == 100
