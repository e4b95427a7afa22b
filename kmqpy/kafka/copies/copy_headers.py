"""The headers of a copy: those of the original, and what the copy itself has to say. Pure: no I/O.

A copy keeps all headers of its original, but for those that tell of the original's own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kmqpy.kafka.markers.codec import encode_count
from kmqpy.kafka.markers.late_operations import PLANNED_AT, planned_at_header, read_planned_at
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, ancestors_header
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    DELIVER_AT,
    ORIGINAL_OFFSET,
    ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP,
)
from kmqpy.kafka.settings import QueueSettings
from kmqpy.message import Headers, last_header, without

_ORIGIN = (ORIGINAL_PARTITION, ORIGINAL_OFFSET, ORIGINAL_TIMESTAMP)
_DEAD_LETTER = (
    DEAD_LETTER_TOPIC,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_REASON,
)


class Origin(NamedTuple):
    """Where in the queue topic the original stands, and since when."""

    partition: int
    offset: int
    timestamp_ms: int


def redelivery_headers(
    original: Headers,
    origin: Origin,
    queue: QueueSettings,
    count: int,
    ancestors: Sequence[RecordPlace],
    position: int = 0,
) -> Headers:
    """The headers of a copy that is redelivered for the `count`-th time.

    ancestors  those of the original
    position   the markers offset before which all markers were known when the copy was planned

    `kmq-deliver-at` is dropped: the delay that it asked for is over.
    """
    return (
        *_kept(original, origin, queue),
        *_planned_at(original, origin, queue, position),
        _lineage(queue.name, ancestors, origin, queue),
        *_count(queue, count),
    )


def dead_letter_headers(
    original: Headers,
    origin: Origin,
    queue: QueueSettings,
    count: int,
    ancestors: Sequence[RecordPlace],
    reason: str,
) -> Headers:
    """The headers of a dead letter, whose original was redelivered `count` times."""
    return (
        *without(_kept(original, origin, queue), *_DEAD_LETTER),
        _lineage(queue.dead_letter_topic, ancestors, origin, queue),
        (DEAD_LETTER_TOPIC, queue.name.encode()),
        (DEAD_LETTER_PARTITION, _decimal(origin.partition)),
        (DEAD_LETTER_OFFSET, _decimal(origin.offset)),
        (DEAD_LETTER_ATTEMPTS, _decimal(count + 1)),
        (DEAD_LETTER_REASON, reason.encode("utf-8", "replace")),
        *_count(queue, count),
    )


def redriven_headers(
    dead_letter: Headers, place: RecordPlace, queue: QueueSettings, ancestors: Sequence[RecordPlace]
) -> Headers:
    """The headers of the dead letter at `place` that is put back into `queue`, as if it was never delivered.

    `ancestors`: those of the dead letter. Of the headers named `kmq-…` only those stay that say where and
    when the message was first sent.
    """
    kept = tuple(
        (name, value)
        for name, value in dead_letter
        if name != queue.redelivery_count_header and (not name.startswith("kmq-") or name in _ORIGIN)
    )
    return (*kept, ancestors_header(queue.name, ancestors, place))


def _kept(original: Headers, origin: Origin, queue: QueueSettings) -> Headers:
    """The original's headers without those of its own state, and where the first original stands."""
    kept = without(original, queue.redelivery_count_header, DELIVER_AT, ANCESTORS, PLANNED_AT)
    if last_header(original, ORIGINAL_OFFSET) is not None:
        return kept
    return (
        *kept,
        (ORIGINAL_PARTITION, _decimal(origin.partition)),
        (ORIGINAL_OFFSET, _decimal(origin.offset)),
        (ORIGINAL_TIMESTAMP, _decimal(origin.timestamp_ms)),
    )


def _lineage(
    topic: str, ancestors: Sequence[RecordPlace], origin: Origin, queue: QueueSettings
) -> tuple[str, bytes]:
    """The ancestors of a copy in `topic`."""
    if not ancestors and topic == queue.name:  # the usual case
        return ANCESTORS, b"%d:%d" % (origin.partition, origin.offset)
    return ancestors_header(topic, ancestors, RecordPlace(queue.name, origin.partition, origin.offset))


def _planned_at(original: Headers, origin: Origin, queue: QueueSettings, position: int) -> Headers:
    """Header: late acknowledgements count from this markers offset, the first copy's plan, on (rule R32)."""
    if not queue.late_acks:
        return ()
    first = read_planned_at(last_header(original, PLANNED_AT), queue.name, origin.partition)
    position = position if first is None else min(first, position)
    return (planned_at_header(queue.name, origin.partition, position),)


def _count(queue: QueueSettings, count: int) -> Headers:
    return ((queue.redelivery_count_header, encode_count(count)),) if count else ()


def _decimal(number: int) -> bytes:
    return b"%d" % number
