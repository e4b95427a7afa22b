"""Runs a worker: it calls a function for each message, and how that ends decides what becomes of the message.

    python examples/worker.py

Uses the servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name: `kmq dev up` prints a line that sets both. Makes a
queue of its own, runs a tracker in this process, deletes the queue, and ends by itself: with 0 only if every
message was handled as it should be.
"""

import logging
import sys
import threading
import uuid
from collections import Counter

from kmqpy import (
    Backoff,
    KafkaConnection,
    KafkaStorage,
    Message,
    Queue,
    Reject,
    Retry,
    Worker,
    ZooKeeperConnection,
)
from kmqpy.errors import KmqError
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

CUSTOMERS = ("ada", "ben", "cleo")
DELIVERIES = 30 + 1 + 2 + 3  # calls of handle(): for the teas, the unknown customer, the till, the order

connection = KafkaConnection.from_environment()
zookeeper = ZooKeeperConnection.from_environment()
name = f"example-worker-{uuid.uuid4().hex[:8]}"

calls: Counter[bytes] = Counter()
lock = threading.Lock()


def handle(message: Message) -> None:
    """Handle one message, in one of several threads; meanwhile the worker extends the message's lease."""
    with lock:  # of print, too: lines of several threads would run into each other
        calls[message.body] += 1
        print(f"{message.body.decode()}, attempt {message.attempts}", flush=True)
    if message.body == b"unknown customer":
        raise Reject("no such customer")  # to the dead letters, without another try
    if message.body == b"till is busy" and message.attempts == 1:
        raise Retry(0.2, reason="busy")  # again, after a delay of our choice
    if message.body == b"broken order":
        raise ValueError("can't be read")  # again after the worker's back-off, until it is a dead letter
    # When handle() returns, the worker acknowledges the message.


def main() -> int:
    # A worker logs a failed handler as a warning, with a traceback. Those here are meant to fail.
    logging.basicConfig(level=logging.ERROR)
    with KafkaStorage(connection, zookeeper) as storage:
        storage.create(name, partitions=2, max_redeliveries=2)
        try:
            return run(storage)
        finally:
            storage.delete(name)


def run(storage: KafkaStorage) -> int:
    # A tracker redelivers messages given back. In production: `kmq tracker`, in processes of its own.
    tracker = Tracker(connection, zookeeper, TrackerSettings(queues=(name,), http_port=-1))
    with tracker, storage.open(name) as queue:
        for customer in CUSTOMERS:
            # Messages with the same key are handled one at a time and in order.
            queue.send_many([f"{customer} orders tea {number}" for number in range(10)], key=customer)
        queue.send_many(["unknown customer", "till is busy", "broken order"])
        worker = Worker(queue, handle, concurrency=4, ordering="key", backoff=Backoff(0.1, 2, 1))
        # In a service, `worker.run()` would work until SIGTERM and then drain.
        with worker:
            done = ended(queue)
        dead = sorted(letter.reason or "" for letter in queue.dead_letters.list())
    print(f"handler calls: {calls.total()}, dead letters: {dead}")
    expected = ["nack: ValueError: can't be read", "rejected: no such customer"]
    return 0 if done and calls.total() == DELIVERIES and dead == expected else 1


def ended(queue: Queue, timeout: float = 60) -> bool:
    """Wait until every message is acknowledged or a dead letter."""
    pause = threading.Event()
    for _ in range(int(timeout / 0.2)):
        if calls.total() >= DELIVERIES and queue.size() == queue.in_flight() == 0:
            return True
        pause.wait(0.2)
    return False


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
