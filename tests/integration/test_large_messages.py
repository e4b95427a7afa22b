"""R7: messages that can't be copied, or only compressed. Small limits of topics stand for large messages."""

import json
import os
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from support import LiveQueue, collect, until, value

from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers.codec import Marker, Op

LIMIT = 2_000
FRAME = 70
"""Bytes of a batch beside the value of its one record, when that has neither key nor headers."""
ROOM = LIMIT - FRAME


@pytest.fixture
def make_small(cluster, make_queue, queue_name):
    """Make a queue whose topics take LIMIT bytes: that of messages, and with `dead` that of dead letters."""

    def make(dead: bool = False, **settings) -> LiveQueue:
        names = [queue_name, f"{queue_name}__undelivered"][: 1 + dead]
        small = {"max.message.bytes": str(LIMIT)}
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        for future in admin.create_topics([NewTopic(name, 1, 1, config=small) for name in names]).values():
            future.result()
        return make_queue(**settings)

    return make


def append(queue, value, key=None, headers=()):
    return queue.append(key, value, headers, topic=queue.name)


def take(queue, *offsets, lease_ms=1):
    queue.mark_all(Marker(0, offset, Op.TAKE, lease_ms) for offset in offsets)


def failures(queue, tracker):
    return value(tracker, queue.name, "redelivery_failures")


@pytest.mark.parametrize("codec", ["gzip", pytest.param("zstd", marks=pytest.mark.breadth)])
def test_r7_what_fits_only_compressed_comes_again_and_ends_as_dead_letter(make_queue, codec):
    queue = make_queue(max_redeliveries=1)
    body = bytes(5_000_000)
    sender = Producer(
        {
            "bootstrap.servers": queue.connection.bootstrap,
            "compression.type": codec,
            "message.max.bytes": 100_000_000,
        }
    )
    sender.produce(queue.name, body, b"key", headers=[("mine", b"1")])
    assert sender.flush(60) == 0
    tracker, client = queue.tracker(), queue.client()
    taken = [collect(client, 1)[0] for _ in range(2)]
    assert [(one.attempts, one.key, one.header("mine")) for one in taken] == [
        (1, b"key", b"1"),
        (2, b"key", b"1"),
    ]
    assert all(one.body == body for one in taken)
    until(lambda: value(tracker, queue.name, "dead_lettered") == 1, what=tracker.problems)
    assert tracker.problems() == []
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        until(letters.list)
        (letter,) = letters.peek()
        assert (letter.body == body, letter.attempts, letter.reason) == (True, 2, "expired")
        assert letters.run_redrive().redriven == 1
    (again,) = collect(client, 1, ack=True)
    assert (again.attempts, again.body == body) == (1, True)


@pytest.mark.parametrize(
    ("key", "body", "headers"),
    [
        (None, os.urandom(ROOM), []),
        pytest.param(os.urandom(ROOM - 1), b"", [], marks=pytest.mark.breadth),
        pytest.param(None, None, [("n", os.urandom(ROOM - 4))], marks=pytest.mark.breadth),
    ],
    ids=["body", "key", "header"],
)
def test_r7_a_message_at_the_limit_is_a_dead_letter_when_its_attempts_are_used_up(
    make_small, key, body, headers
):
    queue = make_small(max_redeliveries=2)
    at_limit = append(queue, body, key, headers)
    take(queue, at_limit, append(queue, b"other"))
    tracker = queue.tracker()
    for metric in ("dead_lettered", "redelivered"):
        until(lambda name=metric: value(tracker, queue.name, name) == 1, what=tracker.problems)
    assert failures(queue, tracker) == 2
    assert tracker.problems() == []
    until(queue.dead_letters)
    (letter,) = queue.dead_letters()
    assert (letter.key(), letter.value()) == (key, body)
    assert letter.headers()[: len(headers)] == headers
    until(lambda: [record.value() for record in queue.records()] == [body, b"other", b"other"])
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        (shown,) = letters.list()
        assert shown.attempts == 1
        assert shown.reason.startswith(f"refused: topic {queue.name} takes no copy of about ")
        assert shown.reason.endswith(" bytes (MSG_SIZE_TOO_LARGE); expired")
        assert letters.run_redrive().refused == (shown.id,)
        queue.topics.configure(queue.name, {"max.message.bytes": "10000"})
        until(lambda: letters.run_redrive().redriven == 1)


