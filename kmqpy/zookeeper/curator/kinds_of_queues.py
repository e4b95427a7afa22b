"""Curator's queues that keep an id, a priority or a due time in the names of the znodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kmqpy.zookeeper.curator.distributed_queue import DistributedQueue
from kmqpy.zookeeper.curator.item_names import (
    BY_ID,
    DELAYED,
    PLAIN,
    cleaned_id,
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)

if TYPE_CHECKING:
    from kmqpy.zookeeper.curator.builder import QueueBuilder

T = TypeVar("T")


class DistributedIdQueue(DistributedQueue[T]):
    """Items have ids and can be removed by them; the same id may occur several times."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, BY_ID)

    def put_with_id(self, item: T, item_id: str, *, timeout: float | None = None) -> bool:
        """Put one item under an id, in which `/` and `|` become `_`; else as put()."""
        return self.put_named(id_prefix(item_id), [item], timeout=timeout)

    def remove_by_id(self, item_id: str) -> int:
        """Remove the items of this id that nobody consumes now; returns how many. Raises Unavailable."""
        wanted = cleaned_id(item_id)
        return sum(self.remove(name) for name in self.children() if id_of(name) == wanted)


class DistributedPriorityQueue(DistributedQueue[T]):
    """Items have priorities; lower numbers come first, as in Curator."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, PLAIN)

    def put_with_priority(self, item: T, priority: int, *, timeout: float | None = None) -> bool:
        """Put one item with a priority of 32 bits, signed; else as put()."""
        return self.put_named(priority_prefix(priority), [item], timeout=timeout)


class DistributedDelayQueue(DistributedQueue[T]):
    """Items have a time before which they are not consumed, by the consumer's clock."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, DELAYED)

    def put_until(self, item: T, due_ms: int, *, timeout: float | None = None) -> bool:
        """Put one item that is due at this time, in ms since 1970 UTC; else as put()."""
        return self.put_named(delay_prefix(due_ms), [item], timeout=timeout)
