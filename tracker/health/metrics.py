"""Prometheus metrics of a tracker; docs/metrics.md shows their help texts. Each has the label `queue`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENESS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class TrackerMetrics:
    """The metrics of one tracker, in a CollectorRegistry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: list[Counter] = []
        self._queues: set[str] = set()
        self.lanes: Mapping[str, Collection[str]] = {}
        """By queue, where it has several: the names of its lanes, each of which has metrics of its own."""

        def counter(name: str, text: str) -> Counter:
            self._counters.append(Counter(name, text, ["queue"], registry=self.registry))
            return self._counters[-1]

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ["queue", *labels], registry=self.registry)

        self.markers = counter("kmq_markers_read", "Markers read, takeovers included.")
        self.undecodable_markers = counter(
            "kmq_undecodable_markers", "Markers skipped: somebody else writes to the markers topic."
        )
        self.unsupported_markers = counter(
            "kmq_unsupported_markers",
            "Markers of a newer kmqpy; redelivery of the partition waits for an upgrade.",
        )
        self.undecodable_counts = counter(
            "kmq_undecodable_counts", "Messages with an unreadable count of redeliveries: 0 was assumed."
        )
        self.redelivered = counter("kmq_redelivered", "Messages appended to the queue again.")
        self.dead_lettered = counter("kmq_dead_lettered", "Messages appended to the dead-letter topic.")
        self.lane_fallbacks = counter(
            "kmq_lane_fallbacks",
            "Copies that stayed in their own lane: the retry lane is missing or refuses them.",
        )
        self.late_acks = counter(
            "kmq_late_acks",
            "Acknowledgements of messages that were redelivered already: leases are too short.",
        )
        self.taken_late = counter(
            "kmq_taken_late",
            "Messages taken when they were finished already, by a paused consumer; not redelivered.",
        )
        self.dead_letters_spared = counter(
            "kmq_dead_letters_spared",
            "Redelivered messages that became no dead letters: acknowledged late (late_acks).",
        )
        self.torn_transactions = counter(
            "kmq_torn_transactions",
            "Transactions that a late request had ended too early; the tracker has mended them.",
        )
        self.lost_to_retention = counter(
            "kmq_lost_to_retention", "Messages deleted by Kafka before they were finished."
        )
        self.log_cuts = counter(
            "kmq_log_cuts",
            "Cuts of the queue's logs and those of markers; a takeover may count one again.",
        )
        self.lost_to_log_cuts = counter(
            "kmq_lost_to_log_cuts", "Messages in flight when the log was cut back behind them: they are lost."
        )
        self.markers_lost = counter(
            "kmq_markers_lost_to_retention",
            "Takeovers that began above the stored offset: Kafka had deleted the markers between.",
        )
        self.failures = counter(
            "kmq_redelivery_failures", "Redeliveries that failed and are tried again; /readyz says why."
        )
        self.failed_markers = counter(
            "kmq_failed_markers", "Markers not applied, by a bug of the tracker; please report the log."
        )
        self.clock_leads = counter(
            "kmq_clock_leads",
            "How often times of markers, or a stored time, were ahead of the broker's clock; not believed.",
        )
        self.internal_errors = counter(
            "kmq_internal_errors", "Bugs of the tracker, after which it went on; please report the log."
        )
        self.ticks = counter(
            "kmq_ticks",
            "Markers of no message, written to learn the broker's time; none in idle queues.",
        )
        self.takeovers = counter("kmq_takeovers", "Partitions taken over.")
        self.in_flight = gauge("kmq_in_flight", "Messages taken and not finished.", "partition")
        oldest = "Seconds since the oldest message in flight was taken; successors read markers from there."
        self.oldest = gauge("kmq_oldest_in_flight_seconds", oldest, "partition")
        counts = {
            "depth": "Messages waiting, delayed ones too. Above 100 in a partition an upper bound; "
            "where only JVM clients take, everything in the topic.",
            "overdue": "Messages in flight or delayed that are past their time; for long: redelivery fails.",
            "oldest_waiting_seconds": "Seconds that the oldest message has waited; 0: none waits.",
            "dead_letters": "Dead letters neither redriven nor purged; the partition is their topic's.",
        }
        self._count_gauges = {name: gauge(f"kmq_{name}", text, "partition") for name, text in counts.items()}
        hanging = (
            "Seconds for which a transaction that nobody ends has held back readers of this topic; "
            "else missing."
        )
        self._hanging = gauge("kmq_hanging_transaction_seconds", hanging, "topic", "partition")
        self.owned = gauge("kmq_owned_partitions", "Partitions owned by this tracker.")
        self.lateness = Histogram(
            "kmq_redelivery_lateness_seconds",
            "Seconds from the end of a lease, or a due time, to the commit of the copy.",
            ["queue"],
            buckets=_LATENESS_BUCKETS,
            registry=self.registry,
        )

    def begin(self, queue: str) -> None:
        """Create the counters of a queue at 0, so that Prometheus sees the first event as an increase."""
        self._queues.add(queue)
        for counter in self._counters:
            counter.labels(queue)

    def show(self, queue: str, partition: int, **counts: float | None) -> None:
        """Set gauges among depth, overdue, oldest_waiting_seconds and dead_letters; None changes nothing."""
        for name, value in counts.items():
            if value is not None:
                self._count_gauges[name].labels(queue, str(partition)).set(value)

    def show_hanging(self, queue: str, partition: int, topic: str, lasts_s: float | None) -> None:
        """Set for how long a transaction in this topic of the queue has been hanging; None: there is none."""
        if lasts_s is None:
            self._hanging.remove_by_labels({"queue": queue, "topic": topic, "partition": str(partition)})
        else:
            self._hanging.labels(queue, topic, str(partition)).set(lasts_s)

    def hide(self, queue: str, partition: int) -> None:
        """Remove the gauges that both `show…` have set: this tracker has the partition no longer."""
        for gauge in (*self._count_gauges.values(), self._hanging):
            gauge.remove_by_labels({"queue": queue, "partition": str(partition)})

    def backlog(self, queue: str) -> int | None:
        """How many messages wait, or are past their time, in this tracker's partitions of a queue's lanes.

        Messages with a running lease do not count. Returns None until each owned partition has been counted.
        Raises KeyError for a queue that the tracker does not know.
        """
        found = 0
        for lane in self.lanes.get(queue, (queue,)):
            owned = self.registry.get_sample_value("kmq_owned_partitions", {"queue": lane})
            if owned is None:
                raise KeyError(queue)
            depth, overdue = self._values("depth", lane), self._values("overdue", lane)
            if len(depth) < owned:
                return None
            found += int(sum(depth) + sum(overdue))
        return found

    def keep_only(self, queues: Collection[str]) -> None:
        """Remove all metrics of queues that are not among these: such queues were removed."""
        for queue in self._queues.difference(queues):
            gauges = (self.in_flight, self.oldest, self.owned, self._hanging, *self._count_gauges.values())
            for metric in (*self._counters, *gauges, self.lateness):
                metric.remove_by_labels({"queue": queue})
        self._queues.intersection_update(queues)

    def _values(self, name: str, queue: str) -> list[float]:
        samples = (sample for metric in self._count_gauges[name].collect() for sample in metric.samples)
        return [sample.value for sample in samples if sample.labels["queue"] == queue]
