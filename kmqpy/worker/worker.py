"""Worker: calls a function for each message of a queue, and acknowledges for it.

Works over the Queue protocol only. One thread takes messages, `concurrency` threads call the handler,
one extends the leases of what is held.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypedDict

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.errors import Closed, ConfigError, Fenced, Forked, KmqError, NotSupported
from kmqpy.message import Message
from kmqpy.queue import Queue
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.keyed_fifo import KeyedFifo

_log = logging.getLogger(__name__)

_RECEIVE_WAIT_S = 0.5
"""How long one receive() waits, and so how long a stop can take to be noticed."""
_SIGNAL_POLL_S = 0.1
_LEASE_S = 30.0
"""Of queues that have no lease of their own."""
_TAKER_GRACE_S = 5.0
_REASON_CHARS = 200
_BACKOFF = Backoff()
_FATAL = (ConfigError, NotSupported, Closed, Fenced, Forked)
"""Errors of receive() that no waiting mends."""


class Reject(Exception):
    """Raised by a handler: the message goes to the dead letters, without another try."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Exception):
    """Raised by a handler: the message is redelivered after `delay` (default: the worker's back-off).

    `count=False`: this delivery was not an attempt.
    """

    def __init__(
        self, delay: Duration | None = None, *, count: bool = True, reason: str | None = None
    ) -> None:
        super().__init__(reason or "to be tried again")
        self.delay = delay
        self.count = count
        self.reason = reason


class WorkerOptions(TypedDict, total=False):
    """The keyword arguments of Worker and AsyncWorker; `handle_signals` has a default of its own in each."""

    concurrency: int
    ordering: Literal["key"] | None
    prefetch: int | None
    lease: Duration | None
    backoff: Backoff
    drain_timeout: Duration
    telemetry: Telemetry | None
    clock: Clock


@dataclass(eq=False, slots=True)
class _Task:
    """A message that this worker holds. Times are those of the monotonic clock."""

    message: Message
    key: bytes | None
    lease_ends: float
    extend_at: float
    finished: bool = False


