"""Extends the leases of the messages that a worker has received and not finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass

from kmqpy.core.clock import Clock
from kmqpy.errors import Unavailable
from kmqpy.message import Message
from kmqpy.queue import Queue
from kmqpy.worker.failure_log import FailureLog


@dataclass(eq=False, slots=True)
class LeasedMessage:
    """A message that a worker has received and not finished. Times are seconds of Clock.monotonic().

    key         messages of one key are handled one at a time; None: no order
    taken_at    when receive() returned it
    lease_ends  the lease certainly holds until this time; afterwards others may have the message
    extend_at   when the LeaseKeeper extends the lease next
    context     the context in which the handler runs, with the span of the message; None before it runs
    lost        True if the message is no longer the worker's: others finished it, or its lease was over
    """

    message: Message
    key: bytes | None
    taken_at: float
    lease_ends: float
    extend_at: float
    context: Context | None = None
    lost: bool = False


class LeaseKeeper:
    """Extends the leases of messages until finish() is called for them, in the thread that calls run().

    run() extends, by one Queue.extend(), all leases that are due. A lease is due when a third of its duration
    has passed since receive() returned the message, or since the last extension.

    If an extension reached the queue after an acknowledgement or a nack of the same message, Queue.extend()
    could report the message as lost. So finish() waits until extensions of its messages that are under way
    have ended. The LeaseKeeper does not extend these messages again.

    If the queue says that messages are lost (no longer the worker's), the LeaseKeeper does not extend them
    again, and calls `on_lost` with them. `on_lost` must not raise.
    """

    def __init__(
        self,
        queue: Queue,
        lease_s: float,
        clock: Clock,
        failures: FailureLog,
        on_lost: Callable[[Sequence[Message]], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._lease_s = lease_s
        self._clock = clock
        self._failures = failures
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._leased: set[LeasedMessage] = set()
        self._extending: frozenset[LeasedMessage] = frozenset()
        self._closed = threading.Event()

    def add(
        self, messages: Iterable[Message], key_of: Callable[[Message], bytes | None]
    ) -> list[LeasedMessage]:
        """Start to extend the leases of messages that receive() just returned; `key_of` tells their keys."""
        now = self._clock.monotonic()
        # Queues promise that half of the lease is left when receive() returns.
        added = [
            LeasedMessage(
                message,
                key_of(message),
                taken_at=now,
                lease_ends=now + self._lease_s / 2,
                extend_at=now + self._lease_s / 3,
            )
            for message in messages
        ]
        with self._changed:
            self._leased.update(added)
        return added

    def finish(self, messages: Sequence[LeasedMessage]) -> list[LeasedMessage]:
        """Stop extending the leases of these messages; returns the messages that were not finished before."""
        with self._changed:
            self._changed.wait_for(lambda: self._extending.isdisjoint(messages))
            mine = [one for one in messages if one in self._leased]
            self._leased.difference_update(mine)
        return mine

    def unfinished(self) -> list[LeasedMessage]:
        """The messages that were given to add() and not yet to finish()."""
        with self._changed:
            return list(self._leased)

    def run(self, before_each: Callable[[], None] | None = None) -> None:
        """Extend leases when they are due, until close(); `before_each` is called before each look."""
        pause_s = min(1.0, max(0.005, self._lease_s / 30))
        while not self._closed.wait(pause_s):
            if before_each is not None:
                before_each()
            self.extend_due()

    def close(self) -> None:
        """Let run() return."""
        self._closed.set()

    def extend_due(self) -> None:
        """Extend the leases that are due; those that fail are due again after a tenth of their duration."""
        now = self._clock.monotonic()
        with self._changed:
            due = [one for one in self._leased if one.extend_at <= now and not one.lost]
            self._extending = frozenset(due)
        try:
            if due:
                self._extend(due)
        finally:
            with self._changed:
                self._extending = frozenset()
                self._changed.notify_all()

    def _extend(self, due: Sequence[LeasedMessage]) -> None:
        begun = self._clock.monotonic()
        lost: set[str] = set()
        failed = call_for_all(
            lambda messages: lost.update(self._queue.extend(*messages, lease=self._lease_s)), due
        )
        ended = self._clock.monotonic()
        if lost:
            self._lose([one for one in due if one.message.receipt in lost])
        for one in due:
            if one in failed:
                one.extend_at = begun + self._lease_s / 10
            else:
                if ended < one.lease_ends:  # else the message may have been redelivered meanwhile
                    one.lease_ends = begun + self._lease_s
                one.extend_at = begun + self._lease_s / 3
        if failed:
            error = next(iter(failed.values()))
            self._failures.report("extend", "leases could not be extended; trying again", error, len(failed))

    def _lose(self, messages: Sequence[LeasedMessage]) -> None:
        for one in messages:
            one.lost = True
        self._on_lost([one.message for one in messages])


def call_for_all(
    call: Callable[[Sequence[Message]], None], messages: Sequence[LeasedMessage]
) -> dict[LeasedMessage, Exception]:
    """Call `call` once for all messages; returns the messages for which it failed, with the error.

    If `call` raises an error, it is called again for each half of the messages, so that only bad messages
    fail. Not so after Unavailable: while the storage does not answer, each `call` would wait as long again.
    """
    try:
        call([one.message for one in messages])
    except Exception as error:
        if len(messages) == 1 or isinstance(error, Unavailable):
            return dict.fromkeys(messages, error)
        half = len(messages) // 2
        return call_for_all(call, messages[:half]) | call_for_all(call, messages[half:])
    return {}
