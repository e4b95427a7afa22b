"""Dead letters on a real broker: listed, sent back as if never delivered, thrown away."""

import os
from typing import Any

import pytest
from letters_support import (
    PARTITIONS,
    assert_each_once,
    bury,
    delivered,
    id_of,
    tracker_headers,
    transactional,
    write,
)
from support import committed_records, configure, delete_topic, until

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, UnsupportedMarker
from kmqpy.kafka import partition_reader
from kmqpy.kafka.dead_letters import KafkaDeadLetters, RedriveResult
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM_ID
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    ORIGINAL_TIMESTAMP,
)
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import Topics


def ancestor(queue: QueueSettings, number: int) -> tuple[str, bytes]:
    """The header of a redriven message that names its dead letter, one of those of bury()."""
    place = f"{queue.dead_letter_topic}:{number % PARTITIONS}:{number // PARTITIONS}"
    return ANCESTORS, place.encode()


def test_list_says_what_the_headers_say(letters, connection, queue):
    bury(connection, queue, 5, size=10)

    found = letters.list()

    assert [one.id for one in found if one.key == b"key-3"] == [id_of(3)]
    one = next(one for one in found if one.key == b"key-3")
    assert (one.origin_topic, one.origin_partition, one.origin_offset) == (queue.name, 0, 3)
    assert (one.attempts, one.reason, one.first_enqueued_ms) == (4, "nack: schön", 1_700_000_000_000)
    assert abs(one.dead_since_ms - SYSTEM_CLOCK.wall_ms()) < 60_000
    assert [one.size] == [len(whole.body) for whole in letters.peek() if whole.id == one.id]
    assert (one.body, one.headers) == (b"", ())
    assert len(found) == 5


