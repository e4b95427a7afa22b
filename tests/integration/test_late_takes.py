"""Messages that are taken after their end (rule R30), on a real Kafka."""

import signal

import pytest
from confluent_kafka import TopicPartition
from support import bodies, collect, until, value

from kmqpy.kafka import librdkafka
from kmqpy.kafka.markers.codec import Marker, Op, tick
from kmqpy.kafka.markers.records import read_marker


@pytest.fixture
def leased(make_queue):
    """A queue with leases of 0.4 s, unless a client asks for others."""
    return make_queue(lease_ms=400, max_redeliveries=None)


def ends_of(queue, offset):
    """The headers of the end markers of a message, in order."""
    records = queue.records(queue.settings.markers_topic)
    found = [(read_marker(record), dict(record.headers() or [])) for record in records]
    return [headers for marker, headers in found if (marker.op, marker.offset) == (Op.END, offset)]


def safe_offset(queue):
    with queue.registry() as registry:
        stored = registry.offsets(queue.name).get(0)
        return -1 if stored is None else stored.offset


def set_back(queue, offset):
    """As Kafka's own tools do it: without metadata."""
    group = librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
    group.commit(offsets=[TopicPartition(queue.name, 0, offset)], asynchronous=False)
    group.close()


def test_r30_who_was_paused_before_its_start_marker_brings_no_acknowledged_message_back(leased):
    tracker = leased.tracker()
    leased.send("m")
    paused = leased.taker_process("--pause-before-start", "--lease=0.4")
    assert paused.read(1) == [{"paused": True}]
    with leased.client() as client:
        assert bodies(collect(client, 1, lease=60.0, ack=True)) == ["m"]  # after the session of the other
        client.flush()
        paused.signal(signal.SIGCONT)
        until(lambda: value(tracker, leased.name, "taken_late") == 1)
        assert leased.copies() == {"m": 1}
    (of_client, of_tracker) = ends_of(leased, 0)
    assert of_client == {}
    assert of_tracker == {"kmq-reason": b"taken late", "kmq-by": b"tracker"}


def test_r30_a_successor_knows_what_was_ended_before_the_safe_offset(leased):
    leased.send("m")
    first = leased.tracker()
    with leased.client() as client:
        collect(client, 1, ack=True, lease=60.0)
        client.flush()
    behind = leased.mark(tick(0))
    until(lambda: safe_offset(leased) > behind)
    first.stop()
    second = leased.tracker()
    leased.mark(Marker(0, 0, Op.TAKE, 300))
    until(lambda: value(second, leased.name, "taken_late") == 1)
    assert leased.copies() == {"m": 1}


@pytest.mark.breadth
def test_r30_what_a_group_takes_again_since_it_was_set_back_is_redelivered(leased):
    tracker = leased.tracker()
    leased.send("a", "b", "c")
    with leased.client() as client:
        collect(client, 3, ack=True, lease=60.0)
    set_back(leased, 1)
    with leased.client() as client:
        taken = collect(client, 2, lease=60.0)
        assert bodies(taken) == ["b", "c"]
        client.nack(*taken)
        again = collect(client, 2, lease=60.0, ack=True)
    assert sorted(bodies(again)) == ["b", "c"]
    assert {message.attempts for message in again} == {2}
    assert value(tracker, leased.name, "taken_late") == 0
    assert leased.copies() == {"a": 1, "b": 2, "c": 2}


@pytest.mark.breadth
def test_r30_where_only_others_take_messages_all_of_them_are_redelivered(leased):
    """JVM clients write no tick: a group of theirs that was set back is served as before."""
    tracker = leased.tracker()
    leased.send("m")
    leased.mark_all([Marker(0, 0, Op.TAKE, 60_000), Marker(0, 0, Op.END), Marker(0, 0, Op.TAKE, 300)])
    until(lambda: leased.copies() == {"m": 2})
    assert value(tracker, leased.name, "taken_late") == 0
