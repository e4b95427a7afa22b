"""Creates a queue: those of its topics that are missing, then its entry in the registry.

If the queue topic was recreated but its markers topic was not, create() deletes the old markers topic.
Clients may have taken messages of the new queue topic meanwhile, and the markers of these messages are
deleted, too. So create() writes markers with which trackers redeliver these messages.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError, TopicError, Unavailable
from kmqpy.kafka.admin.checks.advice import set_option
from kmqpy.kafka.admin.checks.marker_format import check_before_ranges
from kmqpy.kafka.admin.context import AdminContext
from kmqpy.kafka.admin.lane_removal import option_of_removal
from kmqpy.kafka.admin.queue_alteration import ALTERABLE
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.retention import DEFAULT_RETENTION_MS, ample_retention_ms
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import find_stale_markers
from kmqpy.kafka.topic_names import check_new_queue_name, check_topics, markers_topics, topics_of
from kmqpy.kafka.topics import QueueTopics, TopicInfo
from kmqpy.queue_policy import RETRIES

_log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 10.0
"""create() raises Unavailable when Kafka has not confirmed the written markers after this time."""


class QueueCreation:
    """Creates a queue; see Admin.create_queue()."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def create(
        self,
        queue: str | QueueSettings,
        partitions: int | None,
        replication: int | None,
        retention: Duration | None,
    ) -> QueueTopics:
        settings = queue if isinstance(queue, QueueSettings) else QueueSettings(name=queue)
        settings.lanes()  # raises for a name that leaves no room for theirs
        # Asked first: while ZooKeeper does not answer, nothing is created.
        registered_queues, damaged_names = (
            self._context.registry.every_queue() if self._context.has_registry else ([], [])
        )
        former_settings = {one.name: one for one in registered_queues}.get(settings.name)
        # A damaged entry counts as absent: the new settings replace it.
        entry = None
        if former_settings is None:
            check_new_queue_name(settings.name)
        elif settings.name not in damaged_names:
            entry = self._context.registered(settings.name)
        if former_settings is not None and not isinstance(queue, QueueSettings):
            settings = former_settings
        if entry is not None and entry.deleting:
            raise TopicError(
                f"queue {settings.name!r} is being deleted; run: kmq queue delete {settings.name}"
            )
        if entry is not None and entry.settings != settings:
            changed = ", ".join(_differences(entry.settings, settings))
            raise ConfigError(
                f"queue {settings.name!r} exists with other settings ({changed}); "
                f"{_how_to_change(entry.settings, settings)}"
            )
        if former_settings is None or topics_of(former_settings) != topics_of(settings):
            check_topics(settings, registered_queues)
        retention_ms = (
            max(DEFAULT_RETENTION_MS, ample_retention_ms(settings))
            if retention is None
            else duration_ms(retention, "retention")
        )
        existing = self._context.topics.describe(list(topics_of(settings)))
        if entry is None and settings.writes_ranges and settings.markers_topic in existing:
            check_before_ranges(settings, self._context.topics.members())
        tracked = 1 if entry is None else entry.partitions
        if partitions is None:
            most = max([tracked, *(topic.partitions for topic in existing.values())])
            wanted = existing[settings.name].partitions if settings.name in existing else most
        else:
            wanted = partitions
        obsolete = self._obsolete_markers(settings, entry, registered_queues, existing)
        kept = self._delete_markers(obsolete)
        found = self._context.topics.create(settings, wanted, replication, retention_ms, anew=kept)
        for topic, old_ms in kept.items():
            if retention is None and (old_ms == -1 or old_ms > retention_ms):
                self._context.topics.configure(topic, {"retention.ms": str(old_ms)})
        if settings.markers_topic in obsolete and settings.name in existing:
            if partitions is None and found.partitions < tracked:
                found = self._context.topics.grow(
                    settings, tracked
                )  # a broker created the topic by itself, with its default number
            self._redeliver_taken_messages(settings, found)
        for lane in settings.lanes()[:-1]:
            if lane.markers_topic in obsolete and lane.name in existing:
                self._redeliver_taken_messages(lane, self._context.topics.check(lane))
        if self._context.has_registry:
            self._context.registry.register(settings, found.partitions)
            ids = {settings.name: found.ids.queue, settings.markers_topic: found.ids.markers}
            self._context.mirror(lambda mirror: mirror.write([settings.with_topic_ids(ids)], certain=True))
        return found

    def _obsolete_markers(
        self,
        settings: QueueSettings,
        entry: RegisteredQueue | None,
        registered_queues: Iterable[QueueSettings],
        existing: Mapping[str, TopicInfo],
    ) -> dict[str, TopicInfo]:
        """Return the queue's markers topics whose messages are gone, by name.

        Raises TopicError where another queue uses such a topic as well, and where nothing shows that the
        markers in it are of this queue: it is not registered, and no record tells of its earlier topic.
        """
        earlier = self._stale_markers(settings, entry, existing)
        is_registered = any(topics_of(one) == topics_of(settings) for one in registered_queues)
        used = {
            topic: one.name
            for one in registered_queues
            if one.name != settings.name
            for topic in topics_of(one)
        }
        found = {}
        for messages, markers in markers_topics(settings).items():
            if markers not in existing or (messages in existing and messages not in earlier):
                continue
            if messages not in existing and (markers in used or not self._has_records(existing[markers])):
                continue
            if markers in used:
                raise TopicError(
                    f"topic {markers!r} has markers of an earlier topic {messages!r}, but queue "
                    f"{used[markers]!r} uses it as well; kmq doctor says how to give each its own"
                )
            if not (is_registered or messages in earlier):
                raise TopicError(
                    f"topic {markers!r} holds records, but there is no topic {messages!r}: markers of an "
                    "earlier queue would count for the messages of the new one; delete that topic first"
                )
            found[markers] = existing[markers]
        return found

    def _has_records(self, topic: TopicInfo) -> bool:
        offsets = self._context.topics.offsets(topic.name, range(topic.partitions))
        return any(end > 0 for _low, end in offsets.values())

    def _stale_markers(
        self, settings: QueueSettings, entry: RegisteredQueue | None, topics: Mapping[str, TopicInfo]
    ) -> dict[str, str]:
        """Return topics that were recreated while their markers topic was not: topic -> its markers topic.

        The ids of the earlier topics are those in kmq.queues. For the queue topic, the ids that trackers have
        stored with their offsets overrule these.
        """
        now = {name: topic.topic_id for name, topic in topics.items()}
        found = find_stale_markers(settings, self._recorded_ids(settings.name) if now else {}, now)
        if entry is not None and {settings.name, settings.markers_topic} <= now.keys():
            ids = now[settings.name], now[settings.markers_topic]
            stored = self._context.registry.offsets(settings.name).values()
            if any(one.is_of_earlier_queue(*ids) for one in stored):
                found[settings.name] = settings.markers_topic
            elif any((one.queue_id, one.markers_id) == ids for one in stored):
                found.pop(settings.name, None)  # anybody can write a record in kmq.queues
        return found

    def _recorded_ids(self, name: str) -> Mapping[str, str]:
        """Return the topic ids in the queue's record in kmq.queues; empty if there is none."""
        records, error = self._context.records(name)
        if error is not None:
            _log.warning("whether topics of queue %s were recreated is not known: %s", name, error)
        return {} if records is None or name not in records.own else records.own[name].topic_ids

    def _delete_markers(self, topics: Mapping[str, TopicInfo]) -> dict[str, int]:
        """Delete these topics, except those recreated meanwhile. Returns their retention, in ms, by name."""
        if not topics:
            return {}
        found = self._context.topics.describe(list(topics), with_config=True)
        same = {name: one for name, one in found.items() if one.topic_id == topics[name].topic_id}
        _log.warning("markers of messages that are gone; recreated: %s", ", ".join(same))
        self._context.topics.delete(same)
        return {name: int(one.config.get("retention.ms", "0")) for name, one in same.items()}

    def _redeliver_taken_messages(self, settings: QueueSettings, topics: QueueTopics) -> None:
        """Have trackers redeliver all messages of each partition in which clients have committed an offset.

        Some clients can't know that the markers were of an earlier topic: clients of older versions or of the
        JVM library, and clients that may not read kmq.queues. They took messages all the same, and the
        markers of these messages are deleted. Setting the commits back instead is not possible while clients
        are members of the group.
        """
        commits = group_commits(self._context.connection, settings, range(topics.partitions), topics.ids)
        taken = [partition for partition, commit in commits.items() if commit.offset > 0]
        with MarkerWriter(self._context.connection, settings) as writer:
            for partition, (low, end) in self._context.topics.offsets(settings.name, taken).items():
                cuts = commits[partition].cuts
                if cuts:  # the ticks that told them are deleted with the markers
                    writer.put_one(codec.tick(partition, cuts))
                for offset in range(low, end):
                    writer.put_one(Marker(partition, cuts.number_of(offset), Op.DELAY, counts=False))
            if writer.flush(_FLUSH_TIMEOUT_S):
                raise Unavailable(f"markers topic {settings.markers_topic}: markers are not confirmed")


