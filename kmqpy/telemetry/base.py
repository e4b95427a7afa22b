"""The interface through which clients report events; metrics and tracing implement it.

The user gives clients an implementation: `kmqpy.telemetry.prometheus` (Prometheus) or
`kmqpy.telemetry.opentelemetry` (OpenTelemetry).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from kmqpy.message import Headers, Message


class Telemetry:
    """Ignores every event; subclasses override the events that they report."""

    def sending(self, queue: str, headers: Headers) -> AbstractContextManager[Headers]:
        """Around one send; yields the headers to send."""
        return nullcontext(headers)

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Messages were handed out."""

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """`count` messages were given an `op`: ack, nack, extend, dead-letter, or one of those of copies.

        late-ack          the client ended copies that an earlier consumer of the message has acknowledged
        late-dead-letter  it dead-lettered copies, handed out to nobody, as an earlier consumer had asked
        late-postpone     it gave copies back: a lease or delay of an earlier consumer is not over
        """

    def processing(self, message: Message) -> AbstractContextManager[None]:
        """Around the handling of one message by a worker."""
        return nullcontext()

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Something failed that kmqpy gets over by itself: writing start markers, a commit."""

    def in_flight(self, queue: str, count: int) -> None:
        """How many messages of this client are in flight."""

    def moved(self, queue: str, headers: Headers, *, dead_letter: bool) -> None:
        """A tracker appended a copy with these headers: a redelivery or a dead letter."""


class Combined(Telemetry):
    """Reports each event to several others."""

    def __init__(self, *parts: Telemetry) -> None:
        self._parts = parts

    @contextmanager
    def sending(self, queue: str, headers: Headers) -> Iterator[Headers]:
        """Around one send; each part may change the headers of the one before."""
        with ExitStack() as stack:
            for part in self._parts:
                headers = stack.enter_context(part.sending(queue, headers))
            yield headers

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Messages were handed out."""
        for part in self._parts:
            part.received(queue, messages)

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """`count` messages were given an `op`."""
        for part in self._parts:
            part.finished(queue, op, count)

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Around the handling of one message by a worker."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.processing(message))
            yield

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Something failed that kmqpy gets over by itself."""
        for part in self._parts:
            part.failed(queue, what, count)

    def in_flight(self, queue: str, count: int) -> None:
        """How many messages of this client are in flight."""
        for part in self._parts:
            part.in_flight(queue, count)

    def moved(self, queue: str, headers: Headers, *, dead_letter: bool) -> None:
        """A tracker appended a copy with these headers."""
        for part in self._parts:
            part.moved(queue, headers, dead_letter=dead_letter)
