"""What is wrong with a queue's topics, trackers and offsets, and what to do about it. Pure: no I/O."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kmqpy.core.durations import DAY_MS
from kmqpy.kafka.admin.registry import Leftover, RegisteredQueue, StoredOffset, TrackerInfo
from kmqpy.kafka.client.settings_mirror import Records
from kmqpy.kafka.settings import (
    CLOCK_LEAD_MS,
    DEAD_LETTERS_SUFFIX,
    MARKERS_SUFFIX,
    SETTINGS_TOPIC,
    QueueSettings,
)
from kmqpy.kafka.topic_identity import earlier_markers
from kmqpy.kafka.topic_names import SharedTopic, dead_letter_queue, topics_of
from kmqpy.kafka.topics import TopicInfo, ample_retention_ms, dead_letter_limit

RESERVE_MS = DAY_MS
"""Retention beyond the longest hold or delay, for the time that trackers or consumers are down."""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Messages can get lost, or are not redelivered."""
    WARNING = "warning"
    """Works now; can go wrong."""
    OK = "ok"


class Kind(StrEnum):
    """What can be found."""

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
    OTHER_GROUPS = "other-groups"
    SETTINGS_TOPIC_MISSING = "settings-topic-missing"
    SETTINGS_TOPIC_UNREADABLE = "settings-topic-unreadable"
    SETTINGS_TOPIC_NOT_COMPACTED = "settings-topic-not-compacted"
    SETTINGS_TOPIC_PARTITIONS = "settings-topic-partitions"
    RECORD_MISSING = "record-missing"
    RECORD_UNREADABLE = "record-unreadable"
    RECORD_DIFFERS = "record-differs"
    RECORD_OF_NO_QUEUE = "record-of-no-queue"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` found: `what` it is, and what `to_do` (empty when all is well).

    What to do is text; commands in it stand in backquotes, settings of a topic as `set key=value on topic`
    (by Kafka's own tools). Whoever follows it loses nothing.
    """

    severity: Severity
    queue: str
    kind: Kind
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
    markers_latest  offset and timestamp (ms) of the marker with the highest timestamp, by partition
    now_ms      this machine's time
    queue_log   the same of the queue topic
    committed   offsets of the queue's own group
    groups      consumer groups with commits on the queue topic
    leftovers   unusable znodes of the queue
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
    leftovers: tuple[Leftover, ...] = ()
    shared: tuple[SharedTopic, ...] = ()
    records: Records | None = None


def check(facts: Facts) -> list[Finding]:
    """Everything that is wrong with the queue, errors first; one `ok` when nothing is."""
    name = facts.settings.name
    found = [
        Finding(severity, name, kind, what, to_do)
        for part in (
            _topics,
            _shared,
            _partitions,
            _retention,
            _settings,
            _trackers,
            _earlier,
            _offsets,
            _clocks,
            _groups,
            _record,
        )
        for severity, kind, what, to_do in part(facts)
    ]
    found += left_over(name, facts.leftovers)
    found.sort(key=lambda finding: finding.severity is not Severity.ERROR)
    return found or [
        Finding(Severity.OK, name, Kind.OK, "topics, retention, trackers and offsets are as they should")
    ]


def left_over(name: str, leftovers: Iterable[Leftover]) -> list[Finding]:
    """A finding for each unusable znode."""
    to_do = "`kmq doctor --fix` removes it"
    kind = Kind.UNUSABLE_ZNODE
    return [Finding(Severity.WARNING, name, kind, f"{one.path}: {one.why}", to_do) for one in leftovers]


def unreadable(name: str, error: Exception) -> Finding:
    """A queue whose settings in the registry can't be read."""
    what = f"its settings in the registry can't be read, so trackers may not serve it: {error}"
    to_do = (
        f"`kmq queue create {name}` writes them anew, with what can be read of them; look at the result with "
        f"`kmq queue describe {name}`"
    )
    return Finding(Severity.ERROR, name, Kind.UNREADABLE_SETTINGS, what, to_do)


def settings_topic(topic: TopicInfo | None, error: Exception | None, queues: list[str]) -> list[Finding]:
    """What is wrong with kmq.queues itself.

    topic   None: there is none
    error   why it can't be read, if so
    queues  the registered ones
    """
    found = []
    name = SETTINGS_TOPIC
    if topic is None and queues and error is None:
        what = f"topic {name} does not exist: clients without ZooKeeper don't know the settings of queues"
        to_do = (
            f"`kmq queue create {queues[0]}` makes it; running trackers add the other queues in some minutes"
        )
        found.append((Kind.SETTINGS_TOPIC_MISSING, what, to_do))
    if error is not None:
        what = f"it can't be read, so what it says is not checked: {error}"
        to_do = "clients need the right to read it; so does whoever runs this"
        found.append((Kind.SETTINGS_TOPIC_UNREADABLE, what, to_do))
    if topic is not None and topic.config.get("cleanup.policy", "compact") != "compact":
        what = f"{name} is not only compacted: settings of queues that don't change disappear from it"
        found.append((Kind.SETTINGS_TOPIC_NOT_COMPACTED, what, _set("cleanup.policy", "compact", name)))
    if topic is not None and topic.partitions > 1:
        what = f"{name} has {topic.partitions} partitions; kmqpy writes and reads the first only"
        to_do = "nothing, unless something else writes to the others"
        found.append((Kind.SETTINGS_TOPIC_PARTITIONS, what, to_do))
    return [Finding(Severity.WARNING, name, kind, what, to_do) for kind, what, to_do in found]


def records_of_no_queue(
    records: Records, registered: Iterable[str], topics: Mapping[str, TopicInfo]
) -> list[Finding]:
    """Queues under our root that clients are told of, and that are not registered.

    `topics` are those of all queues that there are records of.
    """
    found = []
    for name, queue in sorted(records.own.items()):
        if name in registered:
            continue
        what = f"topic {SETTINGS_TOPIC} tells clients of queue {name}, which is not registered"
        if any(topic in topics for topic in topics_of(queue)):
            what += "; its topics exist, but no tracker redelivers its messages"
            to_do = f"`{_create_command(queue, topics, set())}` registers it again; topics and messages stay"
        else:
            to_do = f"`kmq queue delete {name} --leftovers` takes that away; none of its topics exists"
        found.append(Finding(Severity.WARNING, name, Kind.RECORD_OF_NO_QUEUE, what, to_do))
    return found


def unregistered(topics: set[str], used: set[str]) -> list[Finding]:
    """Topics that look like a queue (there is a markers topic); those that registered ones use are not."""
    return [
        Finding(
            Severity.WARNING,
            name,
            Kind.UNREGISTERED_TOPICS,
            f"topics of a queue {name!r} exist, but it is not registered: no tracker redelivers its messages",
            f"`kmq queue create {name}` registers it; topics and messages stay",
        )
        for name in sorted(topics)
        if name + MARKERS_SUFFIX in topics
        and not name.endswith((MARKERS_SUFFIX, DEAD_LETTERS_SUFFIX))
        and not used.intersection(topics_of(QueueSettings(name=name)))
    ]


_Found = Iterator[tuple[Severity, Kind, str, str]]


def _topics(facts: Facts) -> _Found:
    queue, name = facts.settings, facts.settings.name
    dead = dead_letter_queue(queue)
    create = f"`kmq queue create {name}`"
    if name not in facts.topics:
        yield Severity.ERROR, Kind.QUEUE_TOPIC_MISSING, f"the queue topic {name} does not exist", create
    if queue.markers_topic not in facts.topics:
        what = f"the markers topic {queue.markers_topic} does not exist"
        yield Severity.ERROR, Kind.MARKERS_TOPIC_MISSING, what, create
    if dead.name not in facts.topics:
        what = f"the dead-letter topic {dead.name} does not exist: messages over the limit are stuck"
        yield Severity.ERROR, Kind.DEAD_LETTER_TOPIC_MISSING, what, create
    elif dead.markers_topic not in facts.topics:
        what = f"the dead letters' markers topic {dead.markers_topic} does not exist: no redrive, no purge"
        yield Severity.ERROR, Kind.DEAD_LETTER_MARKERS_MISSING, what, create
    if facts.registered is None:
        what = "the queue is not registered: no tracker redelivers its messages"
        yield Severity.ERROR, Kind.NOT_REGISTERED, what, create
    elif facts.registered.deleting:
        what = "the queue is marked as deleting"
        yield Severity.WARNING, Kind.DELETING, what, f"`kmq queue delete {name}` goes on with it"


def _shared(facts: Facts) -> _Found:
    """Topics that serve two queues, as earlier versions allowed."""
    queue = facts.settings
    dead = dead_letter_queue(queue)
    messages_of = {queue.markers_topic: queue.name, dead.markers_topic: dead.name}
    taken = {one.name for one in facts.shared}
    for shared in facts.shared:
        if any(messages_of.get(shared.name) == one.name for one in facts.shared if one.other == shared.other):
            continue  # told with the topic whose markers these are
        what = f"its {shared.role} {shared.name} is the {shared.role_there} of queue {shared.other}, too"
        to_do = (
            f"give it topics of its own, when it is empty: `kmq queue delete {queue.name} --if-empty`, "
            f"then `{_create_command(queue, facts.topics, taken)}`"
        )
        if shared.role == "queue topic":
            to_do = f"see what is said of queue {shared.other}"
        if shared.name in messages_of:
            what += ": what is done with messages of one counts for the other"
        yield (
            Severity.ERROR if shared.name in messages_of else Severity.WARNING,
            Kind.SHARED_TOPIC,
            what,
            to_do,
        )


def _create_command(queue: QueueSettings, topics: Mapping[str, TopicInfo], but: set[str]) -> str:
    """The command that makes this queue, with topics of the usual names in place of those in `but`."""
    default = QueueSettings(name=queue.name)
    words = [f"kmq queue create {queue.name}"]
    if queue.name in topics:
        words.append(f"--partitions {topics[queue.name].partitions}")
    if (retention := _number(topics.get(queue.name), "retention.ms")) is not None and retention != -1:
        words.append(f"--retention {_text(retention)}")
    given = dataclasses.asdict(queue)
    options: dict[str, Callable[[Any], str]] = {
        "max_redeliveries": lambda limit: "none" if limit is None else str(limit),
        **dict.fromkeys(("redeliver_after_ms", "max_delay_ms", "max_hold_ms"), _text),
    }
    names = ("markers_topic", "dead_letter_topic", "consumer_group", "redelivery_count_header")
    options |= dict.fromkeys(names, shlex.quote)
    words += [
        f"--{key.removesuffix('_ms').replace('_', '-')} {shown(given[key])}"
        for key, shown in options.items()
        if given[key] != getattr(default, key) and given[key] not in but
    ]
    return " ".join(words)


def _partitions(facts: Facts) -> _Found:
    queue = facts.settings
    messages = facts.topics.get(queue.name)
    if messages is None:
        return
    dead = dead_letter_queue(queue)
    taken = {one.name for one in facts.shared}
    for name in (queue.markers_topic, dead.name, dead.markers_topic):
        other = facts.topics.get(name)
        if other is None or other.partitions == messages.partitions:
            continue
        what = f"{queue.name} has {messages.partitions} partitions, {name} has {other.partitions}"
        if other.partitions < messages.partitions:
            yield Severity.ERROR, Kind.TOO_FEW_PARTITIONS, what, _grow(queue, messages.partitions)
        elif name not in taken:
            yield Severity.WARNING, Kind.TOO_MANY_PARTITIONS, what, _grow(queue, other.partitions)
    registered = facts.registered
    if registered is not None and registered.partitions < messages.partitions:
        what = (
            f"{messages.partitions} partitions, but trackers know of {registered.partitions}: "
            "nothing is redelivered in the others"
        )
        yield Severity.ERROR, Kind.TOO_FEW_REGISTERED, what, _grow(queue, messages.partitions)
    if registered is not None and registered.partitions > messages.partitions:
        what = f"trackers know of {registered.partitions} partitions, {queue.name} has {messages.partitions}"
        yield Severity.WARNING, Kind.TOO_MANY_REGISTERED, what, _grow(queue, registered.partitions)


def _grow(queue: QueueSettings, partitions: int) -> str:
    return f"`kmq queue alter {queue.name} --partitions {partitions}`"


def _retention(facts: Facts) -> _Found:
    # Each advice is about one topic, and makes its retention longer: another topic's may be longer already.
    queue = facts.settings
    longest = queue.longest_ms
    enough = ample_retention_ms(queue)
    of_queue = _number(facts.topics.get(queue.name), "retention.ms")
    for name in (queue.name, queue.markers_topic):
        retention = _number(facts.topics.get(name), "retention.ms")
        if retention is None or retention == -1:
            continue
        longer = enough
        if name == queue.markers_topic and of_queue is not None and _shorter(longer, of_queue):
            longer = of_queue
        to_do = _set("retention.ms", longer, name)
        if retention <= longest:
            what = (
                f"{name} keeps records for {_text(retention)}, but a message can be held or delayed for "
                f"{_text(longest)}: it can be lost"
            )
            yield Severity.ERROR, Kind.RETENTION_TOO_SHORT, what, to_do
        elif retention < longest + RESERVE_MS:
            what = (
                f"{name} keeps records for {_text(retention)}: less than {_text(RESERVE_MS)} more than the "
                f"longest hold or delay ({_text(longest)}), too little for a longer standstill"
            )
            yield Severity.WARNING, Kind.RETENTION_WITHOUT_RESERVE, what, to_do
    dead = dead_letter_queue(queue)
    for name, its_markers in ((queue.name, queue.markers_topic), (dead.name, dead.markers_topic)):
        retention = _number(facts.topics.get(name), "retention.ms")
        of_markers = _number(facts.topics.get(its_markers), "retention.ms")
        if retention is not None and of_markers is not None and _shorter(of_markers, retention):
            what = f"{its_markers} keeps records for a shorter time than {name}: what is done can come again"
            to_do = _set("retention.ms", retention, its_markers)
            yield Severity.WARNING, Kind.MARKERS_RETENTION_SHORTER, what, to_do
    for name, topic in facts.topics.items():
        limit = _number(topic, "retention.bytes")
        if limit is not None and limit != -1:
            what = f"{name} has retention.bytes={limit}: messages disappear when it is full, done or not"
            yield Severity.WARNING, Kind.RETENTION_BYTES, what, _set("retention.bytes", -1, name)


def _set(key: str, value: object, topic: str) -> str:
    return f"set {key}={value} on {topic}"


def _settings(facts: Facts) -> _Found:
    queue = facts.settings
    dead = dead_letter_queue(queue)
    for name, topic in facts.topics.items():
        config = topic.config
        if "compact" in config.get("cleanup.policy", ""):
            what = f"{name} is compacted: records disappear"
            yield Severity.ERROR, Kind.COMPACTED, what, _set("cleanup.policy", "delete", name)
        if name in (queue.markers_topic, dead.markers_topic) and _has_client_timestamps(topic):
            what = f"{name} has the clients' timestamps (CreateTime): a wrong clock there moves all leases"
            to_do = _set("message.timestamp.type", "LogAppendTime", name)
            yield Severity.WARNING, Kind.CLIENT_TIMESTAMPS, what, to_do
        if config.get("unclean.leader.election.enable") == "true":
            what = f"{name} allows unclean leader elections: confirmed messages can be lost"
            to_do = _set("unclean.leader.election.enable", "false", name)
            yield Severity.WARNING, Kind.UNCLEAN_ELECTION, what, to_do
        in_sync = _number(topic, "min.insync.replicas")
        if topic.replication > 1 and in_sync is not None and in_sync < 2:
            what = f"{name} has min.insync.replicas={in_sync}: a message can be confirmed by one broker only"
            to_do = _set("min.insync.replicas", 2, name)
            yield Severity.WARNING, Kind.TOO_FEW_IN_SYNC, what, to_do
        if in_sync is not None and in_sync > topic.replication:
            what = (
                f"{name} has min.insync.replicas={in_sync} and {topic.replication} replicas: nothing is sent"
            )
            to_do = _set("min.insync.replicas", max(1, topic.replication - 1), name)
            yield Severity.ERROR, Kind.TOO_MANY_IN_SYNC, what, to_do
    single = [name for name, topic in facts.topics.items() if topic.replication == 1]
    if single:
        what = f"one replica only, as safe as one broker's disk: {', '.join(single)}"
        to_do = "fine for development; else add brokers, then move its partitions to three of them"
        if facts.brokers > 1:
            count = min(3, facts.brokers)
            to_do = (
                f"move its partitions with Kafka's tools to {count} brokers each; or, when it is empty: "
                f"`kmq queue delete {queue.name} --if-empty`, then "
                f"`{_create_command(queue, facts.topics, set())} --replication {count}`"
            )
        yield Severity.WARNING, Kind.ONE_REPLICA, what, to_do
    largest = _number(facts.topics.get(queue.name), "max.message.bytes")
    of_dead = _number(facts.topics.get(dead.name), "max.message.bytes")
    if largest is not None and of_dead is not None and of_dead < min(2 * largest, dead_letter_limit(largest)):
        what = f"{dead.name} takes messages of {of_dead} bytes, {queue.name} of {largest}: "
        to_do = _set("max.message.bytes", dead_letter_limit(largest), dead.name)
        kind = Kind.DEAD_LETTERS_TOO_LARGE
        if of_dead < largest:
            yield Severity.ERROR, kind, f"{what}large ones get stuck", to_do
        else:
            yield Severity.WARNING, kind, f"{what}those too large to be copied get stuck", to_do


def _has_client_timestamps(topic: TopicInfo | None) -> bool:
    config = {} if topic is None else topic.config
    return config.get("message.timestamp.type", "LogAppendTime") != "LogAppendTime"


def _trackers(facts: Facts) -> _Found:
    registered = facts.registered
    if registered is None:
        return
    name = facts.settings.name
    serving = [one for one in facts.trackers if one.queues is None or name in one.queues]
    if not serving:
        kind = Kind.NOT_SERVED if facts.trackers else Kind.NO_TRACKER
        what = "no running tracker serves this queue" if facts.trackers else "no tracker runs"
        yield Severity.ERROR, kind, f"{what}: nothing is redelivered", "start one: `kmq tracker`"
        return
    for one in serving:
        if not one.kafka_ok:
            what = f"tracker {one.id} on {one.host} does not reach Kafka"
            to_do = "look at its log, and at its settings for Kafka"
            yield Severity.WARNING, Kind.TRACKER_WITHOUT_KAFKA, what, to_do
    without = [str(p) for p in range(registered.partitions) if p not in facts.owners]
    if without:
        what = f"partitions without a tracker: {', '.join(without)}"
        to_do = (
            "if it stays so for more than some seconds, look at the trackers' logs and start another: "
            "`kmq tracker`"
        )
        yield Severity.ERROR, Kind.PARTITIONS_WITHOUT_TRACKER, what, to_do


def _earlier(facts: Facts) -> _Found:
    """Topics that were recreated beside their markers topics (rule R24)."""
    queue = facts.settings
    now = {name: topic.topic_id for name, topic in facts.topics.items()}
    told = None if facts.records is None else facts.records.own.get(queue.name)
    found = {} if told is None else earlier_markers(queue, told.topic_ids, now)
    ids = now.get(queue.name, ""), now.get(queue.markers_topic, "")
    if all(ids) and any(stored.is_of_earlier_queue(*ids) for stored in facts.stored.values()):
        found = {queue.name: queue.markers_topic} | found
    for name, markers in found.items():
        what = f"topic {name} was recreated, but not {markers}, whose markers count for the new messages: "
        if name == queue.name:
            what += "none is taken or redelivered, so that none is lost"
        else:
            what += "dead letters can be missing where they are listed or redriven"
        to_do = f"`kmq queue create {queue.name}` recreates {markers}; the messages stay"
        yield Severity.ERROR, Kind.MARKERS_OF_EARLIER_TOPIC, what, to_do


def _offsets(facts: Facts) -> _Found:
    queue = facts.settings
    markers = facts.topics.get(queue.markers_topic)
    for partition, stored in sorted(facts.stored.items()):
        low, end = facts.markers_log.get(partition, (0, stored.offset))
        place = f"{queue.markers_topic}, partition {partition}"
        if markers is not None and stored.topic_id != markers.topic_id:
            what = f"{place}: the stored offset is of an earlier topic of that name"
            to_do = "nothing when the topic was recreated on purpose: a tracker starts at its beginning"
            yield Severity.WARNING, Kind.OFFSET_OF_EARLIER_TOPIC, what, to_do
        elif stored.offset < low:
            what = (
                f"{place}: the stored offset {stored.offset} is below the log start {low}: markers of "
                "messages in flight were deleted"
            )
            to_do = "a tracker goes on at the log start; messages whose markers are gone are not redelivered"
            to_do += _keep_longer(queue.markers_topic, markers)
            yield Severity.ERROR, Kind.OFFSET_BELOW_LOG, what, to_do
        elif stored.offset > end:
            what = f"{place}: the stored offset {stored.offset} is beyond the end {end}"
            to_do = "a tracker reads from the beginning; see why the log was cut"
            yield Severity.WARNING, Kind.OFFSET_BEYOND_LOG, what, to_do
    for partition, offset in sorted(facts.committed.items()):
        low, end = facts.queue_log.get(partition, (0, 0))
        if offset < low < end:  # a purge leaves an empty log
            what = (
                f"{queue.name}, partition {partition}: up to {low - offset} messages were deleted before "
                "anybody took them"
            )
            to_do = "this is told until a client has taken the next one"
            to_do += _keep_longer(queue.name, facts.topics.get(queue.name))
            yield Severity.WARNING, Kind.DELETED_BEFORE_TAKEN, what, to_do


def _keep_longer(name: str, topic: TopicInfo | None) -> str:
    """How to give a topic twice the retention it has; nothing where it has no limit."""
    retention = _number(topic, "retention.ms")
    if retention is None or retention == -1:
        return ""
    return f"; so that it does not happen again, {_set('retention.ms', 2 * retention, name)}"


def _clocks(facts: Facts) -> _Found:
    """Times that are ahead by more than what a tracker tolerates by default (rule R23)."""
    topic = facts.settings.markers_topic
    for partition, (offset, timestamp_ms) in sorted(facts.markers_latest.items()):
        if (ahead_ms := timestamp_ms - facts.now_ms) > CLOCK_LEAD_MS:
            what = (
                f"{topic}, partition {partition}: the marker at offset {offset} has a timestamp "
                f"{ahead_ms / 1000:g} s ahead of this machine's clock; trackers do not believe it"
            )
            to_do = "check the clocks of brokers and of this machine; if they are right, it is of earlier"
            if _has_client_timestamps(facts.topics.get(topic)):
                to_do = (
                    f"check that clock and this one; {_set('message.timestamp.type', 'LogAppendTime', topic)}"
                )
            yield Severity.WARNING, Kind.MARKER_TIME_AHEAD, what, to_do
    for partition, stored in sorted(facts.stored.items()):
        if (ahead_ms := stored.now_ms - facts.now_ms) > CLOCK_LEAD_MS:
            what = (
                f"{topic}, partition {partition}: the time stored in ZooKeeper is {ahead_ms / 1000:g} s "
                "ahead of this machine's clock; the next tracker to take the partition over sets it back"
            )
            to_do = "check the clocks of brokers and of this machine"
            yield Severity.WARNING, Kind.STORED_TIME_AHEAD, what, to_do


def _record(facts: Facts) -> _Found:
    """What clients are told of the queue."""
    if facts.records is None or facts.registered is None or facts.registered.deleting:
        return
    queue = facts.registered.settings
    to_do = f"`kmq queue create {queue.name}` writes it anew"
    told = facts.records.own.get(queue.name)
    if queue.name in facts.records.unreadable:
        what = (
            f"the last record of it in topic {SETTINGS_TOPIC} can't be read: clients may go by the defaults"
        )
        yield Severity.WARNING, Kind.RECORD_UNREADABLE, what, to_do
    elif told is None and queue != QueueSettings(name=queue.name):
        what = f"topic {SETTINGS_TOPIC} has no record of it: clients without ZooKeeper go by the defaults"
        yield Severity.WARNING, Kind.RECORD_MISSING, what, to_do
    elif told is not None and told != queue:
        values = dataclasses.asdict(queue)
        other = ", ".join(
            f"{key}: {value!r}, not {values[key]!r}"
            for key, value in dataclasses.asdict(told).items()
            if value != values[key]
        )
        what = f"topic {SETTINGS_TOPIC} tells clients other settings than the registry has ({other})"
        yield Severity.WARNING, Kind.RECORD_DIFFERS, what, to_do


def _groups(facts: Facts) -> _Found:
    others = [group for group in facts.groups if group != facts.settings.consumer_group]
    if others:
        what = (
            f"other consumer groups read {facts.settings.name}: {', '.join(others)}; one queue topic serves "
            f"one kmq group ({facts.settings.consumer_group})"
        )
        to_do = "give each group that takes messages a queue of its own; a group that only looks on is fine"
        yield Severity.WARNING, Kind.OTHER_GROUPS, what, to_do


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
