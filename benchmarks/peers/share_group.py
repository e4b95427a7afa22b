"""Share groups of Kafka (KIP-932), by confluent-kafka's ShareConsumer.

An acknowledgement goes to the broker with the next poll. With explicit ones, a batch must be acknowledged
before the next one is handed out; implicit ones are of whole batches, and made by the next poll. The broker
decides how large each batch is.
"""

import random
from collections.abc import Iterable
from typing import Any

from confluent_kafka import ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType


class ShareGroup:
    def __init__(self, options: dict[str, Any], *, explicit: bool = True) -> None:
        begin_with_the_oldest(options)
        self._explicit = explicit
        self._consumer = ShareConsumer(
            {
                "bootstrap.servers": options["bootstrap"],
                "group.id": options["group"],
                "share.acknowledgement.mode": "explicit" if explicit else "implicit",
            }
        )
        self._consumer.subscribe([options["topic"]])

    def take(self) -> list[Any]:
        batch = list(self._consumer.poll(1.0))
        for message in batch:
            if (error := message.error()) is not None:
                raise RuntimeError(error.str())
        return batch

    def bodies(self, batch: list[Any]) -> Iterable[bytes]:
        return [message.value() for message in batch]

    def ack(self, batch: list[Any], *, shuffled: bool) -> None:
        if not self._explicit:
            return
        if shuffled:
            random.shuffle(batch)
        for message in batch:
            self._consumer.acknowledge(message)

    def confirm(self) -> None:
        for place, error in self._consumer.commit_sync(60.0).items():
            if error is not None:
                raise RuntimeError(f"partition {place.partition}: {error}")


def begin_with_the_oldest(options: dict[str, Any]) -> None:
    """Have the group, which is new, begin at the beginning of the topic."""
    earliest = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    group = ConfigResource(ResourceType.GROUP, options["group"], incremental_configs=[earliest])
    admin = AdminClient({"bootstrap.servers": options["bootstrap"]})
    for future in admin.incremental_alter_configs([group]).values():
        future.result()


def connect(options: dict[str, Any]) -> ShareGroup:
    return ShareGroup(options)
