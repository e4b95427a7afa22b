"""Acknowledges, gives back or dead-letters the messages whose handlers have ended, in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial

from kmqpy.queue import Queue
from kmqpy.worker.failure_log import FailureLog
from kmqpy.worker.lease_keeper import LeasedMessage, LeaseKeeper, call_for_all
from kmqpy.worker.outcome import Acknowledge, Outcome

_SMALL = 100
"""Outcomes of a batch that is worth waiting for more of them."""


class OutcomeWriter:
    """Writes the outcomes of messages to the queue: one ack(), nack() or dead_letter() for each outcome.

    Of lost messages (LeasedMessage.lost) it writes only acknowledgements, which may still count and do no
    harm. It neither gives lost messages back nor dead-letters them: others have taken or finished them.

    run() writes outcomes in batches, in the thread that calls it. While it writes a batch, further outcomes
    gather for the next one, so batches grow if the queue gets slower. The writer passes each message to
    `written` once, when its outcome is written, or could not be written (such a message is redelivered).

    linger  the seconds that run() waits for more outcomes, before it writes a batch that is small
    """

    def __init__(
        self,
        queue: Queue,
        keeper: LeaseKeeper,
        failures: FailureLog,
        written: Callable[[Sequence[LeasedMessage]], None],
        linger: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._queue = queue
        self._keeper = keeper
        self._failures = failures
        self._written = written
        self._linger = linger
        self._changed = threading.Condition()
        self._waiting: list[tuple[LeasedMessage, Outcome]] = []
        self._closing = False
        self._ended = False

    def put(self, batch: Sequence[tuple[LeasedMessage, Outcome]]) -> None:
        """Have run() write these outcomes, unless another outcome of a message came first.

        After run() has ended, put() writes the outcomes itself.
        """
        with self._changed:
            if not self._ended:
                before = len(self._waiting)
                self._waiting += batch
                if not before or before < _SMALL <= len(self._waiting):  # else run() waits for none
                    self._changed.notify()
                return
        self._write(batch)

    def run(self) -> None:
        """Write outcomes until close(); those that put() was given before close() are written, too."""
        try:
            while batch := self._next_batch():
                self._write(batch)
        finally:
            with self._changed:
                self._ended = True

    def close(self) -> None:
        """Let run() return when it has written all outcomes."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _next_batch(self) -> list[tuple[LeasedMessage, Outcome]]:
        """Wait for outcomes, and return all that wait; empty after close() if none waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if len(self._waiting) < _SMALL and not self._closing and (linger_s := self._linger()):
                self._changed.wait_for(lambda: len(self._waiting) >= _SMALL or self._closing, linger_s)
            batch, self._waiting = self._waiting, []
            self._ended = not batch  # under the same lock: put() can add nothing between empty batch and end
            return batch

    def _write(self, batch: Sequence[tuple[LeasedMessage, Outcome]]) -> None:
        first: dict[LeasedMessage, Outcome] = {}
        for one, outcome in batch:
            first.setdefault(one, outcome)  # a drain may give back a message whose handler has just ended
        groups: dict[Outcome, list[LeasedMessage]] = {}
        for one, outcome in first.items():
            groups.setdefault(outcome, []).append(one)
        for outcome, group in groups.items():
            unfinished: Sequence[LeasedMessage] = group
            try:
                unfinished = self._keeper.finish(group)
                self._finish(outcome, unfinished)
            except BaseException as error:  # this thread must not end while the worker runs
                self._failures.report("worker thread", "a worker thread failed; it goes on", error)
            finally:
                self._written(unfinished)

    def _finish(self, outcome: Outcome, group: Sequence[LeasedMessage]) -> None:
        if not isinstance(outcome, Acknowledge):
            group = [one for one in group if not one.lost]
        if not group:
            return  # the drain gave the messages back, or they are lost
        # In this context the span of ack() or nack() belongs to the trace of the first message.
        context = group[0].context or Context()
        failed = context.run(call_for_all, partial(outcome.apply, self._queue), group)
        if failed:
            error = next(iter(failed.values()))
            fate = "are lost" if self._queue.at_most_once else "come again when their leases end"
            text = f"messages could not be acknowledged or given back; they {fate}"
            self._failures.report("finish", text, error, len(failed))
