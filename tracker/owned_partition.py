"""The state of one owned partition, from takeover to release. No I/O of its own: the main loop does that."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.markers.codec import INT64_MAX
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.replay import ALL_EXIST, QueueEnd
from kmqpy.kafka.settings import CLOCK_LEAD_MS, QueueSettings
from tracker.leadership.assignment import Partition
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.ticker import Tick

_TICK_TIMEOUT_S = 2.0
_STANDS_STILL_S = 1.0
"""How long the partition's clock may stand still while markers are read, before a tick may be needed."""
_TOLD_FOR_S = 60.0
"""How long a wrong clock is reported as a problem."""
_MAX_SHOWN = 10
"""Failed markers that are reported."""
_TAKEOVER_PAUSE = Backoff(0.4, 2, 10, jitter=0)
"""Before a takeover that follows one that failed."""


class Doubt(NamedTuple):
    """Of messages that markers below markers offset `below` name and that don't exist, it is said.

    since   the monotonic time of the first answer, in s
    end     the highest end of the queue that was told since then
    """

    since: float
    below: int
    end: int


class Phase(StrEnum):
    """Where a partition is."""

    FENCING = "fencing"
    """Fencing predecessors; also after a failure, before anything else is done (rule R1)."""
    CATCHING_UP = "catching up"
    """Reading markers up to the tick written after the fencing."""
    ACTIVE = "active"
    """Redelivering."""
    DROPPED = "dropped"
    """Not ours any more."""


