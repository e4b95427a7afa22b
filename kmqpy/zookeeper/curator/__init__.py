"""Curator's DistributedQueue and its siblings, on the same znodes: Java and Python programs share a queue."""

from kmqpy.zookeeper.curator.builder import QueueBuilder
from kmqpy.zookeeper.curator.distributed_queue import (
    DistributedDelayQueue,
    DistributedIdQueue,
    DistributedPriorityQueue,
    DistributedQueue,
)
from kmqpy.zookeeper.curator.options import Consumer, ErrorMode, PutListener
from kmqpy.zookeeper.curator.sharder import QueueSharder
from kmqpy.zookeeper.curator.simple_queue import SimpleDistributedQueue
from kmqpy.zookeeper.curator.single_consumer import SingleConsumer

__all__ = [
    "Consumer",
    "DistributedDelayQueue",
    "DistributedIdQueue",
    "DistributedPriorityQueue",
    "DistributedQueue",
    "ErrorMode",
    "PutListener",
    "QueueBuilder",
    "QueueSharder",
    "SimpleDistributedQueue",
    "SingleConsumer",
]
