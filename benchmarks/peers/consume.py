"""Plain `consume` of confluent-kafka, the upper limit. It writes no markers, and commits offsets."""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer


class PlainConsumer:
    def __init__(self, options: dict[str, Any]) -> None:
        self._batch = options["batch"]
        self._consumer = Consumer(
            {
                "bootstrap.servers": options["bootstrap"],
                "group.id": options["group"],
                "auto.offset.reset": "earliest",
                "fetch.queue.backoff.ms": 5,  # like kmqpy; the default stalls a fast reader
            }
        )
        self._consumer.subscribe([options["topic"]])

    def take(self) -> list[Any]:
        # A lone consume(n, t) waits out t even when messages are there.
        records = self._consumer.consume(1, 1.0)
        if records:
            records += self._consumer.consume(self._batch - 1, 0)
        return [record for record in records if record.error() is None]

    def bodies(self, batch: list[Any]) -> Iterable[bytes]:
        return [record.value() for record in batch]

    def ack(self, batch: list[Any], *, shuffled: bool) -> None:
        pass

    def confirm(self) -> None:
        self._consumer.commit(asynchronous=False)


def connect(options: dict[str, Any]) -> PlainConsumer:
    return PlainConsumer(options)
