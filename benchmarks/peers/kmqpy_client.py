"""kmqpy's KmqClient as a peer, with the settings of the queue in the options."""

import itertools
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.lab import HOUR_MS, stamp_of
from benchmarks.peers.works import shuffle_windows
from kmqpy import KafkaConnection, KmqClient, Message, QueueSettings

_BESIDE = 100
"""The messages that each ack() without waiting acknowledges."""


class Client:
    def __init__(self, options: dict[str, Any]) -> None:
        self._batch = options["batch"]
        self.client = KmqClient(
            QueueSettings.from_json(options["queue"].encode()),
            KafkaConnection(bootstrap=options["bootstrap"]),
            max_in_flight=options.get("max_in_flight", 2 * self._batch),
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


def wait(options: dict[str, Any]) -> dict[str, Any]:
    """Acknowledge in `threads` threads that wait; beside them, one thread acknowledges `rate` a second."""
    peer = Client(options)
    messages: list[Message] = []
    while len(messages) < options["batch"]:
        messages += peer.take()
    warm_at = time.monotonic() + options["warm_up_s"]
    until = warm_at + options["seconds"]

    def acknowledge_and_wait(number: int) -> list[float]:
        delays = []
        for message in itertools.cycle(messages[number :: options["threads"]]):
            began = time.monotonic()
            peer.client.ack(message, confirmed=True)
            now = time.monotonic()
            if began >= warm_at:
                delays.append((now - began) * 1000)
            if now >= until:
                break
        return delays

    with ThreadPoolExecutor(options["threads"] + 1) as pool:
        others = pool.submit(_acknowledge, peer, messages, options["rate"], until)
        found = list(pool.map(acknowledge_and_wait, range(options["threads"])))
    peer.client.close()
    others_per_s = others.result() / (options["warm_up_s"] + options["seconds"])
    return {"delays_ms": list(itertools.chain(*found)), "others_per_s": others_per_s}


def _acknowledge(peer: Client, messages: list[Message], rate: int, until: float) -> int:
    """Acknowledge batch after batch at a steady rate; returns how many messages that were."""
    now = began = time.monotonic()
    done = 0
    while rate and (now < until or not done):
        if done > (now - began) * rate:
            time.sleep(_BESIDE / rate)
        else:
            first = done % (len(messages) - _BESIDE)
            peer.ack(messages[first : first + _BESIDE], shuffled=False)
            done += _BESIDE
        now = time.monotonic()
    return done


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
