"""Prometheus metrics of clients, producers and workers; give one to each as `telemetry=`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.message import Message
from kmqpy.telemetry.base import Telemetry

_OPS = {
    "send": ("sent", "Messages sent and confirmed."),
    "ack": ("acked", "Messages acknowledged."),
    "nack": ("nacked", "Messages given back."),
    "extend": ("extended", "Leases extended."),
    "dead-letter": ("dead_lettered", "Messages moved to the dead letters by a client."),
    "late-ack": ("late_acked", "Copies finished because an earlier consumer acknowledged the message."),
    "late-dead-letter": ("late_dead_lettered", "Copies dead-lettered unseen, as an earlier consumer asked."),
    "late-postpone": ("late_postponed", "Copies given back unseen: an earlier lease or delay is not over."),
}
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800)


class PrometheusTelemetry(Telemetry):
    """Counts what clients and workers do, by queue.

    kmq_client_sent_total, …_received_total, …_acked_total, …_nacked_total, …_extended_total,
    …_dead_lettered_total, …_late_acked_total, …_late_dead_lettered_total, …_late_postponed_total   messages
    kmq_client_failures_total{queue, what}   what kmqpy got over by itself
    kmq_client_in_flight    messages in flight, of the client that reported last
    kmq_worker_handler_seconds{queue, outcome}   histogram; outcome is `ok` or `error`

    One for each registry (default: the global one); share it between clients, but where several
    clients of one queue are in one process, `in_flight` tells of one of them.
    """

    def __init__(self, registry: CollectorRegistry | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        registry = REGISTRY if registry is None else registry
        self._clock = clock
        self._finished = {
            op: Counter(f"kmq_client_{name}", text, ["queue"], registry=registry)
            for op, (name, text) in _OPS.items()
        }
        self._received = Counter("kmq_client_received", "Messages handed out.", ["queue"], registry=registry)
        self._failures = Counter(
            "kmq_client_failures",
            "Failures that kmqpy got over by itself.",
            ["queue", "what"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "kmq_client_in_flight",
            "Messages received by the client that are in flight.",
            ["queue"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kmq_worker_handler_seconds",
            "How long handlers take.",
            ["queue", "outcome"],
            registry=registry,
            buckets=_SECONDS,
        )

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Messages were handed out."""
        self._received.labels(queue).inc(len(messages))

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """`count` messages were given an `op`."""
        if op in self._finished:
            self._finished[op].labels(queue).inc(count)

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Around the handling of one message by a worker."""
        started, outcome = self._clock.monotonic(), "error"
        try:
            yield
            outcome = "ok"
        finally:
            seconds = self._clock.monotonic() - started
            self._seconds.labels(message.queue, outcome).observe(seconds)

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Something failed that kmqpy gets over by itself."""
        self._failures.labels(queue, what).inc(count)

    def in_flight(self, queue: str, count: int) -> None:
        """How many messages of this client are in flight."""
        self._in_flight.labels(queue).set(count)
