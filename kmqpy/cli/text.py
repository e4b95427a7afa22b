"""Makes the JSON objects of messages that commands print."""

from __future__ import annotations

from typing import Any

from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.message import Message
from kmqpy.queue.plain import content, headers_of


def as_object(message: Message) -> dict[str, Any]:
    """Return the fields of a message that `kmq receive` prints.

    A message of Kafka has a partition and an offset, too: the place of this delivery's record.
    """
    place: dict[str, Any] = {}
    if isinstance(message, KafkaMessage):
        place = {"partition": message.partition, "offset": message.offset}
    return {
        "receipt": message.receipt,
        "queue": message.queue,
        "id": message.id,
        **place,
        **content("key", message.key),
        **content("body", message.body),
        **headers_of(message.headers),
        "attempts": message.attempts,
        "enqueued_ms": message.enqueued_ms,
        "first_enqueued_ms": message.first_enqueued_ms,
        "lease_until_ms": message.lease_until_ms,
        **({} if message.group is None else {"group": message.group}),
    }
