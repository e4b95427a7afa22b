"""Checks which topics a queue has: missing, shared and recreated ones, and their numbers of partitions.

Rules R19 (it grows from its markers topic on) and R24 (a queue is its topic ids) of docs/rules.md.
"""

from __future__ import annotations

from kmqpy.kafka.admin.checks.advice import create_command, grow_command, option_of_lane
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.settings import DEAD_LETTERS_SUFFIX, MARKERS_SUFFIX, QueueSettings, queue_of
from kmqpy.kafka.topic_identity import find_stale_markers
from kmqpy.kafka.topic_names import dead_letter_queue, topics_of


def check_topics(facts: Facts) -> Faults:
    """Find topics of the queue that do not exist, and a queue that is not registered."""
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


def check_shared_topics(facts: Facts) -> Faults:
    """Find topics that serve two queues, as earlier versions allowed."""
    queue = facts.settings
    dead = dead_letter_queue(queue)
    messages_of = {queue.markers_topic: queue.name, dead.markers_topic: dead.name}
    shared_names = {one.name for one in facts.shared}
    for shared in facts.shared:
        if any(messages_of.get(shared.name) == one.name for one in facts.shared if one.other == shared.other):
            continue  # the finding about the topic of the messages says it
        what = f"its {shared.role} {shared.name} is the {shared.role_there} of queue {shared.other}, too"
        to_do = (
            f"give it topics of its own, when it is empty: `kmq queue delete {queue.name} --if-empty`, "
            f"then `{create_command(queue, facts.topics, shared_names)}`"
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


def check_partitions(facts: Facts) -> Faults:
    """Find topics, or a registry entry, with more or fewer partitions than the queue topic (rule R19)."""
    queue = facts.settings
    messages = facts.topics.get(queue.name)
    if messages is None:
        return
    dead = dead_letter_queue(queue)
    shared_names = {one.name for one in facts.shared}
    for name in (queue.markers_topic, dead.name, dead.markers_topic):
        other = facts.topics.get(name)
        if other is None or other.partitions == messages.partitions:
            continue
        what = f"{queue.name} has {messages.partitions} partitions, {name} has {other.partitions}"
        if other.partitions < messages.partitions:
            yield Severity.ERROR, Kind.TOO_FEW_PARTITIONS, what, grow_command(queue, messages.partitions)
        elif name not in shared_names:
            yield Severity.WARNING, Kind.TOO_MANY_PARTITIONS, what, grow_command(queue, other.partitions)
    registered = facts.registered
    if registered is not None and registered.partitions < messages.partitions:
        what = (
            f"{messages.partitions} partitions, but trackers know of {registered.partitions}: "
            "nothing is redelivered in the others"
        )
        yield Severity.ERROR, Kind.TOO_FEW_REGISTERED, what, grow_command(queue, messages.partitions)
    if registered is not None and registered.partitions > messages.partitions:
        what = f"trackers know of {registered.partitions} partitions, {queue.name} has {messages.partitions}"
        yield Severity.WARNING, Kind.TOO_MANY_REGISTERED, what, grow_command(queue, registered.partitions)


def check_stale_markers(facts: Facts) -> Faults:
    """Find topics that were recreated while their markers topics were not (rule R24)."""
    queue = facts.settings
    now = {name: topic.topic_id for name, topic in facts.topics.items()}
    told = None if facts.records is None else facts.records.own.get(queue.name)
    found = {} if told is None else find_stale_markers(queue, told.topic_ids, now)
    ids = now.get(queue.name, ""), now.get(queue.markers_topic, "")
    if all(ids) and any(stored.is_of_earlier_queue(*ids) for stored in facts.stored.values()):
        found = {queue.name: queue.markers_topic} | found
    for name, markers in found.items():
        what = f"topic {name} was recreated, but not {markers}, whose markers count for the new messages: "
        if name in queue.lane_markers:
            what += "none is taken or redelivered, so that none is lost"
        else:
            what += "dead letters can be missing where they are listed or redriven"
        to_do = f"`kmq queue create {queue.name}` recreates {markers}; the messages stay"
        yield Severity.ERROR, Kind.MARKERS_OF_EARLIER_TOPIC, what, to_do


def check_unregistered_topics(topics: set[str], used: set[str]) -> list[Finding]:
    """Find topics of no queue that look like those of one, or of a lane: a topic and its markers topic."""
    found = []
    for name in sorted(topics):
        if (
            name + MARKERS_SUFFIX not in topics
            or name.endswith((MARKERS_SUFFIX, DEAD_LETTERS_SUFFIX))
            or used.intersection(topics_of(QueueSettings(name=name)))
        ):
            continue
        what = (
            f"topics of a queue {name!r} exist, but it is not registered: no tracker redelivers its messages"
        )
        to_do = f"`kmq queue create {name}` registers it; topics and messages stay"
        if (queue := queue_of(name)) != name and queue + MARKERS_SUFFIX in topics:
            what = (
                f"topics of a lane of queue {queue!r} exist, which its settings lack: nobody takes from there"
            )
            to_do = f"`kmq queue alter {queue} {option_of_lane(name)}` adds it; topics and messages stay"
        found.append(Finding(Severity.WARNING, name, Kind.UNREGISTERED_TOPICS, what, to_do))
    return found
