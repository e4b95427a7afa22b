"""Measures puts and takes per second of kmqpy's queues on a storage; runs in a process of its own."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from benchmarks.queue_load import BODY, measure, next_groups, next_ids
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage, storage_for

_FILL = 5_000


class Ours:
    """One thread's handle of a queue of kmqpy; all share one storage.

    takes_from  the same queue opened by another storage, for the takes
    """

    def __init__(self, queue: Queue, takes_from: Queue | None = None) -> None:
        self._queue = queue
        self._takes_from = takes_from or queue

    def put(self, count: int) -> None:
        if count == 1:
            self._queue.send(BODY)
        else:
            self._queue.send_many([BODY] * count)

    def take(self, count: int) -> Sequence[Any]:
        return self._takes_from.receive(count, wait=0)

    def finish(self, taken: Sequence[Any]) -> None:
        self._takes_from.ack(taken)

    def close(self) -> None:
        pass


class Grouped(Ours):
    """Each message has a group."""

    def put(self, count: int) -> None:
        self._queue.send_many([OutgoingMessage(BODY, group=one) for one in next_groups(count)])


class Unique(Ours):
    """Each message has a dedup id."""

    def put(self, count: int) -> None:
        self._queue.send_many([OutgoingMessage(BODY, dedup_id=one) for one in next_ids(count)])


_KINDS: Mapping[str, tuple[type[Ours], Mapping[str, str]]] = {
    "groups": (Grouped, {"order": "group"}),
    "unique": (Unique, {"dedup_until": "acknowledged"}),
}


def speed(options: Mapping[str, Any]) -> dict[str, float]:
    """Measure the queue of a depth, or a new one of a kind; options: `url, depth, takers, batch, seconds`."""
    how = {name: options[name] for name in ("takers", "batch", "seconds")}
    with storage_for(options["url"]) as storage:
        if not options.get("kind"):
            queue = filled(storage, options["depth"])
            return measure(lambda: Ours(queue), **how)
        worker, settings = _KINDS[options["kind"]]
        storage.create(name := uuid4().hex, **settings)
        try:
            queue = storage.open(name)
            return measure(lambda: worker(queue), **how)
        finally:
            storage.delete(name)


def filled(storage: Storage, depth: int) -> Queue:
    """The queue of the storage for this depth; it is made and filled if the storage does not have it yet."""
    name = f"depth-{depth}"
    if name not in storage.list():
        storage.create(name)
        queue = storage.open(name)
        for first in range(0, depth, _FILL):
            queue.send_many([BODY] * min(_FILL, depth - first))
    return storage.open(name)
