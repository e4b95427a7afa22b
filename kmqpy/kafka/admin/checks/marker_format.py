"""Checks that programs of the JVM library kmq can read the markers of a queue.

Its clients only write markers, its trackers read them. A JVM tracker takes a range marker for the end marker
of one message: so it redelivers nothing of what kmqpy's clients have taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import GroupMember, Members

_log = logging.getLogger(__name__)

_JVM_CLIENT_ID = "consumer-"
"""How the ids begin that Kafka's library for the JVM gives to consumers, unless a program says otherwise.
Those of librdkafka are `rdkafka`."""


def check_marker_format(facts: Facts) -> Faults:
    """Find programs on the JVM at a queue that has range markers."""
    if facts.registered is None or not facts.registered.settings.writes_ranges:
        return
    queue = facts.settings
    if trackers := facts.members.get(queue.markers_topic):  # kmqpy reads them without a group
        what = (
            f"{_named(trackers)} reads {queue.markers_topic}, as trackers of the JVM library do: they take "
            "range markers for acknowledgements, and don't redeliver what kmqpy's clients have taken"
        )
        to_do = f"`kmq queue alter {queue.name} --markers jvm`, then restart the queue's clients"
        yield Severity.ERROR, Kind.RANGES_WITH_JVM_TRACKER, what, to_do
    elif what := _told_of_clients(queue, facts.members):
        to_do = (
            "nothing where kmqpy's trackers alone serve the queue; else "
            f"`kmq queue alter {queue.name} --markers jvm`, then restart the queue's clients"
        )
        yield Severity.WARNING, Kind.RANGES_WITH_JVM_CLIENTS, what, to_do


def check_before_ranges(queue: QueueSettings, members: Members) -> None:
    """Raise ConfigError if JVM trackers seem to serve a queue that is to get range markers.

    Logs a warning if clients on the JVM do.
    """
    if trackers := members.get(queue.markers_topic):
        raise ConfigError(
            f"markers: {_named(trackers)} reads {queue.markers_topic}, as trackers of the JVM library do, "
            "and these can't read range markers; stop them, or let the queue have JVM markers (--markers jvm)"
        )
    if told := _told_of_clients(queue, members):
        _log.warning("%s", told, extra={"queue": queue.name})


def _told_of_clients(queue: QueueSettings, members: Members) -> str:
    """Say which members of the queue's group are on the JVM; empty if none seem to be."""
    found = [
        one
        for one in members.get(queue.name, [])
        if one.group == queue.consumer_group and one.client_id.startswith(_JVM_CLIENT_ID)
    ]
    if not found:
        return ""
    return (
        f"{_named(found)} has members on the JVM ({', '.join(sorted({one.client_id for one in found}))}): "
        "a tracker of their library, if one runs at times, can't read the queue's range markers"
    )


def _named(members: Iterable[GroupMember]) -> str:
    return f"consumer group {', '.join(sorted({one.group for one in members}))}"
