"""Calls a handler function for each message of a queue, and acknowledges the message afterwards: `Worker`.

A worker uses only the Queue protocol. One thread receives messages, `concurrency` threads call the handler,
one thread writes the outcomes of messages (outcome_writer), and one extends their leases (lease_keeper).
Threads wait for what they need by conditions of their own: one for all would wake them in vain.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import math
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.core.stack import is_inside
from kmqpy.errors import Closed, ConfigError, Fenced, Forked, KmqError, NotSupported, shown
from kmqpy.message import Message
from kmqpy.queue import Queue
from kmqpy.queue.arguments import check_queue
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.failure_log import FailureLog
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
from kmqpy.worker.pace import Breaker, Pace, rate_of
from kmqpy.worker.signals import noted_signals
from kmqpy.worker.taking_ahead import TakingAhead

_log = logging.getLogger(__name__)

_RECEIVE_WAIT_S = 0.4
"""Seconds that one receive() waits for messages; the receiving thread notices stop() only afterwards."""
_MAX_WAIT_S = 1.0
"""When a message has waited for its handler for so many seconds, handlers are not quick any more."""
_PACE_POLL_S = 0.1
"""While rate or breaker keep the worker from receiving, it looks so often whether it may, in seconds."""
_SIGNAL_POLL_S = 0.1
"""Seconds between two checks of run() whether a signal came."""
_GRACE_S = 1.5
"""Seconds beyond `drain_timeout` that stop() waits at most for outcomes to be written; at least a third of
them it waits for the receiving thread. A storage that is away would hold up each call for its own time-out.
"""
_DEFAULT_BACKOFF = Backoff()
_FATAL_ERRORS = (ConfigError, NotSupported, Closed, Fenced, Forked)
"""Errors of receive() that end the worker, because another try would fail, too."""


class WorkerOptions(TypedDict, total=False):
    """The keyword arguments of Worker and AsyncWorker, except `handle_signals`, whose defaults differ."""

    concurrency: int
    ordering: Literal["key"] | None
    prefetch: int | None
    lease: Duration | None
    backoff: Backoff | None
    drain_timeout: Duration
    on_lost: Callable[[Message], None] | None
    rate: str | float | None
    breaker: Breaker | None
    telemetry: Telemetry | None
    clock: Clock


class Worker:
    """Calls `handler` for each message of `queue`, in `concurrency` threads.

    If the handler returns, the worker acknowledges the message. If the handler raises Reject, the message
    becomes a dead letter. If it raises Retry, the message is redelivered after the delay of the Retry. If it
    raises any other error, the message is redelivered after `backoff`, with the error as reason, until the
    queue's limit of redeliveries makes it a dead letter. The worker extends the lease of a message until the
    message is finished, so a handler may take as long as it needs. A handler that hangs keeps its message.

    On a queue with `delivery="at-most-once"` the worker receives nothing ahead unless `prefetch` says so, and
    stop() lets received messages be handled. If a handler raises an error, the message is lost, which is
    logged. Only Retry, which a handler raises on purpose, puts the message back, and only Reject makes it a
    dead letter.

    Use `run()`, which returns after SIGTERM, SIGINT or stop(), or `start()` and `stop()`, or `with`. The
    worker leaves the queue open.

    Args:
        queue: The queue; the worker leaves it open.
        handler: Called with one Message, in any of the threads.
        concurrency: Handlers that run at the same time.
        ordering: "key": messages of one key are handled one at a time, in the order received; a message that
            failed comes later than its successors.
        prefetch: Messages received ahead of the handlers; default: as many as they handled in the last 1/20
            s, at least `concurrency`, at most 1,000 or 16 MB; with ordering always ten times `concurrency`.
        lease: The longest time until messages are redelivered if this process dies; at least 0.1 s, at most
            the queue's `max_lease`; default: the queue's `default_lease`.
        backoff: The delay of a redelivery after a failure; grows with the attempts of the message; default:
            the queue's `retry_delays`, or if it has none, Backoff(). The queue's `max_delay_ms` caps this
            delay, and that of a Retry.
        drain_timeout: How long stop() waits for running handlers; afterwards their messages are given back,
            and the attempt is not counted.
        on_lost: Called with each lost message: its lease can't be extended, because it had ended or an
            earlier consumer has acknowledged the message. The handler of the message may stop; the worker
            writes its outcome only if that is an acknowledgement. The thread that extends leases calls
            on_lost, so on_lost must return soon.
        rate: So many handlers start at most: "100/s", "30/min", "5/h", or a number per second; of this
            worker, whatever others do.
        breaker: Pauses the worker while its handlers fail one after the other.
        handle_signals: Whether SIGTERM and SIGINT stop the worker while run() runs in the main thread.
        telemetry: Told of each handler and failure; default: none.
        clock: For tests.

    Raises:
        ConfigError: For wrong arguments.
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
        backoff: Backoff | None = None,
        drain_timeout: Duration = 30.0,
        on_lost: Callable[[Message], None] | None = None,
        rate: str | float | None = None,
        breaker: Breaker | None = None,
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
        if breaker is not None and not isinstance(breaker, Breaker):
            raise ConfigError(f"breaker: {shown(breaker)} is not a Breaker of kmqpy.worker.pace")
        self._check_handler(handler)
        self._guard = ForkGuard("the worker")
        self._queue = queue
        self._handler: Callable[[Message], Any] = handler
        self._by_key = ordering == "key"
        self._at_most_once = queue.at_most_once
        self._concurrency = concurrency
        # By key, what a slow key holds up could not be given back without losing its order.
        grows = prefetch is None and not (self._by_key or self._at_most_once)
        if prefetch is None:
            prefetch = 0 if self._at_most_once else 10 * concurrency if self._by_key else concurrency
        self._lease_s = _lease_s(queue, lease)
        most = queue.max_in_flight
        self._ahead = TakingAhead(
            prefetch,
            self._lease_s,
            clock.monotonic(),
            grows=grows,
            limit=None if most is None else most - concurrency,
        )
        self._least_ahead = prefetch
        self._backoff = backoff or (None if queue.delays_retries else _DEFAULT_BACKOFF)
        # Handlers of several messages run at a time.
        self._how = {"one_per_group": True} if queue.in_groups else {}
        # For more than TIMEOUT_MAX, waits of threads raise OverflowError.
        self._drain_s = min(duration_ms(drain_timeout, "drain_timeout") / 1000, threading.TIMEOUT_MAX)
        self._handle_signals = handle_signals
        self._on_lost = on_lost
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._failures = FailureLog(queue.name, self._telemetry)
        self._changed = threading.Condition()  # guards the next three
        self._unfinished = 0
        self._handled = 0
        self._enough = 0  # the taking thread waits until no more than these are unfinished
        self._ready_changed = threading.Condition()  # guards the next three
        self._pace = Pace(None if rate is None else rate_of(rate), breaker, clock.monotonic())
        self._ready: KeyedFifo[LeasedMessage] = KeyedFifo()
        self._taking = True
        self._leases = LeaseKeeper(queue, self._lease_s, clock, self._failures, self._report_lost)
        self._outcomes = OutcomeWriter(
            queue, self._leases, self._failures, self._count_finished, self._linger_s
        )
        self._stopping = threading.Event()
        self._stop_asked = False
        self._draining = threading.Lock()
        self._drain_begun = False
        self._failure: KmqError | None = None
        self._taker = _thread("take", partial(self._guarded, self._take))
        self._keeper = _thread("leases", partial(self._guarded, self._keep_leases))
        self._finisher = _thread("outcomes", partial(self._guarded, self._outcomes.run))
        self._handler_threads: Sequence[threading.Thread] = self._make_handler_threads()
        self._started = self._running = False

    @property
    def stopping(self) -> bool:
        """True after stop() or a failure of the worker: it receives no more messages."""
        return self._stopping.is_set()

    @property
    def failure(self) -> KmqError | None:
        """The error that ended the worker and that run() raises; None if there was none."""
        return self._failure

    def run(self) -> None:
        """Work until SIGTERM, SIGINT, stop() or a failure, then drain.

        Signals stop the worker only with `handle_signals`, and if run() is called in the main thread. During
        the drain, a signal does what it does without a worker.

        Raises the error that ended the worker: ConfigError, NotSupported, Closed, Fenced, Forked, or KmqError
        if a thread of the worker failed.
        """
        with ExitStack() as stack:
            signals = stack.enter_context(noted_signals()) if self._handle_signals else []
            self.start()
            while not (signals or self._stop_asked or self._stopping.wait(_SIGNAL_POLL_S)):
                pass
        if signals:
            self.log_signal(signals[0])
        self._stop()
        if self._failure is not None:
            raise self._failure

    def log_signal(self, number: int) -> None:
        """Log that a signal ends the worker.

        Args:
            number: The number of the signal.
        """
        name = signal.Signals(number).name
        _log.info("worker stops at a signal", extra={"queue": self._queue.name, "signal": name})

    def start(self) -> None:
        """Start the threads. Raises KmqError if the worker was started before, Forked in a forked child."""
        self._guard.raise_if_inherited()
        with self._draining:  # so that stop() does not wait for threads that are not started yet
            if self._started:
                raise KmqError("the worker was started before; make another one")
            self._started = True
            if not self._at_most_once:
                self._keeper.start()
            for thread in (self._taker, self._finisher, *self._handler_threads):
                thread.start()
            self._running = True
        if self._stop_asked:
            self._stop(wait=False)

    def stop(self, *, wait: bool = True) -> None:
        """Receive no more messages, give back those that are not started, wait for the running handlers.

        After `drain_timeout` the messages of running handlers are given back, too. In a signal handler that
        has interrupted run(), start() or stop(), it sets a flag and returns; the interrupted call does the
        rest. stop() does nothing in a forked child, because the messages belong to the parent.

        Args:
            wait: False: don't wait, but from now on no message is received or started; so it does even when
                a handler calls it.
        """
        if self._guard.inherited:
            return
        self._stop_asked = True
        if not is_inside((Worker.run, Worker.start, Worker._stop), self):
            self._stop(wait=wait)

    def _stop(self, *, wait: bool = True) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._wake_handlers(self._concurrency)
        if wait and self._started and threading.current_thread() not in self._handler_threads:
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
        """Do the work of a thread; an error that the work does not catch ends the worker."""
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
        _log.error("worker ends: %s", failure, exc_info=failure.__cause__, extra=extra)
        self.stop(wait=False)

    # --- taking -----------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            self._receive_until_stopped()
        finally:
            with self._ready_changed:
                self._taking = False
            self._wake_handlers(self._concurrency)

    def _receive_until_stopped(self) -> None:
        failures = 0
        pause = Backoff(0.1, 2, 10, 0.2)
        while (room := self._wait_for_room()) > 0:
            try:
                messages = self._queue.receive(room, wait=_RECEIVE_WAIT_S, lease=self._lease_s, **self._how)
                failures = 0
                self._accept(messages)
            except _FATAL_ERRORS as error:
                self._fail(error)
            except Exception as error:  # whatever the error is: the storage may come back
                failures += 1
                self._failures.report("receive", "receive failed; trying again", error)
                self._stopping.wait(pause.delay(failures))

    def _wait_for_room(self) -> int:
        with self._changed:
            while not self._stopping.is_set():
                ahead = self._ahead.number(self._handled, self._clock.monotonic())
                room = self._concurrency + ahead - self._unfinished
                refill_at = max(1, ahead // 2)
                if room < refill_at:
                    self._enough = self._concurrency + ahead - refill_at
                    self._changed.wait()
                elif (room := self._pace.room(room, self._ready.count(), self._clock.monotonic())) > 0:
                    return room
                else:
                    self._changed.wait(_PACE_POLL_S)
        return 0

    def _accept(self, messages: Sequence[Message]) -> None:
        leased = self._leases.add(messages, lambda message: message.key if self._by_key else None)
        again = self._ahead.note(messages)
        with self._changed:
            self._unfinished += len(leased)
        with self._ready_changed:
            if not messages:
                self._pace.nothing_came()
            for one in leased:
                self._ready.add(one.key, one)
            surplus = self._ready.cut(self._concurrency + self._least_ahead) if again else []
            if self._pace.is_open and not self._at_most_once and self._ready.count() > 1:
                surplus += self._ready.clear()  # they were under way when the breaker opened
        self._release(surplus)
        self._wake_handlers(len(leased))
        self._tell(self._telemetry.in_flight, self._unfinished)
        if self._stopping.is_set():
            self._release_waiting()

    def _keep_leases(self) -> None:
        self._leases.run(self._give_back_surplus if self._ahead.grows else None)

    def _give_back_surplus(self) -> None:
        """Give back what was taken ahead for quick handlers, if they are slow now: others may be idle."""
        with self._ready_changed:
            oldest = self._ready.first()
            late = oldest is not None and self._clock.monotonic() > oldest.taken_at + _MAX_WAIT_S
            surplus = self._ready.cut(self._least_ahead) if late else []
        self._release(surplus)

    # --- handling ---------------------------------------------------------------------------------

    def _make_handler_threads(self) -> Sequence[threading.Thread]:
        return [_thread(str(number), self._run_handlers) for number in range(self._concurrency)]

    def _check_handler(self, handler: Callable[[Message], object]) -> None:
        if inspect.iscoroutinefunction(handler):
            raise ConfigError("handler: a coroutine function needs kmqpy.worker.asyncio.AsyncWorker")

    def _wake_handlers(self, count: int) -> None:
        """Let up to `count` handlers look for messages, or for the end."""
        with self._ready_changed:
            self._ready_changed.notify(count)

    def _run_handlers(self) -> None:
        while True:
            try:
                while (one := self._next()) is not None:
                    self._handle_and_finish(one)
            except BaseException as error:  # this thread must not end while the worker runs
                self._report_own(error)
            else:
                return

    def _next(self) -> LeasedMessage | None:
        with self._ready_changed:
            while not self._is_over():
                wait_s = self._wait_s()
                if not wait_s and (one := self._start_ready()) is not None:
                    return one
                self._ready_changed.wait(wait_s if self._ready and 0 < wait_s < math.inf else None)
            self._ready_changed.notify_all()  # what is over for one is over for all
        return None

    def _wait_s(self) -> float:
        """Seconds until a handler may start; the caller holds `_ready_changed`."""
        # At the end, messages that can't be given back are handled at once.
        is_free = self._pace.is_free or self._stopping.is_set()
        wait_s = 0.0 if is_free else self._pace.wait_s(self._clock.monotonic())
        if wait_s and self._ready:
            self._pace.hold()
        return wait_s

    def _start_ready(self) -> LeasedMessage | None:
        """The next message, if there is one, as started; the caller holds `_ready_changed`."""
        one = self._ready.start()
        if one is not None:
            self._pace.begin(one.message.id)
        return one

    def _is_over(self) -> bool:
        """True if no handler is called any more; the caller holds `_ready_changed`."""
        return self._stopping.is_set() and not (self._at_most_once and (self._taking or self._ready))

    def _handle_and_finish(self, one: LeasedMessage) -> None:
        outcome: Outcome | None = None
        try:
            outcome = RELEASE if self._is_stale(one) else self._handle(one)
        finally:
            self._finish(one, outcome)

    def _is_stale(self, one: LeasedMessage) -> bool:
        """True for a message that others may have: it is lost, or its lease was not extended in time."""
        if one.lost:
            return True
        if self._at_most_once or self._clock.monotonic() < one.lease_ends:
            return False
        self._failures.count("stale leases")
        return True

    def _finish(self, one: LeasedMessage, outcome: Outcome | None) -> None:
        if outcome is None:  # an error of the worker itself; the message is redelivered after its lease
            self._count_finished(self._leases.finish([one]))
        else:
            self._put_outcome(one, outcome)
        if one.key is not None or not self._pace.is_free:
            with self._ready_changed:  # the caller looks for a message next: nobody need be woken
                self._pace.drop(one.message.id)
                if one.key is not None:
                    self._ready.done(one.key)

    def _put_outcome(self, one: LeasedMessage, outcome: Outcome) -> None:
        self._outcomes.put([(one, outcome)])

    def _handle(self, one: LeasedMessage) -> Outcome:
        failure: BaseException | None = None
        try:
            with self._telemetry.processing(one.message):
                one.context = contextvars.copy_context()
                try:
                    result = self._handler(one.message)
                    if result is not None and inspect.isawaitable(result):
                        return self._refuse_awaitable(result)
                except BaseException as error:
                    failure = error
                    raise  # so that the telemetry sees the error
        except BaseException as error:
            if one.context is None:  # the telemetry failed before the handler was called
                failure = error
        return self._outcome_of(one.message, failure)

    def _refuse_awaitable(self, result: object) -> Outcome:
        """End the worker: the handler did nothing but return an awaitable, which only AsyncWorker awaits."""
        if inspect.iscoroutine(result):
            result.close()
        self._fail(
            ConfigError("handler: it returns an awaitable, which needs kmqpy.worker.asyncio.AsyncWorker")
        )
        return RELEASE

    def _report_own(self, error: BaseException) -> None:
        self._failures.report("worker thread", "a worker thread failed; it goes on", error)

    def _report_lost(self, messages: Sequence[Message]) -> None:
        """Report lost messages to log, telemetry and on_lost, in the thread that extends leases."""
        self._failures.count("lost", len(messages))
        _log.warning("messages are lost", extra={"queue": self._queue.name, "count": len(messages)})
        if self._on_lost is None:
            return
        for message in messages:
            try:
                self._on_lost(message)
            except Exception as error:
                self._failures.report("worker thread", "on_lost failed", error)

    def _outcome_of(self, message: Message, error: BaseException | None) -> Outcome:
        """What becomes of a message whose handler has ended; the breaker hears of it, too."""
        held_s: float | None = None
        if not self._pace.is_free and (error is None or isinstance(error, Exception)):
            held_s = self._tell_breaker(message, None if isinstance(error, Reject | Retry) else error)
        if error is None:
            return ACKNOWLEDGE
        if held_s is None or self._at_most_once:
            return self._outcome_of_failure(message, error)
        return GiveBack(held_s, count=False)

    def _tell_breaker(self, message: Message, error: Exception | None) -> float | None:
        """See Pace.end()."""
        waiting: Sequence[LeasedMessage] = ()
        with self._ready_changed:
            was_open = self._pace.is_open
            held_s = self._pace.end(message.id, error, self._clock.monotonic())
            is_open = self._pace.is_open
            if is_open and not (was_open or self._at_most_once):
                waiting = self._ready.clear()
            late = self._pace.take_late()
            self._ready_changed.notify_all()
        if late:
            self._tell(lambda queue, count: self._telemetry.finished(queue, "hold-back", count), late)
        if is_open != was_open:
            extra = {"queue": self._queue.name}
            self._tell(self._telemetry.paused, is_open)
            if is_open:
                self._failures.count("breaker")
                _log.warning("handlers fail one after the other: the worker pauses", extra=extra)
            else:
                _log.info("handlers do not fail any more: the worker goes on", extra=extra)
        self._release(waiting)
        return held_s

    def _outcome_of_failure(self, message: Message, error: BaseException) -> Outcome:
        outcome = failed_outcome(error, message.attempts, self._backoff)
        extra: dict[str, object] = {"queue": message.queue, "id": message.id, "attempts": message.attempts}
        if not isinstance(error, Reject | Retry):
            if self._at_most_once:
                _log.warning("handler failed; the queue is at most once: lost", exc_info=error, extra=extra)
                return ACKNOWLEDGE
            if isinstance(outcome, GiveBack):
                extra["delay_s"] = outcome.delay_in(self._queue)
            _log.warning("handler failed; the message is given back", exc_info=error, extra=extra)
        return outcome

    def _count_finished(self, messages: Sequence[LeasedMessage]) -> None:
        with self._changed:
            self._unfinished -= len(messages)
            self._handled += sum(one.context is not None for one in messages)
            if self._unfinished <= self._enough:
                self._changed.notify_all()
        self._tell(self._telemetry.in_flight, self._unfinished)

    def _tell(self, event: Callable[[str, int], None], value: int) -> None:
        try:
            event(self._queue.name, value)
        except Exception:  # a faulty telemetry must not end a thread of the worker
            _log.exception("telemetry failed", extra={"queue": self._queue.name})

    def _linger_s(self) -> float:
        return self._ahead.linger_s(self._ready.count())

    # --- stopping ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        deadline = self._clock.monotonic() + self._drain_s
        self._release_waiting()
        self._taker.join(max(self._drain_s, _GRACE_S / 3))
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
            self._release(unfinished)
        self._outcomes.close()
        self._finisher.join(max(0.0, deadline + _GRACE_S - self._clock.monotonic()))
        if self._finisher.is_alive():
            _log.warning(
                "the storage does not answer; unfinished messages are redelivered",
                extra={"queue": self._queue.name, "count": len(self._leases.unfinished())},
            )
        self._leases.close()
        if not late:
            for thread in self._handler_threads:
                thread.join(1)

    def _release_waiting(self) -> None:
        if self._at_most_once:
            return  # no other consumer could get them
        with self._ready_changed:
            waiting = self._ready.clear()
        self._release(waiting)

    def _release(self, messages: Sequence[LeasedMessage]) -> None:
        if messages:
            self._outcomes.put([(one, RELEASE) for one in messages])


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=f"kmq-worker-{name}", daemon=True)


def _lease_s(queue: Queue, lease: Duration | None) -> float:
    """The lease in seconds; raises ConfigError for a lease that the queue does not allow."""
    longest = queue.max_lease
    if lease is None:
        return float(min(queue.default_lease, longest))
    lease_s = lease_duration_ms(lease) / 1000
    if lease_s > longest:
        raise ConfigError(f"lease: {lease_s} s is longer than max_lease of queue {queue.name!r}, {longest} s")
    return lease_s
