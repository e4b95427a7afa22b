"""Message-queue semantics for Apache Kafka: each message is acknowledged by itself.

Kafka alone acknowledges "everything up to an offset". With kmqpy a consumer acknowledges each
message; what it does not acknowledge in time is redelivered by a tracker, and what keeps failing
is moved to a dead-letter topic.

    from kmqpy import Connection, KmqClient, KmqProducer

    connection = Connection(bootstrap="localhost:9092")
    with KmqProducer("orders", connection) as producer:
        producer.send("one order")
    with KmqClient("orders", connection) as client:
        for message in client:
            handle(message.body)
            client.ack(message)

The names here are the public interface, together with the modules named in the README.
"""

from kmqpy.backoff import Backoff
from kmqpy.client import KmqClient
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import (
    Closed,
    ConfigError,
    DecodeError,
    KmqError,
    MessageError,
    MissingExtra,
    NotSupported,
    QueueNotFound,
    ReceiptError,
    TopicError,
    Unavailable,
    Unfinished,
)
from kmqpy.message import Message
from kmqpy.producer import KmqProducer
from kmqpy.queue import Queue, queue_for
from kmqpy.telemetry import Telemetry
from kmqpy.worker import Reject, Retry, Worker

__all__ = [
    "Backoff",
    "Closed",
    "ConfigError",
    "Connection",
    "DecodeError",
    "KmqClient",
    "KmqError",
    "KmqProducer",
    "Message",
    "MessageError",
    "MissingExtra",
    "NotSupported",
    "Queue",
    "QueueNotFound",
    "QueueSettings",
    "ReceiptError",
    "Reject",
    "Retry",
    "Telemetry",
    "TopicError",
    "Unavailable",
    "Unfinished",
    "Worker",
    "queue_for",
]
