"""One owned partition: from takeover to release. No I/O of its own; the service does what it asks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from kmqpy.config import QueueSettings
from kmqpy.inflight import Entry, InFlight
from kmqpy.markers import INT64_MAX
from kmqpy.registry import StoredOffset
from tracker.assignment import Partition
from tracker.redelivery import Redeliverer

_TICK_TIMEOUT_S = 2.0


class Begin(NamedTuple):
    """Where to begin to read markers; what is wrong with what was stored, and whether markers are lost."""

    at: StoredOffset
    problem: str | None = None
    markers_lost: bool = False

    def state(self) -> InFlight:
        """The in-flight state to build on."""
        at = self.at
        state = InFlight(now_ms=at.now_ms, position=at.offset, missed_markers=at.missed_markers)
        state.restore(at.in_flight)
        return state


def begin_at(stored: StoredOffset | None, topic_id: str, log_start: int, end: int) -> Begin:
    """What to make of the offset in ZooKeeper.

    `topic_id`, `log_start` and `end` are those of the markers topic, asked after the fencing.
    """
    fresh = StoredOffset(log_start, topic_id, now_ms=0)
    if stored is None:
        return Begin(fresh)
    if stored.topic_id != topic_id:
        return Begin(fresh, "markers topic was created anew; reading all of it")
    if stored.offset > end:
        return Begin(fresh, "stored offset is beyond the end; reading all markers")
    if stored.offset < log_start:
        return Begin(
            replace(stored, offset=log_start, missed_markers=True),
            "markers were deleted before they were read; raise the markers topic's retention",
            markers_lost=True,
        )
    return Begin(stored)


class Phase(StrEnum):
    """Where a partition is."""

    OPENING = "opening"
    """Fencing predecessors; also after a failure, before anything else is done (rule R1)."""
    CATCHING_UP = "catching up"
    """Reading markers up to the tick written after the fencing."""
    ACTIVE = "active"
    """Redelivering."""
    DROPPED = "dropped"
    """Not ours any more."""


class OwnedPartition:
    """The tracker's view of a partition it owns; used by the main loop only.

    `epoch` is that of its grant; `topic_ids` those of the queue and the markers topic.
    """

    def __init__(self, key: Partition, epoch: int, queue: QueueSettings, redeliverer: Redeliverer) -> None:
        self.key = key
        self.epoch = epoch
        self.queue = queue
        self.redeliverer = redeliverer
        self.phase = Phase.OPENING
        self.state = InFlight()
        self.topic_ids = ("", "")
        self.reading = False
        self.busy = False
        self.retry_at = 0.0
        self.opens = 0
        self.caught_up_at: int | None = None
        self.stored_offset: int | None = None
        self.missed_until_ms = INT64_MAX
        self.problem: str | None = None
        self.tick_problem: str | None = None
        self._stuck: dict[int, str] = {}
        self._read_to = -1
        self._now_read_at = 0.0
        self._marker_read_at = 0.0
        self._tick_sent_at: float | None = None

    @property
    def number(self) -> int:
        """The partition's number."""
        return self.key[1]

    def start_reading(self, state: InFlight, now: float) -> None:
        """The state to build on, before the first marker is read."""
        self.state = state
        self.reading = True
        self._read_to = -1
        self._now_read_at = self._marker_read_at = now

    def catch_up_to(self, tick_offset: int) -> None:
        """The tick at this markers offset was written after the fencing: read up to it first."""
        self.caught_up_at = tick_offset
        self.phase = Phase.CATCHING_UP
        # When reading went on all the while, the tick may have been read already.
        self._end_catching_up()

    def read(self, at: int, now_before_ms: int, now: float) -> bool:
        """Note that the record at markers offset `at` was read; True when that ends catching up."""
        self._read_to = at
        self._marker_read_at = now
        self._tick_sent_at = self.tick_problem = None
        if self.state.now_ms != now_before_ms:
            self._now_read_at = now
        return self._end_catching_up()

    def _end_catching_up(self) -> bool:
        if self.phase is not Phase.CATCHING_UP or self.caught_up_at is None:
            return False
        if self._read_to < self.caught_up_at:
            return False
        self.phase = Phase.ACTIVE
        self.opens = 0
        # Whatever was in redelivery before the fencing either shows as ended now, or never will.
        self.state.retry_all()
        return True

    def due(self, limit: int) -> list[Entry]:
        """What to redeliver now."""
        if self.phase is not Phase.ACTIVE or self.busy:
            return []
        return self.state.take_due(limit)

    def wants_tick(self, now: float, silence_s: float) -> bool:
        """Whether a lease is probably over while no marker says so; call it when not `due`."""
        return self.seconds_to_tick(now, silence_s) <= 0

    def tick_sent(self, now: float) -> None:
        """A tick is on its way."""
        self._tick_sent_at = now

    def seconds_to_tick(self, now: float, silence_s: float) -> float:
        """How long until a tick, or another one, may be needed; infinite while nothing is waiting."""
        next_due_ms = self.state.next_due_ms() if self.phase is Phase.ACTIVE else None
        if next_due_ms is None:
            return float("inf")
        due_in_s = (next_due_ms - self.state.now_ms) / 1000 - (now - self._now_read_at)
        silence_in_s = self._marker_read_at + silence_s - now
        sent_at = self._tick_sent_at
        tick_in_s = 0.0 if sent_at is None else sent_at + _TICK_TIMEOUT_S - now
        return max(due_in_s, silence_in_s, tick_in_s)

    def redelivered(self, entries: list[Entry], failed: Collection[int], why: str) -> None:
        """Note why those of `entries` that failed did; what was said of the others holds no more."""
        for entry in entries:
            if why and entry.offset in failed:
                self._stuck[entry.offset] = why
            else:
                self._stuck.pop(entry.offset, None)

    def problems(self) -> list[str]:
        """What is wrong; for any thread, which must not look at the state."""
        found = [text for text in (self.problem, self.tick_problem) if text]
        return found + sorted({*self._stuck.copy().values()})

    def forget_ended(self) -> None:
        """What is in flight no more (purged, acknowledged late) is not stuck; call it now and then."""
        self._stuck = {offset: why for offset, why in self._stuck.items() if offset in self.state}

    def lateness_s(self, entry: Entry, now: float) -> float:
        """How long ago `entry` was due, in seconds by the partition's clock carried forward."""
        return max(0.0, (self.state.now_ms - entry.due_ms) / 1000 + (now - self._now_read_at))

    def age_s(self, entry: Entry, now: float) -> float:
        """How long ago `entry` was taken, in seconds."""
        return max(0.0, (self.state.now_ms - entry.since_ms) / 1000 + (now - self._now_read_at))
