"""Decisions about a message when its handler ends. Pure: no threads, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.message import Message
from kmqpy.queue import Queue

REASON_CHARS = 200


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


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The message is done with."""

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Finish the messages in one call."""
        queue.ack(*messages)


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The message is redelivered; the fields are the arguments of Queue.nack."""

    delay: Duration = 0
    count: bool = True
    reason: str | None = None

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Finish the messages in one call."""
        queue.nack(*messages, delay=self.delay, count=self.count, reason=self.reason)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The message becomes a dead letter."""

    reason: str

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Finish the messages in one call."""
        queue.dead_letter(*messages, reason=self.reason)


Outcome = Acknowledge | GiveBack | DeadLetter
"""Messages of equal outcomes are finished in one call."""

ACKNOWLEDGE = Acknowledge()
RELEASE = GiveBack(count=False)
"""The outcome of a message whose handler was not called, or did not end in time."""


def failed_outcome(error: BaseException, attempts: int, backoff: Backoff) -> Outcome:
    """The outcome of a message whose handler raised `error` in delivery number `attempts`."""
    if isinstance(error, Reject):
        return DeadLetter(shortened(error.reason))
    if isinstance(error, Retry):
        try:
            # A number of ours: the handler's need not be hashable, and outcomes are.
            asked = None if error.delay is None else duration_ms(error.delay, "delay") / 1000
        except ConfigError as problem:
            return GiveBack(backoff.delay(attempts), reason=described(problem))
        delay = backoff.delay(attempts) if asked is None else asked
        reason = None if error.reason is None else shortened(error.reason)
        return GiveBack(delay, count=bool(error.count), reason=reason)
    return GiveBack(backoff.delay(attempts), reason=described(error))


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
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 1] + "…"
