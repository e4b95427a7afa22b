"""The tracker's main loop, without servers: markers of messages that do not exist (rule R22), and wrong
clocks (R23)."""

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from tracked import Tracked, record_of

from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.replay import QueueEnd
from tracker.partition.owned_partition import TrackingPhase
from tracker.reading import existence_check
from tracker.redelivery.tick_writer import Tick


def test_takes_beyond_the_known_end_wait_for_a_newer_one(
    turning: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = turning.parts["a", 0]
    part.queue_end = QueueEnd(1, 0)
    log = [Marker(0, offset, Op.TAKE, 60_000) for offset in (0, 9, 10)]
    turning.read(part, *(record_of(marker, at) for at, marker in enumerate(log)))
    assert [entry.offset for entry in part.state] == [0]
    turning.ask_for_ends()
    # What is fetched meanwhile may name messages that were not there when the end was asked for.
    turning.read(part, record_of(Marker(0, 11, Op.TAKE, 60_000), 3))
    turning.settle()
    # A broker that no more leads the queue may have said so; that is asked again for a while.
    assert [entry.offset for entry in part.state] == [0, 9]
    assert part.state.position == 2
    monkeypatch.setattr(existence_check, "ABSENCE_CONFIRMED_S", 0.0)
    turning.ask_for_ends(1)
    turning.settle()
    assert part.state.position == 3
    monkeypatch.setattr(existence_check, "ABSENCE_CONFIRMED_S", 3.0)
    turning.ends.ends["a"] = 12
    turning.ask_for_ends(1)
    turning.settle()
    assert [entry.offset for entry in part.state] == [0, 9, 11]
    assert turning.tracker.metrics.undecodable_markers.labels("a")._value.get() == 1


def test_what_a_broker_that_no_more_leads_does_not_know_is_no_lie(turning: Tracked) -> None:
    part = turning.parts["a", 0]
    part.queue_end = QueueEnd(0, 0)
    turning.read(part, record_of(Marker(0, 15, Op.TAKE, 60_000), 0))
    for _ in range(3):
        turning.ask_for_ends(1)
        turning.settle()
    turning.ends.ends["a"] = 16  # found out anew, it is another that leads
    turning.ask_for_ends(1)
    turning.settle()
    assert [entry.offset for entry in part.state] == [15]


def test_a_queue_without_a_known_end_holds_up_no_other(turning: Tracked) -> None:
    turning.ends.fails = ("a",)
    for part in turning.parts.values():
        part.queue_end = QueueEnd(0, 0)
        turning.read(part, record_of(Marker(0, 5, Op.TAKE, 60_000), 0))
    turning.ask_for_ends(100)
    turning.settle()
    assert len(turning.parts["b", 0].state) == 1
    assert len(turning.parts["a", 0].state) == 0
    # While it is asked for again and does not answer, the other one goes on.
    answers, asked = threading.Event(), turning.ends.with_epochs
    turning.ends.with_epochs = lambda places, anew: (
        (places[0][0] == "b" or answers.wait(10)) and asked(places)
    )
    turning.ask_for_ends(100)
    part = turning.parts["b", 0]
    turning.read(part, record_of(Marker(0, 6, Op.TAKE, 60_000), 1))
    part.queue_end = QueueEnd(6, 0)
    turning.read(part, record_of(Marker(0, 7, Op.TAKE, 60_000), 2))
    turning.ask_for_ends(100)
    turning.take_one_result()
    assert len(part.state) == 3
    answers.set()
    turning.settle()
    assert turning.ends.calls == [["a", "b"], ["b"], ["a"]]
    assert "markers wait until it is known where the queue ends" in turning.problems()[0]
    turning.ends.fails = ()
    turning.ask_for_ends(200)
    turning.settle()
    assert len(turning.parts["a", 0].state) == 1
    assert turning.problems() == []


@pytest.mark.parametrize("refused", [False, True])
def test_markers_that_were_fetched_and_lost_with_a_fault_are_read_again(
    turning: Tracked, refused: bool
) -> None:
    """Even where librdkafka has refused to stop reading them."""
    fetched = [record_of(Marker(0, 0, Op.TAKE, 60_000), 0)]

    def consume(limit: int, _wait_s: float) -> list[Message]:
        if limit == 1:
            return fetched
        raise KafkaException(KafkaError(KafkaError._STATE))

    def refuse(_places: list[TopicPartition]) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    for part in turning.parts.values():
        turning.loop._reader._markers.start(part)
    turning.consumer.consume = consume
    if refused:
        turning.consumer.incremental_unassign = refuse
    turning.run_once()
    assert {part.phase for part in turning.parts.values()} == {TrackingPhase.FENCING}
    assert not any(part.reading for part in turning.parts.values())


def test_a_job_for_which_there_is_no_thread_has_failed(
    turning: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    part = turning.parts["a", 0]
    part.queue_end = QueueEnd(0, 0)
    turning.read(part, record_of(Marker(0, 5, Op.TAKE, 60_000), 0))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        turning.ask_for_ends()
        turning.jobs.take_results()
    assert "can't start new thread" in turning.problems()[0]
    turning.ask_for_ends(100)
    turning.settle()
    assert len(part.state) == 1
    assert turning.ends.calls == [["a"]]


def test_a_timestamp_far_ahead_is_not_believed(turning: Tracked) -> None:
    part = turning.parts["a", 0]
    part.tick_written(Tick(0, 1_000_000, asked_at=50.0), now=50.1)
    # 10 s later: the broker's time is about 1,010,000, and 5 s are tolerated.
    part.clock.limit_timestamps(now=60.0)
    part.state.observe(1, 9_000_000)
    assert part.state.now_ms == 1_015_000
    assert part.wants_tick(60.0, 0.05)  # whose clock is wrong?
    assert part.tick_written(Tick(2, 1_010_000, asked_at=60.0), now=60.0) == pytest.approx(7_990)
    assert "7990 s ahead of the broker's clock" in part.problem_texts()[0]
    part.forget_ended(now=200.0)
    assert part.problem_texts() == []


def test_when_the_clock_of_the_broker_goes_back_what_remains_of_leases_is_kept(turning: Tracked) -> None:
    part = turning.parts["a", 0]
    for offset in range(40):  # runs and rows
        part.state.apply(Marker(0, offset, Op.TAKE, 30_000), offset, 5_000_000)
    part.state.apply_takes([(100, 50, 5_000_000)], 30_000, 40)
    part.state.observe(90, 5_010_000)
    assert part.tick_written(Tick(91, 1_000_000, asked_at=0.0), now=0.0) == pytest.approx(4_010)
    assert part.state.now_ms == 1_000_000
    assert {entry.due_ms for entry in part.state} == {1_020_000}
    assert part.state.next_due_ms() == 1_020_000
    assert part.state.take_due(1_000) == []
    part.state.observe(92, 1_020_000)
    assert len(part.state.take_due(1_000)) == 90


def test_markers_of_a_clock_that_is_behind_do_not_keep_ticks_away(turning: Tracked) -> None:
    """They come all the time, and say nothing of the time."""
    part = turning.parts["a", 0]
    part.state.apply(Marker(0, 0, Op.TAKE, 500), 0, 1_000)
    part.read(0, 0, 10.0)
    for step in range(200):
        part.read(1 + step, part.state.now_ms, 10.0 + step / 100)
    assert part.wants_tick(12.0, 0.05)
