"""Copies that trackers have made, by which cuts of the log are noticed though nobody has taken the copies."""

import pytest
from confluent_kafka import Message as Record

from kmqpy.kafka.client.assigned_partition import StartsFound
from kmqpy.kafka.client.crash_recovery import _read_marker
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op, assignment_tick, tick
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut
from kmqpy.kafka.markers.named_copies import NamedCopy
from kmqpy.kafka.markers.replay import replay_markers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.partition.owned_partition import OwnedPartition
from tracker.redelivery.known_log import LastSeen
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick
from tracker.settings import TrackerSettings

CUT = Cut(3, 10, 2)
CUTS = NO_CUTS.with_cut(CUT)
NEW = CUT.base


def records(*encoded: tuple) -> list[Record]:
    return [
        Record(topic="m", partition=0, offset=at, key=key, value=value, headers=headers, timestamp=(2, 1_000))
        for at, (key, value, headers) in enumerate(encoded)
    ]


def transaction(
    epoch: int | None,
    copies: dict,
    *,
    topic: str = "q",
    ranges: bool = False,
    claim_id: bytes = b"c",
    unsure: bool = False,
) -> list[tuple]:
    key, value, headers = naming_tick(0, CLAIM, copies, epoch, unsure=unsure)
    ends = end_markers("q", 0, copies, copy_topic=topic, ranges=ranges)
    claim = (key, value, [*headers, (CLAIM_ID, claim_id), (COPIES_TO, topic.encode())])
    return [claim, *((end.key, end.value, list(end.headers)) for end in ends)]


def read_by_tracker(*encoded: tuple) -> NamedCopy | None:
    state = InFlight()
    assert replay_markers(state, 0, records(*encoded)).records == len(encoded)
    return state.copies.highest


def read_by_client(*encoded: tuple) -> NamedCopy | None:
    found = StartsFound()
    for record in records(*encoded):
        _read_marker(record, 0, 0, 9, found, lambda: 1_000)
    assert found.epoch is None or found.epoch == 7, "claims say nothing of messages that were taken"
    return found.copies.highest


BY = pytest.mark.parametrize("read", [read_by_tracker, read_by_client])


@BY
@pytest.mark.parametrize("ranges", [False, True])
def test_r39_the_highest_copy_has_an_epoch_that_its_claim_limits(read, ranges) -> None:
    first = transaction(2, {1: (0, 11), 3: (0, 12), 4: (0, 14)}, ranges=ranges)
    assert read(*first) == NamedCopy(14, 2, b"c")
    assert read(*first, *transaction(2, {5: (0, 13)})) == NamedCopy(14, 2, b"c")
    last = transaction(4, {5: (0, 17), 6: None}, ranges=ranges, claim_id=b"d")
    assert read(*first, *last) == NamedCopy(17, 4, b"d")


def test_r39_transactions_that_were_aborted_do_not_hide_the_one_before() -> None:
    found = StartsFound()
    made = transaction(2, {1: (0, 11), 2: (0, 12)}) + transaction(2, {3: (0, 14)}, claim_id=b"d")
    for record in records(*made):
        _read_marker(record, 0, 0, 9, found, lambda: 1_000)
    assert found.copies.last == [NamedCopy(12, 2, b"c"), NamedCopy(14, 2, b"d")]


def test_r39_a_later_claim_says_that_nothing_is_missing_that_was_copied_before() -> None:
    """Who reads uncommitted markers may know copies that were aborted, and would find a cut by them."""
    found = StartsFound()
    made = transaction(2, {1: (0, 11)}) + transaction(3, {2: (0, 14)}, claim_id=b"d")
    for record in records(*made):
        _read_marker(record, 0, 0, 9, found, lambda: 1_000)
    assert found.copies.last == [NamedCopy(11, 3, b"c"), NamedCopy(14, 3, b"d")]