class Worker:
    """Calls `handler` for each message of `queue`, in `concurrency` threads.

    The handler returns: the message is acknowledged. It raises Reject: dead letter. It raises Retry:
    again after its delay. It raises anything else: again after `backoff`, with the error as reason,
    until the queue's limit of attempts makes it a dead letter. While a message is held, its lease is
    extended, so a handler may take as long as it needs; one that hangs keeps its message.

    concurrency    handlers that run at the same time
    ordering       "key": messages of one key one at a time, in the order received; a message that
                   failed comes later than its successors
    prefetch       messages taken ahead of the handlers; default: `concurrency`, with ordering ten
                   times as many
    lease          how long a message stays ours if this process dies; at least 0.1 s; default: the queue's
    backoff        the wait after a failure, growing with the message's attempts
    drain_timeout  how long stop() waits for running handlers; what is not done then is given back
                   and not counted as an attempt
    handle_signals whether run() in the main thread takes SIGTERM and SIGINT while it runs

    Use `run()`, which returns after SIGTERM, SIGINT or stop(), or `start()` and `stop()`, or `with`.
    The queue stays open: close it afterwards. Raises ConfigError.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 4,
        ordering: Literal["key"] | None = None,
        prefetch: int | None = None,
        lease: Duration | None = None,
        backoff: Backoff = _BACKOFF,
        drain_timeout: Duration = 30.0,
        handle_signals: bool = True,
        telemetry: Telemetry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency: {concurrency} must be at least 1")
        if ordering not in (None, "key"):
            raise ConfigError(f"ordering: {ordering!r} is neither None nor 'key'")
        if prefetch is None:
            prefetch = concurrency if ordering is None else 10 * concurrency
        if prefetch < 0:
            raise ConfigError(f"prefetch: {prefetch} must not be negative")
        if inspect.iscoroutinefunction(handler):
            raise ConfigError("handler: a coroutine function needs kmqpy.worker.asyncio.AsyncWorker")
        self._guard = ForkGuard("the worker")
        self._queue = queue
        self._handler = handler
        self._by_key = ordering == "key"
        self._limit = concurrency + prefetch
        self._refill_at = max(1, prefetch // 2)
        if lease is None:
            lease = getattr(queue, "default_lease", _LEASE_S)
        self._lease_s = lease_duration_ms(lease) / 1000
        self._backoff = backoff
        self._drain_s = duration_ms(drain_timeout, "drain_timeout") / 1000
        self._handle_signals = handle_signals
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._changed = threading.Condition()
        self._lanes: KeyedFifo[_Task] = KeyedFifo()
        self._held: set[_Task] = set()
        # Whoever extends a lease and whoever finishes a message hold this, so that no extension can
        # follow the end of its message.
        self._settling = threading.Lock()
        self._stopping = threading.Event()
        self._draining = threading.Lock()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._taker = threading.Thread(target=self._take, name="kmq-worker-take", daemon=True)
        self._keeper = threading.Thread(target=self._keep_leases, name="kmq-worker-leases", daemon=True)
        self._servers = [
            threading.Thread(target=self._serve, name=f"kmq-worker-{number}", daemon=True)
            for number in range(concurrency)
        ]
        self._started = False

    @property
    def stopping(self) -> bool:
        """True once the worker receives no more messages: stop() was called, or it failed."""
        return self._stopping.is_set()

    @property
    def failure(self) -> Exception | None:
        """The error that ended the worker and that run() raises; None if there was none."""
        return self._failure

    def run(self) -> None:
        """Work until SIGTERM, SIGINT, stop() or a failure, then drain.

        Signals are looked after in the main thread only, and with `handle_signals`; a second one, during the
        drain, does what it would do without a worker.

        Raises what ended the worker: ConfigError, NotSupported, Closed, Forked.
        """
        with ExitStack() as stack:
            signals = stack.enter_context(noted_signals()) if self._handle_signals else []
            self.start()
            while not signals and not self._stopping.wait(_SIGNAL_POLL_S):
                pass
        self.stop()
        if self._failure is not None:
            raise self._failure

    def start(self) -> None:
        """Begin to work, in threads of its own; once only, and not in a forked child."""
        self._guard.raise_if_inherited()
        with self._draining:  # stop() waits for threads, which must all be there
            if self._started:
                raise KmqError("the worker was started before; make another one")
            self._started = True
            for thread in (self._taker, self._keeper, *self._servers):
                thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Take no more messages, give back what has not begun, wait for the handlers that run.

        After `drain_timeout` their messages are given back too. Does not wait with `wait=False`, nor
        when a handler calls it. Does nothing in a forked child: what is held is the parent's.
        """
        if self._guard.inherited:
            return
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if wait and self._started and threading.current_thread() not in self._servers:
            with self._draining:
                if not self._ended.is_set():
                    self._drain()
                    self._ended.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- taking -----------------------------------------------------------------------------------

    def _take(self) -> None:
        failures = 0
        pause = Backoff(0.1, 2, 10, 0.2)
        while (room := self._wait_for_room()) > 0:
            try:
                messages = self._queue.receive(room, wait=_RECEIVE_WAIT_S, lease=self._lease_s)
                failures = 0
                self._accept(messages)
            except _FATAL as error:
                self._failure = error
                _log.error("worker ends", extra={"queue": self._queue.name, "error": str(error)})
                self.stop(wait=False)
            except Exception as error:  # the servers may come back, whatever it was
                failures += 1
                self._complain("receive", "receive failed; trying again", error)
                self._stopping.wait(pause.delay(failures))

    def _wait_for_room(self) -> int:
        with self._changed:
            while not self._stopping.is_set():
                room = self._limit - len(self._held)
                if room >= self._refill_at:
                    return room
                self._changed.wait()
        return 0

    def _accept(self, messages: list[Message]) -> None:
        now = self._clock.monotonic()
        # Queues promise that half of the lease is left when receive() returns.
        tasks = [
            _Task(
                message,
                message.key if self._by_key else None,
                lease_ends=now + self._lease_s / 2,
                extend_at=now + self._lease_s / 3,
            )
            for message in messages
        ]
        with self._changed:
            self._held.update(tasks)
            for task in tasks:
                self._lanes.add(task.key, task)
            self._changed.notify_all()
        if self._stopping.is_set():
            self._release_waiting()

    # --- handling ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                while (task := self._next()) is not None:
                    try:
                        if self._clock.monotonic() < task.lease_ends:
                            self._handle(task)
                        else:  # its lease could not be extended: it may be somebody else's by now
                            self._count_failure("stale leases")
                            self._release([task])
                    finally:
                        self._leave(task)
            except BaseException as error:  # this thread must not end while the worker runs
                self._complain("worker thread", "a worker thread failed; it goes on", error)
            else:
                return

    def _next(self) -> _Task | None:
        with self._changed:
            while not self._stopping.is_set():
                task = self._lanes.start()
                if task is not None:
                    return task
                self._changed.wait()
        return None

    def _leave(self, task: _Task) -> None:
        with self._changed:
            self._held.discard(task)
            self._lanes.done(task.key)
            self._changed.notify_all()

    def _handle(self, task: _Task) -> None:
        try:
            with self._telemetry.processing(task.message):
                try:
                    self._handler(task.message)
                except BaseException as error:
                    self._handler_failed(task, error)
                    raise  # for the telemetry to see
                self._settle(task, partial(self._queue.ack, task.message))
        except BaseException as error:
            if not task.finished:  # it was the telemetry that failed, before the handler was called
                self._handler_failed(task, error)

    def _handler_failed(self, task: _Task, error: BaseException) -> None:
        message = task.message
        if isinstance(error, Reject):
            how = partial(self._queue.dead_letter, message, reason=shortened(error.reason))
        elif isinstance(error, Retry):
            delay = self._backoff.delay(message.attempts) if error.delay is None else error.delay
            reason = None if error.reason is None else shortened(error.reason)
            how = partial(self._queue.nack, message, delay=delay, count=error.count, reason=reason)
        else:
            delay = self._backoff.delay(message.attempts)
            _log.warning(
                "handler failed; the message will be redelivered",
                exc_info=error,
                extra={
                    "queue": message.queue,
                    "id": message.id,
                    "attempts": message.attempts,
                    "delay_s": round(delay, 3),
                },
            )
            how = partial(self._queue.nack, message, delay=delay, reason=described(error))
        self._settle(task, how)

    def _settle(self, task: _Task, how: Callable[[], None]) -> None:
        if not self._finish(task):
            return  # given back by the drain
        try:
            how()
        except Exception as error:  # the message is redelivered when its lease ends
            self._complain("settle", "a message could not be settled; it will be redelivered", error)

    def _finish(self, task: _Task) -> bool:
        """Mark as finished; False when it was before."""
        with self._settling:
            was, task.finished = task.finished, True
        return not was

    # --- leases -----------------------------------------------------------------------------------

    def _keep_leases(self) -> None:
        tick = min(1.0, max(0.005, self._lease_s / 30))
        while not self._ended.wait(tick):
            now = self._clock.monotonic()
            with self._changed:
                due = [task for task in self._held if task.extend_at <= now]
            for task in due:
                self._extend(task)

    def _extend(self, task: _Task) -> None:
        with self._settling:
            if task.finished:
                return
            now = self._clock.monotonic()
            try:
                self._queue.extend(task.message, lease=self._lease_s)
            except Exception as error:
                task.extend_at = now + self._lease_s / 10
                self._complain("extend", "a lease could not be extended; trying again", error)
            else:
                if self._clock.monotonic() < task.lease_ends:  # else it may have been redelivered before
                    task.lease_ends = now + self._lease_s
                task.extend_at = now + self._lease_s / 3

    # --- stopping ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        deadline = self._clock.monotonic() + self._drain_s
        self._release_waiting()
        self._taker.join(max(self._drain_s, _TAKER_GRACE_S))
        self._release_waiting()
        with self._changed:
            left = max(0.0, deadline - self._clock.monotonic())
            self._changed.wait_for(lambda: not self._held, left)
            unfinished = list(self._held)
        if unfinished:
            _log.warning(
                "handlers did not end in time; their messages are given back",
                extra={"queue": self._queue.name, "count": len(unfinished)},
            )
            self._release(unfinished)
        else:
            for thread in self._servers:
                thread.join(1)

    def _release_waiting(self) -> None:
        with self._changed:
            waiting = self._lanes.clear()
            self._held.difference_update(waiting)
        self._release(waiting)

    def _release(self, tasks: Iterable[_Task]) -> None:
        for task in tasks:
            self._settle(task, partial(self._queue.nack, task.message, count=False))

    def _complain(self, what: str, text: str, error: BaseException) -> None:
        expected = isinstance(error, KmqError)
        _log.warning(
            text,
            exc_info=None if expected else error,
            extra={"queue": self._queue.name, "error": described(error)},
        )
        self._count_failure(what)

    def _count_failure(self, what: str) -> None:
        try:
            self._telemetry.failed(self._queue.name, what)
        except Exception:  # no thread of ours may end because of it
            _log.exception("telemetry failed", extra={"queue": self._queue.name})


def described(error: BaseException) -> str:
    """The error's class and text, shortened to one line."""
    try:
        text = str(error)
    except Exception:  # an error whose text is an error must not cost the message
        text = ""
    name = type(error).__name__
    return shortened(f"{name}: {text}" if text else name)


def shortened(text: str) -> str:
    """Text on one line, and not too long for a header."""
    line = " ".join(str(text).split()).encode(errors="replace").decode()
    return line if len(line) <= _REASON_CHARS else line[: _REASON_CHARS - 1] + "…"


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT are appended to; in the main thread only, elsewhere it stays empty.

    The handler does no more than that: whatever takes a lock could wait for the code it interrupted.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
