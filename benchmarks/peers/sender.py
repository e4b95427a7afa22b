"""Sends stamped messages at an even pace until it is killed; or as fast as each is confirmed."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Producer

from benchmarks.lab import stamped
from kmqpy import KafkaConnection, KmqClient, QueueSettings
from kmqpy.worker.asyncio import AsyncQueue

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
    connect = _CLIENTS[options["client"], options["tasks"]]
    send, bodies = connect(options), [b"x" * 100] * options["at_once"]
    send(bodies)  # connects
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


def _client(options: dict[str, Any]) -> KmqClient:
    return KmqClient(
        QueueSettings.from_json(options["queue"].encode()), KafkaConnection(bootstrap=options["bootstrap"])
    )


def _kmqpy(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    client = _client(options)
    return (lambda bodies: client.send(bodies[0])) if options["at_once"] == 1 else client.send_many


def _plain(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    producer = Producer(_config(options))
    topic, alone = QueueSettings.from_json(options["queue"].encode()).name, options["threads"] == 1

    def send(bodies: list[bytes]) -> None:
        reported = threading.Semaphore(0)
        for body in bodies:
            producer.produce(topic, body, on_delivery=lambda *_: reported.release())
        for _ in bodies:
            while not reported.acquire(blocking=not alone):
                producer.poll(0.01)

    if not alone:
        _poll_in_thread(producer)
    return send


def _config(options: dict[str, Any]) -> dict[str, Any]:
    return {"bootstrap.servers": options["bootstrap"], "linger.ms": 0, "enable.idempotence": True}


def _kmqpy_tasks(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    loop, queue = asyncio.new_event_loop(), AsyncQueue(_client(options))

    async def send(bodies: list[bytes]) -> None:
        await asyncio.gather(*(queue.send(body) for body in bodies))

    return lambda bodies: loop.run_until_complete(send(bodies))


def _plain_tasks(options: dict[str, Any]) -> Callable[[list[bytes]], object]:
    producer = Producer(_config(options))
    loop, topic = asyncio.new_event_loop(), QueueSettings.from_json(options["queue"].encode()).name
    _poll_in_thread(producer)

    async def send_one(body: bytes) -> None:
        reported = loop.create_future()
        producer.produce(
            topic, body, on_delivery=lambda *_: loop.call_soon_threadsafe(reported.set_result, None)
        )
        await reported

    async def send(bodies: list[bytes]) -> None:
        await asyncio.gather(*(send_one(body) for body in bodies))

    return lambda bodies: loop.run_until_complete(send(bodies))


def _poll_in_thread(producer: Producer) -> None:
    def poll() -> None:
        while True:
            producer.poll(0.1)

    threading.Thread(target=poll, daemon=True).start()


_CLIENTS = {
    ("kmqpy", False): _kmqpy,
    ("kmqpy", True): _kmqpy_tasks,
    ("plain", False): _plain,
    ("plain", True): _plain_tasks,
}
