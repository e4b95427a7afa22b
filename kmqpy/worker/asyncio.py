"""Queues and workers for asyncio, which call methods of queues in threads.

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
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, Unpack

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, KmqError
from kmqpy.message import HeadersLike, Message, MessagesLike, OutgoingMessage, each_of, headers_from
from kmqpy.queue import Queue
from kmqpy.queue.arguments import check_queue
from kmqpy.telemetry.base import sent_for
from kmqpy.worker.batches import Batches, each_result
from kmqpy.worker.lease_keeper import LeasedMessage
from kmqpy.worker.outcome import RELEASE, Outcome
from kmqpy.worker.signals import called_at_signals
from kmqpy.worker.worker import Worker, WorkerOptions

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MAX_RECEIVE_S = 1.0
"""The longest wait, in seconds, of one Queue.receive(). AsyncQueue.receive() divides a longer wait, because
Queue.receive() goes on in its thread after the coroutine was cancelled."""
_STOP_POLL_S = 0.05
"""Seconds between two checks of AsyncWorker.run() whether the worker stops."""
_TIMER_EARLY_S = 0.001
"""Seconds by which an event loop may call back too early; timers are longer by that time."""
_MAX_TAKEN_AHEAD = 10
"""The most messages that `async for` takes by one Queue.receive() and then yields one by one. On an
at-most-once queue, each Queue.receive() takes one message: the process could die with those taken ahead."""


class AsyncQueue:
    """Offers the operations of a Queue as coroutines; may be used on several event loops.

    send() and ack() have a thread each, and work in batches: while a batch is sent or acknowledged, the
    messages that concurrent coroutines give to send() or ack() gather for the next batch, in the order given.

    A cancelled receive() loses no message: messages that arrive after the cancellation are given back, and
    the attempt is not counted. Any other operation that is cancelled may have happened: a message may have
    been sent.

    Args:
        queue: The queue; close() closes it, too.
        threads: So many run receive() and `async for`, and as many more run most other operations.
        clock: For tests.
    """

    def __init__(self, queue: Queue, *, threads: int = 4, clock: Clock = SYSTEM_CLOCK) -> None:
        check_queue(queue)
        check_limit(threads, "threads")
        self._guard = ForkGuard(f"the queue {queue.name!r} for asyncio")
        self._queue = queue
        self._clock = clock
        # Two pools, so that no other operation waits for a receive() that waits for messages.
        self._takers = ThreadPoolExecutor(threads, "kmq-aio-receive")
        self._pool = ThreadPoolExecutor(threads, "kmq-aio")
        self._batch_threads = ThreadPoolExecutor(2, "kmq-aio-batch")  # one for sends, one for acks
        self._sends: Batches[_Send, str] = Batches(self._batch_threads, partial(each_result, self._send_all))
        self._acks: Batches[_Ack, None] = Batches(
            self._batch_threads, partial(each_result, self._ack_all), weigh=lambda ack: len(ack.messages)
        )
        self._at_most_once = queue.at_most_once
        self._taken_ahead: deque[Message] = deque()  # for `async for`
        self._hand_out_until = 0.0  # afterwards the messages taken ahead are given back
        self._give_back_timer: asyncio.TimerHandle | None = None
        self._take_ahead_lock = threading.Lock()  # guards _taking_ahead
        self._taking_ahead: Future[None] | None = None
        self._closed = False

    @property
    def queue(self) -> Queue:
        """The queue whose operations this object offers, for call()."""
        return self._queue

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run any other operation of the queue in a thread: `await q.call(q.queue.purge)`.

        Args:
            function: What to call.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """
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
        group: str | None = None,
        dedup_id: str | None = None,
    ) -> str:
        """See Queue.send; within a transaction: `await q.call(q.queue.send, …, transaction=…)`."""
        self._check_open()
        own = None if headers is None else headers_from(headers)  # converted now: they may be an iterator
        message = OutgoingMessage(
            body, key=key, headers=own, delay=delay, priority=priority, group=group, dedup_id=dedup_id
        )
        return await self._sends.submit(_Send(message, copy_context()))

    async def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        group: str | None = None,
    ) -> list[str]:
        """See Queue.send_many."""
        # What only some storages have is passed where it is given: a queue of somebody's own may lack it.
        more: dict[str, Any] = {} if group is None else {"group": group}
        if priority:
            more["priority"] = priority
        return await self.call(self._queue.send_many, bodies, key=key, headers=headers, delay=delay, **more)

    async def receive(
        self,
        max_messages: int = 100,
        *,
        wait: Duration = 1.0,
        lease: Duration | None = None,
        one_per_group: bool = False,
    ) -> Sequence[Message]:
        """See Queue.receive."""
        how: dict[str, Any] = {"lease": lease, **({"one_per_group": True} if one_per_group else {})}
        deadline = self._clock.monotonic() + duration_ms(wait, "wait") / 1000
        while True:
            left = max(0.0, deadline - self._clock.monotonic())
            messages = await self._receive(max_messages, wait=min(left, _MAX_RECEIVE_S), **how)
            if messages or self._clock.monotonic() >= deadline:
                return messages

    async def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        """See Queue.ack."""
        self._check_open()
        await self._acks.submit(_Ack(each_of(messages), confirmed, copy_context()))

    async def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,
    ) -> None:
        """See Queue.nack."""
        await self.call(
            self._queue.nack, *messages, delay=delay, count=count, reason=reason, confirmed=confirmed
        )

    async def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:
        """See Queue.extend."""
        return await self.call(self._queue.extend, *messages, lease=lease, confirmed=confirmed)

    async def dead_letter(
        self, *messages: MessagesLike, reason: str | None = None, confirmed: bool = False
    ) -> None:
        """See Queue.dead_letter."""
        await self.call(self._queue.dead_letter, *messages, reason=reason, confirmed=confirmed)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages one by one until the queue is closed, with the queue's default lease.

        Each Queue.receive() takes up to _MAX_TAKEN_AHEAD messages. Messages that the caller does not ask for
        before about half of their lease is over are given back, and the attempt is not counted.
        """
        while not self._closed:
            self._guard.raise_if_inherited()
            self._give_back_stale()  # the event loop may have been blocked when the timer ended
            try:
                message = self._taken_ahead.popleft()
            except IndexError:  # empty: nothing was taken ahead, or another event loop took it
                try:
                    await self._take_ahead()
                except Closed:
                    return
            else:
                yield message

    async def close(self) -> None:
        """Give back messages that were taken ahead, wait for running operations, then close the queue."""
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
        with self._take_ahead_lock:
            taking = self._taking_ahead
            is_mine = taking is None or taking.done()
            if is_mine:
                taking = self._taking_ahead = self._start(self._takers, self._take_in_thread)
        assert taking is not None
        try:
            await _wait_for_end(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda _: self._give_back_ahead())
            raise
        taking.result()  # raises the error of receive(), if there was one
        if is_mine and not self._at_most_once:
            if self._give_back_timer is not None:
                self._give_back_timer.cancel()
            left_s = self._hand_out_until - self._clock.monotonic()
            self._give_back_timer = asyncio.get_running_loop().call_later(
                left_s + _TIMER_EARLY_S, self._give_back_stale
            )

    def _take_in_thread(self) -> None:
        begun = self._clock.monotonic()
        if self._at_most_once:
            messages = self._queue.receive(1, wait=_MAX_RECEIVE_S, lease=None)
            self._hand_out_until = math.inf
        else:
            # Of a group one: if that is given back, those behind it must not come next.
            how = {"one_per_group": True} if self._queue.in_groups else {}
            messages = self._queue.receive(_MAX_TAKEN_AHEAD, wait=_MAX_RECEIVE_S, lease=None, **how)
            # receive() promises that half of the lease is left. At least half of that is kept for the caller
            # (rule R11 of docs/rules.md). Only durations count: the storage's clock may differ from ours.
            now, lease_s = self._clock.monotonic(), self._queue.default_lease
            self._hand_out_until = now + max(lease_s / 2, lease_s - (now - begun)) / 2
        self._taken_ahead.extend(messages)

    def _give_back_stale(self) -> None:
        if self._clock.monotonic() >= self._hand_out_until:  # else the messages are of a later batch
            self._give_back_ahead()

    def _give_back_ahead(self) -> None:
        """Give back the messages taken ahead, in a thread; must not block: event loops call this method."""
        if ahead := _popped(self._taken_ahead):
            self._pool.submit(self._give_back, ahead)

    async def _receive(self, max_messages: int, **how: Any) -> Sequence[Message]:
        self._check_open()
        taking = self._start(self._takers, partial(self._queue.receive, max_messages, **how))
        try:
            return await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back_later)
            raise

    def _give_back_later(self, taking: Future[Sequence[Message]]) -> None:
        """Give back the messages of a cancelled receive(), in a thread.

        Must not block: event loops may call this method.
        """
        if not taking.cancelled() and taking.exception() is None and (messages := taking.result()):
            self._pool.submit(self._give_back, messages)

    def _give_back(self, messages: Sequence[Message]) -> None:
        try:
            self._queue.nack(*messages, count=False)
        except Exception:  # nobody awaits this nack(); the messages are redelivered when their leases end
            _log.exception("messages could not be given back", extra={"count": len(messages)})

    def _close(self) -> None:
        self._takers.shutdown()  # first: messages that it still receives are given back in the other pool
        self._give_back_ahead()
        self._sends.close()
        self._acks.close()
        self._batch_threads.shutdown()
        self._pool.shutdown()
        self._queue.close()

    def _send_all(self, asked: Sequence[_Send]) -> Sequence[str]:
        messages = [one.message for one in asked]
        return sent_for((one.sender for one in asked), self._queue.send_many, messages)

    def _ack_all(self, asked: Sequence[_Ack]) -> list[None]:
        messages = [message for one in asked for message in one.messages]
        ack = partial(self._queue.ack, confirmed=any(one.confirmed for one in asked))
        asked[0].asker.run(ack, *messages)  # a batch is one span, which has one parent
        return [None] * len(asked)

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        self._check_open()
        try:
            return pool.submit(copy_context().run, work)
        except RuntimeError:  # another thread has just closed the pool
            raise Closed(f"the queue {self._queue.name!r} is closed") from None

    def _check_open(self) -> None:
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed(f"the queue {self._queue.name!r} is closed")


class _Send(NamedTuple):
    """The message of one AsyncQueue.send(), and the context in which it was called: that of its trace."""

    message: OutgoingMessage
    sender: Context


class _Ack(NamedTuple):
    """The arguments of one AsyncQueue.ack(), and the context in which it was called."""

    messages: Sequence[Message | str]
    confirmed: bool
    asker: Context


class AsyncWorker:
    """Calls a coroutine function for each message of a queue, on the event loop that awaits `run()`.

    AsyncWorker is a Worker whose handlers are tasks, at most `concurrency` at a time. Three threads receive
    messages, extend leases and write outcomes. A handler that still runs after `drain_timeout` is cancelled.

    Args:
        queue: A Queue or an AsyncQueue; the worker leaves it open.
        handler: A coroutine function of one Message.
        handle_signals: For programs that do nothing else: SIGTERM and SIGINT stop the worker while run()
            runs. By default the application calls stop() or cancels run().
        options: The other arguments of Worker.
    """

    def __init__(
        self,
        queue: Queue | AsyncQueue,
        handler: Callable[[Message], Awaitable[object]],
        *,
        handle_signals: bool = False,
        **options: Unpack[WorkerOptions],
    ) -> None:
        self._handle_signals = handle_signals
        wrapped = queue.queue if isinstance(queue, AsyncQueue) else queue
        self._worker = _TaskWorker(wrapped, handler, **options)

    async def run(self) -> None:
        """Work until stop(), cancellation, a failure or (with `handle_signals`) a signal, then drain.

        Raises the error that ended the worker, if there was one; see Worker.run().
        """
        loop = asyncio.get_running_loop()
        with called_at_signals(loop, self._stop_at) if self._handle_signals else nullcontext():
            self._worker.start_on(loop)
            try:
                while not self._worker.stopping:
                    await asyncio.sleep(_STOP_POLL_S)
            finally:
                await self._drain()
        if self._worker.failure is not None:
            raise self._worker.failure

    def stop(self) -> None:
        """Let the worker take no more messages; run() returns when the drain is over."""
        self._worker.stop(wait=False)

    async def _drain(self) -> None:
        # stop() blocks, and handlers need the event loop to end, so stop() runs in a thread.
        try:
            await _in_thread(self._worker.stop)
        finally:
            self._worker.cancel_handlers()

    def _stop_at(self, number: signal.Signals) -> None:
        self._worker.log_signal(number)
        self.stop()


class _TaskWorker(Worker):
    """A Worker whose handlers are tasks of an event loop."""

    _loop: asyncio.AbstractEventLoop

    def __init__(
        self, queue: Queue, handler: Callable[[Message], Awaitable[object]], **options: Unpack[WorkerOptions]
    ) -> None:
        super().__init__(queue, handler, **options)
        # Changed on the loop only:
        self._tasks: dict[asyncio.Task[Outcome], LeasedMessage] = {}
        self._ended: list[tuple[LeasedMessage, Outcome]] = []
        self._timer: asyncio.TimerHandle | None = None

    def start_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start, with handlers on this loop; raises KmqError if the worker was started before."""
        if not self._started:
            self._loop = loop
        self.start()

    def cancel_handlers(self) -> None:
        """Cancel the handlers that run; their messages are given back already. Called on the loop."""
        for task in self._tasks:
            task.cancel()

    def _check_handler(self, handler: Callable[[Message], object]) -> None:
        """Any function may return an awaitable."""

    def _make_handler_threads(self) -> Sequence[threading.Thread]:
        return ()

    def _wake_handlers(self, count: int) -> None:
        if not (count and self._started):
            return
        try:
            self._loop.call_soon_threadsafe(self._start_handlers)
        except RuntimeError:  # its loop was closed without an end of run(): nobody handles messages any more
            self._leases.close()
            if not self._stopping.is_set():
                self._fail(KmqError("the event loop of the worker is closed; await run() to its end"))

    def _start_handlers(self) -> None:
        while len(self._tasks) < self._concurrency and (one := self._next_if_ready()) is not None:
            # As in a thread, a handler has no context but what the telemetry sets.
            task = self._loop.create_task(self._handle_in_task(one), context=Context())
            self._tasks[task] = one
            task.add_done_callback(self._end_task)

    def _next_if_ready(self) -> LeasedMessage | None:
        with self._ready_changed:
            if self._is_over() or not self._ready:
                return None
            wait_s = self._wait_s()
            if not wait_s:
                return self._start_ready()
        if wait_s < math.inf and (self._timer is None or self._timer.when() <= self._loop.time()):
            self._timer = self._loop.call_later(wait_s + _TIMER_EARLY_S, self._start_handlers)
        return None

    def _end_task(self, task: asyncio.Task[Outcome]) -> None:
        one = self._tasks.pop(task)
        outcome: Outcome | None = None
        if task.cancelled():  # before it began
            outcome = RELEASE
        elif (error := task.exception()) is not None:
            self._report_own(error)
        else:
            outcome = task.result()
        self._finish(one, outcome)
        self._start_handlers()

    def _put_outcome(self, one: LeasedMessage, outcome: Outcome) -> None:
        if not self._ended:  # those of tasks that end together are put together
            self._loop.call_soon(self._put_ended)
        self._ended.append((one, outcome))

    def _put_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._outcomes.put(ended)

    async def _handle_in_task(self, one: LeasedMessage) -> Outcome:
        if self._is_stale(one):
            return RELEASE
        failure: BaseException | None = None
        try:
            with self._telemetry.processing(one.message):
                one.context = copy_context()
                try:
                    await self._handler(one.message)
                except BaseException as error:  # some, raised in a task, would end the event loop
                    failure = error
                    raise  # so that the telemetry sees the error
        except BaseException as error:
            if one.context is None:  # the telemetry failed before the handler was called
                failure = error
        return self._outcome_of(one.message, failure)


async def _wait_for_end(work: Future[None]) -> None:
    """Wait for the end of `work`; cancelling the caller leaves `work` alone: others may wait for it, too."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    work.add_done_callback(tell)
    await ended.wait()


def _popped(messages: deque[Message]) -> list[Message]:
    """Remove and return all messages, from the left; safe while other threads do it, too."""
    found: list[Message] = []
    with suppress(IndexError):
        while True:
            found.append(messages.popleft())
    return found


async def _in_thread(function: Callable[[], None]) -> None:
    """Run `function` in a new thread; it runs to its end even if the caller is cancelled."""
    executor = ThreadPoolExecutor(1, "kmq-aio-once")
    future = executor.submit(function)
    executor.shutdown(wait=False)
    await asyncio.shield(asyncio.wrap_future(future))
