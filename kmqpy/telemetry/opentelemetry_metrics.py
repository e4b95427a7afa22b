"""OpenTelemetry metrics of clients, producers and workers (`kmqpy[otel]`): a MetricsTelemetry.

Pass it as `telemetry=`. Names, units and buckets of `messaging.*` follow OpenTelemetry's semantic conventions
for messaging. Metrics that the conventions do not name are called `kmq.*`. Without a meter provider,
OpenTelemetry records nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import MissingExtra
from kmqpy.message import Headers, Message
from kmqpy.telemetry.base import Telemetry

try:
    from opentelemetry.metrics import Histogram, Meter, MeterProvider, get_meter
except ImportError:
    raise MissingExtra("otel", "kmqpy.telemetry.opentelemetry_metrics") from None

from kmqpy.telemetry.opentelemetry import SCHEMA_URL, times_operations

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Upper bounds of the buckets of both histograms, in seconds."""


class MetricsTelemetry(Telemetry):
    """Counts and times what clients, producers and workers do, by queue.

    - `messaging.client.sent.messages`: messages sent or tried; failed sends have error.type
    - `messaging.client.operation.duration`: seconds of a send until it is confirmed or fails
    - `messaging.client.consumed.messages`: messages received
    - `messaging.process.duration`: seconds of a worker's handler; failed handlers have error.type
    - `kmq.client.finished.messages`: messages acknowledged, given back, extended or dead-lettered (all ops of
      Telemetry.finished() except `send`), by messaging.operation.name
    - `kmq.client.failures`: failures after which kmqpy went on, by kmq.failure
    - `kmq.client.in_flight`: messages in flight of the client that reported last
    - `kmq.worker.paused`: 1 while the breaker of the worker that reported last is open

    With `messaging` in OTEL_SEMCONV_STABILITY_OPT_IN, when this object is made, operation.duration has the
    calls of receive(), ack(), nack(), extend() and dead_letter(), too; failed ones have error.type, and
    a receive() that returns nothing counts.

    Args:
        meter_provider: Default: the global one.
        system: The value of messaging.system.
        clock: For tests.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        *,
        system: str = "kafka",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        meter = get_meter("kmqpy", meter_provider=meter_provider, schema_url=SCHEMA_URL)
        self._times_operations = times_operations()
        self._system = system
        self._clock = clock
        counter, gauge = meter.create_counter, meter.create_gauge
        tried = "Messages that a producer tried to send."
        self._sent = counter("messaging.client.sent.messages", "{message}", tried)
        self._consumed = counter("messaging.client.consumed.messages", "{message}", "Messages received.")
        sending = "messaging.client.operation.duration", "How long sends and other operations take."
        self._operation_seconds = _histogram(meter, *sending)
        self._process_seconds = _histogram(meter, "messaging.process.duration", "How long handlers take.")
        done = "Messages given an operation after their receipt."
        self._finished = counter("kmq.client.finished.messages", "{message}", done)
        failures = "Failures that kmqpy got over by itself."
        self._failures = counter("kmq.client.failures", "{failure}", failures)
        self._in_flight = gauge("kmq.client.in_flight", "{message}", "Messages in flight of the client.")
        self._paused = gauge("kmq.worker.paused", "{worker}", "Whether the worker's breaker is open.")

    @contextmanager
    def sending(self, queue: str, headers: Headers) -> Iterator[Headers]:
        """Counts and times one send; leaves the headers as they are."""
        attributes = self._attributes(queue, "send", "send")
        try:
            with self._timed(self._operation_seconds, attributes):
                yield headers
        finally:
            self._sent.add(1, attributes)

    def operating(self, queue: str, op: str) -> AbstractContextManager[None]:
        """Times a call."""
        if not self._times_operations:
            return super().operating(queue, op)
        kind = "receive" if op == "receive" else "settle"
        return self._timed(self._operation_seconds, self._attributes(queue, op, kind))

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Count messages that a client received."""
        self._consumed.add(len(messages), self._attributes(queue, "receive", "receive"))

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """Count messages that a client finished or extended; sending() counts those that were sent."""
        if op != "send":
            self._finished.add(count, self._attributes(queue, op, "settle"))

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Times the handler of a worker while it handles one message."""
        with self._timed(self._process_seconds, self._attributes(message.queue, "process", "process")):
            yield

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Count failures after which kmqpy goes on."""
        self._failures.add(count, self._destination(queue) | {"kmq.failure": what})

    def in_flight(self, queue: str, count: int) -> None:
        """Record the number of messages in flight of this client."""
        self._in_flight.set(count, self._destination(queue))

    def paused(self, queue: str, is_paused: int) -> None:
        """Record whether the worker's breaker is open."""
        self._paused.set(is_paused, self._destination(queue))

    @contextmanager
    def _timed(self, histogram: Histogram, attributes: dict[str, str]) -> Iterator[None]:
        """Record the seconds of the block; an error adds its class to `attributes`, as error.type."""
        started = self._clock.monotonic()
        try:
            yield
        except BaseException as error:
            attributes["error.type"] = type(error).__qualname__
            raise
        finally:
            histogram.record(self._clock.monotonic() - started, attributes)

    def _destination(self, queue: str) -> dict[str, str]:
        return {"messaging.system": self._system, "messaging.destination.name": queue}

    def _attributes(self, queue: str, name: str, kind: str) -> dict[str, str]:
        return self._destination(queue) | {"messaging.operation.name": name, "messaging.operation.type": kind}


def _histogram(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=_BUCKETS_S)
