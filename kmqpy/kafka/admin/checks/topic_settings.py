"""Checks the settings that Kafka has for a queue's topics: compaction, timestamps, replicas, size limits."""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.kafka.admin.checks.advice import config_number, create_command, has_client_timestamps, set_advice
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.topic_names import dead_letter_queue, markers_topics
from kmqpy.kafka.topics import TopicInfo, dead_letter_limit

OF_KAFKA = ("__transaction_state", "__consumer_offsets")
"""Kafka's own topics, without which nothing is redelivered, and clients lose how far they were."""


def check_topics_of_kafka(topics: Iterable[TopicInfo], brokers: int) -> list[Finding]:
    """Find among OF_KAFKA and kmq.queues topics that one of several brokers can take with it."""
    found = []
    for topic in topics:
        faults = [*_can_lose_what_is_confirmed(topic, "a change of it", replicas=3), *_lags(topic)]
        if topic.replication == 1 < brokers:
            what = f"{topic.name} has one replica only: while its broker is away, queues stand still"
            to_do = f"move its partitions with Kafka's tools to {min(3, brokers)} brokers each"
            faults.append((Severity.WARNING, Kind.ONE_REPLICA, what, to_do))
        found += [Finding(severity, topic.name, kind, what, to_do) for severity, kind, what, to_do in faults]
    return found


def _can_lose_what_is_confirmed(topic: TopicInfo, record: str = "a message", replicas: int = 2) -> Faults:
    """`record`: what is written there; with fewer than `replicas`, one of them must do."""
    name = topic.name
    if topic.config.get("unclean.leader.election.enable") == "true":
        what = f"{name} allows unclean leader elections: confirmed messages can be lost"
        to_do = set_advice("unclean.leader.election.enable", "false", name)
        yield Severity.WARNING, Kind.UNCLEAN_ELECTION, what, to_do
    in_sync = config_number(topic, "min.insync.replicas")
    if topic.replication >= replicas and in_sync is not None and in_sync < 2:
        what = f"{name} has min.insync.replicas={in_sync}: {record} can be confirmed by one broker only"
        to_do = set_advice("min.insync.replicas", 2, name)
        yield Severity.WARNING, Kind.TOO_FEW_IN_SYNC, what, to_do


def _lags(topic: TopicInfo) -> Faults:
    if topic.behind:
        partitions = ", ".join(map(str, topic.behind))
        what = f"{topic.name}, partition {partitions}: a replica is not in sync"
        to_do = (
            "start its broker; if it runs, its log says why: it may have given the partition up, "
            'see docs/operations.md, "Damaged logs"'
        )
        yield Severity.WARNING, Kind.OUT_OF_SYNC, what, to_do


def check_topic_settings(facts: Facts) -> Faults:
    """Find settings of topics with which records can be lost, can't be written, or have wrong timestamps."""
    queue = facts.settings
    dead = dead_letter_queue(queue)
    for name, topic in facts.topics.items():
        config = topic.config
        if "compact" in config.get("cleanup.policy", ""):
            what = f"{name} is compacted: records disappear"
            yield Severity.ERROR, Kind.COMPACTED, what, set_advice("cleanup.policy", "delete", name)
        if name in markers_topics(queue).values() and has_client_timestamps(topic):
            what = f"{name} has the clients' timestamps (CreateTime): a wrong clock there moves all leases"
            to_do = set_advice("message.timestamp.type", "LogAppendTime", name)
            yield Severity.WARNING, Kind.CLIENT_TIMESTAMPS, what, to_do
        yield from (*_can_lose_what_is_confirmed(topic), *_lags(topic))
        in_sync = config_number(topic, "min.insync.replicas")
        if in_sync is not None and in_sync > topic.replication:
            what = (
                f"{name} has min.insync.replicas={in_sync} and {topic.replication} replicas: nothing is sent"
            )
            to_do = set_advice("min.insync.replicas", max(1, topic.replication - 1), name)
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
                f"`{create_command(queue, facts.topics, set())} --replication {count}`"
            )
        yield Severity.WARNING, Kind.ONE_REPLICA, what, to_do
    largest = config_number(facts.topics.get(queue.name), "max.message.bytes")
    of_dead = config_number(facts.topics.get(dead.name), "max.message.bytes")
    if largest is not None and of_dead is not None and of_dead < min(2 * largest, dead_letter_limit(largest)):
        what = f"{dead.name} takes messages of {of_dead} bytes, {queue.name} of {largest}: "
        to_do = set_advice("max.message.bytes", dead_letter_limit(largest), dead.name)
        kind = Kind.DEAD_LETTERS_TOO_LARGE
        if of_dead < largest:
            yield Severity.ERROR, kind, f"{what}large ones get stuck", to_do
        else:
            yield Severity.WARNING, kind, f"{what}those too large to be copied get stuck", to_do
