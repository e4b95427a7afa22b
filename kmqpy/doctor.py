"""What is wrong with a queue's topics, trackers and offsets, and what to do about it. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kmqpy.config import DAY_MS, QueueSettings
from kmqpy.registry import RegisteredQueue, StoredOffset, TrackerInfo
from kmqpy.topics import TopicInfo, dead_letter_queue

RESERVE_MS = DAY_MS
"""Retention beyond the longest hold or delay, for the time that trackers or consumers are down."""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Messages can get lost, or are not redelivered."""
    WARNING = "warning"
    """Works now; can go wrong."""
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` found: `what` it is, and what `to_do` (empty when all is well)."""

    severity: Severity
    queue: str
    what: str
    to_do: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of one queue.

    registered  its entry in the registry; None: there is none
    topics      those of its four topics that exist, by name, with their settings
    trackers    the living trackers
    owners      tracker id by partition
    stored      safe markers offsets
    markers_log first and next offset of each markers partition
    queue_log   the same of the queue topic
    committed   offsets of the queue's own group
    groups      consumer groups with commits on the queue topic
    """

    settings: QueueSettings
    registered: RegisteredQueue | None
    topics: Mapping[str, TopicInfo]
    brokers: int = 1
    trackers: tuple[TrackerInfo, ...] = ()
    owners: Mapping[int, str] = field(default_factory=dict)
    stored: Mapping[int, StoredOffset] = field(default_factory=dict)
    markers_log: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    queue_log: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    committed: Mapping[int, int] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


def check(facts: Facts) -> list[Finding]:
    """Everything that is wrong with the queue, errors first; one `ok` when nothing is."""
    name = facts.settings.name
    found = [
        Finding(severity, name, what, to_do)
        for part in (_topics, _partitions, _retention, _settings, _trackers, _offsets, _groups)
        for severity, what, to_do in part(facts)
    ]
    found.sort(key=lambda finding: finding.severity is not Severity.ERROR)
    return found or [Finding(Severity.OK, name, "topics, retention, trackers and offsets are as they should")]


def unregistered(topics: set[str], registered: set[str]) -> list[Finding]:
    """Topics that look like a queue (there is a markers topic) and are not in the registry."""
    return [
        Finding(
            Severity.WARNING,
            name,
            f"topics of a queue {name!r} exist, but it is not registered: no tracker redelivers its messages",
            f"kmq queue create {name} (keeps the topics), or kmq queue delete {name}",
        )
        for name in sorted(topics)
        if f"{name}__markers" in topics
        and name not in registered
        and not name.endswith(("__markers", "__undelivered"))
    ]


_Found = Iterator[tuple[Severity, str, str]]


def _topics(facts: Facts) -> _Found:
    queue, name = facts.settings, facts.settings.name
    dead = dead_letter_queue(queue)
    create = f"kmq queue create {name}"
    if name not in facts.topics:
        yield Severity.ERROR, f"the queue topic {name} does not exist", create
    if queue.markers_topic not in facts.topics:
        yield Severity.ERROR, f"the markers topic {queue.markers_topic} does not exist", create
    if dead.name not in facts.topics:
        what = f"the dead-letter topic {dead.name} does not exist: messages over the limit are stuck"
        yield Severity.ERROR, what, create
    elif dead.markers_topic not in facts.topics:
        what = f"the dead letters' markers topic {dead.markers_topic} does not exist: no redrive, no purge"
        yield Severity.ERROR, what, create
    if facts.registered is None:
        what = "the queue is not registered: no tracker redelivers its messages"
        yield Severity.ERROR, what, create
    elif facts.registered.deleting:
        yield Severity.WARNING, "the queue is marked as deleting", f"kmq queue delete {name}"


def _partitions(facts: Facts) -> _Found:
    queue = facts.settings
    messages = facts.topics.get(queue.name)
    if messages is None:
        return
    alter = f"kmq queue alter {queue.name} --partitions {messages.partitions}"
    dead = dead_letter_queue(queue)
    for name in (queue.markers_topic, dead.name, dead.markers_topic):
        other = facts.topics.get(name)
        if other is not None and other.partitions != messages.partitions:
            fewer = other.partitions < messages.partitions
            what = f"{queue.name} has {messages.partitions} partitions, {name} has {other.partitions}"
            to_do = alter if fewer else f"kmq queue alter {queue.name} --partitions {other.partitions}"
            yield (Severity.ERROR if fewer else Severity.WARNING), what, to_do
    registered = facts.registered
    if registered is not None and registered.partitions < messages.partitions:
        what = (
            f"{messages.partitions} partitions, but trackers know of {registered.partitions}: "
            "nothing is redelivered in the others"
        )
        yield Severity.ERROR, what, alter


def _retention(facts: Facts) -> _Found:
    queue = facts.settings
    longest = max(queue.max_delay_ms, queue.max_hold_ms)
    for name in (queue.name, queue.markers_topic):
        retention = _number(facts.topics.get(name), "retention.ms")
        if retention is None or retention == -1:
            continue
        to_do = f"kmq queue alter {queue.name} --retention {_text(longest + 7 * DAY_MS)}"
        if retention <= longest:
            what = (
                f"{name} keeps records for {_text(retention)}, but a message can be held or delayed for "
                f"{_text(longest)}: it can be lost"
            )
            yield Severity.ERROR, what, to_do
        elif retention < longest + RESERVE_MS:
            what = (
                f"{name} keeps records for {_text(retention)}: less than {_text(RESERVE_MS)} more than the "
                f"longest hold or delay ({_text(longest)}), too little for a longer standstill"
            )
            yield Severity.WARNING, what, to_do
    dead = dead_letter_queue(queue)
    for name, its_markers in ((queue.name, queue.markers_topic), (dead.name, dead.markers_topic)):
        retention = _number(facts.topics.get(name), "retention.ms")
        of_markers = _number(facts.topics.get(its_markers), "retention.ms")
        if retention is not None and of_markers is not None and _shorter(of_markers, retention):
            what = f"{its_markers} keeps records for a shorter time than {name}: what is done can come again"
            to_do = f"kmq queue alter {queue.name} --retention {_text(max(retention, longest + RESERVE_MS))}"
            yield Severity.WARNING, what, to_do
    for name, topic in facts.topics.items():
        limit = _number(topic, "retention.bytes")
        if limit is not None and limit != -1:
            what = f"{name} has retention.bytes={limit}: messages disappear when it is full, done or not"
            yield Severity.WARNING, what, f"set retention.bytes=-1 on {name}"


def _settings(facts: Facts) -> _Found:
    queue = facts.settings
    dead = dead_letter_queue(queue)
    for name, topic in facts.topics.items():
        config = topic.config
        if "compact" in config.get("cleanup.policy", ""):
            yield (
                Severity.ERROR,
                f"{name} is compacted: records disappear",
                (f"set cleanup.policy=delete on {name}"),
            )
        if (
            name in (queue.markers_topic, dead.markers_topic)
            and config.get("message.timestamp.type", "LogAppendTime") != "LogAppendTime"
        ):
            what = f"{name} has the clients' timestamps (CreateTime): a wrong clock there moves all leases"
            yield Severity.WARNING, what, f"set message.timestamp.type=LogAppendTime on {name}"
        if config.get("unclean.leader.election.enable") == "true":
            what = f"{name} allows unclean leader elections: confirmed messages can be lost"
            yield Severity.WARNING, what, f"set unclean.leader.election.enable=false on {name}"
        in_sync = _number(topic, "min.insync.replicas")
        if topic.replication > 1 and in_sync is not None and in_sync < 2:
            what = f"{name} has min.insync.replicas={in_sync}: a message can be confirmed by one broker only"
            yield Severity.WARNING, what, f"set min.insync.replicas=2 on {name}"
        if in_sync is not None and in_sync > topic.replication:
            what = (
                f"{name} has min.insync.replicas={in_sync} and {topic.replication} replicas: nothing is sent"
            )
            yield Severity.ERROR, what, f"set min.insync.replicas={max(1, topic.replication - 1)} on {name}"
    single = [name for name, topic in facts.topics.items() if topic.replication == 1]
    if single:
        what = f"one replica only, as safe as one broker's disk: {', '.join(single)}"
        more = "create the queue with --replication 3, or reassign its partitions"
        to_do = more if facts.brokers > 1 else f"fine for development; else add brokers, then {more}"
        yield Severity.WARNING, what, to_do
    largest = _number(facts.topics.get(queue.name), "max.message.bytes")
    of_dead = _number(facts.topics.get(dead.name), "max.message.bytes")
    if largest is not None and of_dead is not None and of_dead < largest:
        what = (
            f"{dead.name} takes messages of {of_dead} bytes, {queue.name} of {largest}: large ones get stuck"
        )
        yield Severity.ERROR, what, f"set max.message.bytes={largest + 65_536} on {dead.name}"


def _trackers(facts: Facts) -> _Found:
    registered = facts.registered
    if registered is None:
        return
    name = facts.settings.name
    serving = [one for one in facts.trackers if one.queues is None or name in one.queues]
    start = "start one: kmq tracker"
    if not serving:
        what = "no tracker runs" if not facts.trackers else "no running tracker serves this queue"
        yield Severity.ERROR, f"{what}: nothing is redelivered", start
        return
    for one in serving:
        if not one.kafka_ok:
            what = f"tracker {one.id} on {one.host} does not reach Kafka"
            yield Severity.WARNING, what, "look at its log, and at its settings for Kafka"
    without = [str(p) for p in range(registered.partitions) if p not in facts.owners]
    if without:
        what = f"partitions without a tracker: {', '.join(without)}"
        yield Severity.ERROR, what, "if it stays so for more than some seconds, look at the trackers' logs"


def _offsets(facts: Facts) -> _Found:
    queue = facts.settings
    markers = facts.topics.get(queue.markers_topic)
    for partition, stored in sorted(facts.stored.items()):
        low, end = facts.markers_log.get(partition, (0, stored.offset))
        place = f"{queue.markers_topic}, partition {partition}"
        if markers is not None and stored.topic_id != markers.topic_id:
            what = f"{place}: the stored offset is of an earlier topic of that name"
            to_do = "nothing when the topic was recreated on purpose: a tracker starts at its beginning"
            yield Severity.WARNING, what, to_do
        elif stored.offset < low:
            what = (
                f"{place}: the stored offset {stored.offset} is below the log start {low}: markers of "
                "messages in flight were deleted"
            )
            yield (
                Severity.ERROR,
                what,
                (
                    f"make retention longer: kmq queue alter {queue.name} --retention …; "
                    "messages whose markers are gone are not redelivered"
                ),
            )
        elif stored.offset > end:
            what = f"{place}: the stored offset {stored.offset} is beyond the end {end}"
            yield Severity.WARNING, what, "a tracker reads from the beginning; see why the log was cut"
    for partition, offset in sorted(facts.committed.items()):
        low, end = facts.queue_log.get(partition, (0, 0))
        if offset < low < end:  # a purge leaves an empty log
            what = (
                f"{queue.name}, partition {partition}: up to {low - offset} messages were deleted before "
                "anybody took them"
            )
            to_do = f"make retention longer, or purge on purpose; kmq queue alter {queue.name} --retention …"
            yield Severity.WARNING, what, to_do


def _groups(facts: Facts) -> _Found:
    others = [group for group in facts.groups if group != facts.settings.consumer_group]
    if others:
        what = (
            f"other consumer groups read {facts.settings.name}: {', '.join(others)}; one queue topic serves "
            f"one kmq group ({facts.settings.consumer_group})"
        )
        yield (
            Severity.WARNING,
            what,
            ("give each group that takes messages a queue of its own; a group that only looks on is fine"),
        )


def _number(topic: TopicInfo | None, key: str) -> int | None:
    text = "" if topic is None else topic.config.get(key, "")
    return int(text) if text.lstrip("-").isdigit() else None


def _shorter(one: int, other: int) -> bool:
    return one != -1 and (other == -1 or one < other)


def _text(ms: int) -> str:
    if ms == -1:
        return "ever"
    for unit, size in (("d", DAY_MS), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
