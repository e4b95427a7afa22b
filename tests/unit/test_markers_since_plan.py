"""Which messages of a plan are left alone for what was written behind it."""

import pytest
from confluent_kafka import Message

from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.message_filter import MessageFilter
from kmqpy.kafka.settings import QueueSettings
from tracker.redelivery.claim import Claim
from tracker.redelivery.markers_since_plan import MarkersSincePlan

NOW_MS = 10_000
POSITION = 50
QUEUE = QueueSettings(name="q")


def record(marker, at=POSITION, timestamp_ms=NOW_MS, key=None):
    made_key, value, headers = codec.encode(marker)
    return Message(
        key=made_key if key is None else key,
        value=value,
        headers=headers,
        partition=3,
        offset=at,
        timestamp=(1, timestamp_ms),
    )


class Log:
    """Reads as OriginalsReader does; what was asked for is in `reads`."""

    def __init__(self, *markers):
        self.records = [record(marker, POSITION + index) for index, marker in enumerate(markers)]
        self.reads = []

    def read_between(self, topic, partition, begin, end, _timeout_s, visit):
        assert (topic, partition) == (QUEUE.markers_topic, 3)
        self.reads.append((begin, end))
        for one in self.records:
            if begin <= one.offset() < end:
                visit([one])


def since_plan(log, state=EntryState.LEASED):
    """A plan of messages 5, 7 and 11, whose leases are over."""
    entries = {n: Entry(n, n, 1_000, NOW_MS - n, state) for n in (5, 7, 11)}
    return MarkersSincePlan(log, QUEUE, 3, entries, POSITION)


def not_due(*markers, state=EntryState.LEASED):
    log = Log(*markers)
    since = since_plan(log, state)
    since.read_to(POSITION + len(markers), 1.0)
    return since.not_due([5, 7, 11])


@pytest.mark.parametrize(
    "marker",
    [
        Marker(3, 7, Op.END),
        Marker(3, 7, Op.END, by_tracker=True),
        Marker(3, 7, Op.EXTEND, 500),
        Marker(3, 7, Op.TAKE, 500),
        Marker(3, 7, Op.DELAY, 500),
        Marker(3, 7, Op.NACK, 500),
        Marker(3, 7, Op.DEAD_LETTER),
        Marker(3, 6, Op.END, runs=((6, 2), (9, 1))),
        Marker(3, 6, Op.TAKE, 500, runs=((6, 2), (9, 1))),
    ],
)
def test_what_ends_a_message_or_gives_it_time_has_it_left_alone(marker):
    assert not_due(marker) == {7}


@pytest.mark.parametrize(
    ("marker", "state"),
    [
        (Marker(3, 7, Op.NACK), EntryState.LEASED),
        (Marker(3, 7, Op.EXTEND), EntryState.LEASED),
        (Marker(3, 7, Op.EXTEND, 500), EntryState.RELEASED),
        (Marker(3, 7, Op.TAKE, 500), EntryState.DEAD),
        (Marker(3, 7, Op.DEAD_LETTER), EntryState.DEAD),
    ],
)
def test_what_gives_a_message_no_time_can_not_put_off_its_redelivery(marker, state):
    assert not_due(marker, state=state) == frozenset()


def test_the_last_marker_decides():
    assert not_due(Marker(3, 7, Op.EXTEND, 500), Marker(3, 7, Op.NACK)) == frozenset()
    assert not_due(Marker(3, 7, Op.NACK), Marker(3, 7, Op.TAKE, 500)) == {7}
    assert not_due(Marker(3, 7, Op.END), Marker(3, 7, Op.EXTEND, 500)) == {7}


def test_what_was_ended_and_is_taken_again_waits_for_the_next_plan():
    """That knows whether it was taken late (rule R30); this one would bring an acknowledged message back."""
    assert not_due(Marker(3, 7, Op.END), Marker(3, 7, Op.TAKE, 0), Marker(3, 7, Op.NACK)) == {7}


def test_markers_of_other_messages_and_undecodable_ones_count_not():
    assert not_due(codec.tick(3), Marker(3, 8, Op.END), Marker(4, 7, Op.END)) == frozenset()
    log = Log()
    log.records = [record(Marker(3, 7, Op.END), key=b"?")]
    since = since_plan(log)
    since.read_to(POSITION + 1, 1.0)
    assert since.not_due([7]) == frozenset()


def test_each_marker_is_read_once_however_many_transactions_there_are():
    """Else, with markers of others pouring in, each transaction would take longer than the one before."""
    log = Log(Marker(3, 5, Op.END), codec.tick(3), Marker(3, 11, Op.END))
    since = since_plan(log)
    since.read_to(POSITION + 2, 1.0)
    assert since.not_due([5]) == {5}
    since.read_to(POSITION + 3, 1.0)
    assert since.not_due([5, 7, 11]) == {5, 11}
    assert log.reads == [(POSITION, POSITION + 2), (POSITION + 2, POSITION + 3)]


def test_a_filter_decodes_only_markers_that_can_speak_of_its_messages(monkeypatch):
    picked = MessageFilter(3, [5, 7])
    near = Marker(3, 6, Op.END, runs=((6, 2),))
    far = Marker(3, 7 + MAX_SPAN, Op.END, runs=((7 + MAX_SPAN, 2),))
    log = [record(one) for one in (Marker(3, 8, Op.END), Marker(3, 7, Op.END), near, far, codec.tick(3))]
    assert [(marker.offset, list(about)) for _, marker, about in picked.pick(log)] == [(7, [7]), (6, [7])]

    def never(*_args, **_more):
        raise AssertionError

    monkeypatch.setattr(codec, "decode", never)
    assert list(picked.pick([log[0], log[3], log[4]])) == []


def test_a_filter_follows_messages_that_are_added_while_it_picks():
    picked = MessageFilter(3, [])
    assert list(picked.pick([record(Marker(3, 6, Op.END, runs=((6, 2),)))])) == []
    picked.add([5])
    found = picked.pick([record(Marker(3, 5, Op.TAKE, 500)), record(Marker(3, 9, Op.END))])
    assert next(found)[1].offset == 5
    picked.add([9, 5])
    assert next(found)[1].offset == 9


def test_r30_what_was_taken_late_by_the_plan_is_left_alone_if_it_was_taken_again_since():
    """Its lease may be over at the claim once more; whether it was taken on purpose, the next plan knows."""
    log = Log(Marker(3, 5, Op.TAKE, redeliver_after_ms=0), codec.tick(3))
    claim = Claim(3, [5, 7, 11], since_plan(log), None, 1.0, {}, frozenset({5, 7}))
    claim.decide(POSITION + 2)
    assert claim.dropped == {5}
