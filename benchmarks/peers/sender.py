"""Sends stamped messages at an even pace until it is killed; or as fast as each is confirmed."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Producer

from benchmarks.lab import stamped
from kmqpy import KafkaConnection, KmqClient, QueueSettings

_WARM_UP_S = 0.5


def send(options: dict[str, Any]) -> None:
    """Send `rate` messages a second to the partitions in turn, at most `count` in all."""
    producer = Producer({"bootstrap.servers": options["bootstrap"], "linger.ms": 0, "acks": "all"})
    interval = 1 / options["rate"]
    began = time.monotonic()
    for number in range(options.get("count", 1 << 62)):
        wait = began + number * interval - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        producer.produce(
            options["topic"],
            stamped(number, time.monotonic_ns()),
            partition=number % options["partitions"],
        )
        producer.poll(0)
    producer.flush()


def confirmed(options: dict[str, Any]) -> dict[str, float]:
    """Send `at_once` messages after the other from each of `threads` threads, each time until confirmed."""
    send, bodies = _CLIENTS[options["client"]](options), [b"x" * 100] * options["at_once"]
    begin = time.monotonic() + _WARM_UP_S

    def send_on(_: int) -> int:
        count = 0
        while (now := time.monotonic()) < begin + options["seconds"]:
            send(bodies)
            count += len(bodies) if now >= begin else 0
        return count

    with ThreadPoolExecutor(options["threads"]) as pool:
        count = sum(pool.map(send_on, range(options["threads"])))
    return {"messages_per_s": count / (time.monotonic() - begin)}


def _kmqpy(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    client = KmqClient(
        QueueSettings.from_json(options["queue"].encode()), KafkaConnection(bootstrap=options["bootstrap"])
    )
    return (lambda bodies: client.send(bodies[0])) if options["at_once"] == 1 else client.send_many


def _plain(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    producer = Producer(
        {"bootstrap.servers": options["bootstrap"], "linger.ms": 0, "enable.idempotence": True}
    )
    topic, alone = QueueSettings.from_json(options["queue"].encode()).name, options["threads"] == 1

    def send(bodies: list[bytes]) -> None:
        reported = threading.Semaphore(0)
        for body in bodies:
            producer.produce(topic, body, on_delivery=lambda *_: reported.release())
        for _ in bodies:
            while not reported.acquire(blocking=not alone):
                producer.poll(0.01)

    def poll() -> None:
        while True:
            producer.poll(0.1)

    if not alone:
        threading.Thread(target=poll, daemon=True).start()
    return send


_CLIENTS = {"kmqpy": _kmqpy, "plain": _plain}
