"""When a message comes again and what as: deadlines, nacks, dead letters, delays, bad messages."""

import os
import threading
import time
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewTopic
from support import LEASE_S, bodies, collect, delete_topic, nothing_comes, until, value

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError, MessageError
from kmqpy.kafka.admin.stats import in_flight
from kmqpy.kafka.client import marker_writer
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.trace import trace
from kmqpy.message import Message

LEASE_MS = int(LEASE_S * 1000)


def take(offset: int, after_ms: int = LEASE_MS, partition: int = 0) -> Marker:
    return Marker(partition, offset, Op.TAKE, after_ms)


def wait_for(queue, tracker, metric: str, count: int, timeout: float = 60.0) -> float:
    return until(
        lambda: value(tracker, queue.name, metric) >= count,
        timeout,
        lambda: (metric, value(tracker, queue.name, metric), tracker.problems()),
    )


def last_offset(queue, partition: int = 0) -> int:
    return max(record.offset() for record in queue.records() if record.partition() == partition)


# --- F11: which deadline holds ------------------------------------------------------------------------


@pytest.mark.breadth
@pytest.mark.parametrize("op", [Op.TAKE, Op.EXTEND, Op.NACK])
@pytest.mark.parametrize(("first_ms", "then_ms"), [(300, 1_300), (60_000, 300)], ids=["later", "sooner"])
def test_f11_the_last_marker_sets_the_deadline(queue, op, first_ms, then_ms):
    tracker = queue.tracker()
    queue.send("m")
    queue.mark(take(0, first_ms))
    queue.mark(Marker(0, 0, op, then_ms))
    waited = wait_for(queue, tracker, "redelivered", 1)
    assert waited > then_ms / 1000 - 0.1  # and less than the minute of the earlier marker
    until(lambda: queue.copies() == {"m": 2})  # readers see it some ms after the commit


def test_f11_a_client_extends_its_lease(queue):
    queue.tracker()
    queue.send("m")
    client = queue.client()
    (message,) = collect(client, 1, lease=3.0)
    for _ in range(2):
        client.extend(message, lease=60.0, confirmed=True)
    nothing_comes(client, 3.5)
    client.ack(message, confirmed=True)
    nothing_comes(client, 2 * LEASE_S)
    assert queue.copies() == {"m": 1}


# --- F12, R5: timestamps that lie ---------------------------------------------------------------------


@pytest.fixture
def create_time_queue(queue):
    """A queue whose markers carry the clocks of those who write them."""
    queue.configure(queue.settings.markers_topic, {"message.timestamp.type": "CreateTime"})
    return queue


@pytest.mark.breadth
def test_f12_markers_of_a_slow_clock_change_nothing(create_time_queue):
    queue = create_time_queue
    tracker = queue.tracker()
    queue.send(*"abcd")
    now_ms = time.time_ns() // 1_000_000
    queue.mark(take(0, 1_000), timestamp_ms=now_ms)
    for offset in (1, 2, 3):
        queue.mark(take(offset, 1_000), timestamp_ms=now_ms - offset * 60_000)
    queue.mark(Marker(0, 10**6, Op.END), timestamp_ms=now_ms + 10)
    time.sleep(0.7)
    assert value(tracker, queue.name, "redelivered") == 0  # R5: no lease is shorter than asked
    wait_for(queue, tracker, "redelivered", 4, 1.5)
    until(lambda: queue.copies() == dict.fromkeys("abcd", 2))


def test_f12_after_a_fast_clock_ticks_catch_up(create_time_queue):
    queue = create_time_queue
    tracker = queue.tracker()
    queue.send(*"ab")
    now_ms = time.time_ns() // 1_000_000
    queue.mark(take(0), timestamp_ms=now_ms + 1_500)
    queue.mark(take(1), timestamp_ms=now_ms)
    assert wait_for(queue, tracker, "redelivered", 2) > LEASE_S - 0.1
    until(lambda: queue.copies() == {"a": 2, "b": 2})


