"""Prometheus metrics of a gateway, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)
_MAX_QUEUES = 200
"""Queues with labels of their own; those that come later share the label `(other)`."""
_OTHER = "(other)"


class GatewayMetrics:
    """The metrics of one gateway.

    kmq_gateway_requests_total{dialect, call, status}   answered requests
    kmq_gateway_request_seconds{dialect, call}          how long they took
    kmq_gateway_messages_total{dialect, call, queue}    messages, or ids of messages, in them
    kmq_gateway_refused_total{why}                      requests that a limit refused
    kmq_gateway_running_requests, kmq_gateway_held_bytes, kmq_gateway_open_queues, kmq_gateway_connections
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kmq_gateway_requests",
            "Requests that were answered.",
            ["dialect", "call", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kmq_gateway_request_seconds",
            "Seconds from the head of a request to its answer.",
            ["dialect", "call"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._messages = Counter(
            "kmq_gateway_messages",
            "Messages, or ids of messages, in requests and answers.",
            ["dialect", "call", "queue"],
            registry=self.registry,
        )
        self.refused = Counter(
            "kmq_gateway_refused", "Requests that a limit refused.", ["why"], registry=self.registry
        )
        self.running = Gauge("kmq_gateway_running_requests", "Requests that run.", registry=self.registry)
        self.held = Gauge(
            "kmq_gateway_held_bytes", "Bytes of bodies in the gateway's memory.", registry=self.registry
        )
        self.open_queues = Gauge("kmq_gateway_open_queues", "Queues that are open.", registry=self.registry)
        self.connections = Gauge("kmq_gateway_connections", "Open connections.", registry=self.registry)
        self._queues: set[str] = set()
        self._of_call: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def note_request(self, dialect: str, call: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        key = dialect, call, status
        children = self._of_call.get(key)
        if children is None:  # prometheus_client takes as long to find them as to count
            children = self._of_call[key] = (
                self._requests.labels(dialect, call, str(status)),
                self._seconds.labels(dialect, call),
            )
        children[0].inc()
        children[1].observe(seconds)

    def count_messages(self, dialect: str, call: str, queue: str, count: int) -> None:
        """Count messages; queues beyond the first _MAX_QUEUES share a label."""
        if queue not in self._queues:
            if len(self._queues) < _MAX_QUEUES:
                self._queues.add(queue)
            else:
                queue = _OTHER
        self._messages.labels(dialect, call, queue).inc(count)
