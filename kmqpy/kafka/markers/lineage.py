"""Writes and reads the headers that say which record is a copy of which record. Pure: no I/O.

A copy is a record with which a tracker redelivers or dead-letters a message, or a redrive sends a dead letter
back to its queue. The original of a copy is the record of which it was made directly, which may be a copy
itself. The first record of a message is the one that send() wrote. The ancestors of a copy are all records
from the first record to the original. A range marker is one record that is the marker of many messages.

    kmq-copy        on an end marker of a tracker or redrive: where the copy of the message stands; on a
                    range marker: where the copies of its messages stand, in the order of the messages
    kmq-ancestors   on a copy: its ancestors, from the first record to the original

The place of a record is `topic:partition:offset`, or `partition:offset` if its topic is that of the record
with the header (for a marker: the topic of its messages). Ancestors are separated by commas. The copies of a
range marker are all in one partition, and are written `partition:runs`: runs are `first` or `first-last`,
separated by commas.

Ancestors take at most MAX_ANCESTORS_BYTES. If there are more, the header names the first record and those of
the newest ancestors that fit. To find the ancestors left out, read the `kmq-ancestors` header of a record
that is named, as long as Kafka still has that record.

Anybody can write such headers. These functions raise DecodeError for a header that can't be true, and readers
then ignore the header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.codec import Headers, runs_of

COPY = "kmq-copy"
ANCESTORS = "kmq-ancestors"

MAX_ANCESTORS_BYTES = 1_000
"""Ancestors that do not fit into this are not written, and read_ancestors() refuses a longer header."""
MAX_COPIES_BYTES = 1_000_000
"""A longer `kmq-copy` is not read. For MAX_SPAN messages it is shorter if offsets have at most 14 digits."""

_PLACE = re.compile(rb"(?:([a-zA-Z0-9._-]{1,249}):)?([0-9]{1,10}):([0-9]{1,19})")
_COPIES = re.compile(rb"(?:([a-zA-Z0-9._-]{1,249}):)?([0-9]{1,10}):([0-9,-]+)")
_LAST_HERE = re.compile(rb"([0-9]{1,10}):(?:[0-9,-]{0,999999}[,-])?([0-9]{1,19})")
_RUN = re.compile(rb"([0-9]{1,19})(?:-([0-9]{1,19}))?")


class RecordPlace(NamedTuple):
    """The topic, partition and offset of a record."""

    topic: str
    partition: int
    offset: int


def copy_header(own_topic: str, topic: str, copies: Sequence[tuple[int, int] | None]) -> Headers:
    """The header for an end marker of messages in `own_topic`, whose copies are these records of `topic`.

    `copies` are partition and offset of each copy. Returns no header if a copy is unknown, or if the copies
    are in several partitions.
    """
    known = [copy for copy in copies if copy is not None]
    if not known or len(known) < len(copies):
        return []
    partition = known[0][0]
    if len(known) > 1 and any(copy[0] != partition for copy in known):
        return []
    runs = [
        b"%d-%d" % (first, first + count - 1) if count > 1 else b"%d" % first
        for first, count in runs_of([offset for _, offset in known])
    ]
    return [(COPY, b"%s%d:%s" % (prefix_of(own_topic, topic), partition, b",".join(runs)))]


def read_copies(data: bytes, own_topic: str, count: int) -> list[RecordPlace]:
    """The copies that an end marker of `count` messages names in `kmq-copy`; raises DecodeError."""
    found = _COPIES.fullmatch(data) if len(data) <= MAX_COPIES_BYTES else None
    if found is None:
        raise DecodeError(f"header {COPY}: {len(data)} bytes that name no copies", data)
    topic = found[1].decode() if found[1] else own_topic
    partition = int(found[2])
    offsets: list[int] = []
    for text in found[3].split(b","):
        run = _RUN.fullmatch(text)
        if run is None:
            raise DecodeError(f"header {COPY}: not a list of offsets", data)
        first, last = int(run[1]), int(run[2] or run[1])
        if last < first or last > INT64_MAX or (offsets and first <= offsets[-1]):
            raise DecodeError(f"header {COPY}: its offsets do not ascend", data)
        if len(offsets) + last - first >= count:
            raise DecodeError(f"header {COPY}: more copies than the marker has messages, {count}", data)
        offsets.extend(range(first, last + 1))
    if len(offsets) != count:
        raise DecodeError(f"header {COPY}: {len(offsets)} copies of {count} messages", data)
    return [RecordPlace(topic, partition, offset) for offset in offsets]


def last_copy_here(data: bytes, partition: int) -> int | None:
    """The last copy in `kmq-copy` of a marker, if it is in this partition of the messages' own topic."""
    found = _LAST_HERE.fullmatch(data)
    if found is None or int(found[1]) != partition:
        return None
    return number if (number := int(found[2])) <= INT64_MAX else None


def ancestors_header(
    copy_topic: str, ancestors: Sequence[RecordPlace], original: RecordPlace
) -> tuple[str, bytes]:
    """The header for a copy in `copy_topic` of `original`, which has these ancestors.

    If there are many ancestors, some are left out; see the module's docstring.
    """
    newest = _place_text(copy_topic, original)
    if not ancestors:
        return ANCESTORS, newest
    oldest, *others = [_place_text(copy_topic, one) for one in ancestors]
    left = MAX_ANCESTORS_BYTES - len(newest) - len(oldest) - 1
    if left < 0:
        return ANCESTORS, newest
    kept = [newest]
    for text in reversed(others):
        left -= len(text) + 1
        if left < 0:
            break
        kept.append(text)
    return ANCESTORS, b",".join([oldest, *reversed(kept)])


def read_ancestors(data: bytes | None, record: RecordPlace) -> tuple[RecordPlace, ...]:
    """The ancestors in the `kmq-ancestors` header of this record, the oldest first; empty without a header.

    Raises DecodeError if the header is not a list of places, if the offsets of ancestors in one partition do
    not ascend, or if they are not below the record's own offset in its partition: Kafka appends a copy after
    its original.
    """
    if data is None:
        return ()
    if len(data) > MAX_ANCESTORS_BYTES:
        raise DecodeError(f"header {ANCESTORS}: {len(data)} bytes, more than {MAX_ANCESTORS_BYTES}", data)
    return tuple(_ancestors(data, record))


def _ancestors(data: bytes, record: RecordPlace) -> Iterable[RecordPlace]:
    highest: dict[tuple[str, int], int] = {}
    for text in data.split(b","):
        found = _PLACE.fullmatch(text)
        if found is None or (offset := int(found[3])) > INT64_MAX:
            raise DecodeError(f"header {ANCESTORS}: not a list of places", data)
        place = RecordPlace(found[1].decode() if found[1] else record.topic, int(found[2]), offset)
        if offset <= highest.get(place[:2], -1) or (place[:2] == record[:2] and offset >= record.offset):
            raise DecodeError(f"header {ANCESTORS}: {offset} can't be an ancestor where it stands", data)
        highest[place[:2]] = offset
        yield place


def _place_text(own_topic: str, place: RecordPlace) -> bytes:
    return b"%s%d:%d" % (prefix_of(own_topic, place.topic), place.partition, place.offset)


def prefix_of(own_topic: str, topic: str) -> bytes:
    """The text before partition and offset of a place in `topic`: empty if that is `own_topic`."""
    return b"" if topic == own_topic else topic.encode() + b":"
