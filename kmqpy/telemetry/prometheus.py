"""Prometheus metrics of clients, producers and workers, and of what queues hold.

Pass one PrometheusTelemetry to all clients and workers as `telemetry=`. QueueGauges asks a storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import KmqError
from kmqpy.message import Message
from kmqpy.telemetry.base import Telemetry

_COUNTER_OF_OP = {  # op of Telemetry.finished(): name of its counter, and help text
    "send": ("client_sent", "Messages sent and confirmed."),
    "ack": ("client_acked", "Messages acknowledged."),
    "nack": ("client_nacked", "Messages given back."),
    "extend": ("client_extended", "Messages whose lease was extended."),
    "dead-letter": ("client_dead_lettered", "Messages made dead letters by the client."),
    "late-ack": (
        "client_late_acked",
        "Copies finished because an earlier consumer has acknowledged the message.",
    ),
    "late-dead-letter": (
        "client_late_dead_lettered",
        "Copies dead-lettered and handed out to nobody: an earlier consumer has asked for that.",
    ),
    "late-postpone": (
        "client_late_postponed",
        "Copies given back unseen: a lease or delay that an earlier consumer asked for is not over.",
    ),
    "collapse": (
        "client_collapsed",
        "Messages passed over: they waited when an equal one was taken (collapse on Kafka).",
    ),
    "hold-back": (
        "worker_held_back",
        "Messages that waited for the worker's rate; if all do, the queue grows.",
    ),
}
_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800)
"""Upper bounds of the buckets of kmq_worker_handler_seconds, in seconds."""


class PrometheusTelemetry(Telemetry):
    """Counts what clients, producers and workers do, and times handlers, by queue.

    - `kmq_client_sent_total`, `…_received_total`, `…_acked_total`, `…_nacked_total`, `…_extended_total`,
      `…_dead_lettered_total`, `…_late_acked_total`, `…_late_dead_lettered_total`, `…_late_postponed_total`,
      `…_collapsed_total`: messages (Telemetry.finished() says what the late ones are)
    - `kmq_client_failures_total{queue, what}`: failures after which kmqpy went on
    - `kmq_client_in_flight`: messages in flight of the client that reported last
    - `kmq_worker_held_back_total`: handlers that started later because of the worker's rate
    - `kmq_worker_paused`: 1 while the breaker of the worker that reported last is open
    - `kmq_worker_handler_seconds{queue, outcome}`: histogram; outcome is `ok` or `error`

    Make one object for each registry, and share it between clients. If a
    process has several clients of one queue, kmq_client_in_flight shows only one of them.

    Args:
        registry: Where to register; default: the global registry.
        clock: For tests.
    """

    def __init__(self, registry: CollectorRegistry | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        registry = REGISTRY if registry is None else registry
        self._clock = clock
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, labelnames=["queue"], registry=registry)
        self._finished = {
            op: counter(f"kmq_{name}", text, ["queue"]) for op, (name, text) in _COUNTER_OF_OP.items()
        }
        self._received = counter("kmq_client_received", "Messages handed out.", ["queue"])
        failures = "Failures that kmqpy got over by itself."
        self._failures = counter("kmq_client_failures", failures, ["queue", "what"])
        self._in_flight = gauge(
            "kmq_client_in_flight",
            "Messages in flight of the client of the queue that reported last, in this process.",
        )
        self._paused = gauge(
            "kmq_worker_paused",
            "1: the breaker of the worker that reported last is open, so it handles nothing.",
        )
        about = (
            "kmq_worker_handler_seconds",
            "Seconds that a worker's handler took; the outcome is ok or error.",
            ["queue", "outcome"],
        )
        self._seconds = Histogram(*about, registry=registry, buckets=_BUCKETS_S)

    def received(self, queue: str, messages: Sequence[Message]) -> None:
        """Count messages that a client received."""
        self._received.labels(queue).inc(len(messages))

    def finished(self, queue: str, op: str, count: int = 1) -> None:
        """Count messages of an `op` in its counter."""
        if op in self._finished:
            self._finished[op].labels(queue).inc(count)

    @contextmanager
    def processing(self, message: Message) -> Iterator[None]:
        """Times the handler of a worker while it handles one message."""
        started, outcome = self._clock.monotonic(), "error"
        try:
            yield
            outcome = "ok"
        finally:
            seconds = self._clock.monotonic() - started
            self._seconds.labels(message.queue, outcome).observe(seconds)

    def failed(self, queue: str, what: str, count: int = 1) -> None:
        """Count failures after which kmqpy goes on."""
        self._failures.labels(queue, what).inc(count)

    def in_flight(self, queue: str, count: int) -> None:
        """Record the number of messages in flight of this client."""
        self._in_flight.labels(queue).set(count)

    def paused(self, queue: str, is_paused: int) -> None:
        """Record whether the worker's breaker is open."""
        self._paused.labels(queue).set(is_paused)


class Describes(Protocol):
    """What QueueGauges asks of a storage; see kmqpy.queue.Storage."""

    def list(self) -> list[str]: ...  # noqa: D102

    def describe(self, name: str) -> Any: ...  # noqa: D102


class QueueGauges(Collector):
    """What the queues of a storage hold, counted each time that somebody asks for the metrics.

    - `kmq_queue_messages{queue, state}`: state is `ready`, `delayed`, `in flight` or `dead`
    - `kmq_queue_held_groups`: groups that wait for their dead letters, of queues with on_dead_letter="hold"

    For storages without trackers. The gauges of a queue that can't be counted are left out.

    Args:
        storage: The storage, which must stay open.
        queues: The names of the queues; by default all that the storage has then.
        registry: Where to register; by default the global registry.
    """

    def __init__(
        self,
        storage: Describes,
        queues: Sequence[str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._storage = storage
        self._queues = queues
        (REGISTRY if registry is None else registry).register(self)

    def describe(self) -> list[GaugeMetricFamily]:
        """The gauges without values, so that registering asks for nothing."""
        return [
            GaugeMetricFamily(
                "kmq_queue_messages",
                "Messages in the queue, whoever takes them: ready, delayed, in flight, dead (QueueGauges).",
                labels=["queue", "state"],
            ),
            GaugeMetricFamily(
                "kmq_queue_held_groups",
                "Groups that a dead letter holds (on_dead_letter=hold; QueueGauges).",
                labels=["queue"],
            ),
        ]

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauges, with the counts of now."""
        messages, held_groups = families = self.describe()
        names: Sequence[str] = self._queues or ()
        with suppress(KmqError):
            names = self._storage.list() if self._queues is None else names
        for name in names:
            with suppress(KmqError):
                found = self._storage.describe(name)
                for state in ("ready", "delayed", "in_flight", "dead"):
                    messages.add_metric([name, state.replace("_", " ")], getattr(found, state))
                if found.settings.get("on_dead_letter") == "hold":
                    held_groups.add_metric([name], found.held_groups)
        return families
