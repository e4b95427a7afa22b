"""A tracker that is connected to fakes, for tests of its main loop."""

import math
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from kmqpy.errors import Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.background import Pool
from tracker.leadership.published_view import LeadershipView
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.reading.markers_consumer import MarkersConsumer
from tracker.settings import TrackerSettings
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

    def list_topics(self, *_: object) -> None:
        """Kafka answers."""


class FakeTickWriter:
    def poll(self) -> None:
        pass


class FakeEnds:
    """Where queues end; `fails` for some of them."""

    def __init__(self, ends: dict[str, int], fails: tuple[str, ...] = ()) -> None:
        self.ends, self.fails = ends, fails
        self.calls: list[list[str]] = []

    def is_silent(self) -> bool:
        return False

    def with_epochs(
        self, places: list[tuple[str, int]], *, anew: bool = False
    ) -> dict[tuple[str, int], LogEnd | Unavailable]:
        self.calls.append([topic for topic, _ in places])
        return {
            place: Unavailable(f"{place[0]} does not answer")
            if place[0] in self.fails
            else LogEnd(self.ends[place[0]])
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
        self.loop._hanging._next_look = math.inf  # there is no Kafka to ask
        self.lifecycle = self.loop._lifecycle
        self.lifecycle._takeover._diagnosed |= {"a", "b", "q"}
        self.jobs = self.loop._jobs
        self.parts = self.tracker._partitions
        self.problems = self.tracker.problems

    def run_once(self) -> None:
        self.loop.run_once(self.clock.monotonic())

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
        while any(self.loop._existence._running.values()):
            self.take_one_result()

    def take_one_result(self) -> None:
        self.jobs._results.get(timeout=10)()


def part_of(tracked: Tracked, queue: QueueSettings) -> OwnedPartition:
    """Partition 0 of the queue, granted beside what the tracker has."""
    queues = {part.queue.name: part.queue for part in tracked.parts.values()} | {queue.name: queue}
    owned = {(name, 0): 1 for name in queues}
    registered = {name: RegisteredQueue(one, 1) for name, one in queues.items()}
    tracked.lifecycle.follow(LeadershipView(owned, frozenset(), registered, connected=True))
    return tracked.parts[queue.name, 0]


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


def with_two_queues(tracked: Tracked) -> Tracked:
    """Partition 0 of queues a and b is its own, and it can turn."""
    tracked.loop._probe.probe = lambda _: None
    for name in ("a", "b"):
        part = part_of(tracked, QueueSettings(name=name))
        part.start_reading(InFlight(), now=0.0)
        part.phase = TrackingPhase.ACTIVE
    tracked.lifecycle.follow = lambda _: None
    return tracked
