"""Message-queue semantics for Apache Kafka: each message is acknowledged by itself.

Kafka alone acknowledges "everything up to an offset". With kmqpy a consumer acknowledges each message. A
tracker (a process beside the consumers) redelivers messages that were not acknowledged in time, and moves
messages that were redelivered too often to a dead-letter topic.

    from kmqpy import KafkaConnection, KmqClient

    with KmqClient("orders", KafkaConnection(bootstrap="localhost:9092")) as client:
        client.send("one order")
        for message in client:
            handle(message.body)
            client.ack(message)

The public interface is the names in `__all__`, and those that docs/api.md lists. kmqpy imports a name
of `_MODULES` when a program first uses the name (PEP 562), so `import kmqpy` loads neither librdkafka nor any
other dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kmqpy.errors import (
    Closed,
    ConfigError,
    DecodeError,
    KmqError,
    MessageError,
    NotSupported,
    QueueNotFound,
    ReceiptError,
    TopicError,
    Unavailable,
    Unfinished,
)

if TYPE_CHECKING:
    from kmqpy.core.backoff import Backoff
    from kmqpy.kafka.kmq_client import KmqClient
    from kmqpy.kafka.settings import KafkaConnection, QueueSettings
    from kmqpy.kafka.storage import KafkaStorage
    from kmqpy.message import Message
    from kmqpy.queue import Queue, queue_for, storage_for
    from kmqpy.telemetry.base import Telemetry
    from kmqpy.worker.outcome import Reject, Retry
    from kmqpy.worker.worker import Worker
    from kmqpy.zookeeper.settings import ZooKeeperConnection

_MODULES = {
    "Backoff": "kmqpy.core.backoff",
    "KafkaConnection": "kmqpy.kafka.settings",
    "KafkaStorage": "kmqpy.kafka.storage",
    "KmqClient": "kmqpy.kafka.kmq_client",
    "Message": "kmqpy.message",
    "Queue": "kmqpy.queue",
    "QueueSettings": "kmqpy.kafka.settings",
    "Reject": "kmqpy.worker.outcome",
    "Retry": "kmqpy.worker.outcome",
    "Telemetry": "kmqpy.telemetry.base",
    "Worker": "kmqpy.worker.worker",
    "ZooKeeperConnection": "kmqpy.zookeeper.settings",
    "queue_for": "kmqpy.queue",
    "storage_for": "kmqpy.queue",
}
"""The public names that are imported at their first use, with the modules that define them."""

__all__ = [
    "Backoff",
    "Closed",
    "ConfigError",
    "DecodeError",
    "KafkaConnection",
    "KafkaStorage",
    "KmqClient",
    "KmqError",
    "Message",
    "MessageError",
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
    "ZooKeeperConnection",
    "queue_for",
    "storage_for",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("kmqpy")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