# --- F14: races of ack, extend, nack ------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.EXTEND, Op.NACK, Op.DEAD_LETTER])
def test_f14_after_an_ack_nothing_brings_a_message_back(queue, op):
    tracker = queue.tracker()
    queue.send("m", "other")
    queue.mark(take(0))
    queue.mark(Marker(0, 0, Op.END))
    queue.mark(Marker(0, 0, op, 0))
    queue.mark(take(1))
    wait_for(queue, tracker, "redelivered", 1)
    until(lambda: queue.copies() == {"m": 1, "other": 2})
    assert queue.dead_letters() == []


@pytest.mark.breadth
@pytest.mark.parametrize("op", [Op.EXTEND, Op.NACK, Op.DEAD_LETTER])
def test_f14_after_the_redelivery_neither(queue, op):
    tracker = queue.tracker()
    queue.send("m", "other")
    queue.mark(take(0))
    wait_for(queue, tracker, "redelivered", 1)
    queue.mark(Marker(0, 0, op, 0))
    queue.mark(take(1))
    wait_for(queue, tracker, "redelivered", 2)
    until(lambda: queue.copies() == {"m": 2, "other": 2})
    assert queue.dead_letters() == []


@pytest.mark.breadth
def test_f14_extensions_racing_with_acks_make_no_copies(either_queue):
    queue = either_queue
    tracker = queue.tracker()
    count = 200
    queue.send(*(f"m{i}" for i in range(count)))
    client, other = queue.client(), queue.client()
    messages = collect(client, count, lease=30.0)
    done = threading.Event()

    def extend() -> None:
        while not done.is_set():
            for message in messages:
                other.extend(message.receipt, lease=30.0)

    thread = threading.Thread(target=extend)
    thread.start()
    for message in messages:
        client.ack(message)
        time.sleep(0.001)
    client.flush()
    done.set()
    thread.join()
    other.flush()
    last = len(queue.records(queue.settings.markers_topic))
    part = tracker._partitions[queue.name, 0]
    until(lambda: part.state.position >= last, what=lambda: part.state.position)
    assert len(part.state) == 0, "an extension behind the end marker opened an entry"
    assert queue.copies() == {f"m{i}": 1 for i in range(count)}


def test_a_late_ack_is_harmless_and_counted(queue):
    tracker = queue.tracker()
    queue.send("m")
    client = queue.client()
    (first,) = collect(client, 1)
    (second,) = collect(client, 1)
    client.ack(first, confirmed=True)
    wait_for(queue, tracker, "late_acks", 1)
    client.ack(second, confirmed=True)
    nothing_comes(client, 2 * LEASE_S)
    assert value(tracker, queue.name, "late_acks") == 1
    until(lambda: queue.copies() == {"m": 2})


# --- nack, dead_letter --------------------------------------------------------------------------------


def test_a_nacked_message_comes_again_after_its_delay(queue):
    queue.tracker()
    queue.send("now", "later", "uncounted")
    client = queue.client()
    now, later, uncounted = collect(client, 3, lease=60.0)
    client.nack(now)
    client.nack(later, delay=3.0)
    client.nack(uncounted, count=False)
    started = time.monotonic()
    again = {message.body: message.attempts for message in collect(client, 2, ack=True)}
    assert again == {b"now": 2, b"uncounted": 1}
    assert bodies(collect(client, 1, lease=60.0)) == ["later"]
    assert time.monotonic() - started > 2.9


