"""The tracker's main loop, without servers: no fault stops it (rule R21)."""

import pytest
from tracked import Tracked, record_of

from kmqpy.errors import Unavailable
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.topics import TopicInfo
from tracker.partition.owned_partition import TrackingPhase
from tracker.topic_probe import TopicProbe


@pytest.mark.parametrize("phase", [TrackingPhase.CATCHING_UP, TrackingPhase.ACTIVE])
def test_r24_topics_made_anew_are_noticed_also_before_all_markers_are_read(
    turning: Tracked, phase: TrackingPhase
) -> None:
    """What is to be read first can be behind the end of the new topic, for ever."""
    anew, same = turning.parts["a", 0], turning.parts["b", 0]
    anew.phase = phase
    anew.topic_ids, same.topic_ids = ("a", "a__markers"), ("b", "b__markers")
    told = {name: TopicInfo(name, name, 1, 1) for name in ("b", "b__markers", "a__markers")}
    told["a"] = TopicInfo("a", "another", 1, 1)
    turning.member.kafka_probed = lambda *, answered: None
    turning.probed_topics.brokers = lambda: 1
    turning.probed_topics.describe = lambda _: told
    TopicProbe.probe(turning.loop._probe, 1_000.0)
    turning.settle()
    assert (anew.phase, same.phase) == (TrackingPhase.FENCING, TrackingPhase.ACTIVE)


def test_a_step_that_fails_is_told_and_tried_again_later_and_the_others_go_on(turning: Tracked) -> None:
    tried = []

    def fails(now: float) -> None:
        tried.append(now)
        raise ValueError("a fault")

    turning.loop._probe.probe = fails
    reads = []
    turning.loop._reader.read = lambda _: reads.append(1)
    for _ in range(5):
        turning.run_once()
    assert len(tried) == 1
    assert len(reads) == 5
    assert turning.problems() == ["probe: ValueError: a fault"]
    assert turning.tracker.metrics.internal_errors.labels("")._value.get() == 1
    turning.loop._supervisor._failed_steps["probe"] = (1, 0.0)
    turning.loop._probe.probe = lambda _: None
    turning.run_once()
    assert turning.problems() == []


def test_a_partition_that_fails_is_taken_over_again_and_the_others_go_on(turning: Tracked) -> None:
    bad, good = turning.parts["a", 0], turning.parts["b", 0]
    advanced = []

    def due(_limit: int) -> list[object]:
        raise IndexError("a fault")

    bad.due = due
    good.due = lambda _limit: advanced.append(1) or []
    turning.run_once()
    turning.run_once()
    assert len(advanced) == 2
    assert (bad.phase, good.phase) == (TrackingPhase.FENCING, TrackingPhase.ACTIVE)
    assert bad.retry_at > turning.clock.monotonic()
    assert turning.problems() == ["queue a, partition 0: IndexError: a fault; taking over again"]


def test_a_marker_that_can_not_be_taken_in_pins_the_state_and_the_others_count(
    turning: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, apply = turning.parts["a", 0], InFlight.apply

    def fails(state: InFlight, marker: Marker, at: int, timestamp_ms: int) -> int:
        if marker.offset == 1:
            raise ZeroDivisionError("a fault")
        return apply(state, marker, at, timestamp_ms)

    monkeypatch.setattr(InFlight, "apply", fails)
    log = [Marker(0, offset, Op.DELAY, 60_000) for offset in range(3)]
    turning.read(part, *(record_of(marker, at) for at, marker in enumerate(log)))
    assert (0 in part.state, 1 in part.state, 2 in part.state) == (True, False, True)
    assert part.state.safe_offset() == 0
    (problem,) = turning.problems()
    assert "marker at offset 1 of a__markers can't be applied: ZeroDivisionError: a fault" in problem
    part.state.apply(Marker(0, 0, Op.END), 3, 1_000)
    part.state.apply(Marker(0, 2, Op.END), 4, 1_000)
    assert part.state.safe_offset() == 1


@pytest.mark.parametrize("error", [TypeError("a fault"), Unavailable("away")])
def test_offsets_are_stored_again_after_any_error(turning: Tracked, error: Exception) -> None:
    stored = []

    def write_offsets(offsets: dict[tuple[str, int], object]) -> frozenset[tuple[str, int]]:
        stored.append(offsets)
        if len(stored) == 1:
            raise error
        return frozenset(offsets)

    turning.leadership.write_offsets = write_offsets
    part = turning.parts["a", 0]
    part.catch_up_offset = 0
    part.state.apply(Marker(0, 0, Op.END), 7, 1_000)
    for now in (100.0, 200.0, 300.0):
        turning.loop._offsets.store_due(now)
        turning.settle()
    assert [{key: one.offset for key, one in offsets.items()} for offsets in stored] == [{("a", 0): 8}] * 2


def test_a_partition_is_given_up_whatever_fails_on_the_way(turning: Tracked) -> None:
    def write_offsets(_: object) -> None:
        raise TypeError("a fault")

    turning.leadership.write_offsets = write_offsets
    part = turning.parts["a", 0]
    part.catch_up_offset = 0
    part.state.apply(Marker(0, 0, Op.END), 7, 1_000)
    turning.lifecycle._release(part)
    turning.settle()
    assert turning.leadership.released == [("a", 0)]
    assert not turning.lifecycle._giving_up


def test_a_stop_stores_what_it_can_and_gives_up_everything_whatever_fails(turning: Tracked) -> None:
    closed, stored = [], []
    turning.leadership.set_kafka_ok = lambda _: None
    turning.leadership.close = lambda: closed.append(1)
    turning.leadership.write_offsets = lambda offsets: stored.append(dict(offsets))
    for part in turning.parts.values():
        part.catch_up_offset = 0
        part.state.apply(Marker(0, 0, Op.END), 7, 1_000)

    def oldest() -> None:
        raise IndexError("a fault")

    turning.parts["a", 0].state.oldest = oldest
    turning.loop.drain()
    assert [list(offsets) for offsets in stored] == [[("b", 0)]]
    assert not turning.parts
    assert closed
