"""A queue is its topic id (rule R24): what was known of a topic counts for none that has its name later."""

import dataclasses
import threading
import time

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions
from support import bodies, collect, until

from kmqpy.errors import AccessDenied, Fenced, ReceiptError, TopicError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin import stats
from kmqpy.kafka.client.group_member import commit_metadata
from kmqpy.kafka.topics import TopicIds, Topics, topics_of
from kmqpy.message import Message
from tracker import tracker as tracker_module

OLD, NEW = 60, 300
LEASE_S = 60.0


def make_anew(queue):
    queue.topics.delete(topics_of(queue.settings))
    queue.topics.create(queue.settings, queue.partitions)
    queue.found = queue.topics.check(queue.settings)


class Acker:
    """A thread that takes and acknowledges messages, whatever a client raises."""

    def __init__(self, client):
        self.client = client
        self.bodies = []
        self.gone = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            try:
                for message in self.client.receive(wait=0.1, lease=LEASE_S):
                    self.bodies.append(message.body.decode())
                    self.client.ack(message)
            except TopicError:
                self.gone.set()
                time.sleep(0.05)
            except ReceiptError:  # it was taken before it was known that the topic is another one
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize(("clients", "partitions"), [(1, 1), (2, 3)])
def test_r24_clients_that_live_through_a_queue_made_anew_take_all_its_messages(
    make_queue, clients, partitions, pause
):
    """The new topic is soon longer than the old one: a position in the one is good in the other."""
    # How soon a topic that is gone is noticed; see `pause`.
    queue = make_queue(partitions, kafka={"topic.metadata.refresh.interval.ms": 300})
    spread = {"partition": 0} if partitions == 1 else {"partition": None}
    old, new = [f"old {i}" for i in range(OLD)], [f"new {i}" for i in range(NEW)]
    own = [queue.client() for _ in range(clients)]
    with Acker(own[0]) as first, Acker(own[-1]) as last:
        until(lambda: sum(len(one.partitions) for one in own) == partitions, 30)
        queue.send(*old, **spread)
        until(lambda: set(old) <= {*first.bodies, *last.bodies}, 20)
        queue.topics.delete(topics_of(queue.settings))
        if pause:
            until(lambda: first.gone.is_set() or last.gone.is_set(), 60)
        queue.topics.create(queue.settings, partitions)
        queue.send(*new, **spread)
        until(
            lambda: set(new) <= {*first.bodies, *last.bodies},
            60,
            lambda: len(set(new) - {*first.bodies, *last.bodies}),
        )
    for client in own:
        client.flush()
    until(lambda: stats.queue_stats(queue.connection, queue.settings).depth == 0)


def commit(queue, offset, metadata):
    member = librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
    try:
        member.commit(offsets=[TopicPartition(queue.name, 0, offset, metadata)], asynchronous=False)
    finally:
        member.close()


@pytest.mark.parametrize(("of", "left"), [("old", 5), ("new", 2), ("unknown", 2)])
def test_r24_commits_count_for_the_topic_that_they_name(queue, of, left):
    sent = [f"m{i}" for i in range(5)]
    queue.send(*sent)
    ids = TopicIds("of-another-topic", queue.found.markers.topic_id) if of == "old" else queue.found.ids
    commit(queue, 3, "kmq1:0" if of == "unknown" else commit_metadata(0, ids))
    assert stats.queue_stats(queue.connection, queue.settings).depth == left
    assert bodies(collect(queue.client(), left)) == sent[-left:]


def test_r24_receipts_are_of_the_topic_also_to_a_client_that_only_acknowledges(queue):
    finisher = queue.client()
    queue.send("old")
    with queue.client() as client:
        (old,) = collect(client, 1, lease=LEASE_S)
    finisher.extend(old, lease=LEASE_S)
    make_anew(queue)
    queue.send("new")
    with queue.client() as client:
        (new,) = collect(client, 1, lease=LEASE_S)
    finisher.extend(new, lease=LEASE_S, wait=True)
    finisher.ack(new.receipt, wait=True)
    for finish in (finisher.ack, finisher.nack, finisher.dead_letter):
        with pytest.raises(ReceiptError, match="deleted since"):
            finish(old)
        with pytest.raises(ReceiptError, match="deleted since"):
            finish(old.receipt)
    assert queue.ended() == {0}


def test_r24_messages_are_of_their_queue_and_storage_like_receipts(make_queue, queue_name):
    queue, other = make_queue(), make_queue(name=f"{queue_name}-other")
    queue.send("mine")
    other.send("other")
    client = queue.client()
    (mine,) = collect(client, 1, lease=LEASE_S)
    (foreign,) = collect(other.client(), 1, lease=LEASE_S)
    fields = {"body": b"", "headers": (), "attempts": 1, "enqueued_ms": 0, "first_enqueued_ms": 0}
    in_memory = Message(queue=queue.name, id="0", lease_until_ms=0, receipt="memory-1", **fields)
    for finish in (client.ack, client.nack, client.dead_letter, lambda *m: client.extend(*m, lease=LEASE_S)):
        for message in (foreign, dataclasses.replace(foreign, queue=queue.name), in_memory):
            with pytest.raises(ReceiptError):
                finish(message)
            with pytest.raises(ReceiptError):
                finish(mine, message)
    client.flush()
    assert queue.ended() == set()
    copy = dataclasses.replace(mine, body=b"changed", partition=7, offset=7)
    assert (type(copy), copy.body, copy.receipt) == (Message, b"changed", mine.receipt)
    client.ack(copy, wait=True)
    assert queue.ended() == {0}


