"""Records that others wrote, or somebody forged: each is judged alone (rules R5, R21, R22, R23)."""

import time
from contextlib import closing
from dataclasses import replace

import foreign_headers
import pytest
from confluent_kafka import TopicPartition
from support import bodies, collect, stopped_after, until, value

from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client import crash_recovery
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.zookeeper.session import connect
from tracker import takeover

FOREIGN = [(b"good", b"1"), (b"caf\xe9", b"2"), (b"last", b"3")]
FOREVER_MS = 2**63 - 1
SPAN = codec.MAX_SPAN


def take(offset, redeliver_after_ms=300, partition=0):
    return Marker(partition, offset, Op.TAKE, redeliver_after_ms)


def take_span(first, redeliver_after_ms=FOREVER_MS):
    """24 bytes that take 65,536 messages."""
    return codec.ranges(0, Op.TAKE, range(first, first + SPAN), redeliver_after_ms=redeliver_after_ms)[0]


def redelivered(queue, tracker, count):
    until(lambda: value(tracker, queue.name, "redelivered") >= count, what=tracker.problems)


# --- headers that can't be read -----------------------------------------------------------------------


def test_markers_with_a_foreign_header_name_are_skipped_by_everybody(queue):
    queue.send("a", "b")
    queue.mark(take(0))
    bootstrap, topic = queue.connection.bootstrap, queue.settings.markers_topic
    foreign = [Marker(0, 0, Op.END), Marker(0, 1, Op.END), take(1), Marker(0, 0, Op.EXTEND, FOREVER_MS)]
    for marker in [*foreign, take_span(0)]:
        key, content, _ = codec.encode(marker)
        foreign_headers.write(bootstrap, topic, content, FOREIGN, key=key)
    with stopped_after(queue.tracker(wait=False)) as tracker:
        redelivered(queue, tracker, 1)
        assert value(tracker, queue.name, "undecodable_markers") == 5
        assert tracker.problems() == []
    again = queue.tracker()
    queue.mark(take(1))
    redelivered(queue, again, 1)
    until(lambda: queue.copies() == {"a": 2, "b": 2})
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert admin.in_flight(queue.settings) == []
        assert admin.stats(queue.settings).depth == 2
    assert sorted(message.body for message in collect(queue.client(), 2)) == [b"a", b"b"]


@pytest.mark.breadth
def test_a_message_with_a_foreign_header_name_is_taken_and_redelivered_like_others(queue):
    foreign_headers.write(queue.connection.bootstrap, queue.name, b"foreign", FOREIGN)
    queue.send(*[f"m{i}" for i in range(20)])
    with queue.client() as client:
        messages = collect(client, 21)
        assert messages[0].body == b"foreign"
        assert messages[0].headers == (("good", b"1"), ("last", b"3"))
        assert messages[0].headers == messages[0].headers  # even when they are read again
        assert messages[0].attempts == 1
    tracker = queue.tracker()
    redelivered(queue, tracker, 21)
    assert tracker.problems() == []
    copies = {message.body: message for message in collect(queue.client(), 21)}
    assert copies[b"foreign"].attempts == 2
    assert copies[b"foreign"].headers[:2] == (("good", b"1"), ("last", b"3"))


@pytest.mark.breadth
def test_a_dead_letter_with_a_foreign_header_name_is_listed_and_redriven(queue):
    foreign_headers.write(queue.connection.bootstrap, queue.settings.dead_letter_topic, b"dead", FOREIGN)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert [letter.headers for letter in letters.peek()] == [(("good", b"1"), ("last", b"3"))]
        assert letters.run_redrive().redriven == 1
        until(lambda: letters.list() == [])
    (message,) = collect(queue.client(), 1, ack=True)
    assert message.body == b"dead"


# --- markers that lie ---------------------------------------------------------------------------------


def test_takes_of_messages_that_do_not_exist_hide_none_and_cost_nothing(queue):
    queue.send("first")
    for index in range(100):
        queue.mark(take_span(1 + index * SPAN))
    queue.mark(take_span(0))
    queue.mark(take(0))
    tracker = queue.tracker()
    redelivered(queue, tracker, 1)
    assert value(tracker, queue.name, "undecodable_markers") == 101
    until(lambda: len(tracker._partitions[queue.name, 0].state) == 0)  # the end marker is read
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert admin.in_flight(queue.settings) == []
        assert admin.stats(queue.settings).in_flight == 0
    # They stay lies when such messages come: for those who have read them, and for a client that joins.
    queue.send("second", "third")
    with queue.client() as client:
        assert {message.body for message in collect(client, 3, ack=True)} == {b"first", b"second", b"third"}
        client.flush()
    until(lambda: value(tracker, queue.name, "undecodable_markers") == 101)
    assert len(tracker._partitions[queue.name, 0].state) == 0


