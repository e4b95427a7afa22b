"""KmqClient, with the marker format that the options name."""

import time
from collections.abc import Iterable
from typing import Any

from benchmarks.lab import HOUR_MS, stamp_of
from benchmarks.peers.works import shuffle_windows
from kmqpy import Connection, KmqClient, Message, QueueSettings


class Client:
    def __init__(self, options: dict[str, Any]) -> None:
        self._batch = options["batch"]
        self.client = KmqClient(
            QueueSettings.from_json(options["queue"].encode()),
            Connection(bootstrap=options["bootstrap"]),
            max_in_flight=options.get("max_in_flight", 2 * self._batch),
            markers=options["markers"],
        )

    def take(self) -> list[Message]:
        return self.client.receive(self._batch, wait=1)

    def bodies(self, batch: list[Message]) -> Iterable[bytes]:
        return [message.body for message in batch]

    def ack(self, batch: list[Message], *, shuffled: bool) -> None:
        self.client.ack(*(shuffle_windows(batch) if shuffled else batch))

    def confirm(self) -> None:
        self.client.flush(60)


def connect(options: dict[str, Any]) -> Client:
    return Client(options)


def hold(options: dict[str, Any]) -> dict[str, float]:
    """Take messages and keep them: their leases last an hour."""
    peer = Client({**options, "max_in_flight": options["messages"]})
    left = options["messages"]
    began = time.monotonic()
    while left:
        left -= len(peer.client.receive(min(left, options["batch"]), wait=1, lease=HOUR_MS / 1000))
    peer.client.close()
    return {"seconds": time.monotonic() - began}


def drop(options: dict[str, Any]) -> dict[str, float]:
    """Acknowledge all but every tenth message; the copy of one that was dropped is acknowledged."""
    peer = Client(options)
    dropped: set[int] = set()
    taken = 0
    until = time.monotonic() + options["seconds"]
    while time.monotonic() < until:
        batch = peer.client.receive(options["batch"], wait=0.1)
        done = []
        for message in batch:
            number = stamp_of(message.body)[0]
            if number % 10 or number in dropped:
                done.append(message)
            else:
                dropped.add(number)
        peer.client.ack(*done)
        taken += len(batch)
    peer.client.close()
    return {"taken": taken, "dropped": len(dropped)}
