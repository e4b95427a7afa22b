"""The tracker's main loop, without servers: from what leadership tells to what is given up."""

import gc
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError
from tracked import Standing, Tracked, part_of, record_of

from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.codec import Marker, Op, tick
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.testing import ManualClock
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.published_view import LeadershipView
from tracker.partition.owned_partition import TrackingPhase
from tracker.partition.start_position import StartPosition
from tracker.redelivery.redeliverer import RedeliveryResult
from tracker.redelivery.redelivery_plan import Copy
from tracker.redelivery.tick_writer import Tick
from tracker.settings import TrackerSettings
from tracker.takeover import TakeoverResult, _with_own_evidence
from tracker.tracker import Tracker


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def view(releasing: set[tuple[str, int]]) -> LeadershipView:
    queue = RegisteredQueue(QueueSettings(name="q"), partitions=2)
    owned = {("q", 0): 1, ("q", 1): 2}
    return LeadershipView(owned, frozenset(releasing), {"q": queue}, connected=True)


def test_a_partition_asked_for_again_before_it_was_taken_over_is_released(tracked: Tracked) -> None:
    tracked.lifecycle.follow(view({("q", 0)}))
    assert tracked.leadership.released == [("q", 0)]
    assert list(tracked.parts) == [("q", 1)]


def test_a_partition_granted_anew_is_taken_over_anew(tracked: Tracked) -> None:
    tracked.lifecycle.follow(view(set()))
    before = tracked.parts["q", 0]
    again = LeadershipView({("q", 0): 7}, frozenset(), view(set()).queues, connected=True)
    tracked.lifecycle.follow(again)
    assert tracked.parts["q", 0] is not before
    assert tracked.parts["q", 0].epoch == 7
    assert ("q", 1) not in tracked.parts


def test_who_may_not_redeliver_does_not_take_over(tracked: Tracked) -> None:
    """A takeover fences, and the partition may be another's by now."""
    tracked.lifecycle.follow(view(set()))
    part = tracked.parts["q", 0]
    tracked.lifecycle._submit = lambda part, *_: setattr(part, "busy", True)
    tracked.leadership.verified = False
    tracked.lifecycle.advance(part, now=0.0)
    assert not part.busy
    tracked.leadership.verified = True
    tracked.lifecycle.advance(part, now=0.0)
    assert part.busy


def grows(waits: list[float]) -> bool:
    """From less than a second to ten: for ever, but not never."""
    steps = itertools.pairwise(waits)
    return waits[0] < 1 and waits[-1] == 10 and all(b >= 1.5 * a > 0 or b == 10 for a, b in steps)


def test_a_takeover_that_fails_is_tried_again_later_and_later() -> None:
    clock = Standing()
    tracked = Tracked(clock)
    part = part_of(tracked, QueueSettings(name="q"))
    waits = []
    for _ in range(12):
        tracked.lifecycle._taken_over(part, Unavailable("no"))
        waits.append(part.retry_at - clock.monotonic())
    assert grows(waits), waits


def test_torn_transactions_that_can_not_be_mended_are_looked_at_again_after_another_takeover() -> None:
    clock = Standing()
    tracked = Tracked(clock)
    part = part_of(tracked, QueueSettings(name="q"))
    part.phase = TrackingPhase.ACTIVE
    tracked.lifecycle._redelivery.mended(part, [], Unavailable("a transaction stays open"))
    assert part.phase is TrackingPhase.FENCING
    assert part.retry_at > clock.monotonic()


def test_r37_a_dead_letter_topic_of_which_nothing_is_known_is_asked_for_again(tracked: Tracked) -> None:
    """A torn dead letter is made again where its topic is gone, so not where Kafka does not answer."""

    def describe(_: list[str]) -> dict[str, object]:
        raise Unavailable("no answer")

    part, redelivery = part_of(tracked, QueueSettings(name="q")), tracked.lifecycle._redelivery
    redelivery._topics = SimpleNamespace(describe=describe)
    torn = [TornClaim(b"claim", "q__undelivered", 0, OffsetRuns([(3, 2)]))]
    with pytest.raises(Unavailable, match="no answer"):
        redelivery.mend(part, torn, part.log)


