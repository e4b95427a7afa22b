"""The in-flight state of a partition in pieces, for a store that loads and writes values. Pure: no I/O.

A bucket holds the messages of `SIZE` offsets that follow each other, as snapshots pack them; the
head holds everything else, and of each bucket what can be asked of it unseen. So a turn loads and writes
only the buckets whose messages it touches, however many are in flight.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.markers.entry import Entry, SnapshotRow, TakenRun
from kmqpy.kafka.markers.inflight import InFlight, MarkerRun

SIZE = 4_096
"""Offsets of a bucket: a multiple of what InFlight keeps in one run."""


class Damaged(Exception):
    """The pieces don't fit together: another process wrote some of them. Begin anew."""


class Bucket(NamedTuple):
    """What the head knows of a bucket.

    due_ms, taken_at, since_ms  the smallest of its messages
    messages, rows              how many messages, in how many rows
    checksum                    of its text
    """

    due_ms: int
    taken_at: int
    since_ms: int
    messages: int
    rows: int
    checksum: int


@dataclass(frozen=True)
class Head:
    """Everything of a partition's state but its messages.

    topic_id         of the markers topic that `position` belongs to
    epoch            of the grant under which predecessors were last fenced; 0: they are to be
    position         the markers offset that is read next
    now_ms           the partition's now
    pinned           markers offset and now of a marker that only a newer kmqpy understands
    missed_markers   markers were never read (rule R2), for messages taken until `missed_until_ms`
    ranges           whether a client has written range markers
    snapshot_at      the position when ZooKeeper was last given a snapshot
    """

    topic_id: str
    position: int
    now_ms: int = 0
    epoch: int = 0
    pinned: tuple[int, int] | None = None
    missed_markers: bool = False
    missed_until_ms: int = INT64_MAX
    ranges: bool = False
    snapshot_at: int = 0
    buckets: Mapping[int, Bucket] = field(default_factory=dict)

    def to_json(self) -> str:
        """For the store."""
        values = {**vars(self), "buckets": [(number, *bucket) for number, bucket in self.buckets.items()]}
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Head:
        """What `to_json` made; raises Damaged."""
        try:
            values = json.loads(text)
            buckets = {number: Bucket(*rest) for number, *rest in values.pop("buckets")}
            pinned = values.pop("pinned")
            return cls(**values, buckets=buckets, pinned=pinned and tuple(pinned))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Damaged(f"head of a partition's state: {error}") from error


