"""The load that storages and their peers get: the same loop for all. Needs nothing but Python.

Figures are of messages of 100 bytes, put, and then taken and acknowledged by threads.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

BODY = b"x" * 100
_WARM_UP = 1 / 3
"""Of the time for which is measured: connections, prepared statements and caches are made in it."""


class Worker(Protocol):
    """One thread's handle of a queue."""

    def put(self, count: int) -> None:
        """Put so many messages, in one call if the queue can."""
        ...

    def take(self, count: int) -> Sequence[Any]:
        """Take up to so many."""
        ...

    def finish(self, taken: Sequence[Any]) -> None:
        """Acknowledge them."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


def measure(
    open_worker: Callable[[], Worker], *, takers: int, batch: int, seconds: float
) -> dict[str, float]:
    """Messages put, and then taken and acknowledged, per second; each part lasts about `seconds`.

    Before, messages are put and taken for a while, which does not count. What is taken was put in the same
    run, so the depth stays what it was.
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
    """How many messages were put, and in which time."""
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
    """How many messages went through `step`, and in which time."""
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