def test_r37_torn_transactions_are_mended_and_their_ends_read_before_anything_is_redelivered(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(tracked, QueueSettings(name="q"))
    part.start_reading(InFlight(now_ms=100), now=0.0)
    part.phase = TrackingPhase.ACTIVE
    part.state.apply(Marker(0, 1, Op.TAKE, 0), at=1, timestamp_ms=100)  # due
    torn = [TornClaim(b"a", "q", 100, OffsetRuns([(1, 1)]))]
    monkeypatch.setattr(part.state.claims, "torn", lambda: torn)
    asked: list[object] = []
    monkeypatch.setattr(
        tracked.lifecycle._redelivery, "mend", lambda _, torn, __: len(asked.append(torn) or torn)
    )
    tracked.lifecycle.advance(part, now=1.0)
    tracked.take_one_result()
    assert asked == [torn]
    assert part.phase is TrackingPhase.FENCING


def test_a_step_that_fails_again_and_again_is_tried_later_and_later(tracked: Tracked) -> None:
    tried = []

    def fails() -> None:
        tried.append(now / 100)
        raise ValueError("a fault")

    for now in range(10_000):
        tracked.loop._supervisor.step("probe", now / 100, fails)
    assert grows([round(b - a, 1) for a, b in itertools.pairwise(tried)]), tried


def test_the_end_of_a_queue_that_is_not_told_is_asked_for_later_and_later() -> None:
    clock = Standing()
    tracked = Tracked(clock)
    part = part_of(tracked, QueueSettings(name="q"))
    waits = []
    for _ in range(12):
        tracked.loop._existence._end_unknown(part, Unavailable("no"))
        waits.append(part.ask_at - clock.monotonic())
    assert grows(waits), waits


def test_queues_with_one_markers_topic_do_not_end_the_tracker(tracked: Tracked) -> None:
    first = part_of(tracked, QueueSettings(name="a"))
    second = part_of(tracked, QueueSettings(name="b", markers_topic="a__markers"))
    begin = StartPosition(StoredOffset(0, "markers-id", now_ms=0))
    takeover = TakeoverResult(("queue-id", "markers-id"), Tick(0, 0, 0.0), LogEnd(0), 0, LogEnd(0), begin, 0)
    tracked.lifecycle._taken_over(first, takeover)
    tracked.lifecycle._taken_over(second, takeover)
    assert (first.phase, second.phase) == (TrackingPhase.CATCHING_UP, TrackingPhase.FENCING)
    assert first.problems.takeover is None
    assert "also that of queue a" in (second.problems.takeover or "")
    tracked.lifecycle.drop(first, "leadership lost")
    tracked.lifecycle._taken_over(second, takeover)
    assert second.phase is TrackingPhase.CATCHING_UP
    assert second.problems.takeover is None


def test_r40_a_tick_that_was_cut_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked, begun = Tracked(ManualClock()), []
    monkeypatch.setattr(tracked.lifecycle, "_submit", lambda *job: begun.append(job))
    part = part_of(tracked, QueueSettings(name="q"))
    begin = StartPosition(StoredOffset(20, "markers-id", now_ms=0))

    def take_over(now: float) -> None:
        ids, tick = ("queue-id", "markers-id"), Tick(25, 0, now)
        tracked.lifecycle._taken_over(part, TakeoverResult(ids, tick, LogEnd(0), 0, LogEnd(0), begin, 0))

    start = tracked.clock.monotonic()
    take_over(start)
    for waited in (9, 11):
        tracked.lifecycle.advance(part, start + waited)
        assert len(begun) == len(tracked.problems()) == (waited > 10)
    take_over(start + 11)
    assert part.reading
    tracked.lifecycle.advance(part, start + 20)
    part.read(24, 0, start + 20)
    tracked.lifecycle.advance(part, start + 29)
    assert (part.phase, len(begun), tracked.problems()) == (TrackingPhase.CATCHING_UP, 1, [])
    part.is_held_back = True
    tracked.lifecycle.advance(part, start + 600)
    assert len(begun) == 1


def test_r40_an_end_marker_that_was_cut_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick shows the new leader epoch, and then the partition is taken over again."""
    tracked, ticks = Tracked(ManualClock()), []
    monkeypatch.setattr(tracked.lifecycle, "_post_tick", lambda *_: ticks.append(1))
    monkeypatch.setattr(tracked.lifecycle, "_submit", lambda *_: None)
    part, now = part_of(tracked, QueueSettings(name="q")), tracked.clock.monotonic()
    part.start_reading(InFlight(), now)
    part.phase = TrackingPhase.ACTIVE
    tracked.read(part, record_of(Marker(0, 3, Op.TAKE, 0), 0))
    tracked.lifecycle.advance(part, now)
    assert (len(part.state), part.state.next_due_ms()) == (1, None), "it is in redelivery"
    part.busy = True
    assert part.seconds_to_tick(now + 3_600, 0.3) == float("inf")
    part.busy = False
    tracked.lifecycle.advance(part, now + 11)
    assert len(ticks) == 1
    part.tick_written(Tick(1, 1_000, now + 11), now + 11)
    part.read(1, 0, now + 11)
    tracked.lifecycle.advance(part, now + 20)
    assert len(ticks) == 1, "whatever else keeps the end marker away: a tick now and then"
    tracked.lifecycle.advance(part, now + 22)
    assert len(ticks) == 2


def test_r39_an_epoch_that_was_told_where_markers_were_cut_away_since_is_not_believed() -> None:
    """Takes of new messages stand there now: these would count as written behind a cut that never was."""
    tracked = Tracked(ManualClock())
    part, now = part_of(tracked, QueueSettings(name="q")), tracked.clock.monotonic()
    ids = ("queue", "markers")
    part.topic_ids = ids
    part.start_reading(InFlight(), now, 100, 1, 1)
    part.catch_up_to(Tick(100, 1_000, now), LogEnd(60, 1), 0, LogEnd(50, 1))
    takes = [record_of(Marker(0, 50 + number, Op.TAKE, 600_000), 101 + number) for number in range(10)]
    tracked.read(part, record_of(tick(0), 100), *takes)
    part.epoch_told(1, 111, 59)
    stored = StoredOffset(100, "markers", now_ms=1_000, taken_end=50, queue_epoch=1, told_below=100)
    assert _with_own_evidence(stored, part, ids, 1).told_below == 111
    assert _with_own_evidence(stored, part, ids, 2).told_below == 100


def test_nothing_is_stored_of_a_partition_that_has_not_caught_up_since_it_is_read() -> None:
    tracked = Tracked(ManualClock())
    part, now = part_of(tracked, QueueSettings(name="q")), tracked.clock.monotonic()
    part.start_reading(InFlight(), now, 0, 1, 1)
    part.reading = True
    part.catch_up_to(Tick(50, 1_000, now), LogEnd(10, 1), 0, LogEnd(0, 1))
    tracked.read(part, record_of(Marker(0, 3, Op.TAKE, 600_000), 20))
    part.take_over_again(now)
    assert tracked.loop._offsets.offset_of(part) is None
    tracked.read(part, record_of(tick(0), 50))
    assert tracked.loop._offsets.offset_of(part) is not None


def test_a_tick_that_fails_later_is_shown(tracked: Tracked) -> None:
    class FailingTickWriter:
        def post_tick(self, *_: object, failed: Callable[[KafkaError], None]) -> None:
            failed(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    tracked.lifecycle._tick_writer = FailingTickWriter()
    part = part_of(tracked, QueueSettings(name="q"))
    tracked.lifecycle._post_tick(part, 0.0)
    tracked.jobs.take_results()
    (shown,) = tracked.problems()
    assert shown.startswith("queue q, partition 0: a tick could not be written: ")
    part.read(5, 0, 1.0)
    tracked.lifecycle._post_tick(part, 0.5)  # its failure comes when a later one was read
    tracked.jobs.take_results()
    assert tracked.problems() == []


def test_a_tick_that_can_not_be_written_is_shown_until_markers_are_read(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeTickWriter:
        def post_tick(self, *_: object, **__: object) -> None:
            raise Unavailable("no tick")

    tracked.lifecycle._tick_writer = FakeTickWriter()
    part = part_of(tracked, QueueSettings(name="q"))
    part.phase = TrackingPhase.ACTIVE
    monkeypatch.setattr(part, "wants_tick", lambda *_: True)
    tracked.lifecycle.advance(part, now=0.0)
    assert tracked.problems() == ["queue q, partition 0: no tick"]
    part.read(5, 0, 0.0)
    assert tracked.problems() == []


def test_a_stuck_message_is_shown_whatever_becomes_of_others_and_until_it_has_ended(tracked: Tracked) -> None:
    part = part_of(tracked, QueueSettings(name="q"))
    part.phase = TrackingPhase.ACTIVE
    for offset in (1, 2):
        part.state.apply(Marker(0, offset, Op.TAKE, 0), at=offset, timestamp_ms=100)
    stuck, other = part.due(10)
    text = "topic q__undelivered does not exist"
    tracked.lifecycle._redelivery.redelivered(
        part, [stuck], RedeliveryResult(failed={1: 0.2}, dead_letter_problem=text)
    )
    copy = Copy(other, key=None, value=None, headers=[], dead_letter=False)
    tracked.lifecycle._redelivery.redelivered(part, [other], RedeliveryResult(redelivered=[copy]))
    assert tracked.problems() == [f"queue q, partition 0: {text}"]
    part.state.apply(Marker(0, 1, Op.END), at=3, timestamp_ms=100)  # acknowledged late
    tracked.loop._health.refresh(now=0.0)
    assert tracked.problems() == []


def test_what_is_due_while_nothing_can_be_done_does_not_keep_the_loop_busy(tracked: Tracked) -> None:
    part = part_of(tracked, QueueSettings(name="q"))
    part.start_reading(InFlight(now_ms=100), now=0.0)
    part.phase = TrackingPhase.ACTIVE
    part.state.apply(Marker(0, 1, Op.TAKE, 50), at=1, timestamp_ms=100)
    assert tracked.loop._wait_s(1.0) == 0.001
    tracked.leadership.verified = False
    assert tracked.loop._wait_s(1.0) == 0.05
    tracked.leadership.verified = True
    part.clock.tick_sent(1.0)  # which does not come back while Kafka is away
    assert tracked.loop._wait_s(1.1) == 0.05
    assert not part.wants_tick(2.9, 0.05)
    assert part.wants_tick(3.0, 0.05)


def test_a_taken_port_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: made.append("consumer"))
    monkeypatch.setattr(librdkafka, "new_producer", lambda *_: made.append("producer"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = TrackerSettings(http_host="127.0.0.1", http_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="can't be opened"):
            Tracker(KafkaConnection(), ZooKeeperConnection(), settings).start()
    assert made == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux tells them")
@pytest.mark.usefixtures("no_gc")
def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Topics) -> int:
        raise AccessDenied("no")

    def held() -> dict[str, int]:
        return {of: len([*Path(f"/proc/self/{of}").iterdir()]) for of in ("task", "fd")}

    monkeypatch.setattr(Topics, "brokers", denied)
    tracker = Tracker(
        KafkaConnection(bootstrap="127.0.0.1:1"), ZooKeeperConnection(), TrackerSettings(http_port=0)
    )
    before = held()
    with pytest.raises(AccessDenied):
        tracker.start()
    more: list[str] = []
    for _ in range(100):  # librdkafka's threads end a moment after their clients
        after = held()
        more = [of for of in after if after[of] > before[of]]
        if not more:
            break
        time.sleep(0.05)
    assert more == [], (before, after)


def test_only_what_does_not_come_back_by_itself_is_not_alive(tracked: Tracked) -> None:
    member = tracked.member
    tracked.leadership.verified = False  # ZooKeeper is away
    assert tracked.tracker.alive()
    member.comes_back = False
    assert not tracked.tracker.alive()
