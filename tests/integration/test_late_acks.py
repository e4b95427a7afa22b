"""Acknowledgements that come when the message has been copied (rules R32, R33), on a real Kafka."""

import pytest
from prometheus_client import CollectorRegistry
from support import collect, until

from kmqpy.errors import Unavailable
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.telemetry.prometheus import PrometheusTelemetry

LONG_S = 60.0
SHORT_S = 1.5
"""A lease that is over soon, but not before its message is handed out on a busy machine."""


@pytest.fixture(params=["jvm", "range"])
def queue(request, make_queue):
    """A queue with late acks, once for each format of markers, with a tracker."""
    return late_ack_queue(make_queue, request.param)


def late_acked(registry, queue):
    return registry.get_sample_value("kmq_client_late_acked_total", {"queue": queue.name})


def all_ended(queue):
    return {record.offset() for record in queue.records()} <= queue.ended()


def copied(queue, times=2):
    """Wait until each message stands in the queue this often."""
    until(lambda: set(queue.copies().values()) == {times})


def late_ack_queue(make_queue, markers="jvm"):
    """A queue with late acks and a tracker; `markers`: the format that its clients write."""
    queue = make_queue(claims=True, late_acks=True)
    queue.markers = markers
    queue.tracker()
    return queue


def taken_and_copied(queue):
    """A client, and the one message that it has taken, whose lease is over and which is copied."""
    client = queue.client()
    queue.send("a")
    (message,) = collect(client, 1, lease=SHORT_S)
    copied(queue)
    return client, message


def test_r32_a_copy_is_not_handed_out_after_an_ack_of_its_original(queue):
    registry = CollectorRegistry()
    client = queue.client(telemetry=PrometheusTelemetry(registry))
    queue.send(*"abcde")
    messages = collect(client, 5, lease=SHORT_S)
    copied(queue)
    client.ack(*messages[:3])
    client.nack(messages[3])  # changes nothing: it has been given back already
    client.flush()
    queue.send("f")
    again = collect(client, 3, lease=LONG_S)
    assert [message.body for message in again] == [b"d", b"e", b"f"]
    assert [message.attempts for message in again] == [2, 2, 1]
    client.ack(*again, wait=True)
    assert late_acked(registry, queue) == 3
    client.flush()
    assert all_ended(queue)


def test_r32_an_ack_after_the_copy_was_taken_ends_the_copies_of_the_copy(queue):
    client, message = taken_and_copied(queue)
    (copy,) = collect(client, 1, lease=SHORT_S)
    assert copy.attempts == 2
    client.ack(message, wait=True)
    copied(queue, 3)  # the tracker does not know that the copy's original is acknowledged
    queue.send("b")
    assert [one.body for one in collect(client, 1, lease=LONG_S)] == [b"b"]
    client.flush()
    waiting = queue.records()[-1].offset()
    assert {record.offset() for record in queue.records()} - queue.ended() == {waiting}


def test_r33_headers_that_somebody_forwards_say_nothing(make_queue):
    queue = late_ack_queue(make_queue)
    client, message = taken_and_copied(queue)
    queue.append(None, b"forwarded", queue.records()[-1].headers(), topic=queue.name)
    client.ack(message, wait=True)
    (forwarded,) = collect(client, 1, lease=SHORT_S)
    assert forwarded.body == b"forwarded"
    until(lambda: queue.copies()["forwarded"] == 2)
    (again,) = collect(client, 1, lease=LONG_S)
    assert again.body == b"forwarded"
    assert again.offset > forwarded.offset


def test_r32_where_markers_are_deleted_the_copy_is_handed_out(make_queue):
    queue = late_ack_queue(make_queue)
    client, message = taken_and_copied(queue)
    client.ack(message, wait=True)
    markers = queue.settings.markers_topic
    queue.topics.delete_records(markers, {0: queue.records(markers)[-1].offset() + 1})
    (again,) = collect(client, 1, lease=LONG_S)
    assert (again.body, again.attempts) == (b"a", 2)


def test_r32_a_copy_whose_markers_can_not_be_read_is_given_back(make_queue, monkeypatch):
    queue = late_ack_queue(make_queue)
    client = queue.client()
    queue.send("a", "b")
    messages = collect(client, 2, lease=SHORT_S)
    copied(queue)
    client.ack(messages[0], wait=True)
    scan, failed = RepeatedReader.scan, []

    def fail_once(*arguments):
        if not failed:
            failed.append(True)
            raise Unavailable("no answer")
        return scan(*arguments)

    monkeypatch.setattr(RepeatedReader, "scan", fail_once)
    (again,) = collect(client, 1, lease=LONG_S)
    assert (again.body, again.attempts) == (b"b", 2)
    assert failed
