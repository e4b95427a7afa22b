"""Checks the trackers of a queue, its offsets, its clocks, and other consumer groups.

The offsets are those that trackers have stored and that the queue's group has committed. The clocks are
judged by the timestamps of markers, and by the partition's now that a tracker has stored with the offset.
"""

from __future__ import annotations

from kmqpy.kafka.admin.checks.advice import config_number, has_client_timestamps, set_advice
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.settings import CLOCK_LEAD_MS
from kmqpy.kafka.topics import TopicInfo


def check_trackers(facts: Facts) -> Faults:
    """Find trackers that do not run or do not reach Kafka, and partitions that no tracker owns."""
    registered = facts.registered
    if registered is None:  # no tracker can serve the queue; check_topics() tells that
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


def check_offsets(facts: Facts) -> Faults:
    """Find offsets that do not fit the records in the topics.

    Trackers have stored the offsets of markers; the queue's group has committed the offsets of messages.
    """
    queue = facts.settings
    markers = facts.topics.get(queue.markers_topic)
    for partition, stored in sorted(facts.stored.items()):
        low, end = facts.markers_log.get(partition, (0, stored.offset))
        place = f"{queue.markers_topic}, partition {partition}"
        if markers is not None and stored.markers_id != markers.topic_id:
            what = f"{place}: the stored offset is of an earlier topic of that name"
            to_do = "nothing when the topic was recreated on purpose: a tracker starts at its beginning"
            yield Severity.WARNING, Kind.OFFSET_OF_EARLIER_TOPIC, what, to_do
        elif stored.offset < low:
            what = (
                f"{place}: the stored offset {stored.offset} is below the log start {low}: markers of "
                "messages in flight were deleted"
            )
            to_do = "a tracker goes on at the log start; messages whose markers are gone are not redelivered"
            to_do += _longer_retention_advice(queue.markers_topic, markers)
            yield Severity.ERROR, Kind.OFFSET_BELOW_LOG, what, to_do
        elif stored.offset > end:
            what = f"{place}: the stored offset {stored.offset} is beyond the end {end}"
            to_do = "a tracker reads from the beginning; see why the log was cut"
            yield Severity.WARNING, Kind.OFFSET_BEYOND_LOG, what, to_do
    for partition, commit in sorted(facts.commits.items()):
        low, end = facts.queue_log.get(partition, (0, 0))
        if commit.offset < low < end:  # low == end: a purge has emptied the log
            what = (
                f"{queue.name}, partition {partition}: up to {low - commit.offset} messages were deleted "
                "before anybody took them"
            )
            to_do = "this is told until a client has taken the next one"
            to_do += _longer_retention_advice(queue.name, facts.topics.get(queue.name))
            yield Severity.WARNING, Kind.DELETED_BEFORE_TAKEN, what, to_do


def _longer_retention_advice(name: str, topic: TopicInfo | None) -> str:
    """Return advice to double the retention of a topic; empty if the topic keeps records for ever."""
    retention = config_number(topic, "retention.ms")
    if retention is None or retention == -1:
        return ""
    return f"; so that it does not happen again, {set_advice('retention.ms', 2 * retention, name)}"


def check_clocks(facts: Facts) -> Faults:
    """Find timestamps of markers, and times stored in ZooKeeper, too far ahead of this machine's clock.

    The stored time is the partition's now at the stored offset. Too far is further than a tracker tolerates
    by default (rule R23 of docs/rules.md).
    """
    topic = facts.settings.markers_topic
    for partition, (offset, timestamp_ms) in sorted(facts.markers_latest.items()):
        if (ahead_ms := timestamp_ms - facts.now_ms) > CLOCK_LEAD_MS:
            what = (
                f"{topic}, partition {partition}: the marker at offset {offset} has a timestamp "
                f"{ahead_ms / 1000:g} s ahead of this machine's clock; trackers do not believe it"
            )
            to_do = "check the clocks of brokers and of this machine; if they are right, they were wrong then"
            if has_client_timestamps(facts.topics.get(topic)):
                brokers_time = set_advice("message.timestamp.type", "LogAppendTime", topic)
                to_do = f"check the clocks of clients and of this machine; {brokers_time}"
            yield Severity.WARNING, Kind.MARKER_TIME_AHEAD, what, to_do
    for partition, stored in sorted(facts.stored.items()):
        if (ahead_ms := stored.now_ms - facts.now_ms) > CLOCK_LEAD_MS:
            what = (
                f"{topic}, partition {partition}: the time stored in ZooKeeper is {ahead_ms / 1000:g} s "
                "ahead of this machine's clock; the next tracker to take the partition over sets it back"
            )
            to_do = "check the clocks of brokers and of this machine"
            yield Severity.WARNING, Kind.STORED_TIME_AHEAD, what, to_do


def check_consumer_groups(facts: Facts) -> Faults:
    """Find consumer groups, other than the queue's own, that read the queue topic."""
    others = [group for group in facts.groups if group != facts.settings.consumer_group]
    if others:
        what = (
            f"other consumer groups read {facts.settings.name}: {', '.join(others)}; one queue topic serves "
            f"one kmq group ({facts.settings.consumer_group})"
        )
        to_do = "give each group that takes messages a queue of its own; a group that only looks on is fine"
        yield Severity.WARNING, Kind.OTHER_GROUPS, what, to_do