def test_the_oldest_come_first_and_no_more_than_asked_for(letters, connection, queue):
    base = SYSTEM_CLOCK.wall_ms() - 10_000
    write(
        connection,
        queue.dead_letter_topic,
        *(
            {"value": b"%d" % number, "partition": PARTITIONS - 1 - number // 2, "timestamp": base + number}
            for number in range(6)
        ),
    )
    assert [one.body for one in letters.peek(3)] == [b"0", b"1", b"2"]
    assert len(letters.list(100)) == 6


def test_peek_shows_body_and_headers(letters, connection, queue):
    bury(connection, queue, 1)
    (one,) = letters.peek()
    assert one.body == b"0"
    assert one.headers == tuple(tracker_headers(queue, 0))


def test_headers_that_cannot_be_read_hide_no_dead_letter(letters, connection, queue):
    odd = [
        (DEAD_LETTER_ATTEMPTS, b"four"),
        (DEAD_LETTER_OFFSET, b"\xff\x00"),
        (DEAD_LETTER_PARTITION, b"9" * 40),
        (DEAD_LETTER_REASON, b"\xff\xfe"),
        (DEAD_LETTER_TOPIC, queue.name.encode()),
        (ORIGINAL_TIMESTAMP, None),
        (queue.redelivery_count_header, b"123"),
    ]
    write(
        connection,
        queue.dead_letter_topic,
        {"value": b"odd", "partition": 1, "headers": odd},
        {"value": None, "key": None, "partition": 1},
    )
    odd_one, empty = letters.peek()
    assert (odd_one.attempts, odd_one.origin_offset, odd_one.origin_partition) == (None, None, None)
    assert odd_one.reason == "\ufffd\ufffd"
    assert (empty.key, empty.body, empty.size) == (None, b"", 0)

    assert letters.run_redrive() == RedriveResult(2)
    records = {record.value(): record for record in delivered(connection, queue)}
    assert set(records) == {b"odd", None}
    assert all(record.partition() == 1 for record in records.values())


def test_redrive_sends_everything_back_as_if_never_delivered(letters, connection, queue):
    bury(connection, queue, 2_500)
    calls: list[tuple[int, int]] = []

    result = letters.run_redrive(progress=lambda done, total: calls.append((done, total)))

    assert result == RedriveResult(2_500)
    assert_each_once(connection, queue, 2_500)
    assert letters.list() == []
    done, totals = zip(*calls, strict=True)
    assert done == (834, 1_667, 2_500)  # a transaction for each partition
    assert totals[-1] == 2_500
    assert all(2_500 <= total <= 2_500 + PARTITIONS for total in totals)  # a control record in each
    record = next(r for r in delivered(connection, queue) if r.value() == b"4")
    assert record.partition() == 4 % PARTITIONS
    assert record.key() == b"key-4"
    assert record.headers()[:-1] == [*tracker_headers(queue, 4)[:5], ancestor(queue, 4)]
    assert record.headers()[-1][0] == CLAIM_ID
    assert letters.run_redrive() == RedriveResult(0)


def test_redrive_by_id_says_which_are_missing(letters, connection, queue):
    bury(connection, queue, 9_000)  # with gaps that are worth a seek
    ids = [id_of(0), id_of(8_997), id_of(17), "1-999999", "7-0", id_of(8_997)]

    result = letters.run_redrive(ids)

    assert result == RedriveResult(3, ("1-999999", "7-0"))
    assert sorted(int(r.value()) for r in delivered(connection, queue)) == [0, 17, 8_997]
    assert letters.run_redrive([id_of(17), id_of(20)]) == RedriveResult(1, (id_of(17),))
    assert letters.run_redrive([]) == RedriveResult(0)
    assert len(letters.list(10_000)) == 8_996


def test_what_is_no_id_is_refused_before_anything_is_done(letters, connection, queue):
    bury(connection, queue, 1)
    for one in ("", "0", "0-", "a-b", "0-1-2", "-1-2", 3, None):
        with pytest.raises(ConfigError, match="id"):
            letters.run_redrive(["0-0", one])
    assert len(letters.list()) == 1


def test_bad_numbers_are_refused(letters):
    with pytest.raises(ConfigError, match="rate"):
        letters.run_redrive(rate=0)
    with pytest.raises(ConfigError, match="limit"):
        letters.list(0)


class SleepClock(SystemClock):
    """Counts the time that was slept; what else takes time, on a busy machine for example, takes none."""

    slept_s = 0.0

    def monotonic(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        super().sleep(min(seconds, 0.01))


def test_the_rate_is_kept(connection, queue):
    bury(connection, queue, 60)
    done: list[int] = []
    clock = SleepClock()
    with KafkaDeadLetters(queue, connection, clock=clock) as letters:
        letters.run_redrive(rate=40, progress=lambda so_far, _total: done.append(so_far))
    assert clock.slept_s >= 1.25
    assert done == [10, 20, 30, 40, 50, 60]


def test_foreign_headers_of_ours_and_old_counts_are_dropped(letters, connection, queue):
    headers = [("kmq-deliver-at", b"99999999999999"), ("kmq-anything", b"x"), ("mine", b"y")]
    write(connection, queue.dead_letter_topic, {"value": b"v", "partition": 2, "headers": headers})
    letters.run_redrive()
    (record,) = delivered(connection, queue)
    assert [one for one in record.headers() if one[0] not in (ANCESTORS, CLAIM_ID)] == [("mine", b"y")]


def test_a_redriven_message_starts_anew_whatever_the_header_of_its_count_is_called(connection, queue_name):
    queue = QueueSettings(name=queue_name, redelivery_count_header="tries")
    Topics(connection).create(queue, PARTITIONS)
    bury(connection, queue, 1)
    with KafkaDeadLetters(queue, connection) as letters:
        assert letters.run_redrive() == RedriveResult(1)
    (record,) = delivered(connection, queue)
    assert record.headers()[:-1] == [*tracker_headers(queue, 0)[:5], ancestor(queue, 0)]


def test_it_goes_to_the_partition_it_came_from(letters, connection, queue):
    def headers(partition: int, topic: str) -> list[tuple[str, bytes]]:
        return [
            (DEAD_LETTER_TOPIC, topic.encode()),
            (DEAD_LETTER_PARTITION, str(partition).encode()),
        ]

    write(
        connection,
        queue.dead_letter_topic,
        {"value": b"own", "partition": 0, "headers": headers(2, queue.name)},
        {"value": b"gone", "partition": 0, "key": b"k", "headers": headers(11, queue.name)},
        {"value": b"foreign", "partition": 0, "headers": headers(2, "another")},
    )
    letters.run_redrive()
    with KafkaDeadLetters(queue, connection, origin="another") as foreign:
        foreign.run_redrive()
    found = {record.value(): record.partition() for record in delivered(connection, queue)}
    assert (found[b"own"], found[b"foreign"]) == (2, 0)
    assert found[b"gone"] in range(PARTITIONS)


def test_acknowledged_ones_are_left_out_and_odd_markers_are_harmless(letters, connection, queue):
    bury(connection, queue, 6)
    topic = dead_letter_queue(queue).markers_topic

    def record(marker: Marker) -> dict[str, Any]:
        key, value, headers = codec.encode(marker)
        return {"key": key, "value": value, "partition": marker.partition, "headers": headers}

    write(
        connection,
        topic,
        {"key": b"junk", "value": None, "partition": 0},
        record(Marker(0, 0, Op.TAKE, 1)),  # taken, not finished: still a dead letter
        record(Marker(0, 1, Op.END)),
        record(codec.tick(1)),
        record(Marker(2, 2**40, Op.END)),
    )
    assert len(letters.list()) == 5
    assert letters.run_redrive().redriven == 5
    assert sorted(r.value() for r in delivered(connection, queue)) == [b"0", b"1", b"2", b"4", b"5"]


def test_a_marker_of_a_newer_version_stops_a_redrive(letters, connection, queue):
    bury(connection, queue, 3)
    topic = dead_letter_queue(queue).markers_topic
    write(connection, topic, {"key": codec.encode_key(0, 0), "value": b"\x05", "partition": 0})
    assert len(letters.list()) == 3
    with pytest.raises(UnsupportedMarker, match=r"partition 0, offset 0.*upgrade"):
        letters.run_redrive()
    assert delivered(connection, queue) == []


def test_nothing_hangs_on_open_and_aborted_transactions(letters, connection, queue):
    bury(connection, queue, 3)
    producer = transactional(connection, queue)
    producer.begin_transaction()
    producer.produce(queue.dead_letter_topic, b"never", partition=0)
    producer.flush(60)
    producer.abort_transaction(60)  # partition 0 ends in records that nobody sees
    producer.begin_transaction()
    producer.produce(queue.dead_letter_topic, b"3", partition=1)
    producer.flush(60)

    assert [one.body for one in letters.peek()] == [b"0", b"1", b"2"]
    assert letters.run_redrive() == RedriveResult(3)
    producer.commit_transaction(60)
    committed_records(connection, queue.dead_letter_topic)
    assert [one.body for one in letters.peek()] == [b"3"]
    assert letters.run_redrive() == RedriveResult(1)
    assert_each_once(connection, queue, 4)


def test_one_that_the_queue_does_not_take_holds_back_no_other(letters, connection, queue):
    bury(connection, queue, 20)
    write(connection, queue.dead_letter_topic, {"value": os.urandom(50_000), "partition": 0})
    configure(Topics(connection), queue.name, {"max.message.bytes": "20000"})

    unnamed = f"{queue.dead_letter_topic}:0:8"
    result = letters.run_redrive()

    assert result == RedriveResult(20, (), (unnamed,))
    assert_each_once(connection, queue, 20)
    assert [one.id for one in letters.list()] == [unnamed]


def test_purge_removes_all_that_are_left(letters, connection, queue):
    bury(connection, queue, 300)
    letters.run_redrive([id_of(0)])

    assert letters.purge() == 299

    assert letters.list() == []
    assert letters.run_redrive() == RedriveResult(0)
    starts = partition_reader.bounds(connection, queue.dead_letter_topic, range(PARTITIONS))
    assert all(first == end for first, end in starts.values())
    ended = []
    topic = dead_letter_queue(queue).markers_topic
    partition_reader.scan(connection, topic, dict.fromkeys(range(PARTITIONS), 0), ended.append)
    ended = [record.key() for record in ended if codec.decode_key(record.key())[1] != codec.TICK_OFFSET]
    assert len(set(ended)) == len(ended) == 300
    assert letters.purge() == 0
    bury(connection, queue, 3, first=300)
    assert len(letters.list()) == 3


def test_missing_topics_say_what_to_run(connection, queue):
    topics = Topics(connection)
    create = f"kmq queue create {queue.name}"
    with KafkaDeadLetters(queue, connection) as letters:
        for topic, error in (
            (dead_letter_queue(queue).markers_topic, TopicError),
            (queue.dead_letter_topic, TopicError),
            (queue.name, QueueNotFound),
        ):
            delete_topic(topics, topic)
            with pytest.raises(error, match=create) as raised:
                letters.run_redrive()
            assert topic in str(raised.value)
        for call in (letters.list, letters.peek, letters.purge):
            with pytest.raises(TopicError, match=create):
                call()


def test_from_a_tracker_and_back_to_a_client(make_queue):
    queue = make_queue(1, max_redeliveries=1)
    queue.tracker()
    queue.send(b"poison", headers={"trace": "t"})
    with KmqClient(queue.settings, queue.connection) as client:
        for attempt in (1, 2):
            (message,) = client.receive(wait=60, lease=60)
            assert message.attempts == attempt
            client.nack(message, reason=f"try {attempt}")

        with KafkaDeadLetters(queue.settings, queue.connection) as letters:
            until(letters.list)
            (letter,) = letters.peek()
            assert (letter.body, letter.attempts, letter.reason) == (b"poison", 2, "nack: try 2")
            # The copy that was dead-lettered, and when the first one was sent.
            assert (letter.origin_topic, letter.origin_partition) == (queue.name, 0)
            assert letter.origin_offset == message.offset
            assert letter.first_enqueued_ms == message.first_enqueued_ms < letter.dead_since_ms
            assert letters.run_redrive() == RedriveResult(1)
            assert letters.list() == []

        (again,) = client.receive(wait=60)
        assert (again.body, again.attempts) == (b"poison", 1)
        assert again.first_enqueued_ms == letter.first_enqueued_ms
        assert again.header("trace") == b"t"
        client.ack(again, confirmed=True)
