"""Trackers of queues whose logs are cut back, as by a power cut. On a Kafka of this file's own.

All queues are prepared, then their logs are cut together, and each test looks at one of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from support import LiveQueue, bodies, collect, until, value

from kmqpy.dev import Cluster
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.markers.log_cuts import Cut
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs
from tracker.partition import clock
from tracker.partition.owned_partition import OwnedPartition
from tracker.reading.markers_consumer import MarkersConsumer
from tracker.redelivery.redeliverer import Redeliverer
from tracker.tracker import Tracker

COUNT = 20
CUT_AT = 12
BASE = Cut(2, CUT_AT, 1).base
LEASE_MS = 600_000
FORGOTTEN = ("anew", "kept")
"""Queues of which only their tracker's stored offset knows what stood in the log of the markers, and in the
first one's also what stood in its own."""
HIDDEN = ("living", "starting", "elected", "taken")
"""Queues in which new messages are at the offsets of the old ones before anybody can notice."""


class Scene:
    """A queue with `COUNT` messages."""

    tracker: Tracker

    def __init__(self, cluster: Cluster, name: str, root: str) -> None:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        settings = {"lease_ms": LEASE_MS, "max_redeliveries": None}
        self.queue = LiveQueue(connection, zookeeper, name, root=root, **settings)
        self.old = self.send(COUNT, "old")
        self.new: list[str] = []

    def take_all(self) -> None:
        self.queue.mark_all(Marker(0, number, Op.TAKE, LEASE_MS) for number in range(COUNT))
        until(lambda: len(self.state) == COUNT)

    def tracker_has_looked(self) -> bool:
        """Whether the tracker has asked for the leader epoch since the takes: it does once a second."""
        return self.tracker._partitions[self.queue.name, 0].taken_end.offset == COUNT

    def has_stored(self) -> bool:
        """Whether the tracker has stored how far it has read, with a part of the messages finished."""
        stored = self.tracker._partitions[self.queue.name, 0].stored_position
        return stored is not None and stored >= COUNT + 5

    def send_and_take(self) -> None:
        """Send messages which a client takes that knows nothing of the former logs."""
        self.new = self.send(COUNT, "new")
        with self.queue.client() as client:
            collect(client, len(self.new) + (0 if self.queue.name == "anew" else COUNT))

    def give_all_back(self) -> None:
        """As their consumers would, that have not noticed the cut."""
        count = COUNT * 2 if self.queue.name == "kept" else COUNT
        self.queue.mark_all(Marker(0, number, Op.NACK, 0) for number in range(count))

    @property
    def state(self):
        return self.tracker._partitions[self.queue.name, 0].state

    def send(self, count: int, kind: str) -> list[str]:
        """Send messages in batches of their own, between which a log can be cut."""
        texts = [f"{kind}{number}" for number in range(count)]
        for text in texts:
            self.queue.append(None, text.encode(), topic=self.queue.name)
        return texts

    def value(self, metric: str) -> float:
        return value(self.tracker, self.queue.name, metric)


def tracker_of(*scenes: Scene) -> Tracker:
    """A tracker of all these queues, running."""
    tracker = scenes[0].queue.tracker(wait=False)
    for scene in scenes:
        scene.tracker = tracker
    until(lambda: len(tracker.owned()) == len(scenes), what=tracker.problems)
    return tracker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture(scope="module")
def scenes(cluster: Cluster) -> Iterator[Callable[[str], Scene]]:
    """Queues by name, whose logs were cut from message `CUT_AT` on; that of `elected` was not."""
    made = {name: Scene(cluster, name, "/lives-on") for name in ("living", "elected", "taken", "short")}
    made["markers"] = Scene(cluster, "markers", "/lives-on")
    tracker_of(*made.values())
    stopped = [Scene(cluster, name, "/stopped") for name in ("starting", "restarted", *FORGOTTEN)]
    tracker = tracker_of(*stopped)
    made |= {scene.queue.name: scene for scene in stopped}
    for scene in made.values():
        scene.take_all()
    until(lambda: all(scene.tracker_has_looked() for scene in made.values()))
    for name in ("markers", *FORGOTTEN):
        made[name].queue.mark_all(Marker(0, number, Op.END) for number in range(5))
        until(made[name].has_stored)
    tracker.stop()
    keep = {(name, 0): COUNT if name == "elected" else CUT_AT for name in made if name != "markers"}
    keep |= {("anew", 0): 0, ("kept", 0): COUNT}
    keep |= {(f"{name}__markers", 0): 0 for name in FORGOTTEN}
    cut_logs(cluster, {**keep, ("markers__markers", 0): CUT_AT})
    for name in FORGOTTEN:
        made[name].send_and_take()
    for name in HIDDEN:
        made[name].new = made[name].send(COUNT, "new")
    tracker_of(*stopped)
    for scene in made.values():
        scene.give_all_back()
    yield made.__getitem__
    for scene in made.values():
        scene.queue.__exit__(None, None, None)


def only_the_old_ones_are_redelivered(scene: Scene) -> None:
    """Of the messages below the cut a copy was made, of no other."""
    kept = scene.old[:CUT_AT]
    until(lambda: scene.value("redelivered") == CUT_AT, what=scene.tracker.problems)
    until(lambda: len(scene.state) == 0, what=scene.tracker.problems)
    assert scene.queue.copies() == {**dict.fromkeys(kept, 2), **dict.fromkeys(scene.new, 1)}
    assert scene.value("log_cuts") == 1
    assert scene.value("lost_to_log_cuts") == COUNT - CUT_AT
    assert scene.value("lost_to_retention") == 0
    assert any(f"topic {scene.queue.name} was cut back" in one for one in scene.tracker.problems())


