"""Brokers that stop answering, go away and come back; clusters of their own."""

import time

import pytest
from confluent_kafka.admin import NewTopic
from support import LiveQueue, bodies, collect, nothing_comes, total_queue, until, value

from kmqpy import kafka
from kmqpy.config import Connection
from kmqpy.dev import Cluster
from kmqpy.markers import Marker, Op

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def own_queue(own_cluster, queue_name):
    with LiveQueue(address(own_cluster), queue_name) as queue:
        yield queue


def address(cluster: Cluster) -> Connection:
    return Connection(bootstrap=cluster.bootstrap, zookeeper=cluster.zookeeper)


def test_f1_a_broker_that_does_not_answer_loses_no_messages(own_cluster, own_queue):
    """The messages were fetched already; their start markers time out."""
    queue = own_queue
    client = queue.client()
    queue.send("first")
    client.ack(*collect(client, 1), wait=True)
    until(lambda: queue.committed() == 1)
    sent = [f"m{i}" for i in range(100)]
    queue.send(*sent)
    time.sleep(0.5)  # the client has fetched them
    own_cluster.broker().pause()
    nothing_comes(client, 4.0)
    own_cluster.broker().resume()
    found = collect(client, 100, 20.0, ack=True, lease=60.0)
    verdict = total_queue(sent, bodies(found))
    assert (verdict.lost, verdict.unexpected, verdict.duplicates) == (set(), set(), {})
    client.flush()
    until(lambda: queue.committed() == 101)


def test_f10_after_a_broker_was_away_everything_goes_on_by_itself(own_cluster, own_queue):
    queue = own_queue
    tracker = queue.tracker()
    client = queue.client()
    sent = [f"m{i}" for i in range(60)]
    queue.send(*sent)
    taken = collect(client, 60, lease=2.5)
    client.ack(*taken[:20], wait=True)
    own_cluster.broker().kill()
    client.ack(*taken[20:30])  # to be confirmed later
    time.sleep(3.0)
    own_cluster.broker().start()
    came = collect(client, 30, 30.0, ack=True, lease=60.0)
    client.flush()
    # Whether the acks of the second ten came before the redelivery is a race, their copies are single.
    time.sleep(1.5)
    for _ in range(3):
        more = client.receive(wait=0.3, lease=60.0)
        client.ack(*more)
        came += more
    verdict = total_queue(sent[30:], bodies(came))
    assert verdict.lost == set()
    assert verdict.duplicates == {}
    assert verdict.unexpected <= set(sent[20:30])
    assert max(queue.copies().values()) == 2
    until(lambda: tracker.problems() == [], 15.0, tracker.problems)
    assert value(tracker, queue.name, "lost_to_retention") == 0


def test_r18_a_markers_partition_without_leader_stops_only_itself(queue_name):
    with Cluster(brokers=3) as cluster:
        admin = kafka.admin(address(cluster))
        topics = [
            NewTopic(queue_name, 2, replica_assignment=[[1], [1]]),
            NewTopic(
                f"{queue_name}__markers",
                2,
                replica_assignment=[[1], [3]],
                config={"message.timestamp.type": "LogAppendTime"},
            ),
        ]
        for future in admin.create_topics(topics).values():
            future.result(10)
        with LiveQueue(address(cluster), queue_name, 2, replication=1) as queue:
            tracker = queue.tracker()
            client = queue.client()
            queue.send("first", partition=0)
            queue.send("first", partition=1)
            client.ack(*collect(client, 2), wait=True)
            cluster.broker(3).kill()
            sent = [f"{partition}-{i}" for i in range(20) for partition in (0, 1)]
            for partition in (0, 1):
                queue.send(*(s for s in sent if s.startswith(str(partition))), partition=partition)
            found = collect(client, 20, 20.0, ack=True, lease=60.0)
            assert {message.partition for message in found} == {0}
            queue.send("held", partition=0)
            queue.mark(Marker(0, 21, Op.TAKE, 100))
            until(lambda: value(tracker, queue.name, "redelivered") == 1, 40.0, tracker.problems)
            cluster.broker(3).start()
            rest = collect(client, 21, 30.0, ack=True, lease=60.0)
            verdict = total_queue([*sent, "held"], bodies(found + rest))
            assert (verdict.lost, verdict.unexpected) == (set(), set())
