"""Reads the commits of a queue's group, and finds cuts of logs that nobody has noticed yet.

Behind a cut, a log has other messages than those that were taken there (rule R39 of docs/rules.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from kmqpy.kafka import kafka_errors, librdkafka, partition_reader
from kmqpy.kafka.client.offset_commits import Commit, commit_of
from kmqpy.kafka.cut_search import find_cut
from kmqpy.kafka.ended_letters import EndedLetters
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts
from kmqpy.kafka.partition_reader import KeptConsumers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds


class KnownRecord(NamedTuple):
    """A record with this leader epoch, or a lower one, stood at this offset; see find_cut."""

    offset: int
    epoch: int
    may_be_control: bool = False


def group_commits(
    connection: KafkaConnection, queue: QueueSettings, partitions: Iterable[int], ids: TopicIds
) -> dict[int, Commit]:
    """Return the commits of the queue's group by partition.

    Leaves out partitions without a commit, and commits for an earlier topic than the queue topic in `ids`
    (rule R24 of docs/rules.md). Raises TopicError, Unavailable.
    """
    with closing(_group_consumer(connection, queue)) as consumer:
        return _ask_commits(consumer, connection, queue, partitions, ids)


def commits_in_log(
    connection: KafkaConnection, queue: QueueSettings, partitions: Iterable[int], ids: TopicIds
) -> dict[int, Commit]:
    """Return the commits as group_commits() does, for the logs as they are now.

    If a log was cut back below its commit, and no client has noticed it yet, the commit ends at the cut, and
    names it. A commit beyond the end of a log that was not cut counts as one of the beginning: so do clients
    of kmqpy take it.
    """
    with closing(_group_consumer(connection, queue)) as consumer:
        commits = _ask_commits(consumer, connection, queue, partitions, ids)
        ends = _ask_ends(consumer, connection, queue, commits)
    commits = {partition: commit.within(*ends[partition]) for partition, commit in commits.items()}
    for partition, cut in _find_cuts(connection, queue, ends, last_taken(commits)).items():
        commits[partition] = commits[partition].cut_back(cut)
    return commits


def new_cuts(
    connection: KafkaConnection, queue: QueueSettings, *known: Mapping[int, KnownRecord]
) -> dict[int, LogCuts]:
    """Return the cuts that took away known records, by partition; raises TopicError, Unavailable."""
    if not any(known):
        return {}
    with closing(_group_consumer(connection, queue)) as consumer:
        ends = _ask_ends(consumer, connection, queue, {*itertools.chain(*known)})
    found: dict[int, LogCuts] = {}
    for records in known:
        for partition, cut in _find_cuts(connection, queue, ends, records).items():
            found[partition] = found.get(partition, NO_CUTS).with_cut(cut)
    return found


def add_cuts_of_letters(
    connection: KafkaConnection, dead_letters: QueueSettings, ended: Mapping[int, EndedLetters]
) -> list[int]:
    """Add the cuts of the dead letters' log that nobody has told yet; returns their partitions.

    Raises TopicError, Unavailable.
    """
    known = [
        {partition: KnownRecord(offset, epoch)}
        for partition, letters in ended.items()
        for epoch, offset in letters.claimed.items()
    ]
    changed = []
    for partition, cuts in new_cuts(connection, dead_letters, *known).items():
        merged = ended[partition].cuts.merged(cuts)
        if merged != ended[partition].cuts:
            ended[partition].cuts = merged
            changed.append(partition)
    return changed


def last_taken(commits: Mapping[int, Commit]) -> dict[int, KnownRecord]:
    """Return the last message before each commit, as far as its leader epoch is known."""
    return {
        partition: KnownRecord(commit.offset - 1, commit.epoch)
        for partition, commit in commits.items()
        if commit.offset > 0 and commit.epoch is not None
    }


def _find_cuts(
    connection: KafkaConnection,
    queue: QueueSettings,
    ends: Mapping[int, LogEnd],
    known: Mapping[int, KnownRecord],
) -> dict[int, Cut]:
    """Find the cuts that took away known records, by partition."""
    gone = {partition for partition, one in known.items() if one.offset >= ends[partition].offset}
    elected = [
        (partition, one.offset)
        for partition, one in known.items()
        if partition not in gone and ends[partition].epoch > one.epoch
    ]
    # Usually the record is still there, and one reader can read those of all partitions.
    records = partition_reader.read_at(connection, queue.name, elected) if elected else {}
    there = {p for (p, _), record in records.items() if (record.leader_epoch() or 0) <= known[p].epoch}
    gone |= {p for p, _ in elected if p not in there}  # even where a record stands that nobody reads
    found = {
        partition: find_cut(connection, queue.name, partition, **known[partition]._asdict())
        for partition in gone
    }
    return {partition: cut for partition, cut in found.items() if cut is not None}


def _group_consumer(connection: KafkaConnection, queue: QueueSettings) -> Consumer:
    """A consumer that reads the group's commits, never joins the group, and knows where logs end."""
    settings = {"group.id": queue.consumer_group, "isolation.level": "read_uncommitted"}
    return librdkafka.new_consumer(connection, settings)


def _ask_commits(
    consumer: Consumer,
    connection: KafkaConnection,
    queue: QueueSettings,
    partitions: Iterable[int],
    ids: TopicIds,
) -> dict[int, Commit]:
    wanted = [TopicPartition(queue.name, partition) for partition in partitions]
    with kafka_errors.translating(f"offsets of group {queue.consumer_group}", connection):
        places = kafka_errors.retrying(
            # An error does not mean that there is no commit.
            lambda try_s: _checked(consumer.committed(wanted, timeout=try_s)),
            connection.timeout_s,
            connection,
        )
    commits = {place.partition: commit_of(place, ids) for place in places}
    return {partition: commit for partition, commit in commits.items() if commit is not None}


def log_ends(kept: KeptConsumers, queue: QueueSettings, partitions: Iterable[int]) -> dict[int, LogEnd]:
    """Return where the logs of the queue topic end; raises TopicError, Unavailable."""
    return _ask_ends(kept.ends.consumer, kept.connection, queue, partitions)


def _ask_ends(
    consumer: Consumer, connection: KafkaConnection, queue: QueueSettings, partitions: Iterable[int]
) -> dict[int, LogEnd]:
    wanted = [TopicPartition(queue.name, partition, OFFSET_END) for partition in partitions]
    if not wanted:
        return {}

    def ask(try_s: float) -> list[TopicPartition]:
        places = _checked(consumer.offsets_for_times(wanted, timeout=try_s))
        if any(place.offset < 0 for place in places):
            raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
        return places

    with kafka_errors.translating(f"ask where {queue.name} ends", connection):
        places = kafka_errors.retrying(ask, connection.timeout_s, connection)
    return {
        place.partition: LogEnd(place.offset, -1 if place.leader_epoch is None else place.leader_epoch)
        for place in places
    }


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places
