"""Writes the settings of queues to the topic kmq.queues, from which clients without ZooKeeper read them."""

from __future__ import annotations

import logging
from functools import partial

from kmqpy.errors import KmqError, TopicError
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.topics import Topics
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart

_log = logging.getLogger(__name__)

_COMPARE_EVERY_S = 1.0
"""MirrorKeeper compares the settings in the registry with those that it wrote last once in this time."""
_REWRITE_EVERY_S = 300.0
"""MirrorKeeper writes unchanged settings again after this time, in case somebody has removed them."""
_RETRY_S = 5.0
"""MirrorKeeper tries the next write this long after a failed one."""

_Mirrored = dict[str, tuple[QueueSettings, tuple[str, str] | None]]
"""By queue: its settings, and the ids of its queue topic and markers topic; None where these are unknown."""


class MirrorKeeper(TrackerPart):
    """Writes the settings of each queue whose partition 0 this tracker owns.

    Adds and updates records, and never removes one (rule R25 of docs/rules.md). A record also names the ids
    of the queue's two topics as soon as this tracker reads the partition.
    """

    def __init__(self, context: TrackerContext, topics: Topics) -> None:
        super().__init__(context)
        self._mirror = SettingsMirror(context.connection, topics)
        self._written: _Mirrored = {}
        self._writing = False
        self._next_comparison_at = 0.0
        self._rewrite_at = 0.0
        self._last_error = ""

    def mirror(self, now: float) -> None:
        """Write the settings in a background job if they have changed, or after `_REWRITE_EVERY_S`."""
        if now < self._next_comparison_at or self._writing:
            return
        self._next_comparison_at = now + _COMPARE_EVERY_S
        wanted = self._wanted()
        if not wanted or (now < self._rewrite_at and wanted.items() <= self._written.items()):
            return
        self._writing = True
        records = [
            settings if ids is None else settings.with_topic_ids(_by_name(settings, ids))
            for settings, ids in wanted.values()
        ]
        job = partial(self._mirror.write, records)
        self._jobs.run(Pool.REDELIVERY, job, partial(self._finished, wanted, now))

    def _wanted(self) -> _Mirrored:
        queues = self._leadership.snapshot().queues
        return {
            name: (queues[name].settings, part.topic_ids if part.reading else None)
            for (name, number), part in self._partitions.items()
            if number == 0 and name in queues and not queues[name].deleting
            if queues[name].settings.lane_of is None  # the record of the queue tells of its lanes
            and (part.reading or part.problems.takeover is not None)
        }

    def _finished(self, wanted: _Mirrored, asked_at: float, error: Exception | None) -> None:
        self._writing = False
        if isinstance(error, TopicError):
            self._problems.show("topics", str(error))
        else:
            self._problems.clear("topics")
        if error is None:
            self._written, self._last_error = wanted, ""
            self._rewrite_at = asked_at + _REWRITE_EVERY_S
            return
        self._next_comparison_at = self._clock.monotonic() + _RETRY_S
        if not isinstance(error, KmqError):
            raise error
        if self._last_error != str(error):
            self._last_error = str(error)
            _log.warning("clients can't be told of queues", extra={"error": self._last_error})


def _by_name(queue: QueueSettings, topic_ids: tuple[str, str]) -> dict[str, str]:
    return dict(zip((queue.name, queue.markers_topic), topic_ids, strict=True))
