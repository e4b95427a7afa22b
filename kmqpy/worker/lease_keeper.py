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
from kmqpy.worker.failures import Failures


@dataclass(eq=False, slots=True)
class LeasedMessage:
    """A message that a worker has received and not finished. Times are monotonic, in seconds.

    context  in which its handler ran, with the span of the message
    lost     it is no longer the worker's: finished by others, or its lease was over
    """

    message: Message
    key: bytes | None
    lease_ends: float
    extend_at: float
    context: Context | None = None
    lost: bool = False


class LeaseKeeper:
    """Extends the leases of messages until they are finished; run() extends all that are due in one call.

    An extension that reached the queue after an acknowledgement or a nack would undo it. So finish() waits
    for one that is under way, and afterwards there is none.

    Messages that the queue says are lost are extended no more; `on_lost` is called with them, and must not
    raise.
    """

    def __init__(
        self,
        queue: Queue,
        lease_s: float,
        clock: Clock,
        failures: Failures,
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
        """Extend the leases of these messages, which were just received, from now on."""
        now = self._clock.monotonic()
        # Queues promise that half of the lease is left when receive() returns.
        added = [
            LeasedMessage(
                message,
                key_of(message),
                lease_ends=now + self._lease_s / 2,
                extend_at=now + self._lease_s / 3,
            )
            for message in messages
        ]
        with self._changed:
            self._leased.update(added)
        return added

    def finish(self, messages: Sequence[LeasedMessage]) -> list[LeasedMessage]:
        """Stop extending these messages; returns those that were not finished before."""
        with self._changed:
            self._changed.wait_for(lambda: self._extending.isdisjoint(messages))
            mine = [one for one in messages if one in self._leased]
            self._leased.difference_update(mine)
        return mine

    def unfinished(self) -> list[LeasedMessage]:
        """The messages that were added and not finished."""
        with self._changed:
            return list(self._leased)

    def run(self) -> None:
        """Extend leases until close()."""
        tick = min(1.0, max(0.005, self._lease_s / 30))
        while not self._closed.wait(tick):
            self.extend_due()

    def close(self) -> None:
        """Let run() end."""
        self._closed.set()

    def extend_due(self) -> None:
        """Extend the leases of which a third is over."""
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
                if ended < one.lease_ends:  # else it may have been redelivered before
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
    """Call once for all messages; returns those for which it failed, with the error.

    Where the call is refused, it is repeated for each half of the messages, so that a bad one costs only
    itself and a few calls. It is not while the storage does not answer: each call would take as long.
    """
    try:
        call([one.message for one in messages])
    except Exception as error:
        if len(messages) == 1 or isinstance(error, Unavailable):
            return dict.fromkeys(messages, error)
        half = len(messages) // 2
        return call_for_all(call, messages[:half]) | call_for_all(call, messages[half:])
    return {}
