"""Reads the markers of owned partitions and applies them to the in-flight states."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.kafka.markers.replay import Applied, replay_markers
from tracker.context import TrackerContext, TrackerPart
from tracker.cut_keeper import CutKeeper
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.reading.markers_consumer import MarkersConsumer

_log = logging.getLogger(__name__)

_MAX_RANGE_MESSAGES = 50_000
"""A range marker is one record that is the marker of many messages. Once the range markers of one apply()
have named more messages than this, apply() stops, so that it returns soon. The later markers stay unread."""
_TAKEOVER_AFTER_ERROR_S = 1.0
"""A takeover begins this long after Kafka has reported an error of a markers partition."""


class MarkerReader(TrackerPart):
    """Applies markers in the order of their log. For the main loop."""

    def __init__(self, context: TrackerContext, markers: MarkersConsumer, cuts: CutKeeper) -> None:
        super().__init__(context)
        self._markers = markers
        self._cuts = cuts

    def read(self, wait_s: float) -> None:
        """Fetch and apply markers that have arrived; waits up to `wait_s` for the first.

        After an error of a partition, the tracker takes this partition over again; after an error of the
        consumer, all partitions.
        """
        try:
            fetched = self._markers.fetch(wait_s)
        except Exception:
            self._read_all_again()
            raise
        now = self._clock.monotonic()
        for partition, error in fetched.errors.items():
            with self._supervisor.surviving(partition):
                self._reading_failed(partition, error)
        for partition, records in fetched.records.items():
            if partition.reading:
                with self._supervisor.surviving(partition):
                    if self._is_of_known_log(partition, records[-1]):
                        self.apply(partition, records, now)

    def apply(self, partition: OwnedPartition, records: Sequence[Any], now: float) -> None:
        """Apply the partition's unread markers and then `records`, up to the first marker that must wait.

        A marker waits, and so do all after it, until Kafka has told whether its message exists (rule R22 of
        docs/rules.md). If markers wait already, `records` are only added to them.
        """
        had_unread = bool(partition.unread)
        if not had_unread:
            partition.ask_at = now
        partition.unread += records
        if had_unread and records:
            self._markers.limit_unread(partition)
            return
        state, now_before_ms = partition.state, partition.state.now_ms
        partition.clock.limit_timestamps(now)
        applied = replay_markers(
            state, partition.number, partition.unread, partition.queue_end, most=_MAX_RANGE_MESSAGES
        )
        done, partition.unread = partition.unread[: applied.records], partition.unread[applied.records :]
        self._markers.limit_unread(partition)
        self._report(partition, applied)
        if done and partition.read(done[-1].offset(), now_before_ms, now):
            # By then every message whose start marker was never read is acknowledged, or its lease has ended.
            partition.missed_until_ms = state.now_ms + partition.queue.longest_ms
            about = self._problems.about(partition.key)
            _log.info("partition active", extra={**about, "in_flight": len(state)})

    def _report(self, partition: OwnedPartition, applied: Applied) -> None:
        """Count the markers that were applied, and log a warning about those that were not."""
        name = partition.key[0]
        self._metrics.markers.labels(name).inc(applied.records)
        if partition.phase is TrackingPhase.ACTIVE:
            self._metrics.late_acks.labels(name).inc(applied.late_acks)
        for cut_away in applied.cut_away:
            self._cuts.cut_away(partition, cut_away)
        if applied.newer:
            self._metrics.unsupported_markers.labels(name).inc(len(applied.newer))
            self._problems.warn("newer", partition.key, "marker of a newer kmqpy", **_first(applied.newer))
        if applied.skipped:
            self._metrics.undecodable_markers.labels(name).inc(len(applied.skipped))
            self._problems.warn(
                "undecodable", partition.key, "undecodable marker skipped", **_first(applied.skipped)
            )
        for at, error in applied.failed:
            partition.problems.marker_failed(at, error)
            self._metrics.failed_markers.labels(name).inc()
            self._problems.survived("applying a marker", error, partition.key)

    def _is_of_known_log(self, partition: OwnedPartition, record: Any) -> bool:
        """Return False if Kafka has elected a leader since: markers that were read may have been cut away.

        Then the partition is taken over again, which finds out (rule R40).
        """
        epoch = record.leader_epoch()
        if epoch is None or epoch <= partition.markers_epoch:
            return True
        if partition.markers_epoch < 0:
            partition.markers_epoch = epoch
            return True
        _log.info("the markers have a new leader; reading again", extra=self._problems.about(partition.key))
        self._markers.stop(partition)
        partition.take_over_again(self._clock.monotonic())
        return False

    def _read_all_again(self) -> None:
        """Take all partitions that are read over again later, because fetched markers may be lost."""
        for partition in self._partitions.values():
            if partition.reading:
                partition.problems.takeover = "markers can't be read"
                with suppress(Exception):
                    self._markers.stop(partition)
                partition.back_off(self._clock.monotonic())

    def _reading_failed(self, partition: OwnedPartition, error: KafkaError) -> None:
        partition.problems.takeover = f"markers can't be read: {error.str()}"
        self._problems.warn("read", partition.key, "markers can't be read", error=error.str())
        # Markers may be deleted, or the topic recreated: the takeover finds out where to begin to read.
        self._markers.stop(partition)
        partition.take_over_again(self._clock.monotonic() + _TAKEOVER_AFTER_ERROR_S)


def _first(found: Sequence[tuple[int, Exception]]) -> dict[str, Any]:
    """The extra fields of a log record: the first of these markers offsets, and its error."""
    at, error = found[0]
    return {"error": str(error), "at": at}
