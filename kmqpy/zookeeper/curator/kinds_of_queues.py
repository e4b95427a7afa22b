"""Curator's queues that keep an id, a priority or a due time in the names of their znodes."""

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
    """A queue whose items can be removed by their ids; several items may have the same id."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, BY_ID)

    def put_with_id(self, item: T, item_id: str, *, timeout: float | None = None) -> bool:
        """Put one item under an id, in which `/` and `|` become `_`; otherwise like put()."""
        return self.put_named(id_prefix(item_id), [item], timeout=timeout)

    def remove_by_id(self, item_id: str) -> int:
        """Remove the items of this id that nobody consumes now; return how many. Raises Unavailable."""
        wanted = cleaned_id(item_id)
        return sum(self.remove(name) for name in self.children() if id_of(name) == wanted)


class DistributedPriorityQueue(DistributedQueue[T]):
    """A queue whose items have priorities; lower numbers come first, as in Curator."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, PLAIN)

    def put_with_priority(self, item: T, priority: int, *, timeout: float | None = None) -> bool:
        """Put one item with a priority of 32 bits, signed; otherwise like put()."""
        return self.put_named(priority_prefix(priority), [item], timeout=timeout)


class DistributedDelayQueue(DistributedQueue[T]):
    """A queue whose items are not consumed before they are due, by the consumer's clock."""

    def __init__(self, options: QueueBuilder[T]) -> None:
        super().__init__(options, DELAYED)

    def put_until(self, item: T, due_ms: int, *, timeout: float | None = None) -> bool:
        """Put one item that is due at `due_ms`, in ms since 1970 UTC; otherwise like put()."""
        return self.put_named(delay_prefix(due_ms), [item], timeout=timeout)
