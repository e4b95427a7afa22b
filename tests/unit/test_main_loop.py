"""The tracker's main loop, without servers: from what leadership tells to what is given up."""

import gc
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.replay import QueueEnd
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import TopicInfo, Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.background import Pool
from tracker.leadership.published_view import LeadershipView
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.partition.start_position import StartPosition
from tracker.reading import existence_check
from tracker.reading.markers_consumer import MarkersConsumer
from tracker.redelivery.redeliverer import RedeliveryResult
from tracker.redelivery.redelivery_plan import Copy
from tracker.redelivery.tick_writer import Tick
from tracker.settings import TrackerSettings
from tracker.takeover import TakeoverResult
from tracker.topic_probe import TopicProbe
from tracker.tracker import Tracker


class Standing(SystemClock):
    def monotonic(self) -> float:
        return 1_000.0


class FakeLeadership:
    def __init__(self) -> None:
        self.released: list[tuple[str, int]] = []
        self.verified = True

    def may_redeliver(self) -> bool:
        return self.verified

    def snapshot(self) -> LeadershipView:
        return LeadershipView()

    def write_offsets(self, offsets: dict[tuple[str, int], object]) -> frozenset[tuple[str, int]]:
        return frozenset(offsets)

    def release(self, queue: str, partition: int) -> None:
        self.released.append((queue, partition))


class FakeMember:
    comes_back = True

    def __init__(self) -> None:
        self.leadership = FakeLeadership()

    def alive(self) -> bool:
        return self.comes_back

    def problems(self) -> list[str]:
        return []


class FakeConsumer:
    """As librdkafka's: what is assigned can't be assigned again."""

    def __init__(self) -> None:
        self.assigned: set[tuple[str, int]] = set()

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        for place in places:
            if (place.topic, place.partition) in self.assigned:
                raise KafkaException(KafkaError(KafkaError._CONFLICT))
            self.assigned.add((place.topic, place.partition))

    def incremental_unassign(self, places: list[TopicPartition]) -> None:
        self.assigned -= {(place.topic, place.partition) for place in places}

    def consume(self, *_: object) -> list[Message]:
        return []


class FakeTickWriter:
    def poll(self) -> None:
        pass


class FakeEnds:
    """Where queues end; `fails` for some of them."""

    def __init__(self, ends: dict[str, int], fails: tuple[str, ...] = ()) -> None:
        self.ends, self.fails = ends, fails
        self.calls: list[list[str]] = []

    def each_of(
        self, places: list[tuple[str, int]], *, anew: bool = False
    ) -> dict[tuple[str, int], int | Unavailable]:
        self.calls.append([topic for topic, _ in places])
        return {
            place: Unavailable(f"{place[0]} does not answer")
            if place[0] in self.fails
            else self.ends[place[0]]
            for place in places
        }