@BY
def test_r39_copies_elsewhere_and_without_epochs_prove_nothing(read) -> None:
    assert read(*transaction(2, {1: (0, 11)}, topic="q__undelivered")) is None
    assert read(*transaction(2, {1: (1, 11)})) is None
    assert read(*transaction(2, {1: (0, 2**63)})) is None
    assert read(*transaction(None, {1: (0, 11)})) is None
    older = transaction(None, {2: (0, 15)})
    assert read(*transaction(2, {1: (0, 11)}), *older) == NamedCopy(11, 2, b"c")
    assert read(*transaction(2, {1: (0, 11)})[1:]) is None


@BY
def test_r39_assignment_ticks_limit_no_epochs_of_copies_and_ticks_of_menders_do(read) -> None:
    claim, end = transaction(2, {1: (0, 11)})
    assert read(claim, codec.encode(assignment_tick(0, 5, epoch=7)), end) == NamedCopy(11, 2, b"c")
    assert read(claim, codec.encode(tick(0)), end) == NamedCopy(11, 2, b"c")
    assert read(claim, codec.encode(tick(0, epoch=4)), end) == NamedCopy(11, 4)


def test_r39_of_markers_before_those_that_a_commit_leads_to_only_cuts_and_copies_count() -> None:
    found = StartsFound()
    take = codec.encode(Marker(0, 4, Op.TAKE, 300))
    told = codec.encode(assignment_tick(0, 5, cuts=CUTS, epoch=3))
    for record in records(take, told, *transaction(2, {1: (0, 11)}), take):
        _read_marker(record, 4, 0, 9, found, lambda: 1_000)
    assert found.copies.highest == NamedCopy(11, 2, b"c")
    assert (found.cuts, found.epoch) == (CUTS, None)
    assert list(found.by_epoch[None].runs()) == [(4, 1)]
    before = StartsFound()
    _read_marker(*records(take), 1, 0, 9, before, lambda: 1_000)
    assert not before.by_epoch


def test_r39_a_copy_that_was_cut_away_is_forgotten() -> None:
    made = transaction(2, {1: (0, 11)})
    assert read_by_tracker(*made, codec.encode(tick(0, NO_CUTS.with_cut(Cut(3, 12, 2))))) is not None
    told = codec.encode(tick(0, CUTS))
    assert read_by_tracker(*made, told) is None
    behind = transaction(3, {1: (0, NEW + 10)})
    assert read_by_tracker(*made, told, *behind) == NamedCopy(NEW + 10, 3, b"c")


@pytest.fixture
def part() -> OwnedPartition:
    queue = QueueSettings(name="q")
    made = OwnedPartition(("q", 0), 1, queue, Redeliverer(KafkaConnection(), queue, 0, TrackerSettings()))
    made.start_reading(InFlight(), now=0.0)
    return made


def read(part: OwnedPartition, *encoded: tuple) -> None:
    replay_markers(part.state, 0, records(*encoded))


def test_r39_of_what_is_known_that_of_the_lowest_epoch_tells(part) -> None:
    """Redelivery waits until somebody has looked: a transaction needs the epoch that the log is known in."""
    part.catch_up_to(Tick(0, 0, 0.0), LogEnd(20, 4))
    assert (part.last_known, part.log.epoch) == (LastSeen(-1, 4), 4)
    read(part, *transaction(2, {1: (0, 11)}))
    assert (part.last_known, part.log.epoch) == (LastSeen(11, 2, b"c"), 2)
    part.is_intact(part.last_known, 4)
    assert (part.last_known, part.log.epoch) == (LastSeen(11, 4, b"c"), 4)
    part.epoch_told(4, 9, highest_taken=15)
    assert part.last_known == LastSeen(15, 4)
    part.is_intact(part.last_known, 5)
    assert (part.taken_end, part.state.copies.highest) == (LogEnd(16, 5), NamedCopy(11, 5, b"c"))


def test_r39_a_copy_behind_what_was_taken_is_looked_at_alone(part) -> None:
    part.catch_up_to(Tick(0, 0, 0.0), LogEnd(20, 2), known_end=LogEnd(15, 2))
    read(part, *transaction(2, {1: (0, 11)}))
    assert part.last_known == LastSeen(14, 2), "of one epoch, the highest"
    part.is_intact(LastSeen(11, 2, b"c"), 3)
    assert part.last_known == LastSeen(14, 2), "who has seen the lower one has not seen the higher one"


