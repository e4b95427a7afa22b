"""Checks that programs of the JVM library kmq can read the markers of a queue.

Its clients only write markers, its trackers read them. A JVM tracker takes a range marker for the end marker
of one message: so it redelivers nothing of what kmqpy's clients have taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import GroupMember, Members

_JVM_CLIENT_ID = "consumer-"
"""How the ids begin that Kafka's library for the JVM gives to consumers, unless a program says otherwise.
Those of librdkafka are `rdkafka`."""


def check_marker_format(facts: Facts) -> Faults:
    """Find programs on the JVM at a queue that has range markers."""
    if facts.registered is None or not facts.registered.settings.writes_ranges:
        return
    queue = facts.settings
    if trackers := jvm_trackers(queue, facts.members):
        what = (
            f"{_named(trackers)} reads {queue.markers_topic}, as trackers of the JVM library do: they take "
            "range markers for acknowledgements, and don't redeliver what kmqpy's clients have taken"
        )
        to_do = f"`kmq queue alter {queue.name} --markers jvm`, then restart the queue's clients"
        yield Severity.ERROR, Kind.RANGES_WITH_JVM_TRACKER, what, to_do
    elif clients := _jvm_clients(queue, facts.members):
        ids = sorted({one.client_id for one in clients})
        what = (
            f"{_named(clients)} has members on the JVM ({', '.join(ids)}): a tracker of their library, "
            "if one runs at times, can't read the queue's range markers"
        )
        to_do = (
            "nothing where kmqpy's trackers alone serve the queue; else "
            f"`kmq queue alter {queue.name} --markers jvm`, then restart the queue's clients"
        )
        yield Severity.WARNING, Kind.RANGES_WITH_JVM_CLIENTS, what, to_do


def jvm_trackers(queue: QueueSettings, members: Members) -> list[GroupMember]:
    """Return the members of consumer groups that read the markers topic: kmqpy reads it without a group."""
    return members.get(queue.markers_topic, [])


def refuse_jvm_trackers(queue: QueueSettings, members: Members) -> None:
    """Raise ConfigError if JVM trackers seem to serve a queue that is about to get range markers."""
    if trackers := jvm_trackers(queue, members):
        raise ConfigError(
            f"markers: {_named(trackers)} reads {queue.markers_topic}, as trackers of the JVM library do, "
            "and these can't read range markers; stop them, or let the queue have JVM markers (--markers jvm)"
        )


def _jvm_clients(queue: QueueSettings, members: Members) -> list[GroupMember]:
    return [
        one
        for one in members.get(queue.name, [])
        if one.group == queue.consumer_group and one.client_id.startswith(_JVM_CLIENT_ID)
    ]


def _named(members: Iterable[GroupMember]) -> str:
    return f"consumer group {', '.join(sorted({one.group for one in members}))}"
