"""Makes OpenTelemetry spans (`kmqpy[otel]`) of sends, receives, handlers, acknowledgements and so on.

Pass a TracingTelemetry as `telemetry=`. Names follow OpenTelemetry's semantic conventions for messaging,
version 1.44.0. The message carries the trace context of its send, and its baggage, in the headers
`traceparent` and `baggage`, or in those of another global propagator; its handler has both. Trackers keep
these headers on redelivered messages and dead letters. No span holds a body, a key or a header.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import MissingExtra
from kmqpy.message import Headers, Message, without
from kmqpy.telemetry.base import Telemetry

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, attach, detach, get_current
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
except ImportError:
    raise MissingExtra("otel", "kmqpy.telemetry.opentelemetry") from None

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

_SETTLE_OPS = {"ack", "nack", "dead-letter"}
"""The values of `op` for which finished() makes a span."""


def times_operations() -> bool:
    """True if OTEL_SEMCONV_STABILITY_OPT_IN asks for what is new: receive and settle have durations."""
    chosen = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
    return not {"messaging", "messaging/dup"}.isdisjoint(one.strip() for one in chosen)


class Stopwatch:
    """Times the operations of queues: one at a time in a thread or task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: ContextVar[tuple[str, int, float] | None] = ContextVar("running", default=None)

    @contextmanager
    def running(self, op: str) -> Iterator[None]:
        """Time the operation `op` in the block."""
        token = self._running.set((op, self._clock.wall_ms(), self._clock.monotonic()))
        try:
            yield
        finally:
            self._running.reset(token)

    def lap(self, op: str) -> tuple[int, float] | None:
        """When `op` began (ms since 1970), and the seconds since; None while another runs, or none.

        What follows in the block is timed from now on: a call may report several batches.
        """
        if (running := self._running.get()) is None or running[0] != op:
            return None
        now = self._clock.monotonic()
        self._running.set((op, self._clock.wall_ms(), now))
        return running[1], now - running[2]


