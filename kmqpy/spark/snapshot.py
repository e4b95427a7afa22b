"""Decides from and up to which offsets the topics of a queue are read."""

from __future__ import annotations

from dataclasses import dataclass

from kmqpy.kafka import partition_reader
from kmqpy.kafka.group_commits import commits_in_log
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.spark.log_cuts import Cuts
from kmqpy.spark.records import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The range of offsets to read of each topic of a queue, by partition, for a state that is consistent.

    committed  the group's committed offsets, read before the ranges
    cuts       where logs of the queue topic were cut back, as far as the commits tell
    ends       the end of each partition of the queue topic, with records that are not committed; read last
    """

    topics: QueueTopics
    committed: list[Place]
    cuts: Cuts
    markers: Bounds
    queue: Bounds
    ends: list[Place]
    dead_letters: Bounds


def take_snapshot(connection: KafkaConnection, queue: QueueSettings) -> Snapshot:
    """Read the offsets of a Snapshot from Kafka; raises QueueNotFound, TopicError, Unavailable."""
    topics = Topics(connection).check(queue)
    dead, numbers = topics.dead_letters, range(topics.partitions)
    commits = commits_in_log(connection, queue, numbers, topics.ids)
    # The order matters. First the commits: a message below a committed offset has its markers in `markers`.
    # Then the markers, before dead letters and messages: a copy is there if `markers` has the end marker that
    # was written with it.
    markers = partition_reader.bounds(connection, queue.markers_topic, numbers)
    dead_letters = (
        {} if dead is None else partition_reader.bounds(connection, dead.name, range(dead.partitions))
    )
    messages = partition_reader.bounds(connection, queue.name, numbers)
    # With uncommitted records: JVM clients read them by default, so they may be taken, too.
    ends = partition_reader.bounds(connection, queue.name, numbers, uncommitted=True)
    return Snapshot(
        topics=topics,
        committed=sorted((partition, commit.offset) for partition, commit in commits.items()),
        cuts={partition: commit.cuts for partition, commit in commits.items() if commit.cuts},
        markers=markers,
        queue=messages,
        ends=[(partition, end) for partition, (_, end) in ends.items()],
        dead_letters=dead_letters,
    )


def committed_starts(
    connection: KafkaConnection, queue: QueueSettings, topics: QueueTopics
) -> dict[int, int]:
    """By partition, where the queue's group goes on; a purge may have deleted more than it has read."""
    partitions = range(topics.partitions)
    commits = commits_in_log(connection, queue, partitions, topics.ids)
    logs = partition_reader.bounds(connection, queue.name, partitions)
    return {p: max(commits[p].offset if p in commits else 0, low) for p, (low, _) in logs.items()}
