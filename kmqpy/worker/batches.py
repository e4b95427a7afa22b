"""Gathers items of concurrent coroutines, for example sends, and processes them in batches in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from kmqpy.errors import Closed, ConfigError, MessageError, NotSupported, ReceiptError

T = TypeVar("T")
R = TypeVar("R")

_MAX_WEIGHT = 1_000
"""A batch ends before this weight is exceeded; further items wait for the next batch."""
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
    """Passes items to `do` in batches, one at a time; `do` returns the result or error of each item.

    While a batch is done in a thread of `threads`, further items gather for the next one. Items stay in the
    order of submit(). Without items, no thread is used.

    weigh      the weight of an item; an item that is heavier than _MAX_WEIGHT is a batch by itself
    unclaimed  is called with the result of an item whose future was cancelled meanwhile; must not block,
               because event loops call it
    """

    def __init__(
        self,
        threads: Executor,
        do: Callable[[Sequence[T]], Sequence[R | BaseException]],
        *,
        weigh: Callable[[T], int] = lambda _: 1,
        unclaimed: Callable[[R], None] = lambda _: None,
    ) -> None:
        self._threads = threads
        self._do = do
        self._weigh = weigh
        self._unclaimed = unclaimed
        self._changed = threading.Condition()
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._running = False
        self._closing = False

    @property
    def idle(self) -> bool:
        """True if no item waits or is being done."""
        return not self._running

    def submit(self, item: T) -> asyncio.Future[R]:
        """Add an item; called on an event loop, on which the returned future gets the result of the item.

        An item whose future is cancelled is still passed to `do`. Raises Closed after close().
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise Closed("the queue is closed")
            self._waiting.append((item, future))
            if not self._running:
                self._start()
        return future

    def close(self) -> None:
        """Return when all submitted items are done; submit() raises Closed from now on."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._running)

    def _start(self) -> None:
        try:
            self._threads.submit(self._do_next)
        except RuntimeError:  # the threads are shut down
            left, self._waiting = self._waiting, []
            self._deliver([future for _, future in left], [Closed("the queue is closed")] * len(left))
        else:
            self._running = True

    def _do_next(self) -> None:
        """Do one batch, then wait for a thread again, so that many Batches share the threads fairly."""
        with self._changed:
            batch = self._take_batch()
        results = self._do([item for item, _ in batch])
        self._deliver([future for _, future in batch], results)
        with self._changed:
            self._running = False
            if self._waiting:
                self._start()
            self._changed.notify_all()

    def _take_batch(self) -> list[tuple[T, asyncio.Future[R]]]:
        count, weight = 0, 0
        for item, _ in self._waiting:
            weight += self._weigh(item)
            if count and weight > _MAX_WEIGHT:
                break
            count += 1
        batch = self._waiting[:count]
        del self._waiting[:count]
        return batch

    def _deliver(self, futures: Sequence[asyncio.Future[R]], results: Sequence[R | BaseException]) -> None:
        """Set the results or errors of the futures, on their event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[R], R | BaseException]]] = {}
        for future, result in zip(futures, results, strict=True):
            by_loop.setdefault(future.get_loop(), []).append((future, result))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._set_all, pairs)
            except RuntimeError:  # the loop is closed: nobody awaits the futures any more
                for _, result in pairs:
                    self._drop(result)

    def _set_all(self, pairs: Sequence[tuple[asyncio.Future[R], R | BaseException]]) -> None:
        for future, result in pairs:
            if future.done():  # cancelled
                self._drop(result)
            elif isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _drop(self, result: R | BaseException) -> None:
        if not isinstance(result, BaseException):
            self._unclaimed(result)
