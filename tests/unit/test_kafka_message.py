"""A message whose fields are worked out when they are read is a Message like any other."""

import copy
import dataclasses
import pickle

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as Record

from kmqpy.errors import DecodeError, ReceiptError
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.message import Message
from kmqpy.telemetry.base import Telemetry

QUEUE = QueueSettings(name="jobs")


class Counting(Telemetry):
    def __init__(self):
        self.failures = []

    def failed(self, queue, what, count=1):
        self.failures.append((queue, what))


def message(headers=None, value=b"body", telemetry=None, client=None):
    record = Record(
        topic="jobs",
        partition=3,
        offset=17,
        key=b"k",
        value=value,
        headers=headers,
        timestamp=(TIMESTAMP_LOG_APPEND_TIME, 1_000),
    )
    return KafkaMessage(record, ReceiveContext(QUEUE, "an-id", 5_000, telemetry or Telemetry(), client))


def test_fields():
    headers = [("kmq-redelivery-count", b"\x02"), ("kmq-original-timestamp", b"700"), ("a", b"1")]
    one = message(headers, client=Client())
    assert isinstance(one, Message)
    assert (one.queue, one.id, one.key, one.body) == ("jobs", "3-17", b"k", b"body")
    assert (one.topic, one.partition, one.offset, one.attempts) == ("jobs", 3, 17, 3)
    assert (one.enqueued_ms, one.first_enqueued_ms, one.lease_until_ms) == (1_000, 700, 5_000)
    assert one.header("a") == b"1"
    assert Receipt.parse(one.receipt) == Receipt("jobs", "an-id", 3, 17)
    assert message().receipt == ""  # that was only looked at


def test_a_first_delivery():
    one = message()
    assert (one.attempts, one.first_enqueued_ms, one.headers) == (1, 1_000, ())
    assert message(value=None).body == b""


@pytest.mark.parametrize(
    ("header", "field", "value"),
    [("kmq-redelivery-count", "attempts", 1), ("kmq-original-timestamp", "first_enqueued_ms", 1_000)],
)
def test_an_undecodable_header_is_counted_and_read_as_absent(header, field, value):
    telemetry = Counting()
    assert getattr(message([(header, b"odd")], telemetry=telemetry), field) == value
    assert telemetry.failures == [("jobs", "undecodable header")]


def test_it_can_be_compared_copied_and_sent_to_another_process():
    one = message([("a", b"1")])
    assert one == message([("a", b"1")])
    assert hash(one) == hash(message([("a", b"1")]))
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one)):
        assert type(other) is Message
        assert dataclasses.asdict(other) == dataclasses.asdict(one)
    assert "body=b'body'" in repr(one)


@pytest.mark.parametrize("field", ["body", "attempts", "receipt", "other"])
def test_it_is_frozen(field):
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        setattr(message(), field, 1)


class Client:
    """Notes what it is to acknowledge."""

    def __init__(self):
        self.acknowledged = []

    def ack(self, *messages, confirmed=False):
        self.acknowledged.append((messages, confirmed))


def test_of_the_issue_a_message_is_acknowledged_by_the_client_that_received_it():
    looked_at, client = message(), Client()
    received = KafkaMessage(looked_at._record, dataclasses.replace(looked_at._context, client=client))
    received.ack(confirmed=True)
    assert client.acknowledged == [((received,), True)]
    for other in (looked_at, pickle.loads(pickle.dumps(received)), copy.copy(received)):
        with pytest.raises(ReceiptError, match=r"message 3-17 of queue 'jobs': no client .* client\.ack"):
            other.ack()


def test_of_the_issue_json():
    assert message(value='{"a": ["ü"]}'.encode()).json() == {"a": ["ü"]}
    for body in (b"hunter2", b"", b"\xff\xfe\xfd", b"[" * 100_000):
        with pytest.raises(DecodeError, match="message 3-17 of queue 'jobs': its body is not JSON") as caught:
            message(value=body).json()
        assert caught.value.data == body
        assert "hunter2" not in str(caught.value)
