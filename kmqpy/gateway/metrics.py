"""Prometheus metrics of a gateway, in a registry of their own; docs/metrics.md shows their help texts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)
_MAX_QUEUES = 200
"""Queues with labels of their own; those that come later share the label `(other)`."""
_OTHER = "(other)"
DEFAULT = "(default)"
"""Stands for the storage that has no name."""


class GatewayMetrics:
    """The metrics of one gateway. The gauges but `connections` are set when somebody asks for them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kmq_gateway_requests",
            "Requests that were answered; status 499: the client went away before.",
            ["dialect", "call", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kmq_gateway_request_seconds",
            "Seconds from the head of a request until its answer was written, to slow clients, too.",
            ["dialect", "call"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._messages = Counter(
            "kmq_gateway_messages",
            "Messages, or their ids, in calls that succeeded; queues after the first 200 are (other).",
            ["dialect", "call", "queue"],
            registry=self.registry,
        )
        self.refused = self._counter(
            "kmq_gateway_refused",
            "Requests or connections that a limit refused.",
            "why",
            ("requests", "memory", "key", "connections", "head", "slow"),
        )
        self.moves = self._counter(
            "kmq_gateway_moves",
            "Moves run by this gateway: complete, error, or postponed since a storage was away.",
            "outcome",
            ("complete", "error", "postponed"),
        )
        self.asked = self._counter(
            "kmq_gateway_asked",
            "Requests to other gateways on Kafka: they had messages, nothing, or were silent.",
            "outcome",
            ("messages", "nothing", "silent"),
        )
        self.running = Gauge(
            "kmq_gateway_running_requests", "Requests that are not answered yet.", registry=self.registry
        )
        self.held = Gauge(
            "kmq_gateway_held_bytes",
            "Bytes of bodies of requests and answers in memory.",
            registry=self.registry,
        )
        self.open_queues = Gauge(
            "kmq_gateway_open_queues",
            "Queues that are open; those not used for longest are closed above 2,000.",
            registry=self.registry,
        )
        self.connections = Gauge(
            "kmq_gateway_connections",
            "Open connections, to the port of clients and to that of operators.",
            registry=self.registry,
        )
        self.late = Gauge(
            "kmq_gateway_late_messages",
            "Messages (Kafka) that came after their poll's answer: kept for the next poll for 3 s at most, "
            "then given back.",
            registry=self.registry,
        )
        self.storage_up = Gauge(
            "kmq_gateway_storage_up",
            "1: the storage answers clients, and a check every 2 s, in time (on Kafka clients only).",
            ["storage"],
            registry=self.registry,
        )
        self.registered = Gauge(
            "kmq_gateway_registered",
            "1: it stands in ZooKeeper, for EmoDB's clients (discovery) or other gateways on Kafka "
            "(gateways); 0: not, as while it drains. Missing where it need not.",
            ["where"],
            registry=self.registry,
        )
        self.others = Gauge(
            "kmq_gateway_others", "Other gateways on Kafka that this one knows.", registry=self.registry
        )
        self.tracker_running = Gauge(
            "kmq_gateway_tracker_running",
            "1: the tracker that the gateway has started runs; its own metrics are not served.",
            ["storage"],
            registry=self.registry,
        )
        self.tracker_deaths = Counter(
            "kmq_gateway_tracker_deaths",
            "Times that this tracker has ended by itself.",
            ["storage"],
            registry=self.registry,
        )
        self._deaths: dict[str, int] = {}
        self._queues: set[str] = set()
        self._of_call: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._of_queue: dict[tuple[str, str, str], Counter] = {}

    def _counter(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """A counter that begins at 0 for each value of its label, so that the first event is an increase."""
        counter = Counter(name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

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

    def show_tracker(self, storage: str, deaths: int, *, running: bool) -> None:
        """Show the state of the gateway's tracker, which has ended so often since the gateway started."""
        self.tracker_running.labels(storage).set(running)
        self.tracker_deaths.labels(storage).inc(deaths - self._deaths.get(storage, 0))
        self._deaths[storage] = deaths

    def count_messages(self, dialect: str, call: str, queue: str, count: int) -> None:
        """Count messages; queues beyond the first _MAX_QUEUES share a label."""
        if queue not in self._queues:
            if len(self._queues) < _MAX_QUEUES:
                self._queues.add(queue)
            else:
                queue = _OTHER
        key = dialect, call, queue
        counter = self._of_queue.get(key)
        if counter is None:
            counter = self._of_queue[key] = self._messages.labels(*key)
        counter.inc(count)
