"""Queues that collapse (rule R41), on a real Kafka; what all storages promise of them is in the contract."""

import uuid

import pytest
from confluent_kafka import Producer
from prometheus_client import CollectorRegistry
from support import bodies, collect, nothing_comes, until

from kmqpy.kafka.client import collapsing
from kmqpy.kafka.client.sender import partition_of
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import QueueSettings
from kmqpy.queue import storage_for
from kmqpy.telemetry.prometheus import PrometheusTelemetry

LONG_S = 60.0


@pytest.fixture
def queue(make_queue):
    return make_queue(collapse=True, lease_ms=60_000)


def test_r41_two_sends_that_were_confirmed_before_a_poll_are_one_message(queue):
    """Asked for, not remembered from the last fetch: what Kafka has just confirmed counts, too."""
    client, sender = queue.client(), queue.producer()
    collect(client, 1 if sender.send("first") else 0)
    for number in range(100):
        sender.send(f"m{number}")
        sender.send(f"m{number}")
        assert bodies(collect(client, 1, max_messages=1)) == [f"m{number}"]
    sender.send("last")
    assert bodies(collect(client, 1)) == ["last"]


def test_r41_what_is_sent_when_its_twin_was_handed_out_comes(queue):
    client, sender = queue.client(), queue.producer()
    for _ in range(50):
        sent = sender.send("m")
        assert [one.id for one in collect(client, 1)] == [sent]


def test_r41_what_waits_behind_an_open_transaction_waits_too(queue):
    client, sender = queue.client(), queue.producer()
    sender.send("m")
    collect(client, 1)
    producer = Producer(
        {"bootstrap.servers": queue.connection.bootstrap, "transactional.id": f"open-{uuid.uuid4().hex}"}
    )
    producer.init_transactions(30)
    sender.send("n")
    producer.begin_transaction()
    producer.produce(queue.name, b"of others", partition=0)
    producer.flush(30)
    sender.send("n")
    assert bodies(collect(client, 1)) == ["n"]
    producer.abort_transaction(30)
    sender.send("last")
    assert bodies(collect(client, 1)) == ["last"]


def test_r41_equal_messages_get_into_one_partition_whatever_their_keys(make_queue):
    queue = make_queue(3, collapse=True, lease_ms=60_000)
    client, sender = queue.client(), queue.producer()
    sent = sender.send_many([f"m{number % 10}" for number in range(60)], key="k")
    sent += [sender.send(f"m{number % 10}", key=f"k{number}") for number in range(30)]
    assert len({one.partition("-")[0] for one in sent}) == 3
    found = collect(client, 10)
    assert sorted(bodies(found)) == [f"m{number}" for number in range(10)]
    assert {one.key for one in found} == {b"k"}
    nothing_comes(client, 1.0)


def test_a_partition_that_is_named_is_that_of_the_message(make_queue):
    queue = make_queue(2, collapse=True)
    other = 1 - partition_of(b"m", 2)
    assert queue.producer().send("m", partition=other) == f"{other}-0"


def test_r41_what_was_passed_over_waits_no_more_also_for_a_successor(queue):
    registry = CollectorRegistry()
    with KmqClient(queue.settings, queue.connection, telemetry=PrometheusTelemetry(registry)) as client:
        queue.send("a", "b", "a", "a", "b")
        assert sorted(bodies(collect(client, 2))) == ["a", "b"]
        until(lambda: not client.receive(wait=0) and client.size() == 0)
        assert registry.get_sample_value("kmq_client_collapsed_total", {"queue": queue.name}) == 3
    queue.send("c")
    assert bodies(collect(queue.client(), 1)) == ["c"]
    assert queue.started() == {0, 1, 5}


def test_what_a_successor_finds_waiting_comes_once_more(queue):
    """Who took the first of them is gone, and nobody knows what waited then: nothing is lost."""
    with queue.client() as client:
        queue.send("a", "a", "a")
        assert bodies(collect(client, 1, max_messages=1)) == ["a"]
    assert bodies(collect(queue.client(), 1)) == ["a"]


def test_r41_beyond_the_digests_that_are_kept_twins_come(queue, monkeypatch):
    monkeypatch.setattr(collapsing, "MAX_DIGESTS", 3)
    client = queue.client()
    sent = ["a", "b", "c", "d", "e"]
    queue.send(*sent, *sent)
    found = bodies(collect(client, 5, max_messages=5))
    assert found == sent
    assert bodies(collect(client, 2)) == ["a", "b"]
    nothing_comes(client, 0.5)


def test_r41_without_an_answer_what_was_read_counts(queue, monkeypatch):
    monkeypatch.setattr(collapsing, "_ENDS_TIMEOUT_S", 0.0)
    client, sender = queue.client(), queue.producer()
    sender.send_many(["a", "a", "b"])
    collect(client, 2)
    sent = sender.send("a")
    assert [one.id for one in collect(client, 1)] == [sent]


def test_redelivered_messages_do_not_collapse(make_queue):
    queue = make_queue(collapse=True, lease_ms=60_000, max_redeliveries=None)
    queue.tracker()
    client = queue.client()
    first = queue.send("m")
    client.nack(collect(client, 1), count=False, confirmed=True)
    until(lambda: len(queue.records()) == 2)
    second = queue.send("m")
    assert sorted(one.id for one in collect(client, 2)) == sorted([*first, *second])


def test_clients_without_zookeeper_know_it_too(cluster, zookeeper, queue_name):

    url = f"kafka://{cluster.bootstrap}?zookeeper={zookeeper.hosts}&root=/kmq-{queue_name}"
    with storage_for(url) as storage:
        storage.create(queue_name, collapse=True)
        assert storage.describe(queue_name).settings["collapse"] is True
        with storage_for(f"kafka://{cluster.bootstrap}?root=/kmq-{queue_name}") as other:
            queue = other.open(queue_name)
            assert isinstance(queue, KmqClient)
            assert queue.settings == QueueSettings(name=queue_name, collapse=True)
        storage.delete(queue_name)
