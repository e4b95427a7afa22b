"""Which record is a copy of which, as headers say it. Pure: no I/O.

    kmq-copy        on the end markers of trackers and redrives: where the copy of the message stands. On a
                    range marker: the copies of its messages, in their order
    kmq-ancestors   on a copy: the records of which it is a copy, the oldest first, its original last

A place is written `partition:offset` where it is in the same topic as the record with the header (for a
marker: as its messages), else `topic:partition:offset`; ancestors are separated by commas. The copies of a
range are all in one partition: `partition:runs`, where runs are `first` or `first-last`, separated by commas.

Ancestors take at most MAX_ANCESTORS bytes. Beyond that the oldest stays, and of the others the newest that
fit; each of those that are left out is among the ancestors of a later one, as long as Kafka keeps that.

Anybody can write such headers. What can't be true is refused with DecodeError, and a reader goes on as if the
header were absent: then nobody knows.
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

MAX_ANCESTORS = 1_000
"""The longest `kmq-ancestors` that is read, in bytes."""
MAX_COPIES = 1_000_000
"""Bytes of a `kmq-copy` that is read; a range of MAX_SPAN messages needs less."""

_PLACE = re.compile(rb"(?:([a-zA-Z0-9._-]{1,249}):)?([0-9]{1,10}):([0-9]{1,19})")
_COPIES = re.compile(rb"(?:([a-zA-Z0-9._-]{1,249}):)?([0-9]{1,10}):([0-9,-]+)")
_RUN = re.compile(rb"([0-9]{1,19})(?:-([0-9]{1,19}))?")


class RecordPlace(NamedTuple):
    """A record of Kafka."""

    topic: str
    partition: int
    offset: int


def copy_header(own_topic: str, topic: str, copies: Sequence[tuple[int, int] | None]) -> Headers:
    """The header for an end marker of `own_topic`'s messages, whose copies are these records of `topic`.

    `copies`: partition and offset of each. Empty where one is unknown, or they are in several partitions.
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
    found = _COPIES.fullmatch(data) if len(data) <= MAX_COPIES else None
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


def ancestors_header(
    copy_topic: str, ancestors: Sequence[RecordPlace], original: RecordPlace
) -> tuple[str, bytes]:
    """The header for a copy, in `copy_topic`, of `original`, which has these ancestors.

    The module's docstring says what is left out where they are many.
    """
    newest = _text(copy_topic, original)
    if not ancestors:
        return ANCESTORS, newest
    oldest, *others = [_text(copy_topic, one) for one in ancestors]
    left = MAX_ANCESTORS - len(newest) - len(oldest) - 1
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
    """The ancestors that `kmq-ancestors` of this record names, the oldest first; empty where it is absent.

    Raises DecodeError, also where they can't be its ancestors: copies stand behind their originals, so that
    the offsets in each partition ascend.
    """
    if data is None:
        return ()
    if len(data) > MAX_ANCESTORS:
        raise DecodeError(f"header {ANCESTORS}: {len(data)} bytes, more than {MAX_ANCESTORS}", data)
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


def _text(own_topic: str, place: RecordPlace) -> bytes:
    return b"%s%d:%d" % (prefix_of(own_topic, place.topic), place.partition, place.offset)


def prefix_of(own_topic: str, topic: str) -> bytes:
    """The topic with which the text of a place in `topic` begins, unless that is `own_topic`."""
    return b"" if topic == own_topic else topic.encode() + b":"
