"""Stores the safe offset of each partition in ZooKeeper: the markers offset from which its next owner reads.

The safe offset is that of the oldest start marker among those of messages in flight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.log_ends import LogEnd
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.leadership.assignment import Partition
from tracker.leadership.offset_znodes import OffsetWriteSchedule
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase

_log = logging.getLogger(__name__)

_SNAPSHOT_MAX_ROWS = 4_000
"""A snapshot has at most this many rows. The stored offset is then that of the first omitted start marker."""
_SNAPSHOT_MAX_BYTES = 500_000
"""A larger snapshot is not stored, only the safe offset: ZooKeeper takes packets of 1 MB."""


class _DueOffset(NamedTuple):
    """An offset to be stored.

    position  the markers offset up to which the partition was read when the offset was due
    make      builds the offset; for any thread
    """

    position: int
    make: Callable[[], StoredOffset]


class OffsetKeeper(TrackerPart):
    """Stores the safe offsets of active partitions at intervals; reads and writes offsets for other parts.

    Any thread may call `read_offset`, `write` and the functions that `offset_of` returns. The other methods
    are for the main loop.
    """

    def __init__(self, context: TrackerContext) -> None:
        super().__init__(context)
        self._interval_s = self._settings.offset_interval_ms / 1000
        self._schedule = OffsetWriteSchedule(self._interval_s, self._settings.offset_writes_per_s)
        self._next_store_at = 0.0
        self._storing = False
        self._lock = threading.Lock()  # only one thread at a time may call Leadership's offset methods

    def read_offset(self, part: OwnedPartition) -> StoredOffset | None:
        """The offset in ZooKeeper; None if there is no offset or it can't be decoded. Raises Unavailable."""
        with self._lock:
            return self._leadership.read_offset(*part.key)

    def write(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store these offsets; returns the partitions whose offset was stored. Raises Unavailable."""
        with self._lock:
            return self._leadership.write_offsets(offsets)

    def offset_of(self, part: OwnedPartition) -> Callable[[], StoredOffset] | None:
        """Return a function that builds the offset to store; None if there is no new offset.

        There is none while the partition is not read, or catches up. If more than `snapshot_after_markers`
        markers follow the safe offset, or it is not known which cuts were known there, a snapshot of the
        messages in flight is stored with it. Also clears the state's `missed_markers` once all messages in
        flight were taken after `missed_until_ms`.
        """
        reads = part.reading and part.phase in (TrackingPhase.ACTIVE, TrackingPhase.FENCING)
        if not reads or part.catch_up_offset is None or part.searches:
            return None  # a successor must read the tick with the cut again, to look for lost copies
        state, oldest = part.state, part.state.oldest()
        if state.position <= part.catch_up_offset:
            return None  # it has not caught up since it is read
        if (state.now_ms if oldest is None else oldest.since_ms) > part.missed_until_ms:
            state.missed_markers = False
        end, told_below = part.log_evidence
        if state.position == part.stored_position and end == part.stored_end:
            return None  # no marker was read since the last store, so the state is the same
        (queue_id, markers_id), missed = part.topic_ids, state.missed_markers
        at = state.safe_offset()
        cuts = state.cuts_before(at)
        safe = StoredOffset(
            at,
            markers_id,
            state.safe_now_ms(),
            missed,
            queue_id=queue_id,
            cuts=state.cuts if cuts is None else cuts,
            taken_end=end.offset,
            queue_epoch=end.epoch,
            told_below=told_below,
            takes_epoch=state.takes_epoch,
            markers_read=state.position,
            markers_epoch=part.markers_epoch,
            copy=state.copies.highest,
        )
        few = state.position - safe.offset <= self._settings.snapshot_after_markers
        if few and cuts is not None:
            if safe.offset == part.stored_offset and end == part.stored_end:
                return None
            safe = replace(safe, finished=state.finished.stored())
            return lambda: safe
        finished = state.finished.stored()
        safe = replace(safe, finished=finished)
        offset, now_ms, rows = state.snapshot(_SNAPSHOT_MAX_ROWS)
        cuts = state.cuts_before(offset)
        known = state.cuts if cuts is None else cuts

        def with_snapshot() -> StoredOffset:
            made = replace(safe, offset=offset, now_ms=now_ms, in_flight=tuple(rows), cuts=known)
            return made if len(made.to_json()) <= _SNAPSHOT_MAX_BYTES else safe

        return with_snapshot

    def store_due(self, now: float) -> None:
        """Store the offsets that are due in a background job, unless one runs."""
        if now < self._next_store_at or self._storing:
            return
        self._next_store_at = now + self._interval_s
        due = self._due(now)
        if due:
            self._storing = True
            self._jobs.run(
                Pool.HOUSEKEEPING, partial(self._make_and_write, due), partial(self._stored, due, now)
            )

    def all_offsets(self) -> dict[Partition, StoredOffset]:
        """The offsets of all partitions that have a new one, due or not."""
        offsets: dict[Partition, StoredOffset] = {}
        for part in list(self._partitions.values()):
            with self._supervisor.surviving(part):
                make = self.offset_of(part)
                if make is not None:
                    offsets[part.key] = make()
        return offsets

    def _due(self, now: float) -> dict[Partition, _DueOffset]:
        partitions = sum(queue.partitions for queue in self._leadership.snapshot().queues.values())
        self._schedule.forget(self._partitions)
        due: dict[Partition, _DueOffset] = {}
        for part in self._partitions.values():
            with self._supervisor.surviving(part):
                unread = part.state.position - (part.stored_offset or 0)
                if part.phase is TrackingPhase.ACTIVE and self._schedule.is_due(
                    part.key, unread, partitions, now
                ):
                    make = self.offset_of(part)
                    if make is not None:
                        due[part.key] = _DueOffset(part.state.position, make)
        return due

    def _make_and_write(self, due: Mapping[Partition, _DueOffset]) -> dict[Partition, StoredOffset]:
        offsets = {key: one.make() for key, one in due.items()}
        written = self.write(offsets)
        return {key: offsets[key] for key in written}

    def _stored(
        self,
        due: Mapping[Partition, _DueOffset],
        now: float,
        written: dict[Partition, StoredOffset] | Exception,
    ) -> None:
        self._storing = False
        if isinstance(written, KmqError):
            _log.warning("offsets not stored; trying again", extra={"error": str(written)})
        elif isinstance(written, Exception):
            raise written
        else:
            self._schedule.written(written, now)
            for key in written.keys() & self._partitions.keys():
                part = self._partitions[key]
                stored = written[key]
                part.stored_offset, part.stored_position = stored.offset, due[key].position
                part.stored_end = LogEnd(stored.taken_end, stored.queue_epoch)
