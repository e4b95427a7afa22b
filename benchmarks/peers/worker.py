"""Workers that handle a backlog: kmqpy's, and the least code for the same on Kafka.

The clock starts when a tenth of the messages was handled, and stops with the last one.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Consumer

from benchmarks.queue_load import BODY
from kmqpy import KafkaConnection, KmqClient, QueueSettings, Worker
from kmqpy.queue import Queue, storage_for
from kmqpy.worker.asyncio import AsyncWorker

_BATCH = 1_000
_PATIENCE_S = 120.0


class _Handlers:
    """Handlers that wait for `ms`, and count."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._wait_s = options["ms"] / 1000
        self._messages = options["messages"]
        self._numbers = itertools.count(1)  # safe to use by several threads
        self._began = self._ended = 0.0
        self.done = threading.Event()

    def handle(self, _: object) -> None:
        if self._wait_s:
            time.sleep(self._wait_s)
        self._count()

    async def handle_in_task(self, _: object) -> None:
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        self._count()

    def figures(self) -> dict[str, float]:
        if not self.done.wait(_PATIENCE_S):
            raise TimeoutError(f"{next(self._numbers) - 1} of {self._messages} messages, and no more")
        return {"handled_per_s": (self._messages - self._messages // 10) / (self._ended - self._began)}

    def _count(self) -> None:
        number = next(self._numbers)
        if number == self._messages // 10:
            self._began = time.perf_counter()
        elif number == self._messages:
            self._ended = time.perf_counter()
            self.done.set()


def kmqpy(options: dict[str, Any]) -> dict[str, float]:
    """A worker on Kafka; options: `bootstrap, queue, kind, handlers, ms, messages`."""
    settings = QueueSettings.from_json(options["queue"].encode())
    with KmqClient(settings, KafkaConnection(bootstrap=options["bootstrap"])) as queue:
        return _worked(queue, options)


def stored(options: dict[str, Any]) -> dict[str, float]:
    """A worker on another storage, which is filled before; options: `url, kind, handlers, ms, messages`."""
    with storage_for(options["url"]) as storage:
        storage.create("work")
        queue = storage.open("work")
        for first in range(0, options["messages"], _BATCH):
            queue.send_many([BODY] * min(_BATCH, options["messages"] - first))
        return _worked(queue, options)


def _worked(queue: Queue, options: dict[str, Any]) -> dict[str, float]:
    handlers, count = _Handlers(options), options["handlers"]
    if options["kind"] == "threads":
        with Worker(queue, handlers.handle, concurrency=count, handle_signals=False):
            return handlers.figures()

    async def work() -> dict[str, float]:
        worker = AsyncWorker(queue, handlers.handle_in_task, concurrency=count)
        running = asyncio.create_task(worker.run())
        try:
            return await asyncio.to_thread(handlers.figures)
        finally:
            worker.stop()
            await running

    return asyncio.run(work())


def bare(options: dict[str, Any]) -> dict[str, float]:
    """confluent-kafka's consumer, and a pool of threads or tasks; options as of kmqpy()."""
    queue = QueueSettings.from_json(options["queue"].encode())
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
    handlers = _Handlers(options)
    if options["kind"] == "threads":
        with ThreadPoolExecutor(options["handlers"]) as pool:
            _handle_batches(consumer, handlers, lambda records: list(pool.map(handlers.handle, records)))
    else:
        with asyncio.Runner() as runner:

            async def handle(records: list[Any]) -> None:
                left = iter(records)
                await asyncio.gather(*(_lane(left, handlers) for _ in range(options["handlers"])))

            _handle_batches(consumer, handlers, lambda records: runner.run(handle(records)))
    consumer.close()
    return handlers.figures()


async def _lane(records: Iterator[Any], handlers: _Handlers) -> None:
    for record in records:
        await handlers.handle_in_task(record)


def _handle_batches(consumer: Consumer, handlers: _Handlers, handle: Callable[[list[Any]], object]) -> None:
    while not handlers.done.is_set():
        records = consumer.consume(1, 1.0)  # a lone consume(n, t) waits out t even when messages are there
        if records:
            handle(records + consumer.consume(_BATCH - 1, 0))
            consumer.commit(asynchronous=True)
