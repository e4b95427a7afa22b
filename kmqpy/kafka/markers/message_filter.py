"""Picks the markers of a few messages from those of a whole partition. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker


class MessageFilter:
    """Picks the markers that name some given messages of one partition.

    A single marker of another message is skipped by the bytes of its key, which is several times as fast as
    decoding it. Range markers are decoded if their lowest offset is near the given messages.
    """

    def __init__(self, partition: int, offsets: Iterable[int]) -> None:
        self.offsets: set[int] = set()
        self._partition = partition
        self._runs = OffsetRuns()
        self._keys: set[bytes] = set()
        self._lowest, self._highest = INT64_MAX, -1
        self.add(offsets)

    def add(self, offsets: Iterable[int]) -> None:
        """Pick the markers of these messages, too, from now on; may be called while pick() runs."""
        new = sorted(set(offsets) - self.offsets)
        if new:
            self.offsets.update(new)
            self._runs.add_runs(codec.runs_of(new))
            self._keys.update(codec.encode_keys(self._partition, new))
            self._lowest, self._highest = min(self._lowest, new[0]), max(self._highest, new[-1])

    def pick(self, records: Iterable[Any]) -> Iterator[tuple[Any, Marker, OffsetRuns]]:
        """Yield each record whose marker names some of the messages, with its marker and their offsets.

        Records that can't be decoded are skipped.
        """
        for record in records:
            key, value = record.key(), record.value()
            if key in self._keys or (value and codec.is_range(value) and self._is_near(key)):
                try:
                    marker = read_marker(record)
                except DecodeError:
                    continue
                if about := OffsetRuns(marker.offset_runs) & self._runs:
                    yield record, marker, about

    def _is_near(self, key: bytes | None) -> bool:
        """Return True if a range marker with this key may name one of the messages."""
        try:
            _, first = codec.decode_key(key)
        except DecodeError:
            return False
        return self._lowest - MAX_SPAN < first <= self._highest
