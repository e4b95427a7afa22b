"""The facts about one queue that the doctor checks. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset, TrackerInfo
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode
from kmqpy.kafka.client.settings_mirror import Records
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_names import SharedTopic
from kmqpy.kafka.topics import TopicInfo

Faults = Iterator[tuple[Severity, Kind, str, str]]
"""Each check of one queue yields these: severity, kind, what is wrong, what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one queue.

    registered  its entry in the registry; None: there is none
    topics      those of its four topics that exist, by name, with their settings
    trackers    the living trackers
    owners      tracker id by partition
    stored      safe markers offsets
    markers_log first and next offset of each markers partition
    markers_latest  offset and timestamp (ms) of the marker with the highest timestamp, by partition
    now_ms      this machine's time
    queue_log   the same of the queue topic
    committed   offsets of the queue's own group
    groups      consumer groups with commits on the queue topic
    unusable_znodes  znodes of the queue that kmqpy can't use
    shared      topics that another queue uses as well
    records     what clients are told of queues, by kmq.queues; None: there is no such topic, or it can't be
                read
    """

    settings: QueueSettings
    registered: RegisteredQueue | None
    topics: Mapping[str, TopicInfo]
    brokers: int = 1
    trackers: tuple[TrackerInfo, ...] = ()
    owners: Mapping[int, str] = field(default_factory=dict)
    stored: Mapping[int, StoredOffset] = field(default_factory=dict)
    markers_log: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    markers_latest: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    now_ms: int = 0
    queue_log: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    committed: Mapping[int, int] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    unusable_znodes: tuple[UnusableZnode, ...] = ()
    shared: tuple[SharedTopic, ...] = ()
    records: Records | None = None