class OwnedPartition:
    """The tracker's view of a partition it owns; used by the main loop only.

    `epoch` is that of its grant; `topic_ids` those of the queue and the markers topic. `unread` are markers
    that were fetched but not applied yet: it takes a newer `queue_end` to tell whether their messages exist.
    `lead_ms`: see TrackerSettings.max_clock_lead_ms.
    """

    def __init__(
        self,
        key: Partition,
        epoch: int,
        queue: QueueSettings,
        redeliverer: Redeliverer,
        lead_ms: int = CLOCK_LEAD_MS,
    ) -> None:
        self.key = key
        self.epoch = epoch
        self.queue = queue
        self.redeliverer = redeliverer
        self.lead_ms = lead_ms
        self.phase = Phase.FENCING
        self.state = InFlight()
        self.topic_ids = ("", "")
        self.reading = False
        self.busy = False
        self.retry_at = 0.0
        self.failures = 0
        self.caught_up_at: int | None = None
        self.stored_offset: int | None = None
        self.stored_position: int | None = None
        """The position of the state that was stored last."""
        self.unread: list[Any] = []
        self.paused = False
        self.queue_end = ALL_EXIST
        self.ask_at = 0.0
        self.ask_failures = 0
        self.doubt: Doubt | None = None
        self.ask_problem: str | None = None
        self.missed_until_ms = INT64_MAX
        self.problem: str | None = None
        self.tick_problem: str | None = None
        self._stuck: dict[int, str] = {}
        self._failed_markers: dict[int, str] = {}
        self._clock_problem: str | None = None
        self._clock_told_at = 0.0
        self._last_tick: Tick | None = None
        self._read_to = -1
        self._now_read_at = 0.0
        self._marker_read_at = 0.0
        self._tick_sent_at: float | None = None

    @property
    def number(self) -> int:
        """The partition's number."""
        return self.key[1]

    @property
    def has_topics(self) -> bool:
        """Whether it is known which topics what it holds is of."""
        return self.topic_ids != ("", "")

    def follow(self, queue: QueueSettings) -> None:
        """Use these settings of the queue, which may have changed."""
        self.queue = self.redeliverer.queue = queue
        self.state.max_hold_ms, self.state.max_delay_ms = queue.max_hold_ms, queue.max_delay_ms

    def start_reading(self, state: InFlight, now: float) -> None:
        """The state to build on, before the first marker is read."""
        self.state = state
        self.follow(self.queue)
        self.unread = []
        self.doubt = None
        self._failed_markers = {}
        self.redeliverer.forget_ended(lambda _offset: False)  # the topic may have been recreated
        self.reading = True
        self._read_to = -1
        self._now_read_at = self._marker_read_at = now

    def catch_up_to(self, tick: Tick, queue_end: int) -> None:
        """Before redelivering, read up to this tick, which was written after the fencing.

        `queue_end`: where the queue ended after that.
        """
        self._last_tick = tick
        self.queue_end = QueueEnd(queue_end, 0)
        self.caught_up_at = tick.at
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
        self.failures = 0
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

    def believe(self, now: float) -> None:
        """Before markers are applied: limit their timestamps by the broker's clock (rule R23)."""
        if self._last_tick is not None:
            self.state.latest_ms = self._last_tick.latest_ms(now) + self.lead_ms

    def tick_written(self, tick: Tick, now: float) -> float:
        """Use the broker's time in a tick that was written; returns by how many s a clock was too far ahead.

        Returns 0 if none was. The partition's clock is set back if it is too far ahead itself, which means
        that the broker's clock has gone back.
        """
        self._last_tick = tick
        broker_ms, state = tick.latest_ms(now), self.state
        ahead_s = max(state.now_ms, state.highest_clamped_ms) / 1000 - broker_ms / 1000
        if state.now_ms > broker_ms + self.lead_ms:
            state.set_back(broker_ms)
        state.highest_clamped_ms = 0
        if ahead_s * 1000 <= self.lead_ms:
            return 0.0
        self.tell_of_clock(
            f"timestamps of markers were {ahead_s:g} s ahead of the broker's clock and are limited; "
            f"set message.timestamp.type=LogAppendTime on {self.queue.markers_topic}, or fix that clock",
            now,
        )
        return ahead_s

    def tell_of_clock(self, problem: str, now: float) -> None:
        """Report for a while that a clock was wrong."""
        self._clock_problem, self._clock_told_at = problem, now

    def seconds_to_tick(self, now: float, silence_s: float) -> float:
        """How long until a tick, or another one, may be needed; infinite while nothing is waiting."""
        if self.phase is not Phase.ACTIVE:
            return float("inf")
        sent_at = self._tick_sent_at
        tick_in_s = 0.0 if sent_at is None else sent_at + _TICK_TIMEOUT_S - now
        if self.state.highest_clamped_ms:  # a tick tells whose clock is wrong
            last = self._last_tick
            return max(tick_in_s, 0.0 if last is None else last.asked_at + _TICK_TIMEOUT_S - now)
        next_due_ms = self.state.next_due_ms()
        if next_due_ms is None:
            return float("inf")
        due_in_s = (next_due_ms - self.state.now_ms) / 1000 - (now - self._now_read_at)
        # Markers with timestamps of a slow clock do not tell that time passes, however many there are.
        silent_from = min(self._marker_read_at, self._now_read_at + _STANDS_STILL_S)
        return max(due_in_s, silent_from + silence_s - now, tick_in_s)

    def redelivered(self, entries: list[Entry], failed: Collection[int], why: str) -> None:
        """Note why those of `entries` that failed did; what was said of the others holds no more."""
        for entry in entries:
            if why and entry.offset in failed:
                self._stuck[entry.offset] = why
            else:
                self._stuck.pop(entry.offset, None)

    def problems(self) -> list[str]:
        """What is wrong. For any thread, so it must not look at the state."""
        found = [
            text for text in (self.problem, self.tick_problem, self.ask_problem, self._clock_problem) if text
        ]
        failed = sorted(self._failed_markers.copy().items())[:_MAX_SHOWN]
        found += [f"marker at offset {at} of {self.queue.markers_topic} {text}" for at, text in failed]
        return found + sorted({*self._stuck.copy().values()}) + self.redeliverer.refused()

    @property
    def has_failed_markers(self) -> bool:
        """Whether there are markers that could not be applied, by a bug of kmqpy."""
        return bool(self._failed_markers)

    def marker_failed(self, at: int, error: Exception) -> None:
        """Note that the marker at this markers offset could not be applied, by a bug of kmqpy."""
        self._failed_markers[at] = f"can't be applied: {type(error).__name__}: {error}"

    def take_over_again(self, at: float) -> None:
        """At the monotonic time `at`, before anything else: nothing is retried from memory (rule R1)."""
        self.phase = Phase.FENCING
        self.retry_at = at

    def back_off(self, now: float) -> None:
        """Take over again after a failure, later with each failure in a row."""
        self.failures += 1
        self.take_over_again(now + _TAKEOVER_PAUSE.delay(self.failures))

    def forget_ended(self, now: float) -> None:
        """Drop problems that are over: old ones of clocks, and those of messages no longer in flight."""
        if now - self._clock_told_at > _TOLD_FOR_S:
            self._clock_problem = None
        self._stuck = {offset: why for offset, why in self._stuck.items() if offset in self.state}
        if not self.busy:
            self.redeliverer.forget_ended(self.state.__contains__)

    def lateness_s(self, entry: Entry, now: float) -> float:
        """How long ago `entry` was due, in seconds by the partition's clock carried forward."""
        return max(0.0, (self.state.now_ms - entry.due_ms) / 1000 + (now - self._now_read_at))

    def now_ms(self, now: float) -> int:
        """The partition's now, carried forward."""
        return self.state.now_ms + max(0, int((now - self._now_read_at) * 1000))

    def delayed_and_overdue(self, now: float) -> tuple[int, int]:
        """How many messages are delayed, and how many of these or in flight are past their time."""
        holds, overdue = self.state.count(self.now_ms(now))
        return holds[EntryState.DELAYED], overdue

    def age_s(self, entry: Entry, now: float) -> float:
        """How long ago `entry` was taken, in seconds."""
        return max(0.0, (self.state.now_ms - entry.since_ms) / 1000 + (now - self._now_read_at))
