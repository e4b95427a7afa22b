"""Queues and workers for asyncio: the same core, called in threads. No second copy of the logic.

async with AsyncQueue(queue_for(url)) as queue:
    async for message in queue:
        ...
        await queue.ack(message)
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, Unpack

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed
from kmqpy.message import HeadersLike, Message, MessagesLike, OutgoingMessage, each_of, headers_from
from kmqpy.queue import Queue
from kmqpy.queue.arguments import check_queue
from kmqpy.worker.batches import Batches, each_result
from kmqpy.worker.signals import called_at_signals
from kmqpy.worker.worker import Worker, WorkerOptions

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SLICE_S = 1.0
"""How long a thread may go on to receive after its caller was cancelled."""
_POLL_S = 0.05
_TIMER_S = 0.001
"""How much too early an event loop may call back, at most."""
_AHEAD = 10
"""How many messages `async for` takes at a time."""


class AsyncQueue:
    """A queue whose operations are awaited; each runs in one of `threads` threads.

    send() and ack() of concurrent coroutines are gathered: while one batch of them is under way, the next
    one grows. They are done in the order of the calls.

    A cancelled receive() loses no message: what arrives after the cancellation is given back and
    not counted as an attempt; on an at-most-once queue the next receive() returns it. Any other operation
    that is cancelled may have happened: a message may have been sent. Closing this closes the queue.

    It may be used on several event loops.
    """

    def __init__(self, queue: Queue, *, threads: int = 4, clock: Clock = SYSTEM_CLOCK) -> None:
        check_queue(queue)
        check_limit(threads, "threads")
        self._guard = ForkGuard(f"the queue {queue.name!r} for asyncio")
        self._queue = queue
        self._clock = clock
        # A pool of their own: receives that wait for messages must not hold up acknowledgements.
        self._takers = ThreadPoolExecutor(threads, "kmq-aio-receive")
        self._pool = ThreadPoolExecutor(threads, "kmq-aio")
        self._sends: Batches[OutgoingMessage, str] = Batches("kmq-aio-send", self._send_all)
        self._acks: Batches[_Ack, None] = Batches("kmq-aio-ack", partial(each_result, self._ack_all))
        self._at_most_once = queue.at_most_once
        self._kept: deque[Message] = deque()  # that can't be given back
        self._ahead: deque[Message] = deque()  # of one batch
        self._use_until = 0.0
        self._giving_back: asyncio.TimerHandle | None = None
        self._turn = threading.Lock()  # for who starts to take ahead
        self._taking_ahead: Future[None] | None = None
        self._closed = False

    @property
    def queue(self) -> Queue:
        """The queue itself, for `call`."""
        return self._queue

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run any operation in a thread: `await q.call(q.queue.purge)`."""
        self._check_open()
        return await asyncio.wrap_future(self._start(self._pool, partial(function, *args, **kwargs)))

    async def send(
        self,
        body: Any,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
    ) -> str:
        """See Queue.send; within a transaction: `await q.call(q.queue.send, …, connection=…)`."""
        self._check_open()
        own = None if headers is None else headers_from(headers)  # now: they may be an iterator
        message = OutgoingMessage(body, key=key, headers=own, delay=delay, priority=priority)
        return await self._sends.submit(message)

    async def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
    ) -> list[str]:
        """See Queue.send_many."""
        return await self.call(self._queue.send_many, bodies, key=key, headers=headers, delay=delay)

    async def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[Message]:
        """See Queue.receive."""
        deadline = self._clock.monotonic() + duration_ms(wait, "wait") / 1000
        while True:
            left = max(0.0, deadline - self._clock.monotonic())
            messages = await self._receive(max_messages, min(left, _SLICE_S), lease)
            if messages or self._clock.monotonic() >= deadline:
                return messages

    async def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """See Queue.ack."""
        self._check_open()
        await self._acks.submit(_Ack(each_of(messages), wait))

    async def nack(
        self,
        *messages: MessagesLike,
        delay: Duration = 0,
        count: bool = True,
        reason: str | None = None,
        wait: bool = False,
    ) -> None:
        """See Queue.nack."""
        await self.call(self._queue.nack, *messages, delay=delay, count=count, reason=reason, wait=wait)

    async def extend(self, *messages: MessagesLike, lease: Duration, wait: bool = False) -> list[str]:
        """See Queue.extend."""
        return await self.call(self._queue.extend, *messages, lease=lease, wait=wait)

    async def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, wait: bool = False
    ) -> None:
        """See Queue.dead_letter."""
        await self.call(self._queue.dead_letter, *messages, reason=reason, wait=wait)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages one by one until the queue is closed, with the queue's default lease.

        A few are taken ahead. Those whose turn does not come in time are given back, which does not
        count as an attempt.
        """
        while not self._closed:
            self._guard.raise_if_inherited()
            self._give_back_stale()  # the loop may have stood still
            try:
                message = self._ahead.popleft()
            except IndexError:  # none is there, or one of another event loop was faster
                try:
                    await self._take_ahead()
                except Closed:
                    return
            else:
                yield message

    async def close(self) -> None:
        """Give back what was taken ahead, let operations end, close the queue."""
        if self._closed or self._guard.inherited:
            return
        self._closed = True
        await _in_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _take_ahead(self) -> None:
        with self._turn:
            taking = self._taking_ahead
            is_mine = taking is None or taking.done()
            if is_mine:
                taking = self._taking_ahead = self._start(self._takers, self._take_in_thread)
        assert taking is not None
        try:
            await _end_of(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda _: self._give_back_ahead())
            raise
        taking.result()  # raises what it raised
        if is_mine and not self._at_most_once:
            if self._giving_back is not None:
                self._giving_back.cancel()
            left_s = self._use_until - self._clock.monotonic()
            self._giving_back = asyncio.get_running_loop().call_later(
                left_s + _TIMER_S, self._give_back_stale
            )

    def _take_in_thread(self) -> None:
        begun = self._clock.monotonic()
        if self._at_most_once:
            messages = _popped(self._kept, 1) or self._queue.receive(1, wait=_SLICE_S, lease=None)
            self._use_until = math.inf
        else:
            messages = self._queue.receive(_AHEAD, wait=_SLICE_S, lease=None)
            # At least half of the lease is left now, and half of what is left is the caller's (rule R11). The
            # times in messages are of the storage's clock, which may differ from ours.
            now, lease_s = self._clock.monotonic(), self._queue.default_lease
            self._use_until = now + max(lease_s / 2, lease_s - (now - begun)) / 2
        self._ahead.extend(messages)

    def _give_back_stale(self) -> None:
        if self._clock.monotonic() >= self._use_until:  # else they are of a later batch
            self._give_back_ahead()

    def _give_back_ahead(self) -> None:
        """Runs in any thread, an event loop's included, so it must not block."""
        if ahead := _popped(self._ahead):
            self._pool.submit(self._give_back, ahead)

    async def _receive(self, max_messages: int, wait_s: float, lease: Duration | None) -> list[Message]:
        self._check_open()
        if kept := _popped(self._kept, max_messages):
            return kept
        taking = self._start(
            self._takers, partial(self._queue.receive, max_messages, wait=wait_s, lease=lease)
        )
        try:
            return await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back_later)
            raise

    def _give_back_later(self, taking: Future[list[Message]]) -> None:
        """Runs in any thread, the event loop's included, so it must not block."""
        if not taking.cancelled() and taking.exception() is None and (messages := taking.result()):
            self._pool.submit(self._give_back, messages)

    def _give_back(self, messages: list[Message]) -> None:
        if self._at_most_once:
            self._kept.extend(messages)
            return
        try:
            self._queue.nack(*messages, count=False)
        except Exception:  # nobody waits for it; the messages are redelivered when their leases end
            _log.exception("messages could not be given back", extra={"count": len(messages)})

    def _close(self) -> None:
        self._takers.shutdown()  # first: what its calls still receive is given back by the other pool
        self._give_back_ahead()
        self._sends.close()
        self._acks.close()
        self._pool.shutdown()
        if self._kept:
            _log.warning(
                "the queue is at most once: messages that nobody has handled are lost",
                extra={"queue": self._queue.name, "count": len(self._kept)},
            )
        self._queue.close()

    def _send_all(self, messages: Sequence[OutgoingMessage]) -> list[str | BaseException]:
        return each_result(self._queue.send_many, messages)

    def _ack_all(self, asked: Sequence[_Ack]) -> list[None]:
        messages = [message for one in asked for message in one.messages]
        self._queue.ack(*messages, wait=any(one.wait for one in asked))
        return [None] * len(asked)

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        self._check_open()
        try:
            return pool.submit(work)
        except RuntimeError:  # another thread has just closed it
            raise Closed(f"the queue {self._queue.name!r} is closed") from None

    def _check_open(self) -> None:
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed(f"the queue {self._queue.name!r} is closed")


