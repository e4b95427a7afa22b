"""Prometheus metrics of a tracker; label `queue`, and `partition` where it says more."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENESS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class TrackerMetrics:
    """The metrics of one tracker, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: list[Counter] = []
        self._queues: set[str] = set()

        def counter(name: str, text: str) -> Counter:
            self._counters.append(Counter(name, text, ["queue"], registry=self.registry))
            return self._counters[-1]

        self.markers = counter("kmq_markers_read", "Markers read")
        self.undecodable_markers = counter("kmq_undecodable_markers", "Markers skipped: not decodable")
        self.unsupported_markers = counter("kmq_unsupported_markers", "Markers of a newer kmqpy")
        self.undecodable_counts = counter("kmq_undecodable_counts", "Redelivery counts read as 0")
        self.redelivered = counter("kmq_redelivered", "Messages redelivered")
        self.dead_lettered = counter("kmq_dead_lettered", "Messages moved to the dead-letter topic")
        self.late_acks = counter("kmq_late_acks", "Acks of messages that were not in flight any more")
        self.lost_to_retention = counter("kmq_lost_to_retention", "Messages gone before they were finished")
        self.markers_lost = counter("kmq_markers_lost_to_retention", "Takeovers above the stored safe offset")
        self.failures = counter("kmq_redelivery_failures", "Redelivery attempts that failed and are retried")
        self.ticks = counter("kmq_ticks", "Ticks written")
        self.takeovers = counter("kmq_takeovers", "Partitions taken over")
        self.in_flight = Gauge(
            "kmq_in_flight", "Messages in flight", ["queue", "partition"], registry=self.registry
        )
        self.oldest = Gauge(
            "kmq_oldest_in_flight_seconds",
            "Age of the oldest message in flight",
            ["queue", "partition"],
            registry=self.registry,
        )
        self.owned = Gauge("kmq_owned_partitions", "Partitions owned", ["queue"], registry=self.registry)
        self.lateness = Histogram(
            "kmq_redelivery_lateness_seconds",
            "From due to committed",
            ["queue"],
            buckets=_LATENESS_BUCKETS,
            registry=self.registry,
        )

    def begin(self, queue: str) -> None:
        """Let the counters of a queue begin at 0, so that the first event is an increase."""
        self._queues.add(queue)
        for counter in self._counters:
            counter.labels(queue)

    def keep_only(self, queues: Collection[str]) -> None:
        """Show nothing more of queues that are not among these: they were removed."""
        for queue in self._queues.difference(queues):
            for metric in (*self._counters, self.in_flight, self.oldest, self.owned, self.lateness):
                metric.remove_by_labels({"queue": queue})
        self._queues.intersection_update(queues)
