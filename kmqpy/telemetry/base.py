"""The interface by which clients, workers and trackers report events.

The application passes an implementation as `telemetry=`: `kmqpy.telemetry.prometheus` (metrics),
`kmqpy.telemetry.opentelemetry_metrics` (metrics), `kmqpy.telemetry.opentelemetry` (traces), or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kmqpy.message import Headers, Message

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_SENDERS: ContextVar[Iterator[Context] | None] = ContextVar("senders", default=None)
"""Of a batch that a thread sends for coroutines: the context of each, in the order of their messages."""
_NOTHING = nullcontext()
"""Shared, so that an operation costs no object where nobody measures it."""


class Telemetry:
    """Receives events and ignores them; a subclass overrides the methods of the events that it reports."""

    def sending(self, queue: str, headers: Headers) -> AbstractContextManager[Headers]:
        """Wraps the send of one message; yields the headers to send with the message.

        Args:
            queue: The queue's name.
            headers: Those of the message.
        """
        return nullcontext(headers)

    def operating(self, queue: str, op: str) -> AbstractContextManager[None]:
        """Wraps a call of receive(), ack(), nack(), extend() or dead_letter().

        received() or finished() follows in the call, unless it raises or there was no message.

        Args:
            queue: The queue's name.
            op: `receive`, or as for finished().
        """
        return _NOTHING

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """A client received these messages, and hands them to its caller.

        Args:
            queue: The queue's name.
            messages: At least one.
        """

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """A client did `op` with `count` messages: send, ack, nack, extend, dead-letter, or one of these.

        - `collapse`: in a queue with that setting, on Kafka, the client passed over messages that waited when
          it took an equal one
        - `hold-back`: handlers of a worker started later, because of its `rate`

        A late op is about copies (a copy is the record with which a tracker redelivers a message). An earlier
        consumer acknowledged, gave back, extended or dead-lettered the message when a tracker was copying it
        already. The client that takes the copy finds this late operation, and applies it to the copy:

        - `late-ack`: the earlier consumer acknowledged the message; the client finished its copy
        - `late-dead-letter`: the earlier consumer asked for a dead letter; the client dead-lettered the copy
          without handing it out
        - `late-postpone`: the earlier consumer asked for a lease or a delay that is not over; the client gave
          the copy back for the rest of that time, without handing it out

        Args:
            queue: The queue's name.
            op: What was done.
            count: With how many messages.
        """

    def processing(self, message: Message) -> AbstractContextManager[None]:
        """Wraps the handler of a worker while it handles one message.

        Args:
            message: The message.
        """
        return nullcontext()

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Something failed, and kmqpy goes on.

        Args:
            queue: The queue's name.
            what: The kind of failure, for example `commit`; docs/metrics.md lists them.
            count: How many there were.
        """

    def in_flight(self, queue: str, count: int) -> None:
        """The client or worker has more or fewer messages that it received and has not finished.

        Args:
            queue: The queue's name.
            count: How many now.
        """

    def paused(self, queue: str, is_paused: int) -> None:
        """The worker's breaker has opened or closed: while it is open, the worker handles no messages.

        Args:
            queue: The queue's name.
            is_paused: 1, or True: it has opened; 0: it has closed.
        """

    def moved(self, queue: str, headers: Headers, *, dead_letter: bool) -> None:
        """A tracker appended a copy: a redelivery, or a dead letter.

        Args:
            queue: The queue's name.
            headers: Those of the copy.
            dead_letter: Whether it is a dead letter, not a redelivery.
        """


class Combined(Telemetry):
    """Passes each event on to several Telemetry objects.

    Args:
        parts: In the order in which they are told.
    """

    def __init__(self, *parts: Telemetry) -> None:
        self._parts = parts

    @contextmanager
    def sending(self, queue: str, headers: Headers) -> Iterator[Headers]:
        """Wraps the send of one message; each part gets the headers that the part before it yielded."""
        with ExitStack() as stack:
            for part in self._parts:
                headers = stack.enter_context(part.sending(queue, headers))
            yield headers

    @contextmanager
    def operating(self, queue: str, op: str) -> Iterator[None]:
        """Wraps a call of receive(), ack() and so on."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.operating(queue, op))
            yield

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """A client received these messages."""
        for part in self._parts:
            part.received(queue, messages)

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """A client did `op` with `count` messages."""
        for part in self._parts:
            part.finished(queue, op, count)

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Wraps the handler of a worker while it handles one message."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.processing(message))
            yield

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """There were `count` failures, and kmqpy goes on."""
        for part in self._parts:
            part.failed(queue, what, count)

    def in_flight(self, queue: str, count: int) -> None:
        """The number of messages in flight changed."""
        for part in self._parts:
            part.in_flight(queue, count)

    def paused(self, queue: str, is_paused: int) -> None:
        """The worker's breaker has opened or closed."""
        for part in self._parts:
            part.paused(queue, is_paused)

    def moved(self, queue: str, headers: Headers, *, dead_letter: bool) -> None:
        """A tracker appended a copy with these headers."""
        for part in self._parts:
            part.moved(queue, headers, dead_letter=dead_letter)


class _Told(Protocol):
    """A queue that reports to a Telemetry."""

    _telemetry: Telemetry

    @property
    def name(self) -> str: ...


Q = TypeVar("Q", bound=_Told)


def operation(op: str) -> Callable[[Callable[Concatenate[Q, P], R]], Callable[Concatenate[Q, P], R]]:
    """Make a method of a queue one that Telemetry.operating() wraps."""

    def wrapped(method: Callable[Concatenate[Q, P], R]) -> Callable[Concatenate[Q, P], R]:
        @wraps(method)
        def call(self: Q, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._telemetry.operating(self.name, op):
                return method(self, *args, **kwargs)

        return call

    return wrapped


def sending(telemetry: Telemetry, queue: str, headers: Headers) -> AbstractContextManager[Headers]:
    """Telemetry.sending() of a queue's next message, in the context of the coroutine that gave it."""
    inner = telemetry.sending(queue, headers)
    return inner if (senders := _SENDERS.get()) is None else _Within(next(senders), inner)


def sent_for(senders: Iterable[Context], send: Callable[[T], R], messages: T) -> R:
    """Return `send(messages)`; sending() is in the context of the sender at the place of each message."""
    token = _SENDERS.set(iter(senders))
    try:
        return send(messages)
    finally:
        _SENDERS.reset(token)


class _Within(AbstractContextManager[Headers]):
    """Enters and leaves `inner` in a context, which the block itself does not run in."""

    def __init__(self, context: Context, inner: AbstractContextManager[Headers]) -> None:
        self._context = context
        self._inner = inner

    def __enter__(self) -> Headers:
        return self._context.run(self._inner.__enter__)

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.run(self._inner.__exit__, *error)
