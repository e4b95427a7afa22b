"""Queues that share a topic of dead letters, or took one over: each touches its own only."""

from typing import Any

import pytest
from letters_support import PARTITIONS, delivered, write

from kmqpy.errors import Unfinished
from kmqpy.kafka.admin import stats
from kmqpy.kafka.dead_letters import KafkaDeadLetters, RedriveResult
from kmqpy.kafka.message_headers import DEAD_LETTER_TOPIC
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import Topics
from tests.torn import tear


@pytest.fixture
def sharing(connection, queue):
    """Another queue with the same dead-letter topic."""
    settings = QueueSettings(name=f"{queue.name}-b", dead_letter_topic=queue.dead_letter_topic)
    Topics(connection).create(settings, PARTITIONS)
    return settings


def letter(number: int, origin: bytes | None, partition: int = 0) -> dict[str, Any]:
    headers = [] if origin is None else [(DEAD_LETTER_TOPIC, origin)]
    return {"value": b"%d" % number, "partition": partition, "headers": headers}


def test_of_two_queues_with_one_dead_letter_topic_each_touches_its_own_only(
    letters, connection, queue, sharing
):
    of = {number: (queue, sharing)[number % 2] for number in range(10)}
    records = [letter(number, one.name.encode(), number // 5) for number, one in of.items()]
    write(connection, queue.dead_letter_topic, *records)
    topic = queue.dead_letter_topic
    with KafkaDeadLetters(sharing, connection) as theirs:
        assert sorted(one.body for one in letters.peek()) == [b"0", b"2", b"4", b"6", b"8"]
        assert sorted(one.body for one in theirs.peek(2)) == [b"1", b"3"]
        assert [stats.queue_stats(connection, one).dead_letters for one in (queue, sharing)] == [5, 5]
        assert theirs.run_redrive([f"{topic}:0:0", f"{topic}:0:1"]) == RedriveResult(1, (f"{topic}:0:0",))
        assert letters.purge() == 5
        assert letters.list() == []
        assert sorted(one.body for one in theirs.peek()) == [b"3", b"5", b"7", b"9"]
        assert theirs.run_redrive() == RedriveResult(4)
        assert letters.run_redrive() == RedriveResult(0)
    assert delivered(connection, queue) == []
    assert sorted(record.value() for record in delivered(connection, sharing)) == [
        b"1",
        b"3",
        b"5",
        b"7",
        b"9",
    ]


def test_what_does_not_say_where_it_came_from_is_of_the_queue_the_topic_is_named_after(
    letters, connection, queue, sharing
):
    odd = [None, b"\xff", b"", b"no topic", None]
    write(connection, queue.dead_letter_topic, *(letter(number, one) for number, one in enumerate(odd)))
    with KafkaDeadLetters(sharing, connection) as theirs:
        assert theirs.list() == []
        assert theirs.run_redrive() == RedriveResult(0)
        assert theirs.purge() == 0
    assert letters.run_redrive() == RedriveResult(5)


def test_in_a_topic_that_is_named_after_no_queue_it_is_of_the_one_that_has_it(connection, queue_name):
    queue = QueueSettings(name=queue_name, dead_letter_topic=f"{queue_name}-given-up")
    Topics(connection).create(queue, 1)
    write(connection, queue.dead_letter_topic, letter(0, None), letter(1, b"former"), letter(2, b"another"))
    with KafkaDeadLetters(queue, connection) as letters:
        assert [one.body for one in letters.peek()] == [b"0"]
    with KafkaDeadLetters(queue, connection, origin="former") as letters:
        assert [one.body for one in letters.peek()] == [b"0", b"1"]
        assert letters.run_redrive() == RedriveResult(2)
    assert [record.value() for record in delivered(connection, queue)] == [b"0", b"1"]


def test_r37_a_torn_redrive_is_mended_by_the_next_one_of_its_queue_only(
    letters, connection, queue, sharing, monkeypatch
):
    """Another queue's would not find its copies, and say that there are none."""
    of = (queue.name.encode(), queue.name.encode(), sharing.name.encode())
    write(connection, queue.dead_letter_topic, *(letter(number, one) for number, one in enumerate(of)))
    tear(monkeypatch, 1)
    with pytest.raises(Unfinished):
        letters.run_redrive()
    with KafkaDeadLetters(sharing, connection) as theirs:
        assert theirs.run_redrive() == RedriveResult(1)
    assert letters.run_redrive() == RedriveResult(1)
    assert sorted(record.value() for record in delivered(connection, queue)) == [b"0", b"1"]
    assert [record.value() for record in delivered(connection, sharing)] == [b"2"]
