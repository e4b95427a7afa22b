"""Clients of queues whose logs are cut back, as by a power cut. On a Kafka of this file's own.

All queues are prepared, then their logs are cut together, and each test looks at one of them.
"""

from collections.abc import Callable, Iterator

import pytest
from support import LiveQueue, bodies, collect, until

from kmqpy.dev import Cluster
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.log_cuts import Cut, offset_of
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.message import Message
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs

pytestmark = pytest.mark.breadth

COUNT = 20
CUT_AT = 12
FORMATS = ("range", "jvm")
MARKERS = ("markers-live", "markers-successor", "markers-both")
"""Queues whose markers are cut back; of the last, the messages, too."""


class Scene:
    """A queue with `COUNT` messages, which a client has received; the first ten are acknowledged."""

    def __init__(self, cluster: Cluster, name: str, markers: str = "range") -> None:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        self.queue = LiveQueue(connection, zookeeper, name, register=False, markers=markers, lease_ms=600_000)
        self.client = self.queue.client()
        send(self.queue, COUNT, "old")
        self.taken: list[Message] = collect(self.client, COUNT)
        self.client.ack(*self.taken[:10], confirmed=True)
        until(lambda: self.queue.committed() == COUNT)

    def take_more(self) -> list[Message]:
        """Take ten messages, and acknowledge the first five of them; the markers of that are cut away."""
        end = partition_reader.bounds(self.queue.connection, self.queue.settings.markers_topic, [0])
        self.marked_to = end[0][1]
        send(self.queue, 10, "more")
        client = self.queue.client() if not self.client._consumer.is_open else self.client
        taken = collect(client, 10)
        client.ack(*taken[:5], confirmed=True)
        until(lambda: self.queue.committed() == COUNT + 10)
        if client is not self.client:
            client.close()
        return taken

    def new(self, count: int) -> list[str]:
        return send(self.queue, count, "new")


def copied(scene: Scene) -> Scene:
    """A tracker has made a copy of the last message behind five others, and nobody has taken any of these."""
    queue = scene.queue
    scene.client.close()
    send(queue, 5, "more")
    copy = queue.append(None, b"old19", topic=queue.name)
    queue.append(*naming_tick(0, CLAIM, [COUNT - 1], epoch=0))
    (end,) = end_markers(queue.name, 0, {COUNT - 1: (0, copy)}, copy_topic=queue.name)
    queue.append(end.key, end.value, list(end.headers))
    return scene


def send(queue: LiveQueue, count: int, kind: str) -> list[str]:
    """Send messages in batches of their own, between which a log can be cut."""
    texts = [f"{kind}{number}" for number in range(count)]
    for text in texts:
        queue.append(None, text.encode(), topic=queue.name)
    return texts


@pytest.fixture(scope="module")
def scenes() -> Iterator[Callable[[str], Scene]]:
    """Queues by name, whose logs were cut from message `CUT_AT` on; that of `elected` was not."""
    with Cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        made = {f"live-{markers}": Scene(cluster, f"live-{markers}", markers) for markers in FORMATS}
        for markers in FORMATS:
            made[f"successor-{markers}"] = scene = Scene(cluster, f"successor-{markers}", markers)
            scene.client.close()
        for name in ("few-live", "late-ack", "elected", "markers-live", "markers-both"):
            made[name] = Scene(cluster, name)
        made["few-successor"] = Scene(cluster, "few-successor")
        made["few-successor"].client.close()
        made["copied"] = copied(Scene(cluster, "copied"))
        made["uncommitted"] = Scene(cluster, "uncommitted")
        made["markers-successor"] = Scene(cluster, "markers-successor")
        made["markers-successor"].client.close()
        for name in MARKERS:  # their takes and ends are cut away, those before are not
            made[name].taken += made[name].take_more()
        patch.setattr(GroupMember, "_commit_these", lambda *_, **__: None)
        send(made["uncommitted"].queue, 5, "more")
        made["uncommitted"].taken += collect(made["uncommitted"].client, 5)
        made["uncommitted"].client.close()
        patch.undo()
        keep = {(name, 0): CUT_AT for name in made}
        keep |= {("copied", 0): COUNT + 2, ("elected", 0): COUNT, ("uncommitted", 0): COUNT + 2}
        for name in MARKERS:
            keep[made[name].queue.settings.markers_topic, 0] = made[name].marked_to
            if name != "markers-both":
                del keep[name, 0]
        cut_logs(cluster, keep)
        yield made.__getitem__
        for scene in made.values():
            scene.queue.__exit__(None, None, None)