def test_r39_a_takeover_keeps_what_was_stored(part) -> None:
    part.catch_up_to(Tick(0, 0, 0.0), LogEnd(20, 2), known_end=LogEnd(15, 2))
    part.epoch_told(2, 1, highest_taken=3)
    assert part.last_known == LastSeen(14, 2)


def test_r39_takes_have_at_most_the_epoch_of_the_tick_before_them(part) -> None:
    """A tracker may read them long after the log was cut back; what Kafka tells then says nothing."""
    part.catch_up_to(Tick(0, 0, 0.0), LogEnd(20, 4))
    taken = codec.encode(Marker(0, 12, Op.TAKE, 300))
    read(part, taken)
    assert part.last_taken is None, "the taker may be a client that knows no epochs"
    told = codec.encode(assignment_tick(0, 3, epoch=2))
    replay_markers(part.state, 0, records(taken, told, taken))
    assert (part.last_taken, part.log.epoch) == (LastSeen(12, 2, is_sure=False), 2)
    assert part.log_evidence[0] == LogEnd(0, 4), "a successor does not take it for sure"
    part.is_intact(part.last_taken, 4)
    assert (part.last_taken, part.log.epoch) == (LastSeen(12, 4, is_sure=False), 4)
    behind = codec.encode(Marker(0, 13, Op.TAKE, 300))
    replay_markers(part.state, 0, records(taken, told, taken, behind))
    assert part.last_taken == LastSeen(13, 2, is_sure=False)


def test_r39_ticks_without_an_epoch_are_of_clients_that_may_take_any_message(part) -> None:
    read(part, codec.encode(assignment_tick(0, 0, epoch=2)), codec.encode(Marker(0, 1, Op.TAKE, 300)))
    assert part.last_taken == LastSeen(1, 2, is_sure=False)
    ticks = [codec.encode(assignment_tick(0, 0))] * 3
    read(part, *ticks)
    assert part.last_taken is None


def test_r39_what_a_cut_has_taken_away_does_not_come_back_when_markers_are_read_again() -> None:
    """Simulation seed 706623 with cut logs: a second cut would be told that never happened."""
    state = InFlight()
    log = records(*transaction(2, {1: (0, 11), 4: (0, 12)}), codec.encode(tick(0, cuts=CUTS)))
    replay_markers(state, 0, log)
    assert state.cuts
    assert state.copies.highest is None
    replay_markers(state, 0, log[1:])
    assert state.copies.highest is None


def test_r37_an_end_that_is_read_again_accounts_for_no_claim_behind_it() -> None:
    state = InFlight()
    log = records(*transaction(2, {1: (0, 11), 4: (0, 12)}), *transaction(2, {1: (0, 13)}, claim_id=b"d")[:1])
    replay_markers(state, 0, log)
    replay_markers(state, 0, log[1:])
    state.claims.end_all()
    assert [(claim.id, list(claim.offsets.runs())) for claim in state.claims.torn()] == [(b"d", [(1, 1)])]


def test_r39_a_claim_of_a_tracker_that_still_looks_says_nothing_of_the_copies_before_it() -> None:
    """A successor looks again at the highest of them, however many transactions follow."""
    state = InFlight()
    later = [transaction(2, {at: (0, 100 + at)}, claim_id=bytes([at]), unsure=True) for at in range(2, 9)]
    encoded = [*transaction(0, {1: (0, 20)}), *(one for some in later for one in some)]
    replay_markers(state, 0, records(*encoded))
    assert state.copies.least_sure == NamedCopy(20, 0, b"c")
    assert state.copies.highest == NamedCopy(108, 2, b"\x08")
    replay_markers(state, 0, records(*encoded, *transaction(2, {9: (0, 200)}, claim_id=b"9")))
    assert {copy.epoch for copy in state.copies.last} == {2}
    assert state.copies.least_sure == state.copies.highest
