"""Uses a queue over asyncio: sends, receives, and runs a worker whose handler is a coroutine function.

    python examples/asyncio_worker.py

Uses the servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name: `kmq dev up` prints a line that sets both. Makes a
queue of its own, deletes it, and ends by itself: with 0 only if every message was handled and acknowledged.
"""

import asyncio
import logging
import sys
import uuid

from kmqpy import KafkaConnection, KafkaStorage, KmqClient, Message, ZooKeeperConnection
from kmqpy.errors import KmqError
from kmqpy.worker.asyncio import AsyncQueue, AsyncWorker
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

connection = KafkaConnection.from_environment()
zookeeper = ZooKeeperConnection.from_environment()
name = f"example-asyncio-{uuid.uuid4().hex[:8]}"


async def main() -> int:
    # Operations run in threads, so the event loop stays free. Await those that wait for Kafka.
    async with AsyncQueue(await asyncio.to_thread(KmqClient, name, connection)) as queue:
        await queue.send_many([f"letter {number}" for number in range(5)])

        # 1. Take messages yourself, and acknowledge each one.
        read = 0
        async for message in queue:
            print(f"read {message.body.decode()}")
            await queue.ack(message)
            read += 1
            if read == 5:
                break

        # 2. A receive() that is cancelled loses nothing: messages that it still takes are given back.
        receiving = asyncio.create_task(queue.receive(wait=60))
        await asyncio.sleep(0.1)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)

        # 3. Or let a worker take and acknowledge: it runs up to 20 handlers at a time, on this event loop.
        await queue.send_many([f"request {number}" for number in range(100)])
        handled = set()

        async def handle(message: Message) -> None:
            await asyncio.sleep(0.05)  # a call to another service
            handled.add(message.body)
            if len(handled) == 100:
                worker.stop()

        worker = AsyncWorker(queue.queue, handle, concurrency=20, handle_signals=True)
        async with asyncio.timeout(60):
            await worker.run()

        left = await queue.call(queue.queue.size) + await queue.call(queue.queue.in_flight)
    print(f"read {read}, handled {len(handled)}, left {left}")
    return 0 if (read, len(handled), left) == (5, 100, 0) else 1


def run() -> int:
    # A tracker warns of a queue with one replica, which is all that a small cluster has.
    logging.basicConfig(level=logging.ERROR)
    with KafkaStorage(connection, zookeeper) as storage:
        storage.create(name, partitions=2)
        try:
            # A tracker redelivers messages given back. In production: `kmq tracker`, in processes of its own.
            with Tracker(connection, zookeeper, TrackerSettings(queues=(name,), http_port=-1)):
                return asyncio.run(main())
        finally:
            storage.delete(name)


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
