"""Measures puts and takes of a queue: the same loop for storages and their peers. Needs nothing but Python.

Threads put messages of 100 bytes, and then take and acknowledge them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count as numbers
from typing import Any, Protocol
from uuid import uuid4

BODY = b"x" * 100
GROUPS = 10_000
_numbers, _process = numbers(), uuid4().hex
_WARM_UP = 1 / 3
"""Workers warm up for this share of `seconds`: they make connections, prepared statements and caches."""


class Worker(Protocol):
    """One thread's handle of a queue."""

    def put(self, count: int) -> None:
        """Put `count` messages, in one request if the queue can."""
        ...

    def take(self, count: int) -> Sequence[Any]:
        """Take up to `count` messages."""
        ...

    def finish(self, taken: Sequence[Any]) -> None:
        """Acknowledge the messages that take() returned."""
        ...

    def close(self) -> None:
        """Close the handle."""
        ...


def next_groups(count: int) -> list[str]:
    """The groups of the next messages, by turns."""
    return [f"g{next(_numbers) % GROUPS}" for _ in range(count)]


def next_ids(count: int) -> list[str]:
    """Ids that no other message has."""
    return [f"{_process} {next(_numbers)}" for _ in range(count)]


def measure(
    open_worker: Callable[[], Worker], *, takers: int, batch: int, seconds: float
) -> dict[str, float]:
    """Return how many messages were put, and then taken and acknowledged, per second.

    Putting lasts `seconds`. Taking ends when as many messages were taken as were put, so the depth stays what
    it was; or after four times `seconds`. Before, messages are put and taken for a while, which does not
    count.
    """
    with ExitStack() as all_of_them:
        workers = [open_worker() for _ in range(takers)]
        for worker in workers:
            all_of_them.callback(worker.close)
        _run(workers, lambda worker, _: _put_and_take(worker, batch), _WARM_UP * seconds, None)
        put, put_s = put_speed(workers, batch, seconds)
        taken, taken_s = _run(workers, lambda worker, left: _take(worker, min(batch, left)), 4 * seconds, put)
        return {"put": put / put_s, "take": taken / taken_s}


def put_speed(workers: Sequence[Worker], batch: int, seconds: float) -> tuple[int, float]:
    """Put messages for `seconds`; returns how many they were, and the seconds that it took."""
    return _run(workers, lambda worker, _: _put(worker, batch), seconds, None)


def _put(worker: Worker, batch: int) -> int:
    worker.put(batch)
    return batch


def _take(worker: Worker, batch: int) -> int:
    taken = worker.take(batch)
    if taken:
        worker.finish(taken)
    return len(taken)


def _put_and_take(worker: Worker, batch: int) -> int:
    worker.put(batch)
    _take(worker, batch)
    return batch


def _run(
    workers: Sequence[Worker], step: Callable[[Worker, int], int], seconds: float, most: int | None
) -> tuple[int, float]:
    """Have each worker repeat `step` in a thread; returns how many messages it handled, and the seconds.

    Ends after `seconds`, after `most` messages, or for a worker when `step` has handled no message.
    """
    lock = threading.Lock()
    done = 0
    errors: list[BaseException] = []
    began = time.monotonic()

    def run(worker: Worker) -> None:
        nonlocal done
        try:
            while time.monotonic() - began < seconds:
                left = 2**31 if most is None else most - done
                if left <= 0 or not (some := step(worker, left)):
                    return
                with lock:
                    done += some
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return done, time.monotonic() - began
