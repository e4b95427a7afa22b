"""Worker: calls a function for each message of a queue, and acknowledges for it.

Works over the Queue protocol only. One thread takes messages, `concurrency` threads call the handler, one
writes their outcomes (outcome_writer), one extends the leases (lease_keeper).
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypedDict

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, ConfigError, Fenced, Forked, KmqError, NotSupported, shown
from kmqpy.message import Message
from kmqpy.queue import Queue
from kmqpy.queue.arguments import check_queue
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.failures import Failures
from kmqpy.worker.keyed_fifo import KeyedFifo
from kmqpy.worker.lease_keeper import LeasedMessage, LeaseKeeper
from kmqpy.worker.outcome import (
    ACKNOWLEDGE,
    RELEASE,
    GiveBack,
    Outcome,
    Reject,
    Retry,
    described,
    failed_outcome,
)
from kmqpy.worker.outcome_writer import OutcomeWriter
from kmqpy.worker.signals import noted_signals

_log = logging.getLogger(__name__)

_RECEIVE_WAIT_S = 0.5
"""How long one receive() waits, and so how long a stop can take to be noticed."""
_SIGNAL_POLL_S = 0.1
_TAKER_GRACE_S = 5.0
_BACKOFF = Backoff()
_FATAL = (ConfigError, NotSupported, Closed, Fenced, Forked)
"""Errors of receive() that no waiting mends."""


class WorkerOptions(TypedDict, total=False):
    """The keyword arguments of Worker and AsyncWorker; `handle_signals` has a default of its own in each."""

    concurrency: int
    ordering: Literal["key"] | None
    prefetch: int | None
    lease: Duration | None
    backoff: Backoff
    drain_timeout: Duration
    on_lost: Callable[[Message], None] | None
    telemetry: Telemetry | None
    clock: Clock


class Worker:
    """Calls `handler` for each message of `queue`, in `concurrency` threads.

    The handler returns: the message is acknowledged. It raises Reject: dead letter. It raises Retry:
    again after its delay. It raises anything else: again after `backoff`, with the error as reason,
    until the queue's limit of attempts makes it a dead letter. While the worker has a message, it extends
    the lease, so a handler may take as long as it needs; one that hangs keeps its message.

    concurrency    handlers that run at the same time
    ordering       "key": messages of one key one at a time, in the order received; a message that
                   failed comes later than its successors
    prefetch       messages taken ahead of the handlers; default: `concurrency`, with ordering ten
                   times as many
    lease          how long a message stays ours if this process dies; at least 0.1 s, at most the queue's
                   max_hold; default: the queue's
    backoff        the wait after a failure, growing with the message's attempts
    drain_timeout  how long stop() waits for running handlers; what is not done then is given back
                   and not counted as an attempt
    on_lost        called with a message whose lease can't be extended because the message is no longer
                   the worker's: the lease had ended, or an earlier consumer has acknowledged the message.
                   Its handler may stop; of its outcome only an acknowledgement is
                   written. The thread that extends leases calls on_lost, so it must return soon
    handle_signals whether run() in the main thread takes SIGTERM and SIGINT while it runs

    Messages are acknowledged, given back and dead-lettered in batches, in a thread of its own.

    On an at-most-once queue (`ephemeral=False`) nothing is taken ahead unless `prefetch` says so, what was
    taken is handled before stop() returns, and a message whose handler failed is lost, which is logged.

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
        on_lost: Callable[[Message], None] | None = None,
        handle_signals: bool = True,
        telemetry: Telemetry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_queue(queue)
        check_limit(concurrency, "concurrency")
        if ordering not in (None, "key"):
            raise ConfigError(f"ordering: {ordering!r} is neither None nor 'key'")
        if prefetch is not None and prefetch != 0:
            check_limit(prefetch, "prefetch")
        if not callable(handler):
            raise ConfigError(f"handler: {shown(handler)} can't be called")
        if on_lost is not None and not callable(on_lost):
            raise ConfigError(f"on_lost: {shown(on_lost)} can't be called")
        if inspect.iscoroutinefunction(handler):
            raise ConfigError("handler: a coroutine function needs kmqpy.worker.asyncio.AsyncWorker")
        self._guard = ForkGuard("the worker")
        self._queue = queue
        self._handler = handler
        self._by_key = ordering == "key"
        self._at_most_once = queue.at_most_once
        if prefetch is None:
            prefetch = 0 if self._at_most_once else concurrency if ordering is None else 10 * concurrency
        self._limit = concurrency + prefetch
        self._refill_at = max(1, prefetch // 2)
        self._lease_s = _lease_s(queue, lease)
        self._backoff = backoff
        # Timers take no more.
        self._drain_s = min(duration_ms(drain_timeout, "drain_timeout") / 1000, threading.TIMEOUT_MAX)
        self._handle_signals = handle_signals
        self._on_lost = on_lost
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._failures = Failures(queue.name, self._telemetry)
        self._changed = threading.Condition()
        self._ready: KeyedFifo[LeasedMessage] = KeyedFifo()
        self._unfinished = 0
        self._taking = True
        self._leases = LeaseKeeper(queue, self._lease_s, clock, self._failures, self._lost)
        self._outcomes = OutcomeWriter(queue, self._leases, self._failures, self._finished)
        self._stopping = threading.Event()
        self._draining = threading.RLock()  # reentrant: a handler of signals may call stop() during a drain
        self._drain_begun = False
        self._failure: KmqError | None = None
        self._taker = _thread("take", partial(self._guarded, self._take))
        self._keeper = _thread("leases", partial(self._guarded, self._leases.run))
        self._finisher = _thread("outcomes", partial(self._guarded, self._outcomes.run))
        self._servers = [_thread(str(number), self._serve) for number in range(concurrency)]
        self._started = self._running = False

    @property
    def stopping(self) -> bool:
        """True once the worker receives no more messages: stop() was called, or it failed."""
        return self._stopping.is_set()

    @property
    def failure(self) -> KmqError | None:
        """The error that ended the worker and that run() raises; None if there was none."""
        return self._failure

    def run(self) -> None:
        """Work until SIGTERM, SIGINT, stop() or a failure, then drain.

        Signals are looked after in the main thread only, and with `handle_signals`; a second one, during the
        drain, does what it would do without a worker.

        Raises what ended the worker: ConfigError, NotSupported, Closed, Forked; KmqError where one of its
        threads failed.
        """
        with ExitStack() as stack:
            signals = stack.enter_context(noted_signals()) if self._handle_signals else []
            self.start()
            # Not Event.wait(): a handler of signals that calls stop() could wait for its lock for ever.
            while not signals and not self._stopping.is_set():
                time.sleep(_SIGNAL_POLL_S)
        if signals:
            self.log_signal(signals[0])
        self.stop()
        if self._failure is not None:
            raise self._failure

    def log_signal(self, number: int) -> None:
        """Log that a signal ends the worker."""
        name = signal.Signals(number).name
        _log.info("worker stops at a signal", extra={"queue": self._queue.name, "signal": name})

    def start(self) -> None:
        """Begin to work, in threads of its own; once only, and not in a forked child."""
        self._guard.raise_if_inherited()
        with self._draining:  # stop() waits for threads, which must all be there
            if self._started:
                raise KmqError("the worker was started before; make another one")
            self._started = True
            if not self._at_most_once:
                self._keeper.start()
            for thread in (self._taker, self._finisher, *self._servers):
                thread.start()
            self._running = True

    def stop(self, *, wait: bool = True) -> None:
        """Take no more messages, give back what has not begun, wait for the handlers that run.

        After `drain_timeout` their messages are given back too. Does not wait with `wait=False`, nor
        when a handler calls it. Does nothing in a forked child: the messages are the parent's.
        """
        if self._guard.inherited:
            return
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if wait and self._started and threading.current_thread() not in self._servers:
            with self._draining:
                if self._running and not self._drain_begun:
                    self._drain_begun = True
                    self._drain()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work of a thread; an error that it does not expect ends the worker."""
        try:
            work()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KmqError):
            failure = error
        else:
            failure = KmqError(f"a thread of the worker failed: {described(error)}")
            failure.__cause__ = error
        self._failure = self._failure or failure
        extra = {"queue": self._queue.name, "error": str(failure)}
        _log.error("worker ends", exc_info=failure.__cause__, extra=extra)
        self.stop(wait=False)

    # --- taking -----------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            self._receive_until_stopped()
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()

    def _receive_until_stopped(self) -> None:
        failures = 0
        pause = Backoff(0.1, 2, 10, 0.2)
        while (room := self._wait_for_room()) > 0:
            try:
                messages = self._queue.receive(room, wait=_RECEIVE_WAIT_S, lease=self._lease_s)
                failures = 0
                self._accept(messages)
            except _FATAL as error:
                self._fail(error)
            except Exception as error:  # the servers may come back, whatever it was
                failures += 1
                self._failures.report("receive", "receive failed; trying again", error)
                self._stopping.wait(pause.delay(failures))

    def _wait_for_room(self) -> int:
        with self._changed:
            while not self._stopping.is_set():
                room = self._limit - self._unfinished
                if room >= self._refill_at:
                    return room
                self._changed.wait()
        return 0

    def _accept(self, messages: list[Message]) -> None:
        leased = self._leases.add(messages, lambda message: message.key if self._by_key else None)
        with self._changed:
            self._unfinished += len(leased)
            for one in leased:
                self._ready.add(one.key, one)
            self._changed.notify_all()
        self._tell_in_flight()
        if self._stopping.is_set():
            self._release_waiting()

    # --- handling ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                while (one := self._next()) is not None:
                    self._serve_one(one)
            except BaseException as error:  # this thread must not end while the worker runs
                self._failures.report("worker thread", "a worker thread failed; it goes on", error)
            else:
                return

    def _next(self) -> LeasedMessage | None:
        with self._changed:
            while not self._stopping.is_set() or (self._at_most_once and (self._taking or self._ready)):
                one = self._ready.start()
                if one is not None:
                    return one
                self._changed.wait()
        return None

    def _serve_one(self, one: LeasedMessage) -> None:
        outcome: Outcome | None = None
        try:
            if one.lost:
                outcome = RELEASE
            elif self._at_most_once or self._clock.monotonic() < one.lease_ends:
                outcome = self._handle(one)
            else:  # its lease could not be extended: it may be somebody else's by now
                self._failures.count("stale leases")
                outcome = RELEASE
        finally:
            if outcome is None:  # its lease will end
                self._finished(self._leases.finish([one]))
            else:
                self._outcomes.put([one], outcome)
            with self._changed:
                self._ready.done(one.key)
                self._changed.notify_all()

    def _handle(self, one: LeasedMessage) -> Outcome:
        failure: BaseException | None = None
        try:
            with self._telemetry.processing(one.message):
                one.context = contextvars.copy_context()
                try:
                    result = self._handler(one.message)
                    if inspect.isawaitable(result):
                        return self._refused(result)
                except BaseException as error:
                    failure = error
                    raise  # for the telemetry to see
        except BaseException as error:
            if one.context is None:  # it was the telemetry that failed, before the handler was called
                failure = error
        return ACKNOWLEDGE if failure is None else self._failed(one.message, failure)

    def _refused(self, result: object) -> Outcome:
        """End the worker, because the handler is for another one and has not handled its message."""
        if inspect.iscoroutine(result):
            result.close()
        self._fail(
            ConfigError("handler: it returns an awaitable, which needs kmqpy.worker.asyncio.AsyncWorker")
        )
        return RELEASE

    def _lost(self, messages: Sequence[Message]) -> None:
        """These messages are no longer the worker's; called by the thread that extends leases."""
        self._failures.count("lost", len(messages))
        _log.warning("messages are lost", extra={"queue": self._queue.name, "count": len(messages)})
        if self._on_lost is None:
            return
        for message in messages:
            try:
                self._on_lost(message)
            except Exception as error:
                self._failures.report("worker thread", "on_lost failed", error)

    def _failed(self, message: Message, error: BaseException) -> Outcome:
        outcome = failed_outcome(error, message.attempts, self._backoff)
        extra: dict[str, object] = {"queue": message.queue, "id": message.id, "attempts": message.attempts}
        if self._at_most_once:
            _log.warning("handler failed; the queue is at most once: lost", exc_info=error, extra=extra)
            return ACKNOWLEDGE
        if not isinstance(error, Reject | Retry):
            if isinstance(outcome, GiveBack):
                extra["delay_s"] = outcome.delay
            _log.warning("handler failed; the message will be redelivered", exc_info=error, extra=extra)
        return outcome

    def _finished(self, messages: Sequence[LeasedMessage]) -> None:
        with self._changed:
            self._unfinished -= len(messages)
            self._changed.notify_all()
        self._tell_in_flight()

    def _tell_in_flight(self) -> None:
        try:
            self._telemetry.in_flight(self._queue.name, self._unfinished)
        except Exception:  # no thread of ours may end because of it
            _log.exception("telemetry failed", extra={"queue": self._queue.name})

    # --- stopping ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        deadline = self._clock.monotonic() + self._drain_s
        self._release_waiting()
        self._taker.join(max(self._drain_s, _TAKER_GRACE_S))
        self._release_waiting()
        with self._changed:
            left = max(0.0, deadline - self._clock.monotonic())
            self._changed.wait_for(lambda: not self._unfinished, left)
            late = self._unfinished
        if late and self._at_most_once:
            _log.warning("handlers did not end in time", extra={"queue": self._queue.name, "count": late})
        elif late:
            unfinished = self._leases.unfinished()
            _log.warning(
                "handlers did not end in time; their messages are given back",
                extra={"queue": self._queue.name, "count": len(unfinished)},
            )
            self._outcomes.put(unfinished, RELEASE)
        self._outcomes.close()
        self._finisher.join()
        self._leases.close()
        if not late:
            for thread in self._servers:
                thread.join(1)

    def _release_waiting(self) -> None:
        if self._at_most_once:
            return  # nobody else could get them
        with self._changed:
            waiting = self._ready.clear()
        self._outcomes.put(waiting, RELEASE)


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=f"kmq-worker-{name}", daemon=True)


def _lease_s(queue: Queue, lease: Duration | None) -> float:
    """The lease in seconds; raises ConfigError for one that the queue refuses."""
    longest = queue.max_lease
    if lease is None:
        return float(min(queue.default_lease, longest))
    lease_s = lease_duration_ms(lease) / 1000
    if lease_s > longest:
        raise ConfigError(f"lease: {lease_s} s is longer than max_hold of queue {queue.name!r}, {longest} s")
    return lease_s
