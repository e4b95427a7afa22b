"""The tracker's main loop, without servers: what it does with what leadership tells."""

import gc
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kmqpy import kafka
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.inflight import InFlight
from kmqpy.markers import Marker, Op
from kmqpy.registry import RegisteredQueue
from kmqpy.topics import Topics
from tracker.leadership import Grant, LeadershipView
from tracker.partition import OwnedPartition, Phase
from tracker.plan import Copy
from tracker.redelivery import Outcome
from tracker.service import Tracker, _Takeover
from tracker.settings import TrackerSettings


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


@pytest.fixture
def tracker() -> Tracker:
    tracker = Tracker(Connection(), TrackerSettings(http_port=-1))
    tracker._leadership = FakeLeadership()
    tracker._consumer = FakeConsumer()
    tracker._diagnose = lambda _: None
    return tracker


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def view(releasing: set[tuple[str, int]]) -> LeadershipView:
    queue = RegisteredQueue(QueueSettings(name="q"), partitions=2)
    owned = {("q", 0): Grant(1), ("q", 1): Grant(2)}
    return LeadershipView(owned, frozenset(releasing), {"q": queue}, connected=True)


def part_of(tracker: Tracker, queue: QueueSettings) -> OwnedPartition:
    """Partition 0 of the queue, granted beside what the tracker has."""
    queues = {part.queue.name: part.queue for part in tracker._parts.values()} | {queue.name: queue}
    owned = {(name, 0): Grant(1) for name in queues}
    registered = {name: RegisteredQueue(one, 1) for name, one in queues.items()}
    tracker._follow(LeadershipView(owned, frozenset(), registered, connected=True))
    return tracker._parts[queue.name, 0]


def test_a_partition_asked_for_again_before_it_was_taken_over_is_released(tracker: Tracker) -> None:
    tracker._follow(view({("q", 0)}))
    assert tracker._leadership.released == [("q", 0)]
    assert list(tracker._parts) == [("q", 1)]


def test_a_partition_granted_anew_is_taken_over_anew(tracker: Tracker) -> None:
    tracker._follow(view(set()))
    before = tracker._parts["q", 0]
    again = LeadershipView({("q", 0): Grant(7)}, frozenset(), view(set()).queues, connected=True)
    tracker._follow(again)
    assert tracker._parts["q", 0] is not before
    assert tracker._parts["q", 0].epoch == 7
    assert ("q", 1) not in tracker._parts


def test_who_may_not_redeliver_does_not_take_over(tracker: Tracker) -> None:
    """A takeover fences, and the partition may be another's by now."""
    tracker._follow(view(set()))
    part = tracker._parts["q", 0]
    tracker._submit = lambda part, *_: setattr(part, "busy", True)
    tracker._leadership.verified = False
    tracker._advance(part, now=0.0)
    assert not part.busy
    tracker._leadership.verified = True
    tracker._advance(part, now=0.0)
    assert part.busy


def test_queues_with_one_markers_topic_do_not_end_the_tracker(tracker: Tracker) -> None:
    first = part_of(tracker, QueueSettings(name="a"))
    second = part_of(tracker, QueueSettings(name="b", markers_topic="a__markers"))
    takeover = _Takeover(("queue-id", "markers-id"), 0, InFlight())
    tracker._taken_over(first, takeover)
    tracker._taken_over(second, takeover)
    assert (first.phase, second.phase) == (Phase.CATCHING_UP, Phase.OPENING)
    assert first.problem is None
    assert "also that of queue a" in (second.problem or "")
    tracker._drop(first, "leadership lost")
    tracker._taken_over(second, takeover)
    assert second.phase is Phase.CATCHING_UP
    assert second.problem is None


def test_a_tick_that_can_not_be_written_is_shown_until_markers_are_read(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeTicker:
        def post_tick(self, _topic: str, _partition: int) -> None:
            raise Unavailable("no tick")

    tracker._member = FakeMember()
    tracker._ticker = FakeTicker()
    part = part_of(tracker, QueueSettings(name="q"))
    part.phase = Phase.ACTIVE
    monkeypatch.setattr(part, "wants_tick", lambda *_: True)
    tracker._advance(part, now=0.0)
    assert tracker.problems() == ["queue q, partition 0: no tick"]
    part.read(5, 0, 0.0)
    assert tracker.problems() == []


def test_a_stuck_message_is_shown_whatever_becomes_of_others_and_until_it_has_ended(tracker: Tracker) -> None:
    tracker._member = FakeMember()
    part = part_of(tracker, QueueSettings(name="q"))
    part.phase = Phase.ACTIVE
    for offset in (1, 2):
        part.state.apply(Marker(0, offset, Op.TAKE, 0), at=offset, timestamp_ms=100)
    stuck, other = part.due(10)
    text = "topic q__undelivered does not exist"
    tracker._redelivered(part, [stuck], Outcome(failed={1: 0.2}, dead_letter_problem=text))
    copy = Copy(other, key=None, value=None, headers=[], dead_letter=False)
    tracker._redelivered(part, [other], Outcome(redelivered=[copy]))
    assert tracker.problems() == [f"queue q, partition 0: {text}"]
    part.state.apply(Marker(0, 1, Op.END), at=3, timestamp_ms=100)  # acknowledged late
    tracker._store_offsets(now=0.0)
    assert tracker.problems() == []


def test_what_is_due_while_nothing_can_be_done_does_not_keep_the_loop_busy(tracker: Tracker) -> None:
    part = part_of(tracker, QueueSettings(name="q"))
    part.start_reading(InFlight(now_ms=100), now=0.0)
    part.phase = Phase.ACTIVE
    part.state.apply(Marker(0, 1, Op.TAKE, 50), at=1, timestamp_ms=100)
    assert tracker._wait_s(1.0) == 0.001
    tracker._leadership.verified = False
    assert tracker._wait_s(1.0) == 0.05
    tracker._leadership.verified = True
    part.tick_sent(1.0)  # which does not come back while Kafka is away
    assert tracker._wait_s(1.1) == 0.05
    assert not part.wants_tick(2.9, 0.05)
    assert part.wants_tick(3.0, 0.05)


def test_a_taken_port_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(kafka, "consumer", lambda *_: made.append("consumer"))
    monkeypatch.setattr(kafka, "producer", lambda *_: made.append("producer"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = TrackerSettings(http_host="127.0.0.1", http_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="can't be had"):
            Tracker(Connection(), settings).start()
    assert made == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux tells them")
@pytest.mark.usefixtures("no_gc")
def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Topics) -> int:
        raise AccessDenied("no")

    def held() -> dict[str, int]:
        return {of: len([*Path(f"/proc/self/{of}").iterdir()]) for of in ("task", "fd")}

    monkeypatch.setattr(Topics, "brokers", denied)
    tracker = Tracker(Connection(bootstrap="127.0.0.1:1"), TrackerSettings(http_port=0))
    before = held()
    with pytest.raises(AccessDenied):
        tracker.start()
    after = held()
    assert [of for of in after if after[of] > before[of]] == [], (before, after)