@pytest.mark.parametrize("name", ["living", "short"])
def test_r39_messages_in_flight_behind_a_cut_are_lost_and_no_others_are_copied(scenes, name: str) -> None:
    only_the_old_ones_are_redelivered(scenes(name))


@pytest.mark.parametrize("name", ["starting", "restarted"])
def test_r39_a_tracker_that_starts_after_a_cut(scenes, name: str) -> None:
    only_the_old_ones_are_redelivered(scenes(name))


def test_r39_messages_that_were_taken_before_anybody_told_the_cut_are_redelivered(scenes) -> None:
    scene = scenes("anew")
    until(lambda: scene.value("redelivered") == COUNT, what=scene.tracker.problems)
    assert scene.queue.copies() == dict.fromkeys(scene.new, 2)
    assert scene.value("log_cuts") == 2


def test_r40_new_markers_at_the_offsets_of_old_ones_prove_no_cut_of_the_queue(scenes) -> None:
    scene = scenes("kept")
    until(lambda: scene.value("redelivered") == 2 * COUNT, what=scene.tracker.problems)
    assert scene.value("log_cuts") == 1
    assert scene.value("lost_to_log_cuts") == 0


def test_r39_an_election_alone_changes_nothing(scenes) -> None:
    scene = scenes("elected")
    until(lambda: scene.value("redelivered") == COUNT, what=scene.tracker.problems)
    assert scene.queue.copies() == {**dict.fromkeys(scene.old, 2), **dict.fromkeys(scene.new, 1)}
    assert scene.value("log_cuts") == 0
    assert not any(f"queue {scene.queue.name}," in one for one in scene.tracker.problems())


def test_r39_new_messages_are_redelivered_by_their_numbers(scenes) -> None:
    scene: Scene = scenes("taken")
    until(lambda: scene.value("redelivered") == CUT_AT, what=scene.tracker.problems)
    with scene.queue.client() as client:
        taken = collect(client, COUNT + CUT_AT, lease=4.0)  # the new ones, and the copies of the old ones
        assert sorted(bodies(taken)) == sorted([*scene.new, *scene.old[:CUT_AT]])
        lost = taken.pop(bodies(taken).index(scene.new[0]))
        client.ack(*taken, confirmed=True)
        (copy,) = collect(client, 1, ack=True)
        client.flush()
    assert copy.body == lost.body
    assert lost.place[1] == BASE + lost.offset
    assert dict(copy.headers)[ANCESTORS] == b"0:%d" % lost.place[1]
    assert lost.place[1] in scene.queue.ended()
    until(lambda: len(scene.state) == 0, what=scene.tracker.problems)
    expected = dict.fromkeys(scene.old[:CUT_AT], 2) | dict.fromkeys(scene.new, 1) | {scene.new[0]: 2}
    assert scene.queue.copies() == expected
    assert scene.value("lost_to_log_cuts") == COUNT - CUT_AT


def test_r40_a_tracker_whose_markers_are_cut_away_says_so(scenes) -> None:
    scene = scenes("markers")
    until(lambda: scene.value("log_cuts") == 1, what=scene.tracker.problems)
    shown = "markers__markers: the log of the markers was cut back: those from markers offset "
    assert any(shown in one for one in scene.tracker.problems())
    until(lambda: len(scene.state) == 0, what=scene.tracker.problems)
    assert scene.value("lost_to_log_cuts") == 0


@pytest.mark.breadth  # tests/unit/test_main_loop.py has it without a Kafka; so the next
def test_r40_a_tracker_does_not_wait_for_a_tick_of_its_own_that_was_cut_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(cluster, "fenced", "/fenced")
    scene.queue.mark_all(Marker(0, number, Op.TAKE, LEASE_MS) for number in range(COUNT))
    start = MarkersConsumer.start

    def cut_away_before(*reading: Any) -> None:
        monkeypatch.setattr(MarkersConsumer, "start", start)
        cut_logs(cluster, {("fenced__markers", 0): COUNT})
        start(*reading)

    monkeypatch.setattr(MarkersConsumer, "start", cut_away_before)
    monkeypatch.setattr(clock, "_LOST_AFTER_S", 2.0)
    tracker_of(scene)
    assert len(scene.state) == COUNT
    scene.queue.__exit__()


@pytest.mark.breadth
def test_r40_a_tracker_does_not_wait_for_its_end_markers_that_were_cut_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(cluster, "ended", "/ended")
    place = TopicPartition("ended__markers", 0)
    reads: list[tuple[MarkersConsumer, OwnedPartition]] = []
    start, redeliver = MarkersConsumer.start, Redeliverer.redeliver

    def start_noted(reader: MarkersConsumer, part: OwnedPartition) -> None:
        reads.append((reader, part))
        start(reader, part)

    def cut_away_behind(*planned: Any) -> Any:
        monkeypatch.setattr(Redeliverer, "redeliver", redeliver)
        reader, part = reads[0]
        reader.consumer.pause([place])  # and what librdkafka has fetched ahead is dropped
        read_to, result = part.state.position, redeliver(*planned)
        cut_logs(cluster, {("ended", 0): COUNT, (place.topic, 0): read_to})
        reader.consumer.resume([place])
        return result

    monkeypatch.setattr(MarkersConsumer, "start", start_noted)
    monkeypatch.setattr(Redeliverer, "redeliver", cut_away_behind)
    monkeypatch.setattr(clock, "_LOST_AFTER_S", 2.0)
    scene.queue.mark_all(Marker(0, number, Op.TAKE, 1) for number in range(COUNT))
    tracker_of(scene)
    until(lambda: scene.value("redelivered") == 2 * COUNT, what=scene.tracker.problems)
    assert scene.queue.copies() == dict.fromkeys(scene.old, 2)
    scene.queue.__exit__()
