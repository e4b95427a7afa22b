"""Changes a queue while it is in use: its limits, its retention, its partitions, its lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import build
from kmqpy.kafka.admin.checks.marker_format import check_before_ranges
from kmqpy.kafka.admin.context import AdminContext, queue_not_found
from kmqpy.kafka.admin.lane_removal import with_draining
from kmqpy.kafka.retention import ample_retention_ms, check_retention
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_names import check_topics, topics_of
from kmqpy.kafka.topics import TopicInfo
from kmqpy.queue.storage import refuse_unalterable
from kmqpy.queue_policy import POLICY

ALTERABLE = (*POLICY, "markers", "late_acks", "retry_lane", "priorities", "lane_share")
"""The settings of a queue that can be changed while it exists."""

_LIKE_THE_QUEUE = ("retention.ms", "max.message.bytes", "min.insync.replicas")
_LIKE_THE_QUEUE_IF_SET = ("flush.messages", "flush.ms")
"""New lanes get what the queue topic has; the last two, which not everybody may set, if it has its own."""


class QueueAlteration:
    """Changes the topics of a registered queue, then its entry in the registry.

    Adds partitions to the markers topic before the queue topic (rule R19 of docs/rules.md).
    """

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def alter(
        self, name: str, partitions: int | None, retention: Duration | None, changes: Mapping[str, Any]
    ) -> QueueSettings:
        refuse_unalterable(changes, ALTERABLE)
        while (settings := self._altered(name, partitions, retention, changes)) is None:
            pass
        return self._context.mirror_settings(settings)

    def _altered(
        self, name: str, partitions: int | None, retention: Duration | None, changes: Mapping[str, Any]
    ) -> QueueSettings | None:
        """Change topics and registry; returns the settings, or None if others have changed them meanwhile."""
        registered = self._context.registry.get(name)
        before = registered.settings
        settings = with_draining(before, build(QueueSettings, dataclasses.asdict(before), changes))
        if settings.writes_ranges and not before.writes_ranges:
            check_before_ranges(settings, self._context.topics.members())
        existing = self._context.topics.describe([name]).get(name)
        if existing is None:
            raise queue_not_found(name)
        counts = [existing.partitions, registered.partitions]
        self._check_retention(settings, retention)
        if partitions is not None:
            self._context.topics.grow(before, partitions)
            counts.append(partitions)  # a broker may still report the former number
        if retention is not None:
            retention_ms = str(duration_ms(retention, "retention"))
            for topic in self._context.topics.describe(list(topics_of(settings))):
                self._context.topics.configure(topic, {"retention.ms": retention_ms})
        adds_lanes = bool(topics_of(settings).keys() - topics_of(before).keys())
        if adds_lanes:
            self._add_lanes(settings, existing, max(counts), before)
        if not self._context.registry.register(settings, max(counts), before=before):
            return None
        if adds_lanes:  # whoever was removing such a lane has perhaps deleted its topics meanwhile
            self._add_lanes(settings, existing, max(counts), before)
        return settings

    def _add_lanes(
        self, settings: QueueSettings, existing: TopicInfo, partitions: int, before: QueueSettings
    ) -> None:
        """Create the topics of lanes that are missing, like the queue topic."""
        topics = self._context.topics
        check_topics(settings, self._context.registry.every_queue()[0])
        wanted = topics.describe([settings.name], with_config=True)[settings.name].config
        own = topics.own_config(settings.name)
        of_lanes = [name for name, role in topics_of(settings).items() if "lane" in role]
        # Also what was made by an alter() that failed then.
        new = set(of_lanes).difference(topics.describe(of_lanes).keys() & topics_of(before).keys())
        topics.create(settings, existing.partitions, existing.replication, ample_retention_ms(settings))
        made = topics.describe(list(new), with_config=True)
        like_it = {key: wanted[key] for key in _LIKE_THE_QUEUE if key in wanted}
        like_it |= {key: own[key] for key in _LIKE_THE_QUEUE_IF_SET if key in own}
        for name in new:
            there = made[name].config if name in made else {}  # a broker may not show it yet
            if changed := dict(like_it.items() - there.items()):
                topics.configure(name, changed)
        topics.grow(settings, partitions)

    def follow_topic(self, name: str) -> None:
        registered = self._context.registry.get(name)
        settings = registered.settings
        wanted = self._context.topics.describe([name]).get(name)
        if wanted is None:
            raise queue_not_found(name)
        if registered.deleting:
            return
        try:
            self._context.topics.grow(settings, wanted.partitions)
        finally:
            markers = self._context.topics.describe([settings.markers_topic]).get(settings.markers_topic)
            count = min(wanted.partitions, markers.partitions if markers is not None else 0)
            if count > registered.partitions:
                while not self._context.registry.register(settings, count, before=settings):
                    settings = self._context.registry.get(name).settings

    def _check_retention(self, settings: QueueSettings, retention: Duration | None) -> None:
        """Raise ConfigError unless the new retention outlives every lease and delay of `settings`.

        Without a new one, check the retention that the queue topics and the markers topics have.
        """
        if retention is not None:
            check_retention(settings, duration_ms(retention, "retention"))
        else:
            names = [name for lane in settings.lanes() for name in (lane.name, lane.markers_topic)]
            topics = self._context.topics.describe(names, with_config=True).values()
            kept = [int(topic.config.get("retention.ms", "-1")) for topic in topics]
            limits = [ms for ms in kept if ms != -1]
            if limits:
                check_retention(settings, min(limits))
