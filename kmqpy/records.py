"""Kafka records by partition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from operator import lt
from typing import Any

from confluent_kafka import Message as Record


def by_partition(records: list[Any]) -> dict[int, Sequence[int]]:
    """The ascending offsets of Kafka records by partition; ranges where none is missing.

    The records of each partition are in the order of its log, and have no error.
    """
    partitions = list(map(Record.partition, records))
    if partitions and partitions.count(partitions[0]) == len(partitions):
        return {partitions[0]: _offsets(records)}  # type: ignore[dict-item]
    parts: dict[int, list[Any]] = {}
    first = 0
    for partition, run in groupby(partitions):
        after = first + sum(1 for _ in run)
        parts.setdefault(partition, []).extend(records[first:after])  # type: ignore[arg-type]
        first = after
    return {partition: _offsets(ones) for partition, ones in parts.items()}


def _offsets(records: list[Any]) -> Sequence[int]:
    offsets: list[Any] = list(map(Record.offset, records))
    run = range(offsets[0], offsets[0] + len(offsets))
    return run if offsets == list(run) else offsets


def ascends(offsets: Sequence[int]) -> bool:
    """Whether each of the offsets is above the one before it."""
    return isinstance(offsets, range) or all(map(lt, offsets, islice(offsets, 1, None)))
