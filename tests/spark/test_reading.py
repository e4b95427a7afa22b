"""A batch of messages, acknowledged or not, by time and state."""

from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Producer

from kmqpy.errors import ConfigError
from kmqpy.kafka import partition_reader
from kmqpy.spark import KmqSpark, State

NOON = (datetime.now(UTC) - timedelta(hours=6)).replace(microsecond=0)


def test_messages_by_time_and_state(spark, make_queue):
    queue = make_queue(1)
    sender = Producer({"bootstrap.servers": queue.connection.bootstrap})
    for hour in (0, 2, 1, 3):  # a sender's clock may go back
        at = round((NOON + timedelta(hours=hour)).timestamp() * 1000)
        sender.produce(queue.name, value=str(hour), timestamp=at)
    sender.flush()
    client = queue.client()
    (message,) = client.receive(1, wait=60, lease=60)
    client.ack(message)
    client.flush()
    kmq = KmqSpark(spark, queue.connection, queue.settings)
    markers = partition_reader.bounds(queue.connection, queue.settings.markers_topic, [0])

    def bodies(**given):
        return sorted(int(row["value"]) for row in kmq.read(**given).collect())

    assert bodies() == [0, 1, 2, 3]
    assert bodies(since=NOON + timedelta(hours=1)) == [1, 2, 3]
    assert bodies(since=NOON + timedelta(hours=1), until=NOON + timedelta(hours=3)) == [1, 2]
    assert bodies(state=[State.PENDING, "in_flight"], since=NOON + timedelta(hours=2)) == [2, 3]
    (row,) = kmq.read(state="processed").collect()
    assert (row["state"], row["attempts"], row["offset"], bytes(row["value"])) == ("processed", 1, 0, b"0")
    assert partition_reader.bounds(queue.connection, queue.settings.markers_topic, [0]) == markers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"state": "done"}, "state: unknown state 'done': use pending, in_flight, overdue, processed"),
        ({"since": datetime(2026, 1, 1)}, "since: must be a datetime with a time zone"),  # noqa: DTZ001
        ({"until": 5}, "until: must be a datetime with a time zone, not 5"),
    ],
)
def test_bad_arguments(spark, make_queue, given, expected):
    queue = make_queue(1)
    with pytest.raises(ConfigError, match=expected):
        KmqSpark(spark, queue.connection, queue.settings).read(**given)
