"""Workers: kmqpy's, and the least code for the same on Kafka; see benchmarks.handlers for what is timed."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Consumer, Producer

from benchmarks.handlers import Handlers, send_first
from benchmarks.results import percentile
from kmqpy import KafkaConnection, KmqClient, Message, QueueSettings, Retry, Worker
from kmqpy.queue import Queue, storage_for
from kmqpy.worker.asyncio import AsyncWorker

_BATCH = 1_000
_PATIENCE_S = 120.0


def kmqpy(options: dict[str, Any]) -> dict[str, float]:
    """A worker on Kafka; options: `bootstrap, queue, kind`, and those of Handlers."""
    with _client(options) as queue:
        return _worked(queue, options)


def stored(options: dict[str, Any]) -> dict[str, float]:
    """A worker on another storage; options: `url, kind`, and those of Handlers."""
    with storage_for(options["url"]) as storage:
        if "work" not in storage.list():
            storage.create("work")
        return _worked(storage.open("work"), options)


def _client(options: dict[str, Any]) -> KmqClient:
    settings = QueueSettings.from_json(options["queue"].encode())
    return KmqClient(settings, KafkaConnection(bootstrap=options["bootstrap"]))


def _worked(queue: Queue, options: dict[str, Any]) -> dict[str, float]:
    handlers, count = Handlers(options), options["handlers"]
    send_first(options, lambda bodies: queue.send_many(bodies) if len(bodies) > 1 else queue.send(bodies[0]))
    if options.get("is_sender"):
        return {}

    def handle(message: Message) -> None:
        handlers.handle(message.body)

    async def handle_in_task(message: Message) -> None:
        await handlers.handle_in_task(message.body)

    async def work() -> dict[str, float]:
        worker = AsyncWorker(queue, handle_in_task, concurrency=count)
        running = asyncio.create_task(worker.run())
        try:
            return await asyncio.to_thread(handlers.figures)
        finally:
            worker.stop()
            await running

    if options["kind"] == "asyncio":
        return asyncio.run(work())
    with Worker(queue, handle, concurrency=count, handle_signals=False):
        return handlers.figures()


def retries(options: dict[str, Any]) -> dict[str, float]:
    """A worker whose handlers ask for every hundredth message again; options as of kmqpy()."""
    numbers = itertools.count(1)
    due: dict[str, float] = {}
    late_ms: list[float] = []
    begun_at: list[float] = []
    drained, done = threading.Event(), threading.Event()
    wanted = options["messages"] // 100

    def handle(message: Message) -> None:
        now = time.monotonic()
        if message.attempts > 1:
            late_ms.append((now - due[message.id]) * 1000)
            if len(late_ms) == wanted:
                done.set()
            return
        number = next(numbers)
        if number in (1, options["messages"]):
            begun_at.append(now)
        if number == options["messages"]:
            drained.set()
        if number % 100 == 0:
            due[message.id] = now + 1
            raise Retry(1)
        time.sleep(0.001)

    with (
        _client(options) as queue,
        Worker(queue, handle, concurrency=options["handlers"], handle_signals=False),
    ):
        if not (done.wait(_PATIENCE_S) and drained.wait(_PATIENCE_S)):
            raise TimeoutError(f"{len(late_ms)} of {wanted} messages came again, and no more")
    return {
        "p50_ms": percentile(late_ms, 50),
        "p99_ms": percentile(late_ms, 99),
        "max_ms": max(late_ms),
        "handled_per_s": options["messages"] / (begun_at[-1] - begun_at[0]),
    }


def bare(options: dict[str, Any]) -> dict[str, float]:
    """confluent-kafka's consumer, and a pool of threads or tasks; options as of kmqpy()."""
    queue = QueueSettings.from_json(options["queue"].encode())
    producer = Producer({"bootstrap.servers": options["bootstrap"], "linger.ms": 0, "acks": "all"})

    def send(bodies: Sequence[str]) -> None:
        for body in bodies:
            producer.produce(queue.name, body)
        producer.flush()  # as send() waits for the confirmation

    send_first(options, send)
    if options.get("is_sender"):
        return {}
    consumer = Consumer(
        {
            "bootstrap.servers": options["bootstrap"],
            "group.id": queue.consumer_group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 5,  # like kmqpy; the default stalls a fast reader
        }
    )
    consumer.subscribe([queue.name])
    handlers = Handlers(options)
    with ThreadPoolExecutor(1) as waiting, ThreadPoolExecutor(options["handlers"]) as pool:
        figures = waiting.submit(handlers.figures)
        if options["kind"] == "threads":
            _handle_batches(consumer, figures.done, lambda bodies: list(pool.map(handlers.handle, bodies)))
        else:
            with asyncio.Runner() as runner:

                async def handle(bodies: list[bytes]) -> None:
                    left = iter(bodies)
                    await asyncio.gather(*(_lane(left, handlers) for _ in range(options["handlers"])))

                _handle_batches(consumer, figures.done, lambda bodies: runner.run(handle(bodies)))
        consumer.close()
        return figures.result()


async def _lane(bodies: Iterator[bytes], handlers: Handlers) -> None:
    for body in bodies:
        await handlers.handle_in_task(body)


def _handle_batches(
    consumer: Consumer, is_over: Callable[[], bool], handle: Callable[[list[bytes]], object]
) -> None:
    while not is_over():
        records = consumer.consume(1, 1.0)  # a lone consume(n, t) waits out t even when messages are there
        if records:
            records += consumer.consume(_BATCH - 1, 0)
            handle([record.value() for record in records if record.error() is None])
            consumer.commit(asynchronous=True)
