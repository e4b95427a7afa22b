"""The facts about one queue that the doctor checks. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset, TrackerInfo
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.copies.own_hanging import OwnTransaction
from kmqpy.kafka.damaged_logs import DamagedLog
from kmqpy.kafka.hanging import HangingTransaction
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.settings_mirror import Records
from kmqpy.kafka.topic_names import SharedTopic
from kmqpy.kafka.topics import Members, TopicInfo

Faults = Iterator[tuple[Severity, Kind, str, str]]
"""The faults that a check of one queue yields: severity, kind, what is wrong, what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one queue. Mappings from int are by partition.

    settings         of the queue
    registered       the queue's entry in the registry; None if it has none
    topics           those of the queue's four topics that exist, by name, with Kafka's settings of them
    brokers          how many brokers the cluster has
    trackers         all running trackers
    owners           the id of the tracker that has the partition
    stored           the markers offset, and a time, that a tracker has stored for the next tracker
    markers_log      first and next offset of the markers topic
    markers_latest   offset and timestamp (ms) of the marker with the highest timestamp
    now_ms           the time of this machine's clock
    queue_log        first and next offset of the queue topic
    commits          those of the queue's own consumer group
    new_cuts         where logs of the queue topic lack records that commits or stored offsets knew
    groups           consumer groups with commits on the queue topic, the queue's own included
    members          the members of consumer groups, by the topics that they read
    unusable_znodes  znodes of the queue that kmqpy can't use
    shared           topics of the queue that another queue uses as well
    records          the records of kmq.queues, which tell clients the settings of queues; None if the topic
                     does not exist or can't be read
    bootstrap        the addresses of Kafka
    hanging          transactions in the queue's topics that nobody ends
    damaged          partitions of which clients, or the next tracker, can't read on
    own_hanging      those of them that kmqpy has written, by topic and partition
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
    commits: Mapping[int, Commit] = field(default_factory=dict)
    new_cuts: Mapping[int, LogCuts] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    members: Members = field(default_factory=dict)
    unusable_znodes: tuple[UnusableZnode, ...] = ()
    shared: tuple[SharedTopic, ...] = ()
    records: Records | None = None
    bootstrap: str = ""
    damaged: tuple[DamagedLog, ...] = ()
    hanging: tuple[HangingTransaction, ...] = ()
    own_hanging: Mapping[TopicPlace, OwnTransaction] = field(default_factory=dict)

    def noticed_cuts(self, partition: int) -> LogCuts:
        """The cuts of a log of the queue topic that a client or a tracker has noticed."""
        commit, stored = self.commits.get(partition), self.stored.get(partition)
        topic = self.topics.get(self.settings.name)
        found = NO_CUTS if commit is None else commit.cuts
        is_of_topic = stored is not None and topic is not None and stored.queue_id == topic.topic_id
        return found.merged(stored.cuts) if stored is not None and is_of_topic else found
