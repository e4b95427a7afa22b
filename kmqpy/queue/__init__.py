"""The `Queue` and `Storage` protocols, which every storage implements; `queue_for(url)` opens a queue."""

from kmqpy.message import OutgoingMessage
from kmqpy.queue.capabilities import Capabilities
from kmqpy.queue.opening import queue_for, storage_for
from kmqpy.queue.protocol import DeadLetter, DeadLetters, Orphan, Queue
from kmqpy.queue.storage import Codec, QueueDescription, Storage
from kmqpy.queue.url import QueueUrl, parse_url

__all__ = [
    "Capabilities",
    "Codec",
    "DeadLetter",
    "DeadLetters",
    "Orphan",
    "OutgoingMessage",
    "Queue",
    "QueueDescription",
    "QueueUrl",
    "Storage",
    "parse_url",
    "queue_for",
    "storage_for",
]
