"""Measures puts and takes per second of kmqpy's queues on a storage; runs in a process of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.queue_load import BODY, measure
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


def speed(options: Mapping[str, Any]) -> dict[str, float]:
    """Measure the queue of a depth; options: `url, depth, takers, batch, seconds`."""
    with storage_for(options["url"]) as storage:
        queue = filled(storage, options["depth"])
        return measure(
            lambda: Ours(queue), takers=options["takers"], batch=options["batch"], seconds=options["seconds"]
        )


def filled(storage: Storage, depth: int) -> Queue:
    """The queue of the storage for this depth; it is made and filled if the storage does not have it yet."""
    name = f"depth-{depth}"
    if name not in storage.list():
        storage.create(name)
        queue = storage.open(name)
        for first in range(0, depth, _FILL):
            queue.send_many([BODY] * min(_FILL, depth - first))
    return storage.open(name)
