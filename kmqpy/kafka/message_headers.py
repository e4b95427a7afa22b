"""Names the headers that kmqpy puts on messages in Kafka, and reads their values. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kmqpy import message
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import DEAD_LETTERS_SUFFIX, QueueSettings, is_topic_name, queue_of
from kmqpy.message import Headers, last_header

# On a copy: the place and the timestamp of the first record, the one that `send` wrote. (What docs/map.md
# calls the original is the record of which the copy was made directly. These names are part of the format.)
# The topic is named if it is another lane than the main one.
ORIGINAL_TOPIC = "kmq-original-topic"
ORIGINAL_PARTITION = "kmq-original-partition"
ORIGINAL_OFFSET = "kmq-original-offset"
ORIGINAL_TIMESTAMP = "kmq-original-timestamp"
# On a message that was sent with a delay: when clients may take it, in ms since 1970.
DELIVER_AT = "kmq-deliver-at"
# On a dead letter: the place in the queue topic of its original, the record that became this dead letter; the
# number of deliveries that counted as attempts; the reason.
DEAD_LETTER_TOPIC = "kmq-dead-letter-topic"
DEAD_LETTER_PARTITION = "kmq-dead-letter-partition"
DEAD_LETTER_OFFSET = "kmq-dead-letter-offset"
DEAD_LETTER_ATTEMPTS = "kmq-dead-letter-attempts"
DEAD_LETTER_REASON = "kmq-dead-letter-reason"
_HEADER_FRAME_BYTES = 10
"""Bytes that Kafka adds to a header, at most: the lengths of its name and of its value."""
_DECIMAL = re.compile(rb"-?[0-9]{1,19}")


class FirstPlace(NamedTuple):
    """The place of the first record of a message; `lane` is the ending of its lane, "" for the main one."""

    partition: int
    number: int
    lane: str = ""


def size_of(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Estimate the bytes of a Kafka record, rather too many than too few.

    Counts the key, the value, and each header with its frame.
    """
    size = len(key or b"") + len(value or b"")
    for name, data in headers:
        size += len(name if name.isascii() else name.encode()) + len(data or b"") + _HEADER_FRAME_BYTES
    return size


def int_header(headers: Headers, name: str) -> int | None:
    """The last header `name` as a number; None when it is absent.

    Raises DecodeError when the header is no decimal number, or does not fit into 64 bits.
    """
    data = last_header(headers, name)
    if data is None:
        return None
    if not _DECIMAL.fullmatch(data) or not -(2**63) <= (number := int(data)) < 2**63:
        raise DecodeError(f"header {name}: not a decimal number of 64 bits", data)
    return number


def first_place(
    headers: Headers, queue: QueueSettings | None = None, own: Place | None = None
) -> FirstPlace | None:
    """Where the first record of a copy stands, by its headers `kmq-original-…`; None if they don't say so.

    Programs that forward records may forward these headers, too: what can't be true of a copy that stands at
    the place `own` of `queue` is not believed. Places in two lanes of a queue don't compare.
    """
    try:
        partition, number = int_header(headers, ORIGINAL_PARTITION), int_header(headers, ORIGINAL_OFFSET)
    except DecodeError:
        return None
    if partition is None or number is None or not 0 <= partition < 2**31 or number < 0:
        return None
    topic = (last_header(headers, ORIGINAL_TOPIC) or b"").decode("utf-8", "replace")
    if topic and (queue_of(topic) == topic or (queue is not None and queue_of(topic) != queue.queue_name)):
        return None
    lane = topic.removeprefix(queue_of(topic)).removeprefix("__")
    if queue is not None and own is not None and (partition, lane) == (own[0], queue.lane_ending):
        return FirstPlace(partition, number, lane) if number < own[1] else None
    return FirstPlace(partition, number, lane)


def redelivery_count(headers: Headers, name: str) -> int:
    """How often the message was redelivered, by header `name`; a negative count reads as 0.

    Raises DecodeError when the header is not a count.
    """
    return max(0, codec.decode_count(last_header(headers, name)))


def origin_queue(headers: message.Headers) -> str | None:
    """The queue from which a dead letter came, by its header; None if that is absent or no topic name."""
    try:
        name = (message.last_header(headers, DEAD_LETTER_TOPIC) or b"").decode()
    except UnicodeDecodeError:
        return None
    return name if is_topic_name(name) else None


def is_dead_letter_of(headers: message.Headers, queue: QueueSettings, origin: str = "") -> bool:
    """Return True for a dead letter that came from `queue`, or from the queue `origin` if that is given.

    Two queues may have one dead-letter topic. A dead letter without a usable header belongs to the queue
    after which the topic is named (`<queue>__undelivered`). If the topic has another name, the dead letter
    belongs to every queue that has the topic.
    """
    found = origin_queue(headers)
    if found is None:
        named_after = queue.dead_letter_topic.removesuffix(DEAD_LETTERS_SUFFIX)
        return named_after in (queue.dead_letter_topic, origin or queue.name)
    return is_or_was_lane(found, queue, origin)


def is_or_was_lane(topic: str, queue: QueueSettings, name: str = "") -> bool:
    """True for the topic of `queue`, or of the queue `name`, and of any lane that it may have had."""
    name = name or queue.name
    return topic == name or (queue.lane_of is None and queue_of(topic) == name)
