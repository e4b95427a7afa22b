"""Gathers what concurrent coroutines ask for, and does it in batches, in one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kmqpy.errors import Closed, ConfigError, MessageError, NotSupported, ReceiptError

T = TypeVar("T")
R = TypeVar("R")

_MOST = 1_000
"""Items of one batch."""
_REFUSALS = (ConfigError, MessageError, NotSupported, ReceiptError)
"""Errors of a bad item; a queue raises them before anything is done."""


def each_result(do: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R | BaseException]:
    """The result of each item, or its error.

    Where `do` refuses items because one of them is bad, the others are done without it. After any other error
    nobody knows which of them were done: it is the error of all.
    """
    try:
        return list(do(items))
    except _REFUSALS as error:
        if len(items) == 1:
            return [error]
        half = len(items) // 2
        return each_result(do, items[:half]) + each_result(do, items[half:])
    except BaseException as error:
        return [error] * len(items)


class Batches(Generic[T, R]):
    """Has items done by `do`, which takes a batch and returns the result or error of each, in a thread.

    While one batch is under way, further items gather for the next. They are done in the order in which they
    were submitted.
    """

    def __init__(self, name: str, do: Callable[[Sequence[T]], Sequence[R | BaseException]]) -> None:
        self._do = do
        self._changed = threading.Condition()
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, item: T) -> asyncio.Future[R]:
        """Submit an item, on an event loop; its result is set there. One that is cancelled may be done.

        Raises Closed after close().
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise Closed("the queue is closed")
            if not self._thread.is_alive():
                self._thread.start()
            self._waiting.append((item, future))
            if len(self._waiting) == 1:
                self._changed.notify()
        return future

    def close(self) -> None:
        """Return when all that was submitted is done; no more may be."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                batch = self._waiting[:_MOST]
                del self._waiting[:_MOST]
            if not batch:
                return
            _deliver([future for _, future in batch], self._do([item for item, _ in batch]))


def _deliver(futures: Sequence[asyncio.Future[R]], results: Sequence[R | BaseException]) -> None:
    """Set the results on the event loops of the futures."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[R], R | BaseException]]] = {}
    for future, result in zip(futures, results, strict=True):
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, pairs)
        except RuntimeError:  # the loop is closed: nobody waits any more
            continue


def _set_all(pairs: Sequence[tuple[asyncio.Future[R], R | BaseException]]) -> None:
    for future, result in pairs:
        if future.done():  # cancelled
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
