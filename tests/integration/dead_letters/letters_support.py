"""Dead letters as trackers write them, and what came of them."""

from collections import Counter
from typing import Any

from confluent_kafka import Producer
from support import committed_records

from kmqpy.kafka import librdkafka
from kmqpy.kafka.markers import codec
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    ORIGINAL_OFFSET,
    ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP,
)
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

PARTITIONS = 3
FIRST_OFFSET = 10_000
"""Where the first record of dead letter 0 of bury() stood in its partition of the queue topic."""


def tracker_headers(queue: QueueSettings, number: int) -> list[tuple[str, bytes | None]]:
    """What a tracker writes on a dead letter, beside headers of the user's own."""
    return [
        ("trace", b"t-%d" % number),
        ("trace", None),
        (ORIGINAL_PARTITION, b"%d" % (number % PARTITIONS)),
        (ORIGINAL_OFFSET, b"%d" % (FIRST_OFFSET + number // PARTITIONS)),
        (ORIGINAL_TIMESTAMP, b"1700000000000"),
        (queue.redelivery_count_header, codec.encode_count(3)),
        (DEAD_LETTER_TOPIC, queue.name.encode()),
        (DEAD_LETTER_PARTITION, b"%d" % (number % PARTITIONS)),
        (DEAD_LETTER_OFFSET, b"%d" % number),
        (DEAD_LETTER_ATTEMPTS, b"4"),
        (DEAD_LETTER_REASON, "nack: schön".encode()),
    ]


def bury(
    connection: KafkaConnection, queue: QueueSettings, count: int, *, first: int = 0, size: int = 0
) -> None:
    """Write dead letters 0, 1, 2, … round robin, as a tracker does: in transactions."""
    producer = transactional(connection, queue)
    producer.begin_transaction()
    for number in range(first, first + count):
        producer.produce(
            queue.dead_letter_topic,
            b"%d" % number + b"x" * size,
            b"key-%d" % number,
            number % PARTITIONS,
            headers=tracker_headers(queue, number),
        )
    producer.commit_transaction(60)
    committed_records(connection, queue.dead_letter_topic)


def id_of(number: int) -> str:
    """The id of a message that bury() has made a dead letter."""
    return f"{number % PARTITIONS}-{FIRST_OFFSET + number // PARTITIONS}"


def transactional(connection: KafkaConnection, queue: QueueSettings) -> Producer:
    producer = librdkafka.new_producer(
        connection, {"transactional.id": f"test-{queue.name}", "transaction.timeout.ms": 60_000}
    )
    producer.init_transactions(60)
    return producer


def write(connection: KafkaConnection, topic: str, *records: dict[str, Any]) -> None:
    producer = librdkafka.new_producer(connection, {})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(60) == 0


def delivered(connection: KafkaConnection, queue: QueueSettings) -> list[Any]:
    """The records of the queue topic that a read_committed reader sees; no transaction stays open."""
    return committed_records(connection, queue.name)


def assert_each_once(connection: KafkaConnection, queue: QueueSettings, count: int) -> None:
    seen = Counter(int(record.value().rstrip(b"x")) for record in delivered(connection, queue))
    assert seen == Counter(range(count))
