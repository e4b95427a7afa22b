"""Builds Curator's queues from options that have Curator's defaults."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from kazoo.client import KazooClient

from kmqpy.errors import ConfigError, MessageError, shown
from kmqpy.zookeeper.curator.distributed_queue import Consumer, DistributedQueue, ErrorMode, PutListener
from kmqpy.zookeeper.curator.item_names import ItemNames
from kmqpy.zookeeper.curator.kinds_of_queues import (
    DistributedDelayQueue,
    DistributedIdQueue,
    DistributedPriorityQueue,
)
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES

T = TypeVar("T")


class Serializer(Protocol[T]):
    """Turns items into bytes and back."""

    def serialize(self, item: T, /) -> bytes:
        """Return the bytes of an item."""
        ...

    def deserialize(self, data: bytes, /) -> T:
        """Return the item that `data` holds; after an exception, the queue leaves the znode where it is."""
        ...


class BytesSerializer:
    """The serializer of items that are bytes already."""

    def serialize(self, item: Any, /) -> bytes:
        """Return `item`; raise MessageError if it is not bytes."""
        if not isinstance(item, bytes):
            raise MessageError(
                f"item: {type(item).__name__} is not bytes; encode it, or give the builder a serializer"
            )
        return item

    def deserialize(self, data: bytes, /) -> Any:
        """Return `data`."""
        return data


def _thread(run: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=run, name="curator-queue", daemon=True)


@dataclass(frozen=True, kw_only=True)
class QueueBuilder(Generic[T]):
    """Options of a queue; `build_queue()` and its siblings make queues with them.

    zk                 a started kazoo client; the queue never stops it
    path               the znode of the queue; start() creates it, and its missing parents as containers
    consumer           a Consumer, or a function of one item; None: this queue object only puts
    serializer         default: items are bytes
    lock_path          the parent of locks. None: AT MOST ONCE, an item is deleted before it is consumed
    error_mode         what becomes of an item whose consumer failed; needs lock_path, default: REQUEUE
    max_items          put() waits while the queue has (roughly) this many znodes; None: no limit
    put_in_background  whether put() returns before ZooKeeper answers; None: yes, unless max_items is given
    put_listeners      objects that learn the outcome of each put
    put_timeout_s      a put in the foreground raises UnknownOutcome if ZooKeeper has not answered after this
                       many seconds
    final_flush_s      close() waits at most this many seconds for puts under way; 0: not at all
    executor           consumes the items of one listing in parallel; None: one after the other
    thread_factory     makes the thread that consumes
    min_items_before_refresh, refresh_on_watch
                       with refresh_on_watch, the queue is listed again when its znodes have changed and
                       min_items_before_refresh items of the listing were consumed; otherwise after all items
    order, due_ms, requeue_prefix
                       replace what the kind of queue does, Curator's sortChildren(), getDelay() and
                       makeRequeueItemPath(): order(names) returns the names in the order of consumption;
                       due_ms(name) when an item may be consumed, in ms since 1970 UTC; requeue_prefix(name)
                       the beginning of the name under which an item is put again, `queue-…`
    max_packet_bytes   the jute.maxbuffer of the servers
    """

    zk: KazooClient
    path: str
    consumer: Consumer[T] | Callable[[T], None] | None = None
    serializer: Serializer[T] = field(default_factory=BytesSerializer)
    lock_path: str | None = None
    error_mode: ErrorMode | None = None
    max_items: int | None = None
    put_in_background: bool | None = None
    put_listeners: tuple[PutListener, ...] = ()
    put_timeout_s: float = 15.0
    final_flush_s: float = 5.0
    executor: Executor | None = None
    thread_factory: Callable[[Callable[[], None]], threading.Thread] = _thread
    min_items_before_refresh: int = sys.maxsize
    refresh_on_watch: bool = False
    order: Callable[[Iterable[str]], list[str]] | None = None
    due_ms: Callable[[str], int] | None = None
    requeue_prefix: Callable[[str], str] | None = None
    max_packet_bytes: int = MAX_PACKET_BYTES

    def __post_init__(self) -> None:
        for name in ("path", "lock_path"):
            path = getattr(self, name)
            if path is not None and (not path.startswith("/") or path.endswith("/") or "//" in path):
                raise ConfigError(f"{name}: {path!r} must be the path of a znode, like /app/queue")
        if self.lock_path == self.path:
            raise ConfigError(f"lock_path: {self.lock_path!r} must not be the path of the queue")
        if self.error_mode is not None and self.lock_path is None:
            raise ConfigError("error_mode: needs lock_path; without it, failed items are deleted already")
        for name in ("order", "due_ms", "requeue_prefix"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigError(f"{name}: {shown(getattr(self, name))} can't be called")
        if self.max_items is not None and self.max_items < 1:
            raise ConfigError(f"max_items: {self.max_items} must be at least 1")
        if self.min_items_before_refresh < 0:
            raise ConfigError(f"min_items_before_refresh: {self.min_items_before_refresh} is negative")
        if self.lock_path is not None and self.error_mode is None:
            object.__setattr__(self, "error_mode", ErrorMode.REQUEUE)

    @property
    def puts_in_background(self) -> bool:
        """True if put() returns before ZooKeeper has answered."""
        return self.max_items is None if self.put_in_background is None else self.put_in_background

    def named(self, names: ItemNames) -> ItemNames:
        """Return the functions of names of a kind of queue, with those that this builder replaces."""
        own = {name: getattr(self, name) for name in ("order", "due_ms", "requeue_prefix")}
        return replace(names, **{name: function for name, function in own.items() if function is not None})

    def build_queue(self) -> DistributedQueue[T]:
        """Return a queue that is consumed in the order of the puts."""
        return DistributedQueue(self)

    def build_id_queue(self) -> DistributedIdQueue[T]:
        """Return a queue whose items can be removed by an id."""
        return DistributedIdQueue(self)

    def build_priority_queue(self, min_items_before_refresh: int) -> DistributedPriorityQueue[T]:
        """Return a queue in which items of lower priorities come first.

        With a larger `min_items_before_refresh` the queue lists the znodes less often, and notices a more
        urgent item later.
        """
        return DistributedPriorityQueue(
            replace(self, min_items_before_refresh=min_items_before_refresh, refresh_on_watch=True)
        )

    def build_delay_queue(self) -> DistributedDelayQueue[T]:
        """Return a queue whose items are consumed when they are due."""
        return DistributedDelayQueue(self)
