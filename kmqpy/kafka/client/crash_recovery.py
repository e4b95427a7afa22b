"""Finds messages that were started before: by a client that crashed, or by this one without knowing it.

A commit leads here to the start markers it does not cover (rule R10); see `offset_commits`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.assigned_partition import StartsFound
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_TIMEOUT_S = 2.0
"""How long one markers partition that gives nothing may keep the others waiting (rule R18)."""


def find_starts(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    *,
    markers_offset: int | None,
    first_offset: int,
    clock: Clock,
) -> StartsFound:
    """Start and end markers from `markers_offset` on, for queue offsets >= `first_offset`.

    Finds none, and is not complete, if `markers_offset` is None. Raises Unavailable, TopicError.
    """
    found = StartsFound()
    scan = partial(
        partition_reader.scan,
        connection,
        queue.markers_topic,
        visit=partial(
            _read_marker,
            first_offset=first_offset,
            found=found,
            # Asked only when the end of the markers is known: valid for all of them (rule R22).
            queue_end=cache(partial(_queue_end, connection, queue, partition)),
        ),
        # Start markers are never part of a transaction, and an open one must not hold us up.
        uncommitted=True,
        timeout_s=_TIMEOUT_S,
        clock=clock,
    )
    reached = scan({partition: INT64_MAX if markers_offset is None else markers_offset})
    if markers_offset is not None and markers_offset > reached[partition].end:  # the topic was recreated
        reached = scan({partition: 0})
        markers_offset = 0
    found.end = reached[partition].end
    found.complete = markers_offset is not None and markers_offset >= reached[partition].low
    return found


def _queue_end(connection: KafkaConnection, queue: QueueSettings, partition: int) -> int:
    ends = partition_reader.bounds(connection, queue.name, [partition], _TIMEOUT_S, uncommitted=True)
    return ends[partition][1]


def _read_marker(record: Any, first_offset: int, found: StartsFound, queue_end: Callable[[], int]) -> None:
    try:
        marker = read_marker(record)
    except DecodeError:
        return
    if marker.op not in (Op.TAKE, Op.DELAY, Op.END) or marker.highest < first_offset:
        return
    runs = [
        (max(first, first_offset), first + count - max(first, first_offset))
        for first, count in marker.offset_runs
        if first + count > first_offset
    ]
    if marker.op is not Op.END:
        if marker.highest >= queue_end():
            return  # it names messages that don't exist
        found.started.add_runs(runs)
    if marker.op is Op.TAKE:
        found.in_flight.add_runs(runs)
    else:
        found.in_flight.discard_runs(runs)