def _differences(before: QueueSettings, after: QueueSettings) -> Iterable[str]:
    """Yield a text for each setting that differs."""
    old = dataclasses.asdict(before)
    return (f"{key}: {old[key]}, not {value}" for key, value in _changes(before, after).items())


def _how_to_change(before: QueueSettings, after: QueueSettings) -> str:
    """Return what to do, with the whole command if there is one."""
    changes = _changes(before, after)
    for lane in before.lanes():
        if lane.lane_ending in before.draining_lanes:
            finish = f"kmq queue alter {after.name} {option_of_removal(lane)}"
            return f"lane {lane.name!r} is being removed; finish that with: {finish}"
    if fixed := [key for key in changes if key not in ALTERABLE]:
        return f"{', '.join(fixed)} can't be changed; give the new queue another name"
    options = [_option(key, value) for key, value in changes.items()]
    return f"change them with: kmq queue alter {after.name} {' '.join(options)}"


def _option(key: str, value: Any) -> str:
    if key in ("lane_share", *RETRIES):
        return set_option(key, value)
    option = key.removesuffix("_ms").replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {'none' if value is None else f'{value}ms' if key.endswith('_ms') else value}"


def _changes(before: QueueSettings, after: QueueSettings) -> dict[str, Any]:
    """Return the settings that differ, with their new values."""
    old = dataclasses.asdict(before)
    return {key: value for key, value in dataclasses.asdict(after).items() if value != old[key]}
