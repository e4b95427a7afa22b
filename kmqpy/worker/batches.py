"""Gathers items of concurrent coroutines, for example sends, and processes them in batches in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kmqpy.errors import Closed, ConfigError, MessageError, NotSupported, ReceiptError

T = TypeVar("T")
R = TypeVar("R")

_MAX_BATCH = 1_000
"""The most items in one batch; further items wait for the next batch."""
_REFUSAL_ERRORS = (ConfigError, MessageError, NotSupported, ReceiptError)
"""Errors that a queue raises for a bad item before it does anything with the other items."""


def each_result(do: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R | BaseException]:
    """Call `do` with the items; return the result of each item, or its error.

    If `do` raises one of _REFUSAL_ERRORS, each half of the items is tried alone, so that only bad items get
    the error. After any other error nobody knows which items were done: all items get the error.
    """
    try:
        return list(do(items))
    except _REFUSAL_ERRORS as error:
        if len(items) == 1:
            return [error]
        half = len(items) // 2
        return each_result(do, items[:half]) + each_result(do, items[half:])
    except BaseException as error:
        return [error] * len(items)


class Batches(Generic[T, R]):
    """Passes items to `do` in batches, in a thread; `do` returns the result or error of each item of a batch.

    While `do` runs, further items gather for the next batch. Items stay in the order of submit().
    """

    def __init__(self, name: str, do: Callable[[Sequence[T]], Sequence[R | BaseException]]) -> None:
        self._do = do
        self._changed = threading.Condition()
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, item: T) -> asyncio.Future[R]:
        """Add an item; called on an event loop, on which the returned future gets the result of the item.

        An item whose future is cancelled is still passed to `do`. Raises Closed after close().
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
        """Return when all submitted items are done; submit() raises Closed from now on."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                batch = self._waiting[:_MAX_BATCH]
                del self._waiting[:_MAX_BATCH]
            if not batch:
                return
            _deliver([future for _, future in batch], self._do([item for item, _ in batch]))


def _deliver(futures: Sequence[asyncio.Future[R]], results: Sequence[R | BaseException]) -> None:
    """Set the results or errors of the futures, on their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[R], R | BaseException]]] = {}
    for future, result in zip(futures, results, strict=True):
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, pairs)
        except RuntimeError:  # the loop is closed: nobody awaits the futures any more
            continue


def _set_all(pairs: Sequence[tuple[asyncio.Future[R], R | BaseException]]) -> None:
    for future, result in pairs:
        if future.done():  # cancelled
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