@pytest.mark.breadth
def test_r7_without_a_limit_of_attempts_it_waits_for_a_larger_topic(make_small):
    queue = make_small(max_redeliveries=None)
    take(queue, append(queue, os.urandom(ROOM)))
    tracker = queue.tracker()
    until(lambda: failures(queue, tracker) == 2, what=tracker.problems)
    assert value(tracker, queue.name, "dead_lettered") == 0
    queue.topics.configure(queue.name, {"max.message.bytes": "10000"})
    until(lambda: value(tracker, queue.name, "redelivered") == 1, what=tracker.problems)
    assert tracker.problems() == []


@pytest.mark.parametrize(
    "end",
    [
        "dead letters take it",
        *(pytest.param(one, marks=pytest.mark.breadth) for one in ("acknowledged", "the queue takes it")),
    ],
)
def test_r7_what_even_dead_letters_refuse_stays_in_flight_and_is_named(make_small, end):
    queue = make_small(dead=True, max_redeliveries=1)
    at = append(queue, os.urandom(ROOM))
    tracker, client = queue.tracker(http_port=0), queue.client()
    (message,) = collect(client, 1)
    topics = (queue.name, queue.settings.dead_letter_topic)
    texts = [f"queue {queue.name}, partition 0: offset {at}: topic {topic} takes no copy" for topic in topics]

    def refused(times):
        found, before = failures(queue, tracker), tracker.problems()
        if found:
            assert len(before) == 1, before
            assert before[0].startswith(tuple(texts))
        return found >= times

    until(lambda: refused(1), what=tracker.problems)
    take(queue, append(queue, b"other"))
    until(lambda: refused(2), what=tracker.problems)  # by the queue's topic, then by that of dead letters
    assert value(tracker, queue.name, "redelivered") == 1
    with pytest.raises(HTTPError) as red:
        urlopen(f"http://127.0.0.1:{tracker.http_port}/readyz", timeout=5)
    with red.value as answer:
        assert json.loads(answer.read())["problems"][0].startswith(tuple(texts))
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert [one.offset for one in admin.in_flight(queue.name)] == [at]
    if end == "acknowledged":
        client.ack(message.receipt, confirmed=True)
    else:
        topic = topics[end.startswith("dead")]
        queue.topics.configure(topic, {"max.message.bytes": "10000"})
        metric = "dead_lettered" if end.startswith("dead") else "redelivered"
        before = value(tracker, queue.name, metric)
        until(lambda: value(tracker, queue.name, metric) > before, what=tracker.problems)
    until(lambda: tracker.problems() == [], what=tracker.problems)
    assert len(queue.dead_letters()) == end.startswith("dead")


@pytest.mark.parametrize("topic", ["messages", pytest.param("markers", marks=pytest.mark.breadth)])
def test_r21_a_record_that_unpacks_to_more_than_librdkafka_takes_by_itself_stops_nobody(make_queue, topic):
    """5 kB of zstd."""
    queue = make_queue()
    name = queue.name if topic == "messages" else queue.settings.markers_topic
    sender = Producer(
        {
            "bootstrap.servers": queue.connection.bootstrap,
            "compression.type": "zstd",
            "message.max.bytes": 200_000_000,
        }
    )
    sender.produce(name, bytes(101_000_000), partition=0)
    assert sender.flush(60) == 0
    queue.tracker()
    behind = append(queue, b"behind")
    client = queue.client()
    taken = []
    until(lambda: taken.extend(client.receive()) or any(one.offset == behind for one in taken))
    (again,) = [one for one in collect(client, 1) if one.offset != behind]
    assert (again.body, again.attempts) == (b"behind", 2)


@pytest.mark.breadth
def test_r7_what_others_write_comes_again_as_it_was(make_queue):
    queue = make_queue(max_redeliveries=1)
    records = [
        (None, None, []),
        (bytes(900_000), b"", []),
        (b"", b"h", [("n", None)] * 3 + [("n" * 100_000, b"")]),
        (None, b"v", [(f"{number}", b"%d" % number) for number in range(5_000)]),
    ]
    for key, body, headers in records:
        append(queue, body, key, headers)
    queue.append(None, b"old", topic=queue.name, timestamp_ms=-1)
    tracker, client = queue.tracker(), queue.client()
    collect(client, 5)
    collect(client, 5)
    until(lambda: value(tracker, queue.name, "dead_lettered") == 5, what=tracker.problems)
    for found in (queue.records()[5:], queue.dead_letters()):
        shown = {record.value(): (record.key(), (record.headers() or [])) for record in found}
        for key, body, headers in records:
            assert (shown[body][0], shown[body][1][: len(headers)]) == (key, headers)
        assert shown.keys() == {None, b"", b"h", b"v", b"old"}
    assert tracker.problems() == []
