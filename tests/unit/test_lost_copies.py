"""Messages whose last copies were cut away with the end of a queue's log."""

from collections.abc import Iterator
from dataclasses import replace

from confluent_kafka import Message

from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Headers, Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut
from tracker.redelivery.lost_copies import LostCopies

CUTS = NO_CUTS.with_cut(Cut(3, 100, 2))
NEW = CUTS.number_of(100)


def record(key: bytes | None, value: bytes | None, headers: Headers | None) -> Message:
    return Message(topic="q__markers", partition=0, key=key, value=value, headers=headers or None)


def copied(copies: dict[int, int], topic: str = "q", *, ranges: bool = False) -> Iterator[Message]:
    """The end markers of a tracker for messages with these copies."""
    places = {offset: (0, copy) for offset, copy in copies.items()}
    for made in end_markers("q", 0, places, copy_topic=topic, ranges=ranges):
        yield record(made.key, made.value, list(made.headers))


def marked(op: Op, *offsets: int) -> Iterator[Message]:
    for marker in codec.ranges(0, op, offsets):
        yield record(*codec.encode(marker))


def read(*markers: Iterator[Message]) -> LostCopies:
    lost = LostCopies("q", 0, CUTS, start=100)
    for some in markers:
        for one in some:
            lost.read(one)
    return lost


def found(*markers: Iterator[Message]) -> list[int]:
    return read(*markers).found()


def test_r39_whose_copy_is_cut_away_is_redelivered() -> None:
    assert found(copied({5: 105, 6: 99, 7: NEW})) == [5]
    assert found(copied({5: 105, 6: 106}, ranges=True)) == [5, 6]


def claimed(epoch: int | None) -> Iterator[Message]:
    yield record(*naming_tick(0, CLAIM, [5], epoch))


def test_r39_what_was_copied_behind_a_cut_before_it_was_told_is_not_lost() -> None:
    for epoch, lost in ((3, []), (4, []), (2, [5]), (None, [5])):
        assert found(claimed(epoch), copied({5: 105})) == lost
    assert found(claimed(3), copied({5: 105}), claimed(4), copied({NEW + 5: 150})) == []


def test_r39_whose_copy_before_the_cut_is_aborted_is_redelivered() -> None:
    """The record that had committed it was cut away, so the next transaction has decided."""
    lost = read(claimed(2), copied({4: 90}), claimed(2), copied({5: 97}), copied({6: 98, 7: 105}))
    assert list(lost.before.values()) == [{90}, {97, 98}]
    assert lost.found() == [7]
    assert lost.found(aborted={98}) == [6, 7]
    lost.read(next(marked(Op.END, 98)))
    assert lost.found(aborted={98}) == [7]


def test_r39_copies_behind_the_cut_are_of_no_transaction_that_it_has_torn() -> None:
    lost = read(claimed(2), copied({5: 97}), claimed(3), copied({6: NEW}))
    assert list(lost.before.values()) == [{97}]
    assert read(claimed(2), copied({5: 97}, "q__undelivered")).before == {}


def test_r39_the_last_copy_decides() -> None:
    assert found(copied({5: 50}), copied({50: 150}), copied({150: 151})) == [50]
    assert found(copied({5: 150}), copied({150: 151})) == [5]
    assert found(copied({5: 150}), copied({150: 0}, "q__undelivered")) == []


def test_r39_what_is_acknowledged_is_done() -> None:
    assert found(copied({5: 105}), marked(Op.END, 105)) == []
    assert found(marked(Op.END, 105), copied({5: 105})) == []
    assert found(copied({5: 105}), marked(Op.END, 4, 5, 6)) == []
    assert found(copied({5: 105}), copied({105: 106}), marked(Op.END, *range(90, 110))) == []


def test_r39_what_is_in_flight_again_or_gone_itself_is_left_alone() -> None:
    assert found(copied({5: 105}), marked(Op.TAKE, 5)) == []
    assert found(copied({5: 105}), marked(Op.TAKE, *range(20))) == []
    assert found(copied({105: 106})) == []


def test_r39_copies_elsewhere_are_not_looked_at() -> None:
    assert found(copied({5: 105}, "q__undelivered")) == []
    broken = codec.encode(codec.tick(0))
    assert found(iter([record(b"x", b"", None), record(broken[0], broken[1], [("kmq-copy", b"?")])])) == []


def test_r39_the_marker_of_a_tracker_brings_back_what_had_been_ended() -> None:
    state = InFlight()
    state.finished.assigned(0, again=False)
    for at, marker in enumerate(
        [Marker(0, 5, Op.TAKE, 1_000), replace(codec.tick(0), offset=5), Marker(0, 6, Op.TAKE, 1_000)]
    ):
        state.apply(marker, at, 1_000)
    assert 5 in state.finished
    state.apply(Marker(0, 5, Op.DELAY, 0, counts=False, by_tracker=True), 3, 1_000)
    (entry,) = state.take_due(10)
    assert entry.offset == 5
    assert not entry.counts
    assert state.taken_late([entry]) == frozenset()
