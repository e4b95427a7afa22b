"""Ends hanging transactions that kmqpy has written itself: those of trackers and redrives.

A producer that is opened with the transactional.id of a hanging transaction gets the same producer id. So
when it ends a transaction of its own in the partition, Kafka's control record ends the hanging one, too, and
in the same way. That is impossible where Kafka's coordinator has forgotten the transactional.id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kmqpy.core.clock import wait_until
from kmqpy.errors import DecodeError
from kmqpy.kafka import kafka_errors, partition_reader
from kmqpy.kafka.copies.copy_transaction import open_producer
from kmqpy.kafka.hanging import HangingTransaction, open_transactions
from kmqpy.kafka.log_ends import LogEnds
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY, RecordPlace, read_ancestors, read_copies
from kmqpy.kafka.markers.records import message_headers, read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import markers_topics
from kmqpy.message import last_header

_log = logging.getLogger(__name__)

_TIMEOUT_MS = 10_000
_OPEN_TIMEOUT_S = 30.0
_SHOWN_WITHIN_S = 5.0
"""Readers see the end of a transaction a moment after its commit or abort has returned."""
_CLOCKS_DIFFER_MS = 600_000
"""End markers are looked for from this long before the time of the copy on, which another clock may tell."""


@dataclass(frozen=True, slots=True)
class OwnTransaction:
    """A hanging transaction of a tracker or redrive.

    transactional_id  that of its producer
    commits           True if readers see its records in another partition: it was committed there
    may_be_ended      False if end_transaction() would have to commit a record that readers take for a message
    """

    hanging: HangingTransaction
    transactional_id: str
    commits: bool
    may_be_ended: bool


def open_transactions_of_tracker(
    connection: KafkaConnection, queue: QueueSettings, partition: int
) -> list[OwnTransaction]:
    """Return the open transactions of the tracker that owns this partition.

    They hang if the caller has fenced the partition's former owners and has begun none. Raises Unavailable.
    """
    name = _transactional_id(queue, queue.name, partition)
    places = ((queue.markers_topic, partition), (queue.name, partition))
    found = (own_transaction(connection, queue, one) for one in open_transactions(connection, places))
    return [own for own in found if own is not None and own.transactional_id == name]


def original_of(own: OwnTransaction) -> int:
    """The number of the message whose copy is the first record of a transaction in its queue topic."""
    copy = RecordPlace(own.hanging.topic, own.hanging.partition, own.hanging.offset)
    return read_ancestors(last_header(own.hanging.headers, ANCESTORS), copy)[-1].offset


def own_transaction(
    connection: KafkaConnection, queue: QueueSettings, hanging: HangingTransaction
) -> OwnTransaction | None:
    """Return what is known of a hanging transaction in a topic of `queue`; None if it is not kmqpy's own.

    A transaction copies messages, and writes end markers that name the copies. So end markers are looked for
    that name a copy which hangs, and copies that are named by end markers which hang. Raises Unavailable.
    """
    markers_of = {**markers_topics(queue), **queue.lane_markers}
    messages_of = {markers: name for name, markers in markers_of.items()}
    if not hanging.ours:
        return None
    if hanging.topic in messages_of:
        messages = messages_of[hanging.topic]
        name = _transactional_id(queue, messages, hanging.partition)
        commits = _has_committed_copy(connection, messages, hanging)
        return OwnTransaction(hanging, name, commits, may_be_ended=True)
    copy = RecordPlace(hanging.topic, hanging.partition, hanging.offset)
    try:
        *_, original = read_ancestors(last_header(hanging.headers, ANCESTORS), copy)
    except (DecodeError, ValueError):
        return None
    if original.topic not in messages_of.values():
        return None
    name = _transactional_id(queue, original.topic, original.partition)
    commits = _is_named(connection, markers_of[original.topic], original, copy, hanging.since_ms)
    return OwnTransaction(hanging, name, commits, may_be_ended=not commits)


def end_transaction(connection: KafkaConnection, own: OwnTransaction) -> bool:
    """Commit or abort a hanging transaction; returns False if Kafka does not know its producer any more.

    What an aborted transaction has copied is copied again. Fences the tracker or redrive that works with this
    transactional.id; a tracker then takes its partition over again. Raises KmqError if Kafka refuses.
    """
    topic, partition = own.hanging.place
    doing = f"end the transaction in {topic}, partition {partition}"
    producer = open_producer(connection, own.transactional_id, _TIMEOUT_MS, doing, _OPEN_TIMEOUT_S)
    key, value, headers = codec.encode(codec.tick(partition))
    with kafka_errors.translating(doing, connection):
        producer.begin_transaction()
        producer.produce(topic, value, key, partition, headers=headers)  # type: ignore[arg-type]
        producer.flush(_TIMEOUT_MS / 1000)
        end = producer.commit_transaction if own.commits else producer.abort_transaction
        end(_TIMEOUT_MS / 1000)
    with closing(LogEnds(connection, committed=True)) as asks:
        return wait_until(lambda: _is_beyond(asks, own.hanging), _SHOWN_WITHIN_S)


def _transactional_id(queue: QueueSettings, messages: str, partition: int) -> str:
    """The transactional.id with which messages of this topic, and partition, are copied."""
    if messages in queue.lane_markers:
        return f"kmq-tracker-{messages}-{partition}"
    return f"kmq-redrive-{queue.queue_name}"


def _has_committed_copy(connection: KafkaConnection, messages: str, hanging: HangingTransaction) -> bool:
    """Return True if readers see the first copy that end markers from the hanging record on name."""
    named: list[RecordPlace] = []

    def visit(record: Any) -> None:
        if not named:
            named.extend(_copies(record, messages))

    starts = {hanging.partition: hanging.offset}
    partition_reader.scan(connection, hanging.topic, starts, visit, uncommitted=True)
    return any(
        partition_reader.read_at(connection, topic, [(partition, offset)])
        for topic, partition, offset in named[:1]
    )


def _is_named(
    connection: KafkaConnection, markers: str, original: RecordPlace, copy: RecordPlace, since_ms: int
) -> bool:
    """Return True if a committed end marker names this copy."""
    found: list[RecordPlace] = []

    def visit(_partition: int, records: list[Any]) -> bool:
        found.extend(one for record in records for one in _copies(record, original.topic) if one == copy)
        return bool(found)

    times_ms = {original.partition: since_ms - _CLOCKS_DIFFER_MS}
    partition_reader.scan_since(connection, markers, times_ms, visit)
    return bool(found)


def _copies(record: Any, messages: str) -> Iterator[RecordPlace]:
    """The copies that an end marker of messages in this topic names; none for any other record."""
    data = last_header(message_headers(record), COPY)
    if data is not None:
        try:
            yield from read_copies(data, messages, read_marker(record).count)
        except DecodeError:
            return


def _is_beyond(asks: LogEnds, hanging: HangingTransaction) -> bool:
    stable = asks.each_of([hanging.place])[hanging.place]
    return isinstance(stable, int) and stable > hanging.offset