def numbers(messages: list[Message]) -> list[int]:
    return [message.place[1] for message in messages]  # type: ignore[attr-defined]


def all_new_come(scene: Scene, client: KmqClient, new: list[str]) -> None:
    """The new messages come once each, behind the cut, and can be acknowledged."""
    taken = collect(client, len(new), ack=True)
    assert bodies(taken) == new
    assert client.receive(100, wait=0.3) == []
    client.flush()
    assert numbers(taken) == [Cut(2, CUT_AT, 1).base + CUT_AT + index for index in range(len(new))]
    assert set(numbers(taken)) <= scene.queue.ended()


@pytest.mark.parametrize("markers", FORMATS)
@pytest.mark.parametrize("who", ["live", "successor"])
def test_r39_new_messages_at_the_offsets_of_old_ones_are_delivered(scenes, who: str, markers: str) -> None:
    scene = scenes(f"{who}-{markers}")
    client = scene.client if who == "live" else scene.queue.client()
    all_new_come(scene, client, scene.new(2 * COUNT))
    if who == "live":  # what lies below the cut can be acknowledged as ever
        scene.client.ack(*scene.taken[10:CUT_AT], confirmed=True)
        assert set(range(CUT_AT)) <= scene.queue.ended()


@pytest.mark.parametrize("who", ["live", "successor"])
def test_r39_a_log_that_stays_shorter_than_it_was(scenes, who: str) -> None:
    scene = scenes(f"few-{who}")
    client = scene.client if who == "live" else scene.queue.client()
    all_new_come(scene, client, scene.new(3))


def test_r39_an_old_receipt_ends_no_new_message(scenes) -> None:
    scene = scenes("late-ack")
    other = scene.queue.client(instance_id="other")
    new = scene.new(COUNT)
    scene.client.close()
    taken = collect(other, COUNT)
    assert bodies(taken) == new
    old = scene.taken[CUT_AT:]
    with scene.queue.client() as late:
        late.ack(*(message.receipt for message in old), confirmed=True)
        late.nack(*(message.receipt for message in old), confirmed=True)
    assert {offset_of(number) for number in scene.queue.ended()} >= {message.offset for message in old}
    assert not scene.queue.ended() & set(numbers(taken))
    other.ack(taken[0].receipt, confirmed=True)
    assert numbers(taken)[0] in scene.queue.ended()


def test_r39_messages_that_were_started_and_not_committed(scenes) -> None:
    scene = scenes("uncommitted")
    new = scene.new(5)
    with scene.queue.client() as client:
        taken = collect(client, 5)
        assert bodies(taken) == new
        assert numbers(taken) == [Cut(2, 22, 1).base + 22 + index for index in range(5)]
        assert client.receive(100, wait=0.3) == []


def test_r39_copies_that_nobody_had_taken(scenes) -> None:
    scene = scenes("copied")
    new = scene.new(COUNT)
    taken = collect(scene.queue.client(), 2 + COUNT, ack=True)
    assert bodies(taken) == ["more0", "more1", *new]
    assert numbers(taken[:2]) == [COUNT, COUNT + 1]
    base = Cut(2, COUNT + 2, 1).base
    assert numbers(taken[2:]) == [base + COUNT + 2 + index for index in range(COUNT)]


def test_r39_an_election_alone_changes_nothing(scenes) -> None:
    scene = scenes("elected")
    new = scene.new(5)
    assert bodies(collect(scene.client, 5)) == new
    with scene.queue.client() as client:
        scene.client.close()
        newer = scene.new(1)
        taken = collect(client, 1)
        assert bodies(taken) == newer
        assert numbers(taken) == [COUNT + 5]


@pytest.mark.parametrize("name", ["markers-live", "markers-successor"])
def test_r39_messages_whose_start_markers_are_cut_away_are_taken_again(scenes, name: str) -> None:
    """Also those whose acknowledgement was cut away; of the others, nothing is taken again."""
    scene = scenes(name)
    client = scene.client if name == "markers-live" else scene.queue.client()
    new = scene.new(5)
    taken = collect(client, 15, ack=True)
    assert sorted(bodies(taken)) == sorted([*bodies(scene.taken[COUNT:]), *new])
    client.flush()
    assert set(range(COUNT, COUNT + 15)) <= scene.queue.ended()
    with scene.queue.client() as successor:
        client.close()
        assert successor.receive(100, wait=0.5) == []


def test_r39_both_logs_are_cut_back(scenes) -> None:
    scene = scenes("markers-both")
    new = scene.new(2 * COUNT)
    assert bodies(collect(scene.client, len(new), ack=True)) == new
    assert scene.client.receive(100, wait=0.3) == []