class Tracked:
    """A tracker that is connected to fakes, and its main loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.consumer = FakeConsumer()
        self.ends = FakeEnds({"a": 10, "b": 10})
        self.member = FakeMember()
        self.leadership = self.member.leadership
        self.probed_topics = SimpleNamespace()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(librdkafka, "new_consumer", lambda *_: self.consumer)
            markers = MarkersConsumer(KafkaConnection())
        kafka = SimpleNamespace(
            markers=markers,
            tick_writer=FakeTickWriter(),
            ends=self.ends,
            topics=None,
            probed_topics=self.probed_topics,
        )
        self.tracker = Tracker(KafkaConnection(), ZooKeeperConnection(), TrackerSettings(http_port=-1), clock)
        self.tracker._member = self.member
        self.loop = self.tracker._main_loop(self.member, kafka)
        self.lifecycle = self.loop._lifecycle
        self.lifecycle._takeover._diagnosed |= {"a", "b", "q"}
        self.jobs = self.loop._jobs
        self.parts = self.tracker._parts
        self.problems = self.tracker.problems

    def turn(self) -> None:
        self.loop.turn(self.clock.monotonic())

    def read(self, part: OwnedPartition, *records: Message) -> None:
        """As if these markers had been fetched."""
        self.loop._reader.apply(part, [*records], 0.0)

    def ask_for_ends(self, after_s: float = 0.0) -> None:
        self.loop._existence.ask(self.clock.monotonic() + after_s)

    def settle(self) -> None:
        """Let what was given to other threads end, and take in its results."""
        for pool in (Pool.REDELIVERY, Pool.HOUSEKEEPING):
            self.jobs._pools[pool].submit(lambda: None).result(10)
        self.jobs.take_results()
        while any(self.loop._existence._under_way.values()):
            self.take_one_result()

    def take_one_result(self) -> None:
        self.jobs._results.get(timeout=10)()


@pytest.fixture
def tracked() -> Tracked:
    return Tracked()


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


def part_of(tracked: Tracked, queue: QueueSettings) -> OwnedPartition:
    """Partition 0 of the queue, granted beside what the tracker has."""
    queues = {part.queue.name: part.queue for part in tracked.parts.values()} | {queue.name: queue}
    owned = {(name, 0): 1 for name in queues}
    registered = {name: RegisteredQueue(one, 1) for name, one in queues.items()}
    tracked.lifecycle.follow(LeadershipView(owned, frozenset(), registered, connected=True))
    return tracked.parts[queue.name, 0]


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


def test_the_end_of_a_queue_that_is_not_told_is_asked_for_later_and_later() -> None:
    clock = Standing()
    tracked = Tracked(clock)
    part = part_of(tracked, QueueSettings(name="q"))
    waits = []
    for _ in range(12):
        tracked.loop._existence._not_found(part, Unavailable("no"))
        waits.append(part.ask_at - clock.monotonic())
    assert grows(waits), waits


def test_queues_with_one_markers_topic_do_not_end_the_tracker(tracked: Tracked) -> None:
    first = part_of(tracked, QueueSettings(name="a"))
    second = part_of(tracked, QueueSettings(name="b", markers_topic="a__markers"))
    begin = StartPosition(StoredOffset(0, "markers-id", now_ms=0))
    takeover = TakeoverResult(("queue-id", "markers-id"), Tick(0, 0, 0.0), 0, begin)
    tracked.lifecycle._taken_over(first, takeover)
    tracked.lifecycle._taken_over(second, takeover)
    assert (first.phase, second.phase) == (TrackingPhase.CATCHING_UP, TrackingPhase.FENCING)
    assert first.problems.takeover is None
    assert "also that of queue a" in (second.problems.takeover or "")
    tracked.lifecycle.drop(first, "leadership lost")
    tracked.lifecycle._taken_over(second, takeover)
    assert second.phase is TrackingPhase.CATCHING_UP
    assert second.problems.takeover is None


def test_a_tick_that_can_not_be_written_is_shown_until_markers_are_read(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeTickWriter:
        def post_tick(self, *_: object) -> None:
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
    tracked.lifecycle._redelivered(part, [stuck], RedeliveryResult(failed={1: 0.2}, dead_letter_problem=text))
    copy = Copy(other, key=None, value=None, headers=[], dead_letter=False)
    tracked.lifecycle._redelivered(part, [other], RedeliveryResult(redelivered=[copy]))
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
        with pytest.raises(ConfigError, match="can't be had"):
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


# --- R21: no fault stops the loop ---------------------------------------------------------------------


def record_of(marker: Marker, at: int) -> Message:
    key, content, headers = codec.encode(marker)
    return Message(
        topic="q__markers",
        partition=marker.partition,
        offset=at,
        key=key,
        value=content,
        headers=headers or None,
        timestamp=(2, 1_000),
    )


@pytest.fixture
def turning(tracked: Tracked) -> Tracked:
    """A tracker that owns partition 0 of queues a and b, and can turn."""
    tracked.loop._probe.probe = lambda _: None
    for name in ("a", "b"):
        part = part_of(tracked, QueueSettings(name=name))
        part.start_reading(InFlight(), now=0.0)
        part.phase = TrackingPhase.ACTIVE
    tracked.lifecycle.follow = lambda _: None
    return tracked


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
        turning.turn()
    assert len(tried) == 1
    assert len(reads) == 5
    assert turning.problems() == ["probe: ValueError: a fault"]
    assert turning.tracker.metrics.internal_errors.labels("")._value.get() == 1
    turning.loop._supervisor._failed_steps["probe"] = (1, 0.0)
    turning.loop._probe.probe = lambda _: None
    turning.turn()
    assert turning.problems() == []


def test_a_step_that_fails_again_and_again_is_tried_later_and_later(tracked: Tracked) -> None:
    tried = []

    def fails() -> None:
        tried.append(now / 100)
        raise ValueError("a fault")

    for now in range(10_000):
        tracked.loop._supervisor.step("probe", now / 100, fails)
    assert grows([round(b - a, 1) for a, b in itertools.pairwise(tried)]), tried


def test_a_partition_that_fails_is_taken_over_again_and_the_others_go_on(turning: Tracked) -> None:
    bad, good = turning.parts["a", 0], turning.parts["b", 0]
    advanced = []

    def due(_limit: int) -> list[object]:
        raise IndexError("a fault")

    bad.due = due
    good.due = lambda _limit: advanced.append(1) or []
    turning.turn()
    turning.turn()
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


# --- R22: takes are judged by the end of the queue ----------------------------------------------------


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
    monkeypatch.setattr(existence_check, "DOUBT_S", 0.0)
    turning.ask_for_ends(1)
    turning.settle()
    assert part.state.position == 3
    monkeypatch.setattr(existence_check, "DOUBT_S", 3.0)
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


def test_a_queue_whose_end_can_not_be_had_keeps_up_no_other(turning: Tracked) -> None:
    turning.ends.fails = ("a",)
    for part in turning.parts.values():
        part.queue_end = QueueEnd(0, 0)
        turning.read(part, record_of(Marker(0, 5, Op.TAKE, 60_000), 0))
    turning.ask_for_ends(100)
    turning.settle()
    assert len(turning.parts["b", 0].state) == 1
    assert len(turning.parts["a", 0].state) == 0
    # While it is asked for again and does not answer, the other one goes on.
    answers, asked = threading.Event(), turning.ends.each_of
    turning.ends.each_of = lambda places, anew: (places[0][0] == "b" or answers.wait(10)) and asked(places)
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


def test_markers_that_were_fetched_and_lost_with_a_fault_are_read_again(turning: Tracked) -> None:
    fetched = [record_of(Marker(0, 0, Op.TAKE, 60_000), 0)]

    def consume(limit: int, _wait_s: float) -> list[Message]:
        if limit == 1:
            return fetched
        raise KafkaException(KafkaError(KafkaError._STATE))

    turning.consumer.consume = consume
    turning.turn()
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


# --- R23: clocks --------------------------------------------------------------------------------------


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
