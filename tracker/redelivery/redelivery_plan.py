"""Computes the copy of a message whose lease has ended, from its entry, its original and the queue. Pure.

The entry is the message in the in-flight state. The original is its record in the queue topic, which may be a
copy itself. The copy is the record that redelivers or dead-letters the message.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from kmqpy import message as m
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.copies.copy_headers import Origin, dead_letter_headers, redelivery_headers
from kmqpy.kafka.markers.codec import MAX_COUNT, MAX_REASON
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.late_operations import CopyHeaders, read_copy_headers
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.message_headers import redelivery_count, size_of
from kmqpy.kafka.settings import QueueSettings

EXPIRED = "expired"
"""Why a message is copied, or held back, whose lease has ended."""
_RECORD_OVERHEAD = 64
"""An upper estimate of the bytes of a record besides its key, value and headers."""
_DELAYED = (EntryState.LEASED, EntryState.FAILED)
"""What `retry_delays` hold back."""


class Original(NamedTuple):
    """A record of the queue topic, as far as its copy needs it.

    offset  the offset of the record; where it is known of which message it is, the message's number
    epoch   the leader epoch of the record; -1: not known
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: m.Headers
    epoch: int = -1


class Refusal(NamedTuple):
    """How Kafka refused copies of a message.

    times   how many deliveries the refusals have used up. A refusal by the queue topic adds one. When these
            and the redeliveries reach the queue's limit, the message becomes a dead letter. A refusal by the
            dead-letter topic subtracts one, so that the next copy goes to the queue topic again: its limit of
            record sizes may have been raised meanwhile
    why     which topic refused the last copy, how large the copy was, and Kafka's error
    by_lane True if the retry lane has refused a copy: the next ones stay in the message's own lane
    """

    times: int
    why: str
    by_lane: bool = False


class Copy(NamedTuple):
    """The record that replaces an original.

    undecodable_count
                True if the redelivery-count header of the original could not be decoded; the count is then 0
    undecodable_ancestors
                True if the header `kmq-ancestors` of the original could not be decoded; it is then ignored
    topic       where the copy goes; empty: to the topic of the original
    held_ms     so much longer the queue's `retry_delays` hold the message back (rule R44): no copy is made
    last_copy   what the headers of the original say of it, to look for acknowledgements of its ancestors.
                Set only if the copy is a dead letter, the queue has `late_acks`, and the original has a
                valid header `kmq-planned-at`: then the original is a copy, too
    """

    entry: Entry
    dead_letter: bool
    key: bytes | None
    value: bytes | None
    headers: m.Headers
    undecodable_count: bool = False
    undecodable_ancestors: bool = False
    last_copy: CopyHeaders | None = None
    held_ms: int = 0
    topic: str = ""

    @property
    def size(self) -> int:
        """An upper estimate of the record's bytes before compression."""
        return _RECORD_OVERHEAD + size_of(self.key, self.value, self.headers)


def copy_of(
    entry: Entry,
    original: Original,
    queue: QueueSettings,
    partition: int,
    refusal: Refusal | None = None,
    position: int = 0,
    now_ms: int = INT64_MAX,
    lane: str = "",
) -> Copy:
    """Compute the copy of `original`, the record of `entry` in partition `partition` of the queue.

    refusal   how Kafka has refused earlier copies of the message, if it has
    position  the markers offset up to which markers were read when the message was due
    now_ms    the partition's now then
    lane      the lane to which copies go; empty: that of the original

    The copy is a dead letter if a consumer asked for one, or if redeliveries and refusals reach the queue's
    limit of redeliveries; else a redelivery. The copy keeps all headers of the original, but headers
    that describe the copy replace older ones, and `kmq-deliver-at` is left out.
    """
    count, undecodable_count = 0, False
    try:
        count = redelivery_count(original.headers, queue.redelivery_count_header)
    except DecodeError:
        undecodable_count = True
    ancestors: tuple[RecordPlace, ...] = ()
    undecodable_ancestors = False
    try:
        named = m.last_header(original.headers, ANCESTORS) if original.headers else None
        if named is not None:
            ancestors = read_ancestors(named, RecordPlace(queue.name, partition, original.offset))
    except DecodeError:
        undecodable_ancestors = True
    origin = Origin(partition, original.offset, original.timestamp_ms)
    limit = queue.max_redeliveries
    dead_letter = entry.state is EntryState.DEAD or (entry.counts and limit is not None and count >= limit)
    refused = ""
    if not dead_letter and refusal is not None and limit is not None:
        dead_letter = refusal.times >= max(1, limit - count)
        refused = f"refused: {refusal.why}; "
    last_copy = None
    if dead_letter:
        if queue.late_acks:
            last_copy = read_copy_headers(original.headers, queue.name, partition, queue.lane_markers)
        topic = queue.dead_letter_topic
        reason = f"{refused}{reason_of(entry)}"
        headers = dead_letter_headers(original.headers, origin, queue, count, ancestors, reason)
    else:
        new_count = min(count + 1, MAX_COUNT) if entry.counts else count
        topic = lane if refusal is None or not refusal.by_lane else ""
        headers = redelivery_headers(original.headers, origin, queue, new_count, ancestors, position, topic)
    held_ms = 0
    if queue.retry_delays and not dead_letter and entry.counts and entry.state in _DELAYED:
        held_ms = _held_ms(entry, max(0, count), queue, partition, now_ms)
    return Copy(
        entry,
        dead_letter,
        original.key,
        original.value,
        headers,
        undecodable_count,
        undecodable_ancestors,
        last_copy,
        held_ms,
        topic,
    )


def _held_ms(entry: Entry, count: int, queue: QueueSettings, partition: int, now_ms: int) -> int:
    """What is left of the delay that follows the end of a lease, or a nack.

    A tracker that takes the partition over meanwhile finds the same, jitter included.
    """
    drawn = zlib.crc32(b"%d %d %d" % (partition, entry.offset, count)) / 0xFFFFFFFF
    delay_ms = queue.retries.delay_ms(count, drawn)
    return max(0, entry.due_ms + delay_ms - now_ms) if delay_ms else 0


def reason_of(entry: Entry) -> str:
    """Why the message is copied: `expired`, `nack` or `rejected`, then `: ` and the consumer's reason."""
    words = {EntryState.DEAD: "rejected", EntryState.RELEASED: "nack", EntryState.FAILED: "nack"}
    if entry.state not in words:
        return EXPIRED
    word = words[entry.state]
    return f"{word}: {entry.reason[:MAX_REASON]}" if entry.reason else word


def batches(copies: list[Copy], max_messages: int, max_bytes: int) -> list[list[Copy]]:
    """Split `copies`, in order, into batches of limited number and size; a larger copy is a batch alone."""
    result: list[list[Copy]] = []
    size = 0
    for copy in copies:
        copy_size = copy.size
        if not result or len(result[-1]) >= max_messages or size + copy_size > max_bytes:
            result.append([])
            size = 0
        result[-1].append(copy)
        size += copy_size
    return result


def halves(batch: list[Copy]) -> tuple[list[Copy], list[Copy]]:
    """The smaller and the larger half of the copies, in the order of `batch`: Kafka refuses large ones."""
    by_size = sorted(range(len(batch)), key=lambda index: batch[index].size)
    smaller = set(by_size[: len(batch) // 2])
    return (
        [copy for index, copy in enumerate(batch) if index in smaller],
        [copy for index, copy in enumerate(batch) if index not in smaller],
    )