def test_r24_a_markers_topic_made_anew_alone_costs_no_message(queue):
    queue.send(*(f"m{i}" for i in range(5)))
    client = queue.client()
    taken = collect(client, 5, lease=LEASE_S)
    until(lambda: queue.committed() == 5)
    markers = queue.settings.markers_topic
    queue.topics._admin.delete_topics([markers])[markers].result(10)
    until(lambda: not queue.topics.describe([markers]))
    queue.topics.create(queue.settings, 1)
    queue.send("m5", "m6")
    taken += collect(client, 2, 30.0, lease=LEASE_S)
    assert bodies(taken) == [f"m{i}" for i in range(7)]
    client.ack(*taken, wait=True)
    until(lambda: queue.committed() == 7)
    assert stats.queue_stats(queue.connection, queue.settings).depth == 0


@pytest.mark.parametrize("probe_every_s", [0.2, 3_600])
def test_r24_a_tracker_redelivers_no_message_of_a_new_topic_for_one_of_the_old(
    queue, monkeypatch, probe_every_s
):
    """Also when it is due before the next probe."""
    monkeypatch.setattr(tracker_module, "_PROBE_EVERY_S", probe_every_s)
    tracker = queue.tracker()
    queue.send(*(f"old {i}" for i in range(20)))
    with queue.client() as client:
        collect(client, 20, lease=3.0)
    part = tracker._parts[queue.name, 0]
    until(lambda: len(part.state) == 20)
    make_anew(queue)
    new = [f"new {i}" for i in range(20)]
    queue.send(*new)
    until(lambda: part.topic_ids[0] == queue.found.queue.topic_id, 30)
    with queue.client() as client:
        taken = collect(client, 20, lease=LEASE_S)
        client.ack(*taken[:10], wait=True)
        client.extend(*taken[10:], lease=0.5, wait=True)
        until(lambda: sum(queue.copies().values()) == 30, 30, queue.copies)
    assert queue.copies() == {**dict.fromkeys(new[:10], 1), **dict.fromkeys(new[10:], 2)}


def test_two_clients_with_one_instance_id_do_not_go_on_side_by_side(queue):
    queue.send(*(f"m{i}" for i in range(5)))
    first = queue.client(instance_id="one")
    collect(first, 5, lease=LEASE_S)
    second = queue.client(instance_id="one")
    told = []

    def is_told():
        try:
            first.receive(wait=0.1)
        except Fenced as error:
            told.append(str(error))
        second.receive(wait=0.1)
        return told

    until(is_told, 30)
    assert "instance_id of its own" in told[0]
    with pytest.raises(Fenced):  # for good
        first.receive()
    with pytest.raises(Fenced):
        next(iter(first))
    queue.send("last")
    assert bodies(collect(second, 1, 30.0, lease=LEASE_S)) == ["last"]


def add_partitions(queue, topic, count):
    queue.topics._admin.create_partitions([NewPartitions(topic, count)])[topic].result(10)
    until(lambda: queue.topics.describe([topic])[topic].partitions == count)


def test_r19_partitions_added_with_kafkas_own_tools_are_served(make_queue):
    queue = make_queue(1, kafka={"topic.metadata.refresh.interval.ms": 300})
    tracker = queue.tracker()
    client = queue.client()
    queue.send("m0")
    client.ack(*collect(client, 1, lease=LEASE_S))
    add_partitions(queue, queue.name, 3)
    queue.append(None, b"m1", topic=queue.name, partition=1)  # a new client would be refused for a moment
    queue.append(None, b"m2", topic=queue.name, partition=2)
    taken = collect(client, 2, 30.0)
    assert sorted(bodies(taken)) == ["m1", "m2"]
    until(lambda: len(tracker.owned()) == 3, 30, tracker.problems)
    until(lambda: queue.copies() == {"m0": 1, "m1": 2, "m2": 2}, 20, queue.copies)
    assert queue.topics.check(queue.settings).markers.partitions == 3
    until(lambda: tracker.problems() == [], what=tracker.problems)


def test_r19_partitions_that_a_tracker_can_not_add_are_named(make_queue, monkeypatch):
    queue = make_queue(1)
    tracker = queue.tracker()

    def refused(self, _settings, partitions):
        raise AccessDenied("add partitions: not allowed")

    monkeypatch.setattr(Topics, "grow", refused)
    add_partitions(queue, queue.settings.markers_topic, 2)
    add_partitions(queue, queue.name, 3)
    until(lambda: len(tracker.owned()) == 2, 30, tracker.problems)
    wanted = f"kmq queue alter {queue.name} --partitions 3"
    until(lambda: any(wanted in problem for problem in tracker.problems()), 30, tracker.problems)
