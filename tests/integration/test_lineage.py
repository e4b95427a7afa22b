"""Copies and their originals name each other, on real servers."""

import pytest
from support import collect, until, value

from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY, RecordPlace, read_copies
from kmqpy.kafka.topic_names import dead_letter_queue


def copies_named(queue, topic=None):
    """The copies that end markers in the queue's markers topic, or in `topic`, name; by message."""
    found = {}
    for record in queue.records(topic or queue.settings.markers_topic):
        marker = codec.decode(record.key(), record.value(), record.headers())
        named = dict(record.headers() or ()).get(COPY)
        if marker.op is Op.END and named is not None:
            own = queue.name if topic is None else queue.settings.dead_letter_topic
            found |= dict(zip(marker.offsets(), read_copies(named, own, marker.count), strict=True))
    return found


def ancestors(record):
    return dict(record.headers() or ()).get(ANCESTORS)


@pytest.mark.parametrize("either_queue", ["jvm", "range"], indirect=True)
def test_end_markers_name_the_copies_and_these_their_ancestors(either_queue):
    queue = either_queue
    queue.send(*"abc")
    client = queue.client()
    collect(client, 3)
    queue.tracker()
    until(lambda: len(copies_named(queue)) >= 3)
    first = copies_named(queue)
    assert first.keys() == {0, 1, 2}
    again = collect(client, 3, lease=20.0)
    assert {message.offset for message in again} == {place.offset for place in first.values()}
    client.nack(*again)
    until(lambda: len(copies_named(queue)) >= 6)
    by_offset = {record.offset(): record for record in queue.records()}
    for original, place in first.items():
        copy = by_offset[place.offset]
        assert copy.value() == by_offset[original].value()
        assert ancestors(copy) == b"0:%d" % original
        second = by_offset[copies_named(queue)[place.offset].offset]
        assert second.value() == copy.value()
        assert ancestors(second) == b"0:%d,0:%d" % (original, place.offset)


def test_dead_letters_and_redriven_messages_name_topics(make_queue, either_queue):
    queue = either_queue
    queue.tracker()
    queue.send(*"ab")
    client = queue.client()
    client.dead_letter(*collect(client, 2, lease=20.0))
    until(lambda: len(copies_named(queue)) >= 2)
    dead = queue.settings.dead_letter_topic
    letters = {record.offset(): record for record in queue.dead_letters()}
    for original, place in copies_named(queue).items():
        assert place.topic == dead
        assert ancestors(letters[place.offset]) == f"{queue.name}:0:{original}".encode()

    with KafkaDeadLetters(queue.settings, queue.connection) as opened:
        assert opened.redrive() == 2
    until(lambda: len(copies_named(queue, dead_letter_queue(queue.settings).markers_topic)) >= 2)
    redriven = {record.offset(): record for record in queue.records()}
    for letter, place in copies_named(queue, dead_letter_queue(queue.settings).markers_topic).items():
        copy = redriven[place.offset]
        assert place[:2] == (queue.name, 0)
        assert copy.value() == letters[letter].value()
        original = next(one for one, to in copies_named(queue).items() if to == (dead, 0, letter))
        assert ancestors(copy) == f"0:{original},{dead}:0:{letter}".encode()


def test_jvm_readers_see_what_they_saw_before(queue):
    """Key and value of the end marker of a copy are those of any end marker; only headers tell more."""
    queue.send("a")
    queue.mark(Marker(0, 0, Op.TAKE, 100))
    queue.tracker()
    until(lambda: copies_named(queue))
    ends = [one for one in queue.records(queue.settings.markers_topic) if one.key() == codec.encode_key(0, 0)]
    assert [one.value() for one in ends] == [codec.encode_start(100), codec.encode_end()]


@pytest.mark.breadth
@pytest.mark.parametrize("forged", [b"", b"0:0", b"0:99", b"7:1,7:1", b"\xff", b"0:1," * 15_000])
def test_forged_headers_stop_nothing(queue, forged, caplog):
    """Of a message that its sender gave ancestors, and of end markers that name copies that can't be."""
    headers = [(ANCESTORS, forged), ("kmq-by", b"tracker"), (COPY, forged)]
    queue.append(None, b"m", headers, topic=queue.name)
    queue.send("other")
    queue.append(codec.encode_key(0, 99), codec.encode_end(), headers[1:])
    queue.mark(Marker(0, 0, Op.TAKE, 100))
    queue.mark(Marker(0, 1, Op.TAKE, 100))
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "redelivered") >= 2)
    until(lambda: queue.copies() == {"m": 2, "other": 2})
    copies = queue.records()[2:]
    assert {record.value(): ancestors(record) for record in copies} == {b"m": b"0:0", b"other": b"0:1"}
    assert sum("kmq-ancestors" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.breadth
def test_copies_of_messages_that_were_copied_before_there_were_ancestors(queue):
    """Without the header nobody knows; the list begins with the message itself."""
    queue.append(
        None, b"m", [("kmq-original-partition", b"0"), ("kmq-original-offset", b"7")], topic=queue.name
    )
    queue.mark(Marker(0, 0, Op.TAKE, 100))
    queue.tracker()
    until(lambda: copies_named(queue) == {0: RecordPlace(queue.name, 0, 1)})
    assert ancestors(queue.records()[1]) == b"0:0"
