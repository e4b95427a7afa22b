"""Reads the markers of owned partitions and applies them to the in-flight states."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.kafka.markers.replay import Applied, replay_markers
from tracker.context import TrackerContext
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.reading.markers_consumer import MarkersConsumer

_log = logging.getLogger(__name__)

_MAX_RANGE_MESSAGES = 50_000
"""Once the range markers of one apply() have named more messages (within half a second), the rest waits."""
_TAKEOVER_AFTER_ERROR_S = 1.0
"""A takeover begins this long after Kafka has reported an error of a markers partition."""


class MarkerReader:
    """Applies markers in the order of their log. For the main loop."""

    def __init__(self, context: TrackerContext, markers: MarkersConsumer) -> None:
        self._markers = markers
        self._clock = context.clock
        self._metrics = context.metrics
        self._parts = context.parts
        self._problems = context.problems
        self._supervisor = context.supervisor

    def read(self, wait_s: float) -> None:
        """Fetch and apply markers that have arrived; waits up to `wait_s` for the first.

        After an error of a partition, or of the consumer, the partitions concerned are taken over again.
        """
        try:
            fetched = self._markers.fetch(wait_s)
        except Exception:
            self._read_all_again()
            raise
        now = self._clock.monotonic()
        for part, error in fetched.errors.items():
            with self._supervisor.surviving(part):
                self._reading_failed(part, error)
        for part, records in fetched.records.items():
            if part.reading:
                with self._supervisor.surviving(part):
                    self.apply(part, records, now)

    def apply(self, part: OwnedPartition, records: Sequence[Any], now: float) -> None:
        """Apply the partition's unread markers and then `records`, up to the first marker that must wait.

        A marker waits, and so do all after it, until Kafka has told whether its message exists (rule R22 of
        docs/rules.md). If markers wait already, `records` are only added to them.
        """
        had_unread = bool(part.unread)
        if not had_unread:
            part.ask_at = now
        part.unread += records
        if had_unread and records:
            self._markers.limit_unread(part)
            return
        state, now_before_ms = part.state, part.state.now_ms
        part.clock.limit_timestamps(now)
        applied = replay_markers(state, part.number, part.unread, part.queue_end, most=_MAX_RANGE_MESSAGES)
        done, part.unread = part.unread[: applied.records], part.unread[applied.records :]
        self._markers.limit_unread(part)
        part.redeliverer.ranges = part.redeliverer.ranges or applied.in_ranges > 0
        self._report(part, applied)
        if done and part.read(done[-1].offset(), now_before_ms, now):
            # By then every message whose start marker was never read is acknowledged, or its lease has ended.
            part.missed_until_ms = state.now_ms + part.queue.longest_ms
            about = self._problems.about(part.key)
            _log.info("partition active", extra={**about, "in_flight": len(state)})

    def _report(self, part: OwnedPartition, applied: Applied) -> None:
        """Count the markers that were applied, and log a warning about those that were not."""
        name = part.key[0]
        self._metrics.markers.labels(name).inc(applied.records)
        if part.phase is TrackingPhase.ACTIVE:
            self._metrics.late_acks.labels(name).inc(applied.late_acks)
        if applied.newer:
            self._metrics.unsupported_markers.labels(name).inc(len(applied.newer))
            self._problems.warn("newer", part.key, "marker of a newer kmqpy", **_first(applied.newer))
        if applied.skipped:
            self._metrics.undecodable_markers.labels(name).inc(len(applied.skipped))
            self._problems.warn(
                "undecodable", part.key, "undecodable marker skipped", **_first(applied.skipped)
            )
        for at, error in applied.failed:
            part.problems.marker_failed(at, error)
            self._metrics.failed_markers.labels(name).inc()
            self._problems.survived("applying a marker", error, part.key)

    def _read_all_again(self) -> None:
        """Have all partitions that are read taken over again, since fetched markers may be lost."""
        for part in self._parts.values():
            if part.reading:
                part.problems.takeover = "markers can't be read"
                with suppress(Exception):
                    self._markers.stop(part)
                part.back_off(self._clock.monotonic())

    def _reading_failed(self, part: OwnedPartition, error: KafkaError) -> None:
        part.problems.takeover = f"markers can't be read: {error.name()}"
        self._problems.warn("read", part.key, "markers can't be read", error=error.name())
        # Markers may be deleted, or the topic recreated: the takeover finds out where to begin to read.
        self._markers.stop(part)
        part.take_over_again(self._clock.monotonic() + _TAKEOVER_AFTER_ERROR_S)


def _first(found: Sequence[tuple[int, Exception]]) -> dict[str, Any]:
    """The extra fields of a log record: the first of these markers offsets, and its error."""
    at, error = found[0]
    return {"error": str(error), "at": at}
