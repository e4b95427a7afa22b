"""Reads headers, markers and offsets from Kafka records, as confluent_kafka returns them.

Anybody can write to the topics, so confluent_kafka may be unable to read a record. These functions judge each
record alone (rule R21 of docs/rules.md): an unreadable record does not keep others from being read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import lt, methodcaller
from typing import Any, Final

from kmqpy import message
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Headers, Marker

UNREADABLE: Final = object()
"""Stands for the headers of a record of which at least one can't be read; equal to nothing else."""

_raw_headers = methodcaller("headers")


def read_headers(record: Any) -> tuple[Headers, int]:
    """The headers of `record` that can be read, and the number of others: their names are not UTF-8.

    Only this module may call `record.headers()`. For a name that is not UTF-8, confluent_kafka raises a
    SystemError at the first call. With a plain method call in a loop, Python 3.11 and later may raise this
    error at a later statement. Further calls return pairs whose name is a null pointer, which crashes the
    process when it is used; gc.get_referents() leaves null pointers out.
    """
    try:
        headers = _raw_headers(record)
    except SystemError:
        headers = _raw_headers(record)
    if not headers:
        return [], 0
    readable = [pair for pair in headers if len(gc.get_referents(pair)) == len(pair)]
    return readable, len(headers) - len(readable)


def headers_of_each(records: Sequence[Any]) -> list[Any]:
    """The headers of each record: as confluent_kafka returns them, None if it has none, or UNREADABLE."""
    found: list[Any]
    try:
        found = list(_of_each("headers", records))
    except SystemError:
        found = [UNREADABLE if read_headers(record)[1] else _raw_headers(record) for record in records]
    return [
        headers if not headers or headers is UNREADABLE or _is_readable(headers) else UNREADABLE
        for headers in found
    ]


def message_headers(record: Any) -> message.Headers:
    """The headers of a message that can be read."""
    return message.headers_of(read_headers(record)[0])


def have_headers(records: Sequence[Any]) -> bool:
    """True if any of the records has a header, readable or not."""
    try:
        return any(_of_each("headers", records))
    except SystemError:
        return True


def read_marker(record: Any, topic: bytes | None = None) -> Marker:
    """The marker in a record of a markers topic; `topic`: see codec.decode().

    Raises DecodeError, also for headers that can't be read and for a key that names another partition
    than the record's. Raises UnsupportedMarker for a marker of a newer version.
    """
    headers, unreadable = read_headers(record)
    key = record.key()
    if unreadable:
        raise DecodeError("marker headers: a name that is not UTF-8", key)
    return codec.decode(key, record.value(), headers, partition=record.partition(), topic=topic)


def _of_each(method: str, records: Sequence[Any]) -> Iterator[Any]:
    """The results of this method of each record; five times as fast as by a methodcaller."""
    return map(getattr(type(records[0]), method), records) if records else iter(())


def _is_readable(headers: Headers) -> bool:
    return all(len(gc.get_referents(pair)) == len(pair) for pair in headers)


def records_by_partition(records: list[Any]) -> dict[int, list[Any]]:
    """Kafka records without errors, by partition."""
    partitions = list(_of_each("partition", records))
    if partitions and partitions.count(partitions[0]) == len(partitions):
        return {partitions[0]: records}
    parts: dict[int, list[Any]] = {}
    first = 0
    for partition, run in groupby(partitions):
        after = first + len(list(run))
        parts.setdefault(partition, []).extend(records[first:after])
        first = after
    return parts


def offsets_of_records(records: list[Any]) -> dict[int, Sequence[int]]:
    """The ascending offsets of Kafka records, by partition; see records_by_partition, ascending_offsets."""
    return {partition: ascending_offsets(ones) for partition, ones in records_by_partition(records).items()}


def ascending_offsets(records: list[Any]) -> Sequence[int]:
    """The offsets of records of one partition, in the order of its log; a `range` if none is missing."""
    offsets: list[Any] = list(_of_each("offset", records))
    run = range(offsets[0], offsets[0] + len(offsets))
    return run if offsets == list(run) else offsets


def ascends(offsets: Sequence[int]) -> bool:
    """True if each of the offsets is above the one before it."""
    return isinstance(offsets, range) or all(map(lt, offsets, islice(offsets, 1, None)))


def peak(offsets: Sequence[int], before: int) -> int | None:
    """The first offset that is too high to be true: behind it comes one that had not been read, and is lower.

    `before` is the last offset that was read before these. When librdkafka reads again, lower offsets come,
    too, but those that had been read.
    """
    for low, high, following in zip((before, *offsets), offsets, offsets[1:], strict=False):
        if low < following < high:
            return high
    return None
