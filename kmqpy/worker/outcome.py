"""Decides what becomes of a message when its handler has ended. Pure: no threads, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.message import Message
from kmqpy.queue import Queue

REASON_CHARS = 200
"""The most characters of a reason; a longer text is cut, and ends with `…`."""


class Reject(Exception):
    """A handler raises Reject to make the message a dead letter, without another try.

    Args:
        reason: Text that the dead letter keeps.
    """

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Exception):
    """A handler raises Retry to have the message redelivered after `delay`.

    Args:
        delay: Seconds or timedelta; default: the worker's back-off.
        count: False: this delivery does not count as an attempt.
        reason: Text that a dead letter keeps, if this was the last attempt.
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
    """The outcome of a message that was handled: the message is acknowledged."""

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Acknowledge the messages by one Queue.ack()."""
        queue.ack(*messages)


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The outcome of a message that the queue redelivers; the fields are arguments of Queue.nack().

    The queue's max_delay_ms caps the delay: refused, the message would use up its lease and an attempt.
    """

    delay: float | None = 0.0
    count: bool = True
    reason: str | None = None

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Give the messages back by one Queue.nack()."""
        queue.nack(*messages, delay=self.delay_in(queue), count=self.count, reason=self.reason)

    def delay_in(self, queue: Queue) -> float | None:
        """The delay that the queue allows, in seconds; None: the queue's own."""
        return None if self.delay is None else min(self.delay, queue.settings.max_delay_ms / 1000)


@dataclass(frozen=True, slots=True)
class SetAside:
    """The outcome of a message that becomes a dead letter."""

    reason: str

    def apply(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Make the messages dead letters by one Queue.dead_letter()."""
        queue.dead_letter(*messages, reason=self.reason)


Outcome = Acknowledge | GiveBack | SetAside
"""An outcome says what becomes of a message. Its apply() finishes several messages of equal outcome."""

ACKNOWLEDGE = Acknowledge()
"""The outcome of a message whose handler returned."""
RELEASE = GiveBack(count=False)
"""The outcome of a message whose handler was not called, or did not end in time. The worker gives the message
back, and this delivery does not count as an attempt."""


def failed_outcome(error: BaseException, attempts: int, backoff: Backoff | None) -> Outcome:
    """The outcome of a message whose handler raised `error` in delivery number `attempts`.

    backoff  None: the queue knows how long redeliveries wait
    """
    own_delay = None if backoff is None else backoff.delay(attempts)
    if isinstance(error, Reject):
        return SetAside(shortened(error.reason))
    if isinstance(error, Retry):
        try:
            # As a float: outcomes must be hashable, and the delay of a handler need not be.
            asked = None if error.delay is None else duration_ms(error.delay, "delay") / 1000
        except ConfigError as problem:
            return GiveBack(own_delay, reason=described(problem))
        if own_delay is None and not error.count:  # the queue's delays are for what counts
            own_delay = Backoff().delay(attempts)
        delay = own_delay if asked is None else asked
        reason = None if error.reason is None else shortened(error.reason)
        return GiveBack(delay, count=bool(error.count), reason=reason)
    return GiveBack(own_delay, reason=described(error))


def described(error: BaseException) -> str:
    """The class and text of an error, on one line of at most REASON_CHARS characters."""
    try:
        text = str(error)
    except Exception:  # an error whose text is an error must not cost the message
        text = ""
    name = type(error).__name__
    return shortened(f"{name}: {text}" if text else name)


def shortened(text: str) -> str:
    """The text on one line, cut to REASON_CHARS characters."""
    line = " ".join(str(text).split()).encode(errors="replace").decode()
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 1] + "…"
