"""The options of Curator's queues, and what they ask of a program: a consumer, listeners, a serializer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from kazoo.client import KazooClient

from kmqpy.errors import ConfigError, MessageError, shown
from kmqpy.zookeeper.curator.item_names import ItemNames
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES

T = TypeVar("T")
Item_contra = TypeVar("Item_contra", contravariant=True)


class ErrorMode(StrEnum):
    """What becomes of an item whose consumer raised an exception; Curator's ErrorMode."""

    REQUEUE = "requeue"
    """The item is put again at the end of the queue."""
    DELETE = "delete"
    """The item is deleted."""


class Consumer(Protocol[Item_contra]):
    """Consumes the items of a queue; without an executor, one at a time."""

    def consume(self, item: Item_contra, /) -> None:
        """Process one item; after an exception, ErrorMode says what becomes of the item.

        Args:
            item: What the serializer returned; by default bytes.
        """
        ...

    def connection_changed(self, state: str) -> None:
        """Called with each new state of kazoo's connection.

        The method must not block: kazoo's own thread calls it.

        Args:
            state: SUSPENDED (stop: locks may be lost soon), LOST (they are) or CONNECTED.
        """
        ...


class PutListener(Protocol):
    """Learns the outcome of each put; must not block, because kazoo's thread calls it for background puts."""

    def put_completed(self, items: Sequence[Any]) -> None:
        """The items of one znode are stored.

        Args:
            items: All of the znode.
        """
        ...

    def put_failed(self, items: Sequence[Any], error: Exception) -> None:
        """The items are not in the queue.

        Args:
            items: All of the znode.
            error: Why; after UnknownOutcome they may be in the queue.
        """
        ...


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
            kind = type(item).__name__
            raise MessageError(f"item: {kind} is not bytes; encode it, or give the builder a serializer")
        return item

    def deserialize(self, data: bytes, /) -> Any:
        """Return `data`."""
        return data


def _thread(run: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=run, name="curator-queue", daemon=True)


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Generic[T]):
    """The options of a queue; QueueBuilder describes them."""

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
        for name, function in self._own_names().items():
            if not callable(function):
                raise ConfigError(f"{name}: {shown(function)} can't be called")
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
        """Return the functions of names of a kind of queue, with those that this builder replaces.

        Args:
            names: Those of the kind of queue.
        """
        return replace(names, **self._own_names())

    def _own_names(self) -> dict[str, Any]:
        own = {"order": self.order, "due_ms": self.due_ms, "requeue_prefix": self.requeue_prefix}
        return {name: function for name, function in own.items() if function is not None}
