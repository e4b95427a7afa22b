"""Builds the headers of copies: redeliveries, dead letters and redriven messages. Pure: no I/O.

The original of a copy is the record of which it was made directly, which may be a copy itself. The first
record of a message is the one that send() wrote: the headers `kmq-original-…` say where it stands in the
queue topic, and when it was written.

A redelivery and a dead letter keep the headers of their original, except those about the original itself:
its redelivery count, its delay, its ancestors, its claim, and from where to look for its late
acknowledgements (acknowledgements written when the message was claimed or copied already). A redriven message
keeps of the `kmq-…` headers only those about the first record. CopyTransaction adds the claim of each copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kmqpy.kafka.markers.claim_headers import CLAIM_ID
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
    ORIGINAL_TOPIC,
    first_place,
)
from kmqpy.kafka.settings import QueueSettings
from kmqpy.message import Headers, without

_FIRST_RECORD_HEADERS = (ORIGINAL_TOPIC, ORIGINAL_PARTITION, ORIGINAL_OFFSET, ORIGINAL_TIMESTAMP)
_DEAD_LETTER_HEADERS = (
    DEAD_LETTER_TOPIC,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_REASON,
)


class Origin(NamedTuple):
    """The place of the original of a copy in the queue topic, and its timestamp."""

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
    topic: str = "",
) -> Headers:
    """The headers of a copy that redelivers a message.

    count      the redeliveries that count as attempts, with this one if it counts; 0 writes no header
    ancestors  the ancestors of the original: records of which it is a copy, the oldest first
    position   when the tracker decided to copy the message, it had applied all markers before this markers
               offset; clients look for late operations (see late_operations) from there on
    topic      the lane to which the copy goes; empty: that of the original

    `kmq-deliver-at` is dropped, because the delay is over.
    """
    return (
        *_kept_headers(original, origin, queue),
        *_planned_at_header(original, origin, queue, position),
        _ancestors_of_copy(topic or queue.name, ancestors, origin, queue),
        *_count_header(queue, count),
    )


def dead_letter_headers(
    original: Headers,
    origin: Origin,
    queue: QueueSettings,
    count: int,
    ancestors: Sequence[RecordPlace],
    reason: str,
) -> Headers:
    """The headers of a dead letter; `count` as in the redelivery-count header of its original."""
    return (
        *without(_kept_headers(original, origin, queue), *_DEAD_LETTER_HEADERS),
        _ancestors_of_copy(queue.dead_letter_topic, ancestors, origin, queue),
        (DEAD_LETTER_TOPIC, queue.name.encode()),
        (DEAD_LETTER_PARTITION, _decimal(origin.partition)),
        (DEAD_LETTER_OFFSET, _decimal(origin.offset)),
        (DEAD_LETTER_ATTEMPTS, _decimal(count + 1)),
        (DEAD_LETTER_REASON, reason.encode("utf-8", "replace")),
        *_count_header(queue, count),
    )


def redriven_headers(
    dead_letter: Headers,
    place: RecordPlace,
    queue: QueueSettings,
    ancestors: Sequence[RecordPlace],
    topic: str,
) -> Headers:
    """The headers of the copy in `topic` with which a redrive puts the dead letter at `place` into `queue`.

    The copy counts as never delivered: the redelivery count is dropped, and all `kmq-…` headers but those
    about the first record. `ancestors` are those of the dead letter.
    """
    kept = tuple(
        (name, value)
        for name, value in dead_letter
        if name != queue.redelivery_count_header
        and (not name.startswith("kmq-") or name in _FIRST_RECORD_HEADERS)
    )
    return (*kept, ancestors_header(topic, ancestors, place))


def _kept_headers(original: Headers, origin: Origin, queue: QueueSettings) -> Headers:
    """The headers that a copy keeps of its original, and those about the first record.

    An original without headers about the first record is the first record itself. So is one whose headers
    can't be true: programs that forward records may forward them, and clients do not believe them either.
    """
    dropped = (queue.redelivery_count_header, DELIVER_AT, ANCESTORS, PLANNED_AT, CLAIM_ID)
    if first_place(original, queue, (origin.partition, origin.offset)) is not None:
        return without(original, *dropped)
    lane = ((ORIGINAL_TOPIC, queue.name.encode()),) if queue.lane_of is not None else ()
    return (
        *without(original, *dropped, *_FIRST_RECORD_HEADERS),
        *lane,
        (ORIGINAL_PARTITION, _decimal(origin.partition)),
        (ORIGINAL_OFFSET, _decimal(origin.offset)),
        (ORIGINAL_TIMESTAMP, _decimal(origin.timestamp_ms)),
    )


def _ancestors_of_copy(
    topic: str, ancestors: Sequence[RecordPlace], origin: Origin, queue: QueueSettings
) -> tuple[str, bytes]:
    """The ancestors header of a copy in `topic`."""
    if not ancestors and topic == queue.name:  # the usual case
        return ANCESTORS, b"%d:%d" % (origin.partition, origin.offset)
    return ancestors_header(topic, ancestors, RecordPlace(queue.name, origin.partition, origin.offset))


def _planned_at_header(original: Headers, origin: Origin, queue: QueueSettings, position: int) -> Headers:
    """The headers with the markers offsets from which to look for late operations (rules R32, R46).

    One for each lane of the queue in which the message was. A copy of a copy keeps the markers offset of the
    first copy, unless `position` is lower. Empty if the queue's setting `late_acks` is off.
    """
    if not queue.late_acks:
        return ()
    starts = read_planned_at(original, origin.partition, queue.lane_markers)
    starts[queue.name] = min(starts.get(queue.name, position), position)
    return tuple(planned_at_header(lane, origin.partition, start) for lane, start in starts.items())


def _count_header(queue: QueueSettings, count: int) -> Headers:
    return ((queue.redelivery_count_header, encode_count(count)),) if count else ()


def _decimal(number: int) -> bytes:
    return b"%d" % number