@pytest.mark.breadth
def test_a_lie_between_true_takes_changes_none_of_them(queue):
    """Half of what it names exists, with leases of its own."""
    tracker = queue.tracker()
    queue.send("a", "b", "c")
    queue.mark_all([take(0), take(1), take_span(0), take_span(1, 0), take(2)])
    redelivered(queue, tracker, 3)
    until(lambda: queue.copies() == {"a": 2, "b": 2, "c": 2})
    assert value(tracker, queue.name, "undecodable_markers") == 2


@pytest.mark.parametrize(
    "partition", [-1, 1, *(pytest.param(one, marks=pytest.mark.breadth) for one in (-3, 7))]
)
def test_a_marker_that_names_another_partition_is_undecodable_to_everybody(make_queue, partition):
    queue = make_queue(2)
    queue.send("a")
    foreign_headers.write(
        queue.connection.bootstrap, queue.settings.dead_letter_topic, b"dead", [], partition=1
    )
    dead_markers = f"{queue.settings.dead_letter_topic}__markers"
    end, start = codec.encode_end(), codec.encode_start(FOREVER_MS)
    for topic in (dead_markers, queue.settings.markers_topic):
        for content in (start, end):
            queue.append(codec.encode_key(partition, 0), content, topic=topic)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert [letter.body for letter in letters.peek()] == [b"dead"]
    with Admin(queue.connection, queue.zookeeper) as admin:
        found = admin.stats(queue.settings)
        assert (found.depth, found.in_flight, found.dead_letters) == (1, 0, 1)
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "undecodable_markers") == 2)
    assert [message.body for message in collect(queue.client(), 1, ack=True)] == [b"a"]


def test_leases_and_delays_count_at_most_as_the_queue_allows(make_queue):
    queue = make_queue(max_lease_ms=400, max_delay_ms=300)
    tracker = queue.tracker()
    queue.send(*"abcd")
    queue.mark(take(0, FOREVER_MS))
    queue.mark(Marker(0, 1, Op.DELAY, FOREVER_MS, counts=False))
    queue.mark_all([take(2), Marker(0, 2, Op.EXTEND, FOREVER_MS)])
    queue.mark_all([take(3), Marker(0, 3, Op.NACK, FOREVER_MS)])
    redelivered(queue, tracker, 4)
    until(lambda: queue.copies() == dict.fromkeys("abcd", 2))


# --- time that lies -----------------------------------------------------------------------------------


@pytest.mark.breadth
def test_a_marker_of_a_clock_far_ahead_holds_up_nothing(make_queue):
    queue = make_queue()
    queue.configure(queue.settings.markers_topic, {"message.timestamp.type": "CreateTime"})
    tracker = queue.tracker()
    queue.send(*"abc")
    now_ms = time.time_ns() // 1_000_000
    until(lambda: appended_as(queue, now_ms - 5_000))
    queue.mark(take(0, 2_000), timestamp_ms=now_ms)
    queue.mark(take(1), timestamp_ms=now_ms + 120_000)
    queue.mark(take(2), timestamp_ms=now_ms)
    until(lambda: value(tracker, queue.name, "clock_leads") > 0, what=tracker.problems)
    assert any("ahead of the broker's clock" in problem for problem in tracker.problems())
    redelivered(queue, tracker, 3)
    until(lambda: queue.copies() == dict.fromkeys("abc", 2))
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert any("s ahead of this machine's clock" in finding.what for finding in admin.doctor(queue.name))


def appended_as(queue, timestamp_ms):
    """Whether the broker has noticed that it is to keep timestamps."""
    at = queue.mark(codec.tick(0), timestamp_ms=timestamp_ms)
    found = {record.offset(): record.timestamp()[1] for record in queue.records(queue.settings.markers_topic)}
    return found[at] == timestamp_ms


@pytest.mark.breadth
@pytest.mark.parametrize(
    "ahead_ms",
    [120_000, *(pytest.param(one, marks=pytest.mark.breadth) for one in (10 * 365 * 86_400_000, 2**62))],
)
def test_a_stored_time_far_ahead_holds_up_nothing(queue, ahead_ms):
    queue.send("a")
    queue.mark(take(0))
    now_ms = time.time_ns() // 1_000_000
    stored = StoredOffset(0, queue.found.markers.topic_id, now_ms + ahead_ms)
    store(queue, stored.to_json())
    tracker = queue.tracker()
    redelivered(queue, tracker, 1)
    assert any("ahead of the broker's" in problem for problem in tracker.problems())
    assert value(tracker, queue.name, "clock_leads") == 1