@pytest.mark.parametrize("markers", ["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def test_r44_what_failed_waits_as_long_as_the_queue_says_also_for_the_next_tracker(make_queue, markers):
    queue = make_queue(retry_delays=["4s", "100ms"], max_redeliveries=2, markers=markers)
    tracker = queue.tracker()
    queue.send("nacked", "expired", "at once", "uncounted", "done")
    client = queue.client()
    nacked, expired, at_once, uncounted, done = collect(client, 5, lease=60.0)
    started = time.monotonic()
    client.nack(nacked.receipt, reason="busy")
    client.extend([expired, done], lease=0.2)
    client.nack(at_once, delay=0)
    client.nack(uncounted, count=False)
    assert {one.body for one in collect(client, 2, ack=True)} == {b"at once", b"uncounted"}
    assert time.monotonic() - started < 3.9
    until(lambda: client.in_flight() == 0)
    held = {one.offset: one for one in in_flight(queue.connection, queue.settings)}
    assert {at: (one.state, one.reason, one.attempts) for at, one in held.items()} == {
        0: (EntryState.RELEASED, "busy", 1),
        1: (EntryState.RELEASED, "expired", 1),
        4: (EntryState.RELEASED, "expired", 1),
    }
    client.ack(done, confirmed=True)
    tracker.stop()
    tracker = queue.tracker()
    again = {message.body: message.attempts for message in collect(client, 2, lease=60.0)}
    assert 3.9 < time.monotonic() - started < 20
    assert again == {b"nacked": 2, b"expired": 2}
    for one in (nacked, expired):
        life = trace(queue.connection, queue.settings, one.receipt)
        assert [event.what.value for event in life.events].count("held back") == 1
    nothing_comes(client, 0.5)  # the copies are in flight, and `done` is acknowledged


def test_reasons_stand_in_the_dead_letter(make_queue):
    queue = make_queue(max_redeliveries=0)
    tracker = queue.tracker()
    queue.send("nacked", "rejected", "expired", "silent")
    client = queue.client()
    nacked, rejected, expired, silent = collect(client, 4, lease=60.0)
    client.nack(nacked, reason="no täste")
    client.dead_letter(rejected, reason="no form")
    client.extend(rejected, lease=60.0)  # too late: it is decided
    client.nack(silent, count=False)
    client.extend(expired, lease=0.2)
    wait_for(queue, tracker, "dead_lettered", 3)
    reasons = {r.value().decode(): dict(r.headers())["kmq-dead-letter-reason"] for r in queue.dead_letters()}
    assert reasons == {
        "nacked": "nack: no täste".encode(),
        "rejected": b"rejected: no form",
        "expired": b"expired",
    }
    assert queue.copies()["silent"] == 2


def test_a_dead_letter_stays_one_whatever_comes_after(queue):
    queue.send("m")
    queue.mark(take(0, 60_000))
    for op in (Op.DEAD_LETTER, Op.EXTEND, Op.NACK, Op.TAKE):
        queue.mark(Marker(0, 0, op, 60_000))
    wait_for(queue, queue.tracker(), "dead_lettered", 1)
    assert queue.copies() == {"m": 1}


# --- R16: delays and extreme leases -------------------------------------------------------------------


def test_r16_a_delayed_message_is_not_handed_out_before_its_time_and_loses_no_attempt(queue):
    queue.tracker()
    client = queue.client()
    nothing_comes(client, 0.3)
    producer = queue.producer()
    started = time.monotonic()
    producer.send("later", delay=2.0, headers={"mine": "x"}, partition=0)
    producer.send("now", partition=0)
    came: dict[bytes, tuple[float, Message]] = {}
    while len(came) < 2:
        for one in collect(client, 1, ack=True):
            came[one.body] = time.monotonic() - started, one
    assert came.keys() == {b"now", b"later"}
    after_s, message = came[b"later"]
    assert after_s > 1.9
    assert message.attempts == 1
    assert message.header("kmq-deliver-at") is None
    assert message.header("mine") == b"x"
    nothing_comes(client, 2 * LEASE_S)


def test_r16_a_delay_that_is_over_costs_no_detour(queue):
    queue.send("later", delay=0.2)
    time.sleep(0.3)
    client = queue.client()
    (message,) = collect(client, 1, ack=True)
    assert (message.body, message.attempts) == (b"later", 1)
    assert queue.copies() == {"later": 1}


def test_r16_a_delay_above_the_limit_is_refused(make_queue):
    queue = make_queue(max_delay_ms=1_000)
    with pytest.raises(MessageError, match=r"max_delay"):
        queue.send("m", delay=1.5)


@pytest.mark.breadth
def test_r16_extreme_leases_end_when_they_say(queue):
    tracker = queue.tracker()
    queue.send("endless", "negative", "smallest")
    queue.mark(take(0, INT64_MAX))
    queue.mark(take(1, -5))
    queue.mark(take(2, -(2**63)))
    wait_for(queue, tracker, "redelivered", 2)
    until(lambda: queue.copies() == {"endless": 1, "negative": 2, "smallest": 2})
    queue.mark(Marker(0, 0, Op.EXTEND, 200))
    wait_for(queue, tracker, "redelivered", 3)


# --- F10, R7: what can't be written holds up nothing else ---------------------------------------------


def test_f10_a_missing_dead_letter_topic_holds_up_only_dead_letters(make_queue):
    queue = make_queue(2, max_redeliveries=1)
    dead = queue.settings.dead_letter_topic
    delete_topic(queue.topics, dead)
    tracker = queue.tracker()
    for partition in (0, 1):
        queue.send("a", "b", partition=partition)
    poison = [("kmq-redelivery-count", b"\x01")]
    queue.append(b"k", b"poison", poison, topic=queue.name)
    for offset in (2, 0, 1):
        queue.mark(take(offset))
    wait_for(queue, tracker, "redelivered", 2)
    until(lambda: any(dead in problem for problem in tracker.problems()))
    assert dead not in queue.topics.names()
    for offset in (0, 1):
        queue.mark(take(offset, partition=1))
    queue.send("c")
    queue.mark(take(last_offset(queue)))
    wait_for(queue, tracker, "redelivered", 5)
    assert value(tracker, queue.name, "redelivery_failures") > 0
    queue.topics._admin.create_topics([NewTopic(dead, 2, 1)])
    wait_for(queue, tracker, "dead_lettered", 1, 20.0)
    until(lambda: tracker.problems() == [], what=tracker.problems)
    assert [record.value() for record in queue.dead_letters()] == [b"poison"]
    assert queue.copies()["poison"] == 1


def test_r7_a_message_that_became_too_large_holds_up_no_other(make_queue):
    queue = make_queue(max_redeliveries=None)  # else it would become a dead letter
    tracker = queue.tracker()
    queue.send(*(f"before{i}" for i in range(5)), os.urandom(4_000).hex(), *(f"after{i}" for i in range(5)))
    queue.configure(queue.name, {"max.message.bytes": "3000"})
    for offset in range(11):
        queue.mark(take(offset))
    wait_for(queue, tracker, "redelivered", 10)
    until(lambda: tracker.problems() != [])
    assert value(tracker, queue.name, "redelivery_failures") > 0
    queue.send("later")
    queue.mark(take(last_offset(queue)))
    wait_for(queue, tracker, "redelivered", 11)
    queue.configure(queue.name, {"max.message.bytes": "1000000"})
    wait_for(queue, tracker, "redelivered", 12)
    assert set(queue.copies().values()) == {2}
    until(lambda: tracker.problems() == [], what=tracker.problems)


# --- R20 ----------------------------------------------------------------------------------------------


def test_r20_foreign_kmq_headers_are_stripped(queue):
    headers = {"kmq-redelivery-count": b"\x7f", "kmq-deliver-at": "99999999999999", "kmq-x": "y", "mine": "z"}
    queue.send("m", headers=headers)
    (message,) = collect(queue.client(), 1, ack=True)
    assert (message.headers, message.attempts) == ((("mine", b"z"),), 1)


def test_r20_an_undecodable_count_is_zero_and_counted(queue):
    tracker = queue.tracker()
    queue.append(None, b"m", [("kmq-redelivery-count", b"abc")], topic=queue.name)
    client = queue.client()
    assert [collect(client, 1)[0].attempts for _ in range(2)] == [1, 2]
    wait_for(queue, tracker, "undecodable_counts", 1)  # counted after the commit


# --- queues that come, grow and go --------------------------------------------------------------------


def test_a_queue_registered_while_the_tracker_runs_is_picked_up(make_queue):
    queue = make_queue(register=False)
    tracker = queue.tracker(wait=False)
    queue.send("m")
    queue.mark(take(0))
    assert tracker.owned() == []
    queue.register()
    wait_for(queue, tracker, "redelivered", 1)


def test_a_removed_queue_is_let_go(make_queue):
    queue = make_queue(2)
    tracker = queue.tracker()
    with queue.registry() as registry:
        started = time.monotonic()
        registry.remove(queue.name)
        assert time.monotonic() - started < 20  # 30 s is how long it waits for trackers that are away
    until(lambda: tracker.owned() == [])
    assert tracker.problems() == []


def test_settings_changed_in_the_registry_are_followed(make_queue):
    queue = make_queue(max_redeliveries=0)
    tracker = queue.tracker()
    queue.settings = replace(queue.settings, max_redeliveries=5)
    queue.register()
    until(lambda: tracker._partitions[queue.name, 0].queue.max_redeliveries == 5)
    # The tracker writes the record of the old settings, then of the new ones; meanwhile clients refuse these.
    until(lambda: SettingsMirror(queue.connection).find(queue.name) == queue.settings)
    queue.send("m")
    queue.mark(take(0))
    wait_for(queue, tracker, "redelivered", 1)


def test_r19_new_partitions_are_served_while_all_runs(queue):
    tracker, producer = queue.tracker(), queue.producer()
    # A consumer looks for new partitions every 30 s; here more often.
    often = {"topic.metadata.refresh.interval.ms": 500}
    with (
        KmqClient(queue.settings, replace(queue.connection, kafka=often)) as client,
        MarkerWriter(queue.connection, queue.settings) as writer,
    ):
        producer.send("old")
        (old,) = collect(client, 1)
        writer.put_one(Marker(0, old.offset, Op.END))
        assert writer.flush(60) == 0
        queue.topics.grow(queue.settings, 3)
        queue.register(3)
        until(lambda: len(tracker.owned()) == 3, what=tracker.problems)
        producer.send("new", partition=2)
        (first,) = collect(client, 1)
        (second,) = collect(client, 1)
        client.ack(second.receipt, confirmed=True)
        writer.put_one(Marker(1, 0, Op.END))
        assert writer.flush(60) == 0
    assert [(m.body, m.partition, m.attempts) for m in (first, second)] == [(b"new", 2, 1), (b"new", 2, 2)]
    with pytest.raises(ConfigError, match="partition: 3"):
        producer.send("none", partition=3)


def test_f14_a_nack_right_behind_the_ack_does_not_overtake_it(either_queue, monkeypatch):
    for name in ("_COLLECT_S", "_COLLECT_RANGES_S"):
        monkeypatch.setattr(marker_writer, name, 0.3)
    queue = either_queue
    tracker = queue.tracker()
    queue.send(*(f"m{i}" for i in range(60)), "last")
    client = queue.client()
    taken = collect(client, 61, lease=60.0)
    client.ack(*taken[:60])
    for message in taken[:30]:
        client.nack(message)
    client.dead_letter(*taken[30:60])
    client.extend(*taken[:60], lease=0.3)
    client.nack(taken[60])
    client.flush()
    until(lambda: queue.copies()["last"] == 2)
    time.sleep(0.5)
    wait_for(queue, tracker, "redelivered", 1)
    assert value(tracker, queue.name, "redelivered") == 1
    assert queue.dead_letters() == []