class TracingTelemetry(Telemetry):
    """Makes spans of what clients, producers, workers and trackers do.

    - `send`: kind PRODUCER; its context is added to the message's headers. If they hold one already: CLIENT
    - `receive`: kind CLIENT, linked to the send of every message
    - `process`: kind CONSUMER, child of the message's send and linked to it
    - `ack`, `nack`, `dead-letter`: of a client: kind CLIENT, child of the current span, which in a handler is
      the process span of the message. Where a worker finishes several messages by one ack() or nack(), the
      span is a child of the process span of the first message
    - `redeliver`, `dead-letter`: of a tracker: kind CLIENT, child of the message's send and linked to it

    A process span also links to the span that was current when processing began. With
    `messaging` in OTEL_SEMCONV_STABILITY_OPT_IN, when this object is made, the spans of receive, ack, nack
    and dead-letter last as long as the call, and calls that raise have spans; otherwise these spans have no
    duration. Those of trackers have none.

    Args:
        tracer_provider: Default: the global one.
        system: The value of messaging.system.
        clock: For tests.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        system: str = "kafka",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._watch = Stopwatch(clock) if times_operations() else None
        self._tracer = trace.get_tracer("kmqpy", tracer_provider=tracer_provider, schema_url=SCHEMA_URL)
        self._system = system

    @contextmanager
    def sending(self, queue: str, headers: Headers) -> Iterator[Headers]:
        """Wraps one send in a span; yields the headers with the context of the span."""
        known = _context_of(headers)
        kind = SpanKind.CLIENT if _links(known) else SpanKind.PRODUCER
        span = self._span("send", queue, "send", kind, links=_links(known))
        with _ends_span(span):
            if not _links(known):
                carrier: dict[str, str] = {}
                propagate.inject(carrier, trace.set_span_in_context(span))
                added = tuple((name, value.encode()) for name, value in carrier.items())
                headers = without(headers, *carrier) + added
            yield headers

    def operating(self, queue: str, op: str) -> AbstractContextManager[None]:
        """Times a call, and makes a span of it if it raises."""
        is_told = op == "receive" or op in _SETTLE_OPS
        return self._timed(queue, op) if self._watch and is_told else super().operating(queue, op)

    @contextmanager
    def _timed(self, queue: str, op: str) -> Iterator[None]:
        assert self._watch is not None
        with self._watch.running(op):
            try:
                yield
            except BaseException as error:
                self._ended(queue, op, error=error)
                raise

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Make a span of a receive() that returned these messages."""
        links = [link for message in messages for link in _links(_context_of(message.headers))]
        count = {"messaging.batch.message_count": len(messages)}
        self._ended(queue, "receive", count, links=links)

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """Make a span of `op`, if it is one of _SETTLE_OPS."""
        if op not in _SETTLE_OPS:
            return
        more = {} if count == 1 else {"messaging.batch.message_count": count}
        self._ended(queue, op, more)

    def _ended(
        self,
        queue: str,
        op: str,
        more: Mapping[str, str | int] = {},
        *,
        links: Sequence[Link] = (),
        error: BaseException | None = None,
    ) -> None:
        """Make a span of a call that is over: as long as it was, or without a duration."""
        began = end = None
        if self._watch and (lap := self._watch.lap(op)):
            began = lap[0] * 1_000_000
            end = began + round(lap[1] * 1e9)
        type_ = "receive" if op == "receive" else "settle"
        span = self._span(op, queue, type_, SpanKind.CLIENT, more, links=links, start_time=began)
        if error is not None:
            _note(span, error)
        span.end(end)

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Wraps the handling of one message in a span, which is the current span meanwhile."""
        sent = _context_of(message.headers)
        ambient = trace.get_current_span().get_span_context()
        links = _links(sent) + ([Link(ambient)] if ambient.is_valid else [])
        attributes: dict[str, str | int] = {
            "messaging.message.id": message.id,
            "messaging.message.body.size": len(message.body),
            "kmq.attempts": message.attempts,
        }
        if hasattr(message, "partition") and hasattr(message, "offset"):  # a KafkaMessage
            attributes["messaging.destination.partition.id"] = str(message.partition)
            attributes["messaging.kafka.offset"] = message.offset
        context = sent if _links(sent) else None
        span = self._span(
            "process", message.queue, "process", SpanKind.CONSUMER, attributes, context=context, links=links
        )
        with _ends_span(span):
            token = attach(trace.set_span_in_context(span, _context_of(message.headers, get_current())))
            try:
                yield
            finally:
                detach(token)

    def moved(self, queue: str, headers: Headers, *, dead_letter: bool) -> None:
        """Make a span of a copy that a tracker appended, as a child of the message's send."""
        sent = _context_of(headers)
        name = "dead-letter" if dead_letter else "redeliver"
        self._span(name, queue, "send", SpanKind.CLIENT, context=sent, links=_links(sent)).end()

    def _span(
        self,
        name: str,
        queue: str,
        type_: str,
        kind: SpanKind,
        more: Mapping[str, str | int] = {},
        **given: Any,
    ) -> trace.Span:
        attributes: dict[str, str | int] = {
            "messaging.system": self._system,
            "messaging.destination.name": queue,
            "messaging.operation.name": name,
            "messaging.operation.type": type_,
            **more,
        }
        return self._tracer.start_span(f"{name} {queue}", kind=kind, attributes=attributes, **given)


@contextmanager
def _ends_span(span: trace.Span) -> Iterator[None]:
    """End the span after the block; of an error only the class is recorded: its text may hold a body."""
    try:
        yield
    except BaseException as error:
        _note(span, error)
        raise
    finally:
        span.end()


def _note(span: trace.Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR))


def _context_of(headers: Headers, beside: Context | None = None) -> Context:
    """The context that the headers of a message carry, added to another one."""
    fields = propagate.get_global_textmap().fields
    carrier = {
        name: value.decode("utf-8", "replace")
        for name, value in headers
        if name in fields and value is not None
    }
    return propagate.extract(carrier, Context() if beside is None else beside)


def _links(context: Context) -> list[Link]:
    span_context = trace.get_current_span(context).get_span_context()
    return [Link(span_context)] if span_context.is_valid else []