class BucketedState(InFlight):
    """InFlight whose messages are loaded when a marker concerns them, or when they are due.

    `load` gives the text of a bucket, None where there is none; every call may raise Damaged. What looks
    at single messages (get, in, iteration, oldest) sees loaded ones only.
    """

    def __init__(self, head: Head, load: Callable[[int], str | None]) -> None:
        now_ms = head.now_ms if head.pinned is None else head.pinned[1]
        super().__init__(now_ms=now_ms, position=head.position, missed_markers=head.missed_markers)
        self.pinned_at: tuple[int, int] | None = None
        if head.pinned is not None:
            self.pin(head.pinned[0])
            self.now_ms = head.now_ms
        self._load = load
        self._unseen = dict(head.buckets)
        self._known = dict(head.buckets)
        self._touched: set[int] = set()

    # --- the same, of messages seen and unseen ------------------------------------------------------

    def __len__(self) -> int:
        return super().__len__() + sum(bucket.messages for bucket in self._unseen.values())

    def next_due_ms(self) -> int | None:
        """When the next entry is due, in the partition's time; None when nothing is waiting."""
        unseen = [bucket.due_ms for bucket in self._unseen.values()]
        seen = super().next_due_ms()
        return min(unseen if seen is None else [*unseen, seen], default=None)

    def safe_offset(self) -> int:
        """The markers offset from which a successor must read to have this same state."""
        return min([super().safe_offset(), *(bucket.taken_at for bucket in self._unseen.values())])

    def safe_now_ms(self) -> int:
        """The partition's now at the safe offset."""
        # It never goes back, so the smallest is that of the smallest offset.
        return min([super().safe_now_ms(), *(bucket.since_ms for bucket in self._unseen.values())])

    def oldest_since_ms(self) -> int | None:
        """When the oldest message in flight was taken; None when there is none."""
        oldest = self.oldest()
        seen = [] if oldest is None else [oldest.since_ms]
        return min([*seen, *(bucket.since_ms for bucket in self._unseen.values())], default=None)

    def may_hold(self, offset: int) -> bool:
        """Whether a message that was in flight may still be; False only if its bucket is loaded."""
        return offset // SIZE in self._unseen or offset in self

    @property
    def rows(self) -> int:
        """How many rows a snapshot of everything would have, about: a message is one at the most."""
        return super().__len__() + sum(bucket.rows for bucket in self._unseen.values())

    def snapshot(self, max_rows: int) -> tuple[int, int, list[SnapshotRow]]:
        """What a successor needs to have this same state; loads everything."""
        for number in list(self._unseen):
            self._see(number)
        return super().snapshot(max_rows)

    def pin(self, at: int) -> None:
        """Keep the safe offset from passing a marker that only a newer version understands (R3)."""
        super().pin(at)
        self.pinned_at = self.pinned_at or (at, self.now_ms)

    # --- changes ------------------------------------------------------------------------------------

    def apply(self, marker: Marker, at: int, timestamp_ms: int) -> int:
        """Take in the marker read at markers offset `at`."""
        for first, count in marker.offset_runs:
            self._touch(first, count)
        return super().apply(marker, at, timestamp_ms)

    def apply_takes(
        self, series: Iterable[MarkerRun], redeliver_after_ms: int, at: int, holder: str | None = None
    ) -> None:
        """Take in start markers with one lease and holder, that stand from markers offset `at` on."""
        series = list(series)
        for first, count, _ in series:
            self._touch(first, count)
        super().apply_takes(series, redeliver_after_ms, at, holder)

    def apply_ends(self, series: Iterable[MarkerRun], at: int) -> int:
        """Take in end markers, as apply_takes() takes in starts; returns how many changed the state."""
        series = list(series)
        for first, count, _ in series:
            self._touch(first, count)
        return super().apply_ends(series, at)

    def restore(self, rows: Iterable[SnapshotRow]) -> None:
        """Begin with the rows of a snapshot."""
        rows = list(rows)
        for row in rows:
            self._touch(*((row.offset, 1) if isinstance(row, Entry) else (row.first, row.bits.bit_length())))
        super().restore(rows)

    def take_due(self, limit: int) -> list[Entry]:
        """Up to `limit` entries whose time is up."""
        for number in [n for n, bucket in self._unseen.items() if bucket.due_ms <= self.now_ms]:
            self._see(number)
        return super().take_due(limit)

    def retry(self, offset: int, delay_ms: int) -> None:
        """Redelivery of `offset` failed: it is due again `delay_ms` from now."""
        self._touch(offset, 1)
        super().retry(offset, delay_ms)

    def _touch(self, first: int, count: int) -> None:
        # A series may begin with a tick, whose offset is negative.
        for number in range(max(0, first) // SIZE, (first + count - 1) // SIZE + 1):
            self._touched.add(number)
            if number in self._unseen:
                self._see(number)

    def _see(self, number: int) -> None:
        text = self._load(number)
        if text is None or zlib.crc32(text.encode()) != self._unseen[number].checksum:
            raise Damaged(f"bucket {number} of a partition's state is missing or another")
        del self._unseen[number]
        try:
            super().restore(snapshot.unpack(text, max_json_bytes=0))
        except ValueError as error:
            raise Damaged(str(error)) from error

    # --- what is to be stored -------------------------------------------------------------------------

    def changes(self) -> tuple[dict[int, Bucket], dict[int, str | None]]:
        """What the head is to say of buckets, and the texts that have changed; None: to be removed."""
        by_bucket: dict[int, list[SnapshotRow]] = {number: [] for number in self._touched}
        _, _, rows = super().snapshot(super().__len__() + 1)
        for row in rows:
            number = (row.first if isinstance(row, TakenRun) else row.offset) // SIZE
            if number in self._touched:
                by_bucket[number].append(row)
        texts: dict[int, str | None] = {}
        for number, held in by_bucket.items():
            before = self._known.pop(number, None)
            if not held:
                if before is not None:
                    texts[number] = None
                continue
            text = snapshot.pack(held)
            bucket = _summary(held, text)
            self._known[number] = bucket
            if before is None or before.checksum != bucket.checksum:
                texts[number] = text
        self._touched = set()
        return dict(self._known), texts


def _summary(rows: list[SnapshotRow], text: str) -> Bucket:
    return Bucket(
        due_ms=min(row.due_ms for row in rows),
        taken_at=min(row.taken_at for row in rows),
        since_ms=min(row.since_ms for row in rows),
        messages=sum(row.bits.bit_count() if isinstance(row, TakenRun) else 1 for row in rows),
        rows=len(rows),
        checksum=zlib.crc32(text.encode()),
    )
