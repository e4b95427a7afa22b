"""One of three brokers is killed or halted: partitions that it leads have no leader for a while."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import ElectionType, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support import LiveQueue, bodies, collect, total_queue, until

from kmqpy.dev import Cluster
from kmqpy.dev.server import Server
from kmqpy.errors import Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import batches, damage, log_folder

pytestmark = [pytest.mark.slow, pytest.mark.breadth]

ELECTION_S = 180.0
"""Seconds in which the two brokers that are left agree on who leads what, also on a busy machine: who misses
heartbeats for 3 s is left out, and a controller that misses 2 s is voted out again."""
LONG_S = 600.0
"""A lease, in seconds, that no wait here outlasts."""


@dataclass(frozen=True)
class ThreeBrokers:
    """A cluster whose third broker may be killed or paused."""

    cluster: Cluster
    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    third: Server


@pytest.fixture(scope="module")
def cluster_of_three() -> Iterator[ThreeBrokers]:
    with Cluster(brokers=3) as cluster:
        yield ThreeBrokers(
            cluster,
            KafkaConnection(bootstrap=cluster.bootstrap),
            ZooKeeperConnection(hosts=cluster.zookeeper),
            cluster.broker(3),
        )


@pytest.fixture
def three_brokers(cluster_of_three: ThreeBrokers) -> Iterator[ThreeBrokers]:
    yield cluster_of_three
    cluster_of_three.third.resume()
    cluster_of_three.third.start()


def test_r18_a_markers_partition_without_leader_stops_only_itself(three_brokers, queue_name):
    admin = librdkafka.new_admin(three_brokers.connection)
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
        future.result(60)
    with LiveQueue(three_brokers.connection, three_brokers.zookeeper, queue_name, 2, replication=1) as queue:
        tracker = queue.tracker()
        client = queue.client()
        # A new producer would ask the controller, which may be the broker that is killed.
        producer = queue.producer()
        queue.send("first", partition=0)
        queue.send("first", partition=1)
        client.ack(*collect(client, 2, lease=LONG_S), confirmed=True)
        queue.send("taken", partition=1)
        (taken,) = collect(client, 1, lease=LONG_S)
        three_brokers.third.kill()
        client.ack(taken)
        sent = [f"{partition}-{i}" for i in range(20) for partition in (0, 1)]
        for partition in (0, 1):
            producer.send_many([s for s in sent if s.startswith(str(partition))], partition=partition)
        found = collect(client, 20, ELECTION_S, ack=True, lease=LONG_S)
        assert {message.partition for message in found} == {0}
        client.ack(*found, confirmed=True)  # R26: for no other partition
        with pytest.raises(Unavailable):
            client.flush(0.2)
        offset = int(producer.send("held", partition=0).rpartition("-")[2])
        queue.mark(Marker(0, offset, Op.TAKE, 100))
        # Not the tracker's count: it leaves out copies of transactions whose outcome was unknown at first.
        until(lambda: copies_of(queue, "held") == 2, ELECTION_S, tracker.problems, every=0.2)
        three_brokers.third.start()
        rest = collect(client, 21, ELECTION_S, ack=True, lease=LONG_S)
        verdict = total_queue([*sent, "held"], bodies(found + rest))
        assert (verdict.lost, verdict.unexpected) == (set(), set())


def test_r18_a_broker_that_hangs_keeps_up_markers_only_until_another_leads_its_queues(
    three_brokers, queue_name
):
    admin = librdkafka.new_admin(three_brokers.connection)
    config = {"message.timestamp.type": "LogAppendTime"}
    topics = [
        NewTopic(queue_name, 2, replica_assignment=[[1, 2, 3], [3, 2, 1]]),
        NewTopic(f"{queue_name}__markers", 2, replica_assignment=[[1, 2, 3], [1, 2, 3]], config=config),
    ]
    for future in admin.create_topics(topics).values():
        future.result(60)
    with LiveQueue(three_brokers.connection, three_brokers.zookeeper, queue_name, 2, replication=1) as queue:
        tracker = queue.tracker()
        states = [tracker._partitions[queue_name, partition].state for partition in (0, 1)]
        for partition in (0, 1):
            queue.send(*"abcde", partition=partition)
        three_brokers.third.pause()
        for partition in (0, 1):  # nobody knows yet that there are such messages
            queue.mark_all(Marker(partition, offset, Op.TAKE, 120_000) for offset in range(5))
        until(lambda: len(states[0]) == 5, 8.0, tracker.problems)
        until(lambda: len(states[1]) == 5, ELECTION_S, tracker.problems)
        three_brokers.third.resume()


@pytest.mark.breadth
def test_a_damaged_follower_that_leads_holds_up_its_partition_only_is_named_and_mended_by_another_replica(
    three_brokers, queue_name, caplog
):
    admin = librdkafka.new_admin(three_brokers.connection)
    markers, bits, cut, whole = f"{queue_name}__markers", 0, 1, 2
    topics = [
        NewTopic(queue_name, 3, replica_assignment=[[3, 2], [3, 2], [2, 1]]),
        NewTopic(
            markers,
            3,
            replica_assignment=[[2, 1], [2, 1], [3, 2]],
            config={"message.timestamp.type": "LogAppendTime"},
        ),
    ]
    for future in admin.create_topics(topics).values():
        future.result(60)
    led = {(queue_name, bits), (markers, whole)}
    folders = {
        place: log_folder(three_brokers.cluster, *place, broker=3) for place in (*led, (queue_name, cut))
    }

    def leads(broker: int) -> bool:
        found = admin.list_topics(timeout=10).topics
        return all(found[topic].partitions[number].leader == broker for topic, number in led)

    def third_leads() -> None:
        until(lambda: all(len(in_sync(admin, *place)) == 2 for place in led), ELECTION_S, every=0.2)
        admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(*place) for place in led]).result(60)
        until(lambda: leads(3), ELECTION_S, every=0.2)

    with LiveQueue(three_brokers.connection, three_brokers.zookeeper, queue_name, 3, replication=1) as queue:
        sent = [f"{partition}-{number}".ljust(600) for partition in range(3) for number in range(20)]
        for body in sent:  # each in a batch of its own
            queue.append(None, body.encode(), topic=queue_name, partition=int(body[0]))
        for number in range(20):
            queue.mark(Marker(whole, number, Op.TAKE, 1))
        three_brokers.third.stop()
        until(lambda: leads(2), ELECTION_S, every=0.2)
        damage(folders[queue_name, bits], 12)
        damage(folders[markers, whole], 12)
        half = batches(folders[queue_name, cut])[12]
        os.truncate(half.segment, half.begin + 30)
        three_brokers.third.start(ELECTION_S)
        third_leads()  # it has not noticed; of the log that was cut off it has, and has given it up

        client = queue.client()
        came = collect(client, 32, ELECTION_S, lease=LONG_S)
        assert sorted(bodies(came)) == sorted(sent[:12] + sent[20:40])

        def named() -> set[int]:
            begun = [vars(one) for one in caplog.records if "can't be begun" in one.getMessage()]
            return {one["partition"] for one in begun if "at offset 12" in one["error"]}

        until(lambda: client.receive(wait=0.1) or named(), ELECTION_S)  # its first try may fail otherwise
        assert named() == {whole}
        with Admin(queue.connection, queue.zookeeper) as doctor:

            def findings() -> dict[Kind, str]:
                return {one.kind: one.what for one in doctor.doctor(queue_name)}

            until(lambda: Kind.DAMAGED_LOG in findings(), ELECTION_S)  # once the client has committed
            found = findings()
        assert f"{queue_name}, partition {bits}: nobody can read on from offset 12" in found[Kind.DAMAGED_LOG]
        assert found[Kind.OUT_OF_SYNC] == f"{queue_name}, partition {cut}: a replica is not in sync"
        tracker = queue.tracker(wait=False)
        until(lambda: "at offset 12" in str(tracker.problems()), ELECTION_S, tracker.problems)

        three_brokers.third.stop()
        for folder in folders.values():
            shutil.rmtree(folder)
        three_brokers.third.start(ELECTION_S)
        third_leads()
        came = collect(client, 28, ELECTION_S, lease=LONG_S)
        assert sorted(bodies(came)) == sorted(sent[12:20] + sent[40:])
        until(lambda: tracker.problems() == [], ELECTION_S, tracker.problems)
        until(lambda: len(in_sync(admin, queue_name, cut)) == 2, ELECTION_S)


def in_sync(admin: AdminClient, topic: str, partition: int) -> list[int]:
    found: list[int] = admin.list_topics(topic, timeout=10).topics[topic].partitions[partition].isrs
    return found


def copies_of(queue: LiveQueue, body: str) -> int:
    """How often it stands in the queue topic; 0 while no broker says it."""
    try:
        return queue.copies(at_once=True)[body]
    except Unavailable:
        return 0
