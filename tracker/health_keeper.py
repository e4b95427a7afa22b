"""Updates the gauges of /metrics, and drops problems from /readyz, for the partitions of a tracker."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.topic_identity import TopicIds
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.health.queue_counts import Counted, QueueCounts, ToCount
from tracker.leadership.assignment import Partition
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase

_log = logging.getLogger(__name__)

_MAX_PARTITIONS_PER_COUNT = 500
"""One background job counts at most this many partitions. The next job begins with the other partitions."""


class HealthKeeper(TrackerPart):
    """Shows messages in flight from the main loop's state; counts waiting messages in a background job.

    held_back  returns about how many records of a topic's partition wait for a hanging transaction to end
    stopping   returns True once the tracker is to stop; a count that runs then ends early
    """

    def __init__(
        self, context: TrackerContext, held_back: Callable[[TopicPlace], int], stopping: Callable[[], bool]
    ) -> None:
        super().__init__(context)
        self._held_back = held_back
        self._stopping = stopping
        self._counts = QueueCounts(context.connection, context.clock)
        self._counted_at: dict[Partition, float] = {}
        self._counting = False
        self._next_refresh = 0.0
        self._next_count = 0.0

    def refresh(self, now: float) -> None:
        """Show owned partitions and messages in flight, and drop problems that are over.

        Does so once in TrackerSettings.offset_interval_ms.
        """
        if now < self._next_refresh:
            return
        self._next_refresh = now + self._settings.offset_interval_ms / 1000
        view = self._leadership.snapshot()
        owned = Counter(queue for queue, _ in self._partitions)
        for name in view.queues:
            self._metrics.owned.labels(name).set(owned[name])
        queues = {name: one.settings for name, one in view.queues.items()}
        self._metrics.lanes = {name: one.lane_names for name, one in queues.items() if one.has_lanes}
        if view.connected:
            self._metrics.keep_only(view.queues)
        for part in self._partitions.values():
            with self._supervisor.surviving(part):
                self._show_in_flight(part, now)
                part.forget_ended(now)

    def count(self, now: float) -> None:
        """Count waiting messages and dead letters for /metrics in a background job, unless one runs.

        Counts nothing where the tracker serves no HTTP port.
        """
        if now < self._next_count or self._counting or self._settings.http_port < 0:
            return
        active = [key for key, part in self._partitions.items() if part.phase is TrackingPhase.ACTIVE]
        self._counted_at = {key: self._counted_at.get(key, 0.0) for key in active}
        # Partitions that were counted longest ago come first.
        chosen = sorted(active, key=self._counted_at.__getitem__)[:_MAX_PARTITIONS_PER_COUNT]
        if not chosen:
            return
        self._counted_at.update(dict.fromkeys(chosen, now))
        self._counting = True
        self._next_count = now + self._settings.count_interval_ms / 1000
        delayed: dict[Partition, int] = {}
        for key in chosen:  # this needs no answer from Kafka
            delayed[key], overdue = self._partitions[key].delayed_and_overdue(now)
            self._metrics.show(*key, overdue=overdue)
        parts = {key: self._partitions[key] for key in chosen}
        wanted = {
            key: ToCount(part.queue, TopicIds(*part.topic_ids), part.state.cuts)
            for key, part in parts.items()
        }
        job = partial(self._counts.count, wanted, active, self._stopping)
        self._jobs.run(Pool.COUNTING, job, partial(self._counted, delayed))

    def close(self) -> None:
        """Release the connections."""
        self._counts.close()

    def _show_in_flight(self, part: OwnedPartition, now: float) -> None:
        labels = (part.key[0], str(part.number))
        oldest = part.state.oldest()
        self._metrics.in_flight.labels(*labels).set(len(part.state))
        age_s = 0.0 if oldest is None else part.clock.seconds_since(oldest.since_ms, now)
        self._metrics.oldest.labels(*labels).set(age_s)

    def _counted(self, delayed: Mapping[Partition, int], found: dict[Partition, Counted] | Exception) -> None:
        self._counting = False
        if isinstance(found, Exception):
            if self._problems.is_news("count"):
                _log.warning("waiting messages are not counted", extra={"error": str(found)})
            return
        now = self._clock.monotonic()
        for key, counts in found.items():
            part = self._partitions.get(key)
            if part is not None and part.phase is TrackingPhase.ACTIVE:
                self._show_counts(part, counts, delayed[key], now)

    def _show_counts(self, part: OwnedPartition, counts: Counted, delayed: int, now: float) -> None:
        self._metrics.show(*part.key, dead_letters=counts.dead_letters)
        if counts.more is not None:
            waiting = [enqueued_ms for offset, enqueued_ms in counts.waiting if not part.has_taken(offset)]
            age_s = (part.clock.now_ms(now) - min(waiting)) / 1000 if waiting else 0.0
            held_back = 0 if counts.more else self._held_back(part.key)  # `more` counts them, too
            depth = len(waiting) + counts.more + held_back + delayed
            self._metrics.show(*part.key, depth=depth, oldest_waiting_seconds=max(0.0, age_s))
