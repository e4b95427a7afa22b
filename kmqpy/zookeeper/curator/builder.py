"""Builds Curator's queues from options that have Curator's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from kmqpy.zookeeper.curator.distributed_queue import (
    DistributedDelayQueue,
    DistributedIdQueue,
    DistributedPriorityQueue,
    DistributedQueue,
)
from kmqpy.zookeeper.curator.options import QueueOptions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class QueueBuilder(QueueOptions[T]):
    """Options of a queue; `build_queue()` and its siblings make queues with them.

    Args:
        zk: A started kazoo client; the queue never stops it.
        path: The znode of the queue; start() creates it, and its missing parents as containers.
        consumer: A Consumer, or a function of one item; None: this queue object only puts.
        serializer: Default: items are bytes.
        lock_path: The parent of locks. None: AT MOST ONCE, an item is deleted before it is consumed.
        error_mode: What becomes of an item whose consumer failed; needs lock_path, default: REQUEUE.
        max_items: put() waits while the queue has (roughly) this many znodes; None: no limit.
        put_in_background: Whether put() returns before ZooKeeper answers; None: yes, unless max_items is
            given.
        put_listeners: Objects that learn the outcome of each put.
        put_timeout_s: A put in the foreground raises UnknownOutcome if ZooKeeper has not answered after this
            many seconds.
        final_flush_s: close() waits at most this many seconds for puts under way; 0: not at all.
        executor: Consumes the items of one listing in parallel; None: one after the other.
        thread_factory: Makes the thread that consumes.
        min_items_before_refresh: How many items of a listing are consumed at least before the next.
        refresh_on_watch: Whether the queue is listed again, after so many items, when its znodes have
            changed; otherwise it is after all items.
        order: Replaces Curator's sortChildren() of the kind of queue: order(names) returns the names in the
            order of consumption.
        due_ms: Replaces getDelay(): due_ms(name) returns when an item may be consumed, in ms since 1970 UTC.
        requeue_prefix: Replaces makeRequeueItemPath(): requeue_prefix(name) returns the beginning of the name
            under which an item is put again, `queue-…`.
        max_packet_bytes: The jute.maxbuffer of the servers.
    """

    def build_queue(self) -> DistributedQueue[T]:
        """Return a queue that is consumed in the order of the puts."""
        return DistributedQueue(self)

    def build_id_queue(self) -> DistributedIdQueue[T]:
        """Return a queue whose items can be removed by an id."""
        return DistributedIdQueue(self)

    def build_priority_queue(self, min_items_before_refresh: int) -> DistributedPriorityQueue[T]:
        """Return a queue in which items of lower priorities come first.

        Args:
            min_items_before_refresh: A larger number makes the queue list the znodes less often, and notice a
                more urgent item later.
        """
        return DistributedPriorityQueue(
            replace(self, min_items_before_refresh=min_items_before_refresh, refresh_on_watch=True)
        )

    def build_delay_queue(self) -> DistributedDelayQueue[T]:
        """Return a queue whose items are consumed when they are due."""
        return DistributedDelayQueue(self)
