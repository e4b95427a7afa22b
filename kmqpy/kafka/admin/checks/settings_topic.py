"""Checks the topic kmq.queues, which tells clients without ZooKeeper the settings of queues.

The topic has one record for each queue. Clients take the defaults for a queue without a readable record, and
write JVM markers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from kmqpy.kafka.admin.checks.advice import create_command, set_advice
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.settings import SETTINGS_TOPIC, QueueSettings
from kmqpy.kafka.settings_mirror import Records
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import TopicInfo


def check_settings_topic(
    topic: TopicInfo | None, error: Exception | None, queues: list[str]
) -> list[Finding]:
    """Find faults of the topic kmq.queues itself.

    topic   kmq.queues as Kafka describes it; None if it does not exist
    error   why its records can't be read; None if they can
    queues  the names of the registered queues
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
        found.append((Kind.SETTINGS_TOPIC_NOT_COMPACTED, what, set_advice("cleanup.policy", "compact", name)))
    if topic is not None and topic.partitions > 1:
        what = f"{name} has {topic.partitions} partitions; kmqpy writes and reads the first only"
        to_do = "nothing, unless something else writes to the others"
        found.append((Kind.SETTINGS_TOPIC_PARTITIONS, what, to_do))
    return [Finding(Severity.WARNING, name, kind, what, to_do) for kind, what, to_do in found]


def check_records_of_no_queue(
    records: Records, registered: Iterable[str], topics: Mapping[str, TopicInfo]
) -> list[Finding]:
    """Find records of kmq.queues for queues of our ZooKeeper root that are not registered.

    `topics` are the existing topics that such records name.
    """
    found = []
    for name, queue in sorted(records.own.items()):
        if name in registered:
            continue
        what = f"topic {SETTINGS_TOPIC} tells clients of queue {name}, which is not registered"
        if any(topic in topics for topic in topics_of(queue)):
            what += "; its topics exist, but no tracker redelivers its messages"
            to_do = f"`{create_command(queue, topics, set())}` registers it again; topics and messages stay"
        else:
            to_do = f"`kmq queue delete {name} --leftovers` takes that away; none of its topics exists"
        found.append(Finding(Severity.WARNING, name, Kind.RECORD_OF_NO_QUEUE, what, to_do))
    return found


def check_record(facts: Facts) -> Faults:
    """Check the record of the queue in kmq.queues: it may be missing, unreadable or unlike the registry."""
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
    elif told is None and queue != QueueSettings(name=queue.name).unregistered():
        what = (
            f"topic {SETTINGS_TOPIC} has no record of it: clients without ZooKeeper go by the defaults, and "
            "write JVM markers"
        )
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
