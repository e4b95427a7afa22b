"""Deletes all messages of a queue: writes end markers for those in flight, then deletes the records."""

from __future__ import annotations

from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.context import AdminContext
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_names import check_new_queue_name, topics_of

_FLUSH_TIMEOUT_S = 10.0
"""purge() raises Unavailable when Kafka has not confirmed the end markers after this time."""


class QueuePurge:
    """Deletes every message of a queue; see Admin.purge()."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def purge(self, queue: str | QueueSettings) -> int:
        settings, known = self._context.find(queue)
        if known is None:
            self._check_is_queue(settings.name)
        counted = self._context.stats(queue)
        for lane in settings.lanes():
            self._purge_lane(lane, self._context.tracked(lane, known)[1])
        return counted.depth + counted.in_flight

    def _purge_lane(self, lane: QueueSettings, stored: dict[int, StoredOffset]) -> None:
        topics = self._context.topics.check(lane)
        log = self._context.topics.offsets(lane.name, range(topics.partitions))
        before = {partition: end for partition, (_low, end) in log.items()}
        with MarkerWriter(self._context.connection, lane) as writer:
            self._end_all(lane, stored, before, writer)
            self._context.topics.delete_records(lane.name, before)
            self._end_all(lane, stored, before, writer)  # taken since the first look

    def _check_is_queue(self, name: str) -> None:
        """Raise ConfigError if `name` is another topic of a queue: a markers topic or dead-letter topic."""
        registered = self._context.registry.every_queue()[0] if self._context.has_registry else []
        for one in registered:
            if name in topics_of(one):
                raise ConfigError(
                    f"{name!r} is the {topics_of(one)[name]} of queue {one.name!r}, not a queue"
                )
        check_new_queue_name(name)

    def _end_all(
        self,
        settings: QueueSettings,
        stored: dict[int, StoredOffset],
        before: dict[int, int],
        writer: MarkerWriter,
    ) -> None:
        """Write an end marker for each message in flight below the offset of its partition in `before`.

        Raises Unavailable if Kafka does not confirm these markers in time.
        """
        context = self._context
        open_entries = stats.open_entries(context.connection, settings, stored, context.topics)
        for partition, state in open_entries.items():
            below = before.get(partition, 0)
            writer.end(partition, [entry.offset for entry in state if offset_of(entry.offset) < below])
        if writer.flush(_FLUSH_TIMEOUT_S):
            raise Unavailable(f"markers topic {settings.markers_topic}: end markers are not confirmed")