class _Ack(NamedTuple):
    """A call of ack()."""

    messages: Sequence[Message | str]
    wait: bool


class AsyncWorker:
    """A Worker whose handler is a coroutine function, run on the event loop that awaits `run()`.

    Everything else is as with Worker, whose keyword arguments it takes; one thread per running
    handler waits for it. A handler that is still running after `drain_timeout` is cancelled.

    Signals are the application's, which calls stop() or cancels run() when it ends; with `handle_signals`,
    for programs that do nothing else, run() takes SIGTERM and SIGINT.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Callable[[Message], Awaitable[object]],
        *,
        handle_signals: bool = False,
        **options: Unpack[WorkerOptions],
    ) -> None:
        self._handler = handler
        self._handle_signals = handle_signals
        self._worker = Worker(queue, self._call, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[Future[BaseException | None]] = set()

    async def run(self) -> None:
        """Work until stop(), cancellation, a failure, or a signal with `handle_signals`, then drain.

        Raises what ended the worker: ConfigError, NotSupported, Closed, Forked.
        """
        self._loop = asyncio.get_running_loop()
        with called_at_signals(self._loop, self._stop_at) if self._handle_signals else nullcontext():
            self._worker.start()
            try:
                while not self._worker.stopping:
                    await asyncio.sleep(_POLL_S)
            finally:
                await self._drain()
        if self._worker.failure is not None:
            raise self._worker.failure

    def stop(self) -> None:
        """Take no more messages; run() returns when the handlers have ended."""
        self._worker.stop(wait=False)

    async def _drain(self) -> None:
        # In a thread, because handlers need the event loop to end.
        try:
            await _in_thread(self._worker.stop)
        finally:
            for future in list(self._running):
                future.cancel()

    def _call(self, message: Message) -> None:
        assert self._loop is not None
        handling = self._handle(message)
        try:
            # The task inherits this thread's context: the span of the message.
            future = asyncio.run_coroutine_threadsafe(handling, self._loop)
        except RuntimeError:  # the loop is closed
            handling.close()
            raise
        self._running.add(future)
        try:
            error = future.result()
        finally:
            self._running.discard(future)
        if error is not None:
            raise error

    async def _handle(self, message: Message) -> BaseException | None:
        """Call the handler; returns its error, because some errors would end the event loop."""
        try:
            await self._handler(message)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    def _stop_at(self, number: signal.Signals) -> None:
        self._worker.log_signal(number)
        self.stop()


async def _end_of(work: Future[None]) -> None:
    """Wait until it has ended; it goes on when the caller is cancelled, since others may wait for it, too."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    work.add_done_callback(tell)
    await ended.wait()


def _popped(messages: deque[Message], most: int = sys.maxsize) -> list[Message]:
    """Take up to `most` from the left; other threads may do the same."""
    found: list[Message] = []
    with suppress(IndexError):
        while len(found) < most:
            found.append(messages.popleft())
    return found


async def _in_thread(function: Callable[[], None]) -> None:
    """Run `function` to its end in a thread of its own, also when the caller is cancelled."""
    executor = ThreadPoolExecutor(1, "kmq-aio-once")
    future = executor.submit(function)
    executor.shutdown(wait=False)
    await asyncio.shield(asyncio.wrap_future(future))
