"""What is done with messages that have been copied meanwhile (rules R32, R33), on a real Kafka."""

import contextlib
import threading

import pytest
from prometheus_client import CollectorRegistry
from support import collect, until, value

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.stats import in_flight, queue_stats
from kmqpy.kafka.copies import late_acks
from kmqpy.kafka.copies.late_acks import LateAckCheck
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.late_operations import CopyHeaders
from kmqpy.kafka.markers.life import LifeState
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.trace import trace
from kmqpy.telemetry.prometheus import PrometheusTelemetry
from kmqpy.worker.outcome import Retry
from kmqpy.worker.worker import Worker

LONG_S = 60.0
SHORT_S = 1.5
SOON_S = 0.2
LATE_S = 8.0
"""What is asked for late, and not over before the copy is taken."""


@pytest.fixture(params=["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def queue(request, make_queue):
    """A queue with late acks, once for each format of markers, with a tracker."""
    return late_ack_queue(make_queue, request.param)


def counted(registry, queue, what):
    return registry.get_sample_value(f"kmq_client_late_{what}_total", {"queue": queue.name})


def late_acked(registry, queue):
    return counted(registry, queue, "acked")


def all_ended(queue):
    return {record.offset() for record in queue.records()} <= queue.ended()


def copied(queue, times=2):
    """Wait until each message stands in the queue this often."""
    until(lambda: set(queue.copies().values()) == {times})


def late_ack_queue(make_queue, markers="jvm", **settings):
    """A queue with late acks and a tracker."""
    queue = make_queue(late_acks=True, markers=markers, **settings)
    queue.tracker()
    return queue


def taken(client, count):
    """Messages that the client has taken, whose leases are over soon.

    With a short lease from the start, a busy machine gives some back, which makes further copies.
    """
    messages = collect(client, count, lease=LONG_S)
    client.extend(*messages, lease=SOON_S)
    client.flush()
    return messages


def taken_and_copied(queue):
    """A client, and the one message that it has taken, whose lease is over and which is copied."""
    client = queue.client()
    queue.send("a")
    (message,) = taken(client, 1)
    copied(queue)
    return client, message


def test_r32_a_copy_is_not_handed_out_after_an_ack_of_its_original(queue):
    registry = CollectorRegistry()
    client = queue.client(telemetry=PrometheusTelemetry(registry))
    queue.send(*"abcde")
    messages = taken(client, 5)
    copied(queue)
    client.ack(*messages[:3])
    client.nack(messages[3])  # it has been given back already
    client.flush()
    queue.send("f")
    again = collect(client, 3, lease=LONG_S)
    assert [message.body for message in again] == [b"d", b"e", b"f"]
    assert [message.attempts for message in again] == [2, 2, 1]
    client.ack(*again, confirmed=True)
    assert late_acked(registry, queue) == 3
    client.flush()
    assert all_ended(queue)


def test_r32_an_ack_after_the_copy_was_taken_ends_the_copies_of_the_copy(queue):
    client, message = taken_and_copied(queue)
    (copy,) = collect(client, 1, lease=LONG_S)
    assert copy.attempts == 2
    client.ack(message, confirmed=True)
    client.extend(copy.receipt, lease=SOON_S)  # of a receipt, the client does not look for that ack
    copied(queue, 3)  # the tracker does not know that the copy's original is acknowledged
    queue.send("b")
    assert [one.body for one in collect(client, 1, lease=LONG_S)] == [b"b"]
    client.flush()
    waiting = queue.records()[-1].offset()
    assert {record.offset() for record in queue.records()} - queue.ended() == {waiting}


def test_r32_what_earlier_takers_ask_for_applies_to_the_copy(queue):
    registry = CollectorRegistry()
    client = queue.client(telemetry=PrometheusTelemetry(registry))
    queue.send(*"abc")
    rejected, deferred, extended = taken(client, 3)
    copied(queue)
    client.dead_letter(rejected, reason="why")
    client.nack(deferred, delay=LATE_S)
    client.extend(extended, lease=LATE_S)
    client.flush()
    queue.send("d")
    assert [message.body for message in collect(client, 1, lease=LONG_S)] == [b"d"]
    assert (counted(registry, queue, "dead_lettered"), counted(registry, queue, "postponed")) == (1, 2)
    client.ack(extended, confirmed=True)
    (again,) = collect(client, 1, lease=LONG_S)
    assert (again.body, again.attempts) == (b"b", 2)
    until(lambda: not client.receive(1, wait=0.2) and late_acked(registry, queue) == 1)
    until(queue.dead_letters)
    (dead,) = queue.dead_letters()
    assert (dead.value(), dict(dead.headers())["kmq-dead-letter-reason"]) == (b"a", b"rejected: why")
    client.flush()
    assert queue.copies() == {"a": 2, "b": 3, "c": 3, "d": 1}


def test_r32_who_has_a_copy_is_told_that_it_is_acknowledged_and_makes_no_dead_letter_of_it(make_queue):
    queue = late_ack_queue(make_queue, max_redeliveries=1)
    client = queue.client()
    queue.send(*"abcd")
    messages = taken(client, 4)
    copied(queue)
    copies = collect(client, 4, lease=LONG_S)
    assert client.extend(*messages, *copies, lease=LONG_S) == []
    client.ack(*messages[:3], confirmed=True)
    assert client.extend(copies[0], copies[3], lease=LONG_S) == [copies[0].receipt]
    client.nack(copies[0])
    client.nack(copies[1])  # its last attempt
    client.dead_letter(copies[2], copies[3])
    client.flush()
    until(queue.dead_letters)
    assert [dead.value() for dead in queue.dead_letters()] == [b"d"]
    until(lambda: all_ended(queue))
    assert set(queue.copies().values()) == {2}
    assert [dead.value() for dead in queue.dead_letters()] == [b"d"]


def test_r32_an_acknowledged_copy_whose_taker_dies_in_its_last_attempt_is_no_dead_letter(make_queue):
    queue = make_queue(late_acks=True, max_redeliveries=1)
    tracker = queue.tracker()
    client = queue.client()
    queue.send(*"abc")
    messages = taken(client, 3)
    copied(queue)
    copies = collect(client, 3, lease=LONG_S)
    client.ack(*messages[:2], confirmed=True)
    # As if their taker had died. Of receipts, the client does not look for these acks.
    client.extend(*(copy.receipt for copy in copies), lease=SOON_S)
    until(queue.dead_letters)
    until(lambda: all_ended(queue))
    assert [dead.value() for dead in queue.dead_letters()] == [b"c"]
    assert set(queue.copies().values()) == {2}
    assert value(tracker, queue.name, "dead_letters_spared") == 2
    life = trace(queue.connection, queue.settings, messages[0].receipt)
    assert life.state is LifeState.ACKNOWLEDGED
    assert (life.events[-1].record, life.events[-1].reason) == (life.records[-1], "by an earlier taker")
    stats = queue_stats(queue.connection, queue.settings)
    assert (stats.depth, stats.in_flight, stats.dead_letters) == (0, 0, 1)
    assert in_flight(queue.connection, queue.settings) == []


def test_r32_a_copy_planned_long_ago_is_examined_while_newer_ones_come(make_queue, monkeypatch):
    """Neither can be read to the end at once; what was read for one must not be read again for the other."""
    monkeypatch.setattr(partition_reader, "_BATCH_RECORDS", 10)
    monkeypatch.setattr(late_acks, "_MAX_KNOWN_MARKERS", 40)
    monkeypatch.setattr(late_acks, "_MAX_GAP_MARKERS", 5)
    queue = make_queue(late_acks=True)
    claim = queue.append(*naming_tick(0, CLAIM, [0]))
    key, value_, headers = codec.encode(Marker(0, 0, Op.END, by_tracker=True))
    queue.append(key, value_, [*headers, (COPY, b"0:500")])
    queue.mark_all(Marker(0, 1_000 + n, Op.END) for n in range(150))
    queue.mark(Marker(0, 0, Op.END))  # of the original, late
    with contextlib.closing(LateAckCheck(queue.connection, queue.settings, SYSTEM_CLOCK, str)) as check:
        for _ in range(40):
            found = check.examine({0: {500: CopyHeaders(claim, b"0:0")}}, within_s=0).acknowledged
            if found:
                break
            for _ in range(2):
                newer = queue.mark_all(Marker(0, 2_000 + n, Op.END) for n in range(7))[-1]
                check.examine({0: {600: CopyHeaders(newer)}}, within_s=0)
        assert found == [(0, 500)]


def test_r32_a_worker_is_told_and_gives_nothing_back(make_queue):
    live = late_ack_queue(make_queue)
    lost, gate = threading.Event(), threading.Event()

    def handler(_):
        assert gate.wait(60)
        raise Retry(delay=0)

    live.send("a")
    with KmqClient(live.settings, live.connection) as queue:
        (message,) = taken(queue, 1)
        copied(live)
        with Worker(queue, handler, lease=SHORT_S, on_lost=lambda _: lost.set()) as worker:
            until(lambda: worker._unfinished)
            queue.ack(message, confirmed=True)
            assert lost.wait(60)
            copies = live.copies()
            gate.set()
            until(lambda: not worker._unfinished)
        queue.flush()
    assert all_ended(live)
    assert live.copies() == copies


def test_r32_what_nobody_knows_is_not_lost(make_queue, monkeypatch):
    queue = late_ack_queue(make_queue)
    client, message = taken_and_copied(queue)
    (copy,) = collect(client, 1, lease=LONG_S)
    client.ack(message, confirmed=True)
    with monkeypatch.context() as patched:
        patched.setattr(RepeatedReader, "scan", unanswered)
        assert client.extend(copy, lease=LONG_S) == []
    assert client.extend(copy.receipt, lease=LONG_S) == []  # nobody knows that it is that of a copy
    assert client.extend(copy, lease=LONG_S) == [copy.receipt]


def unanswered(*_):
    raise Unavailable("no answer")


@pytest.mark.breadth
def test_r33_headers_that_somebody_forwards_say_nothing(make_queue):
    queue = late_ack_queue(make_queue)
    client, message = taken_and_copied(queue)
    queue.append(None, b"forwarded", queue.records()[-1].headers(), topic=queue.name)
    client.ack(message, confirmed=True)
    (forwarded,) = collect(client, 1, lease=SHORT_S)
    assert forwarded.body == b"forwarded"
    until(lambda: queue.copies()["forwarded"] == 2)
    (again,) = collect(client, 1, lease=LONG_S)
    assert again.body == b"forwarded"
    assert again.offset > forwarded.offset


@pytest.mark.breadth
def test_r32_where_markers_are_deleted_the_copy_is_handed_out(make_queue):
    queue = late_ack_queue(make_queue)
    client, message = taken_and_copied(queue)
    client.ack(message, confirmed=True)
    markers = queue.settings.markers_topic
    queue.topics.delete_records(markers, {0: queue.records(markers)[-1].offset() + 1})
    (again,) = collect(client, 1, lease=LONG_S)
    assert (again.body, again.attempts) == (b"a", 2)


@pytest.mark.breadth
def test_r32_a_copy_whose_markers_can_not_be_read_is_given_back(make_queue, monkeypatch):
    queue = late_ack_queue(make_queue)
    client = queue.client()
    queue.send("a", "b")
    messages = taken(client, 2)
    copied(queue)
    client.ack(messages[0], confirmed=True)
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