@pytest.mark.breadth
def test_a_stored_time_far_ahead_is_told_by_the_doctor(queue):
    store(queue, StoredOffset(0, queue.found.markers.topic_id, 2**62).to_json())
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert any("the time stored in ZooKeeper is" in finding.what for finding in admin.doctor(queue.name))


@pytest.mark.breadth
def test_what_was_stored_with_a_time_ahead_keeps_what_remains_of_its_lease(queue):
    """As after the broker's clock went back: the stored time and the leases are ahead alike."""
    queue.send("a", "b")
    queue.mark_all([take(0, 60_000), take(1, 60_000)])
    with stopped_after(queue.tracker(snapshot_after_markers=1)):
        until(lambda: (found := stored_of(queue)) is not None and len(found.in_flight) == 2)
    found = stored_of(queue)
    ahead_ms = 3_600_000
    first, second = (
        row._replace(since_ms=row.since_ms + ahead_ms, due_ms=row.due_ms + ahead_ms)
        for row in found.in_flight
    )
    rows = (first._replace(due_ms=found.now_ms + ahead_ms + 1_000), second)
    store(queue, replace(found, now_ms=found.now_ms + ahead_ms, in_flight=rows).to_json())
    tracker = queue.tracker()
    redelivered(queue, tracker, 1)
    until(lambda: queue.copies() == {"a": 2, "b": 1})
    (entry,) = tracker._partitions[queue.name, 0].state
    assert entry.due_ms - time.time_ns() // 1_000_000 < 60_000


# --- leader epochs that the log never had (rule R25) ------------------------------------------------


def commit(queue, partition, offset, log):
    """Commit for the queue's group, as whoever may read its topic can."""
    ids = queue.found.queue.topic_id, queue.found.markers.topic_id
    place = TopicPartition(queue.name, partition, offset, f"kmq3:0:{ids[0]}:{ids[1]}:{log}")
    with closing(
        librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
    ) as one:
        one.commit(offsets=[place], asynchronous=False)


def test_r25_commits_that_name_what_their_logs_never_had_lose_nothing(make_queue, monkeypatch):
    """Numbers that trackers refuse would be given: what a client takes then would never come again."""
    monkeypatch.setattr(crash_recovery, "_DISBELIEVED_AFTER_S", 0.1)
    lies = [(2, "400000:0<400000@0:"), (2, "0:0<7@1:"), (1_000, "0::"), (1_000, "600000::")]
    queue = make_queue(partitions=len(lies), lease_ms=300)
    for partition, lie in enumerate(lies):
        queue.send(*(f"{partition}-{number}" for number in range(4)), partition=partition)
        commit(queue, partition, *lie)
    expected = {f"{partition}-{n}" for partition, (at, _) in enumerate(lies) for n in range(at % 1_000, 4)}
    client = queue.client()
    taken = collect(client, len(expected))
    assert set(bodies(taken)) == expected
    assert all(message.place[1] < 4 for message in taken)
    tracker = queue.tracker()
    redelivered(queue, tracker, len(expected))
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert admin.stats(queue.name).depth is not None
    assert set(bodies(collect(client, len(expected)))) == expected


@pytest.mark.breadth
def test_r25_a_stored_offset_that_names_what_its_log_never_had_loses_nothing(queue, monkeypatch):
    monkeypatch.setattr(takeover, "_BELIEVED_TIMES", 1)
    queue.send("a", "b")
    markers_id, queue_id = queue.found.markers.topic_id, queue.found.queue.topic_id
    lie = StoredOffset(
        *(0, markers_id, 0),
        queue_id=queue_id,
        cuts=LogCuts.parse("0<7@1"),
        taken_end=2,
        queue_epoch=500_000,
        takes_epoch=500_000,
    )
    store(queue, lie.to_json())
    queue.mark_all([take(0), take(1)])
    tracker = queue.tracker()
    redelivered(queue, tracker, 2)
    assert queue.copies() == {"a": 2, "b": 2}
    until(lambda: (found := stored_of(queue)) is not None and found.offset > 0)
    found = stored_of(queue)
    assert (found.cuts, found.queue_epoch) == (NO_CUTS, 0)


def store(queue, data):
    with connect(queue.zookeeper) as zk:
        path = f"{queue.connection.root}/queues/{queue.name}/partitions/0/offset"
        if zk.exists(path):
            zk.set(path, data)
        else:
            zk.create(path, data)


def stored_of(queue):
    with queue.registry() as registry:
        return registry.offsets(queue.name).get(0)
