"""`Finding`: a fault that the doctor found, with its severity and advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Messages can get lost, or are not redelivered."""
    WARNING = "warning"
    """The queue works now, but can fail or lose messages later."""
    OK = "ok"
    """Nothing is wrong."""


class Kind(StrEnum):
    """The kinds of findings. Scripts may rely on the values: they do not change between versions."""

    OK = "ok"
    QUEUE_TOPIC_MISSING = "queue-topic-missing"
    MARKERS_TOPIC_MISSING = "markers-topic-missing"
    DEAD_LETTER_TOPIC_MISSING = "dead-letter-topic-missing"
    DEAD_LETTER_MARKERS_MISSING = "dead-letter-markers-missing"
    NOT_REGISTERED = "not-registered"
    DELETING = "deleting"
    UNREGISTERED_TOPICS = "unregistered-topics"
    UNREADABLE_SETTINGS = "unreadable-settings"
    UNUSABLE_ZNODE = "unusable-znode"
    SHARED_TOPIC = "shared-topic"
    TOO_FEW_PARTITIONS = "too-few-partitions"
    TOO_MANY_PARTITIONS = "too-many-partitions"
    TOO_FEW_REGISTERED = "too-few-partitions-registered"
    TOO_MANY_REGISTERED = "too-many-partitions-registered"
    RETENTION_TOO_SHORT = "retention-too-short"
    RETENTION_WITHOUT_RESERVE = "retention-without-reserve"
    MARKERS_RETENTION_SHORTER = "markers-retention-shorter"
    RETENTION_BYTES = "retention-bytes"
    COMPACTED = "compacted"
    CLIENT_TIMESTAMPS = "client-timestamps"
    UNCLEAN_ELECTION = "unclean-leader-election"
    TOO_FEW_IN_SYNC = "too-few-in-sync-replicas"
    TOO_MANY_IN_SYNC = "too-many-in-sync-replicas"
    ONE_REPLICA = "one-replica"
    OUT_OF_SYNC = "replica-out-of-sync"
    DEAD_LETTERS_TOO_LARGE = "dead-letters-too-large"
    NO_TRACKER = "no-tracker"
    NOT_SERVED = "not-served"
    TRACKER_WITHOUT_KAFKA = "tracker-without-kafka"
    PARTITIONS_WITHOUT_TRACKER = "partitions-without-tracker"
    MARKERS_OF_EARLIER_TOPIC = "markers-of-earlier-topic"
    OFFSET_OF_EARLIER_TOPIC = "offset-of-earlier-topic"
    OFFSET_BELOW_LOG = "offset-below-log"
    OFFSET_BEYOND_LOG = "offset-beyond-log"
    DELETED_BEFORE_TAKEN = "deleted-before-taken"
    MARKER_TIME_AHEAD = "marker-time-ahead"
    STORED_TIME_AHEAD = "stored-time-ahead"
    LOG_CUT = "log-cut"
    HANGING_TRANSACTION = "hanging-transaction"
    DAMAGED_LOG = "damaged-log"
    OTHER_GROUPS = "other-groups"
    RANGES_WITH_JVM_TRACKER = "range-markers-with-jvm-tracker"
    RANGES_WITH_JVM_CLIENTS = "range-markers-with-jvm-clients"
    SETTINGS_TOPIC_MISSING = "settings-topic-missing"
    SETTINGS_TOPIC_UNREADABLE = "settings-topic-unreadable"
    SETTINGS_TOPIC_NOT_COMPACTED = "settings-topic-not-compacted"
    SETTINGS_TOPIC_PARTITIONS = "settings-topic-partitions"
    RECORD_MISSING = "record-missing"
    RECORD_UNREADABLE = "record-unreadable"
    RECORD_DIFFERS = "record-differs"
    RECORD_OF_NO_QUEUE = "record-of-no-queue"
    NOT_DURABLE = "not-durable"
    UNCHECKED = "unchecked"
    DAMAGED_TABLE = "damaged-table"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor found.

    Attributes:
        severity: How bad it is.
        queue: The queue's name, or that of a topic, or the registry.
        kind: Which kind; scripts may rely on it.
        what: What is wrong.
        to_do: Advice; empty if nothing is wrong. Commands stand in backquotes. `set key=value on topic` asks
            to change a setting of a topic with Kafka's own tools. Whoever follows the advice loses no
            messages.
    """

    severity: Severity
    queue: str
    kind: Kind
    what: str
    to_do: str = ""
