"""Trackers and late operations in queues with a retry lane, on a real Kafka (rules R46, R47)."""

import contextlib
from dataclasses import replace

import pytest
from support import delete_topic, until, value

from kmqpy.errors import Unfinished
from kmqpy.kafka.client.consumer import QueueConsumer
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers.late_operations import PLANNED_AT
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.message_headers import DEAD_LETTER_PARTITION, DEAD_LETTER_TOPIC
from kmqpy.kafka.settings_mirror import CurrentSettings

LONG_S = 60.0
SOON_S = 0.2


@pytest.fixture
def queue(make_queue):
    """A queue with a retry lane and one priority, with a tracker."""
    queue = make_queue(late_acks=True, retry_lane=True, priorities=2, max_redeliveries=2)
    queue.live_tracker = queue.tracker(wait=False)
    until(lambda: len(queue.live_tracker.owned()) == 3, what=queue.live_tracker.problems)
    return queue


@pytest.fixture
def lanes(queue):
    """By its ending, a consumer of each lane alone, in a group of its own."""
    with contextlib.ExitStack() as ends:
        found = {}
        for lane in queue.settings.lanes():
            alone = replace(lane, consumer_group=f"alone-{lane.name}", markers_topic=lane.markers_topic)
            if lane.lane_of:
                alone = alone.as_lane_of(lane.lane_of)
            consumer = QueueConsumer(alone, queue.connection)
            ends.callback(consumer.close)
            found[lane.lane_ending] = consumer
        yield found


def take(consumer, count):
    found = []

    def enough():
        found.extend(consumer.receive(count - len(found), wait=0.5, lease=LONG_S))
        return len(found) == count

    until(enough)
    return found


def let_go(consumer, *messages):
    """Have their leases end."""
    consumer.extend(*messages, lease=SOON_S)
    consumer.flush()


def copies_in(queue, lane, count):
    until(lambda: len(queue.records(f"{queue.name}__{lane}")) == count)
    return queue.records(f"{queue.name}__{lane}")


def test_r46_late_operations_on_originals_in_other_lanes(queue, lanes):
    queue.send("a", "b", "c", "d")
    a, b, c, d = take(lanes[""], 4)
    let_go(lanes[""], a, b, c, d)
    copies = copies_in(queue, "retry", 4)
    assert len(queue.records()) == 4
    assert [dict(copy.headers())[ANCESTORS] for copy in copies] == [
        f"{queue.name}:0:{offset}".encode() for offset in range(4)
    ]
    lanes[""].ack(a, confirmed=True)
    lanes[""].dead_letter(b, reason="why", confirmed=True)
    first, second = take(lanes["retry"], 2)
    assert (first.body, second.body) == (b"c", b"d")
    assert [one.id for one in (first, second)] == [c.id, d.id] == ["0-2", "0-3"]
    until(queue.dead_letters)
    (dead,) = queue.dead_letters()
    assert (dead.value(), dict(dead.headers())[DEAD_LETTER_TOPIC]) == (b"b", f"{queue.name}__retry".encode())

    # From the retry lane to itself: the first delivery counts still, in the markers of the main lane.
    let_go(lanes["retry"], first, second)
    *_, third = copies_in(queue, "retry", 6)
    named = [value.decode() for name, value in third.headers() if name == PLANNED_AT]
    assert [one.rpartition(":")[0] for one in named] == [f"{queue.name}:0", f"{queue.name}__retry:0"]
    at = copies[3].offset()  # more than 3, if the four were copied in more than one transaction
    assert dict(third.headers())[ANCESTORS] == f"{queue.name}:0:3,0:{at}".encode()
    lanes[""].ack(c, confirmed=True)
    (again,) = take(lanes["retry"], 1)
    assert (again.body, again.id, again.attempts) == (b"d", d.id, 3)
    assert lanes["retry"].receive(1, wait=0.3) == []

    # Of two dead letters, one was acknowledged in its first delivery; the other goes back to the retry lane.
    let_go(lanes["retry"], again)
    until(lambda: len(queue.dead_letters()) == 2)
    letters = KafkaDeadLetters(queue.settings, queue.connection)
    assert {letter.id for letter in letters.list()} == {b.id, d.id}
    assert letters.redrive([d.id]) == 1
    (redriven,) = take(lanes["retry"], 1)
    assert (redriven.body, redriven.id, redriven.attempts) == (b"d", d.id, 1)
    assert len(queue.records()) == 4


