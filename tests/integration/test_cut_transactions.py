"""Logs whose last records were those that end a tracker's transaction, and were cut away (rule R38).

Kafka takes the transaction for ended, so nobody ends it, and readers wait for it: in the queue the clients,
in the markers the tracker. On a Kafka of this file's own.
"""

from collections.abc import Iterator, Sequence

import pytest
from support import LiveQueue, bodies, collect, until

from kmqpy.dev import Cluster
from kmqpy.kafka import hanging, librdkafka, partition_reader
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import Batch, cut_logs
from tracker.tracker import Tracker

COUNT = 5
pytestmark = pytest.mark.breadth
CUT = {
    "markers": [False, True],
    "queue": [True, False],
    "both": [True, True],
    "aborted": [True, False],
}
"""Queues by name: whether the end of the transaction is cut away in the queue topic, and in the markers."""


def before_the_last_end(batches: Sequence[Batch]) -> int:
    """Keep all before the last control record."""
    return max(index for index, batch in enumerate(batches) if batch.control)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hanging, "LOOK_EVERY_S", 1.0)
        yield made


@pytest.fixture(scope="module")
def queues(cluster: Cluster) -> Iterator[dict[str, LiveQueue]]:
    """Queues whose `COUNT` messages were redelivered in one transaction, before logs were cut back."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
    made = {name: LiveQueue(connection, zookeeper, name, root="/cut-transactions") for name in CUT}
    for queue in made.values():
        queue.send(*(f"{number}" for number in range(COUNT)))
        queue.mark_all(Marker(0, number, Op.TAKE, 1) for number in range(COUNT))
    tracker = running(made)
    until(lambda: all(sum(queue.copies().values()) == 2 * COUNT for queue in made.values()))
    tracker.stop()
    keep = {}
    for name, (in_queue, in_markers) in CUT.items():
        if in_queue:
            keep[name, 0] = before_the_last_end
        if in_markers:
            keep[made[name].settings.markers_topic, 0] = before_the_last_end
    cut_logs(cluster, keep)
    abort_what_hangs(made["aborted"])
    running(made)
    yield made
    for queue in made.values():
        queue.__exit__(None, None, None)


def running(queues: dict[str, LiveQueue]) -> Tracker:
    tracker = next(iter(queues.values())).tracker(wait=False)
    until(lambda: len(tracker.owned()) == len(queues), what=tracker.problems)
    return tracker


def abort_what_hangs(queue: LiveQueue) -> None:
    """As does a tracker that had begun its next transaction when the log was cut back."""
    tracker = f"kmq-tracker-{queue.name}-0"
    producer = librdkafka.new_producer(queue.connection, {"transactional.id": tracker})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(queue.name, b"aborted, too", partition=0)
    assert producer.flush(30) == 0
    producer.abort_transaction(30)


@pytest.mark.parametrize("name", [name for name in CUT if name != "aborted"])
def test_r38_a_tracker_ends_what_its_predecessor_has_left_hanging(
    queues: dict[str, LiveQueue], name: str
) -> None:
    queue = queues[name]
    with queue.client() as client:
        taken = collect(client, COUNT + CUT[name][0], ack=True)  # copies in the queue: one is made twice
        assert set(bodies(taken)) == {f"{number}" for number in range(COUNT)}
        assert client.receive(10, wait=0.5) == []
    topic = queue.settings.markers_topic
    stable = partition_reader.bounds(queue.connection, topic, [0])[0][1]
    assert stable == partition_reader.bounds(queue.connection, topic, [0], uncommitted=True)[0][1]


def test_r39_messages_are_redelivered_whose_copies_were_committed_and_then_aborted(
    queues: dict[str, LiveQueue],
) -> None:
    """Nothing but the record that had committed them was cut away, so nobody tells a cut."""
    with queues["aborted"].client() as client:
        assert set(bodies(collect(client, COUNT, ack=True))) == {f"{number}" for number in range(COUNT)}
        assert client.receive(10, wait=0.5) == []


def test_r38_a_transaction_that_can_not_be_ended_keeps_no_tracker_from_its_work(cluster: Cluster) -> None:
    """It looks like a tracker's, but its producer is somebody else's: redelivery goes on without it."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
    with LiveQueue(connection, zookeeper, "forged", root="/forged") as queue:
        queue.send("message")
        queue.mark(Marker(0, 0, Op.TAKE, 1))
        forger = librdkafka.new_producer(connection, {"transactional.id": "forger"})
        forger.init_transactions(30)
        forger.begin_transaction()
        forger.produce(queue.name, b"forged", partition=0, headers={ANCESTORS: b"0:0"})
        assert forger.flush(30) == 0
        tracker = queue.tracker(wait=False)
        until(lambda: queue.ended() == {0}, what=tracker.problems)
        forger.abort_transaction(30)
        until(lambda: queue.copies() == {"message": 2})
