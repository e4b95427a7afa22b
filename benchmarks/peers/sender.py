"""Sends stamped messages at an even pace until it is killed."""

import time
from typing import Any

from confluent_kafka import Producer

from benchmarks.lab import stamped


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