def test_each_lane_has_metrics_and_dead_letters_count_once(make_queue):
    queue = make_queue(retry_lane=True)
    tracker = queue.tracker(http_port=0, count_interval_ms=50, wait=False)
    for topic in (
        f"{queue.name}__retry",
        f"{queue.name}__retry",
        queue.name,
        queue.settings.dead_letter_topic,
    ):
        queue.append(None, b"a", topic=topic)

    def shown(lane):
        found = (
            tracker.metrics.registry.get_sample_value(f"kmq_{name}", {"queue": lane, "partition": "0"})
            for name in ("depth", "dead_letters")
        )
        return tuple(found)

    until(lambda: shown(queue.name) == (1, 1) and shown(f"{queue.name}__retry") == (2, None))
    assert tracker.metrics.backlog(queue.name) == 3


def test_dead_letters_of_a_lane_that_is_gone_stay_those_of_the_queue(make_queue):
    queue = make_queue(2)
    headers = [(DEAD_LETTER_TOPIC, f"{queue.name}__retry".encode()), (DEAD_LETTER_PARTITION, b"1")]
    queue.append(None, b"a", headers, topic=queue.settings.dead_letter_topic)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert len(letters.list()) == letters.redrive() == 1
    assert [(one.partition(), one.value()) for one in queue.records()] == [(1, b"a")]


def test_r47_a_redrive_does_not_commit_to_a_lane_that_is_removed(make_queue, monkeypatch):
    queue = make_queue(retry_lane=True)
    queue.append(None, b"a", topic=queue.settings.dead_letter_topic)
    monkeypatch.setattr(CurrentSettings, "recent", lambda _: replace(queue.settings, retry_lane=False))
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        with pytest.raises(Unfinished):
            letters.redrive()
        assert len(letters.list()) == 1
    assert queue.records(f"{queue.name}__retry") == []


def test_r46_an_acknowledged_message_of_another_lane_becomes_no_dead_letter(queue, lanes):
    lane = next(one for one in queue.settings.lanes() if one.lane_ending == "priority1")
    queue.append(None, b"a", topic=lane.name)
    (message,) = take(lanes["priority1"], 1)
    assert message.id == "priority1:0-0"
    let_go(lanes["priority1"], message)
    (copy,) = take(lanes["retry"], 1)
    assert copy.id == message.id
    lanes["priority1"].ack(message, confirmed=True)
    lanes["retry"].dead_letter(copy, confirmed=True)
    until(lambda: value(queue.live_tracker, f"{queue.name}__retry", "dead_letters_spared") == 1)
    assert queue.dead_letters() == []


def test_r47_without_its_retry_lane_a_queue_redelivers_in_its_own(queue, lanes):
    queue.send("a")
    (a,) = take(lanes[""], 1)
    lanes["retry"].close()
    delete_topic(queue.topics, f"{queue.name}__retry")
    let_go(lanes[""], a)
    (again,) = take(lanes[""], 1)
    assert (again.body, again.id, again.attempts) == (b"a", a.id, 2)
    assert value(queue.live_tracker, queue.name, "lane_fallbacks") == 1
    lanes[""].ack(a, confirmed=True)
    let_go(lanes[""], again)
    queue.send("b")
    assert [one.body for one in take(lanes[""], 1)] == [b"b"]


def test_r47_a_successor_redelivers_what_is_in_flight_in_all_lanes(queue, lanes):
    queue.send("a", "b", "c")
    a, b, c = take(lanes[""], 3)
    let_go(lanes[""], b)
    (again,) = take(lanes["retry"], 1)
    queue.live_tracker.stop()
    lanes[""].dead_letter(c, reason="why", confirmed=True)
    let_go(lanes[""], a)
    let_go(lanes["retry"], again)
    queue.tracker(wait=False)
    found = take(lanes["retry"], 2)
    assert {(one.body, one.id, one.attempts) for one in found} == {(b"a", a.id, 2), (b"b", b.id, 3)}
    until(queue.dead_letters)
    assert [one.value() for one in queue.dead_letters()] == [b"c"]
    assert len(copies_in(queue, "retry", 3)) == 3
