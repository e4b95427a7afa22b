"""The clock of a partition: the broker's time, as markers and ticks tell it (rules R4, R23)."""

from __future__ import annotations

from kmqpy.kafka.markers.inflight import InFlight
from tracker.redelivery.tick_writer import Tick

_TICK_TIMEOUT_S = 2.0
_STANDS_STILL_S = 1.0
"""How long the partition's now may stand still while markers are read, before a tick may be needed."""


class PartitionClock:
    """Tells the partition's now between markers, when a tick is needed, and which timestamps are too late.

    `now` are monotonic times in s; `lead_ms`: see TrackerSettings.max_clock_lead_ms.
    """

    def __init__(self, state: InFlight, lead_ms: int) -> None:
        self._state = state
        self._lead_ms = lead_ms
        self._last_tick: Tick | None = None
        self._tick_sent_at: float | None = None
        self._marker_read_at = 0.0
        self._now_read_at = 0.0
        """When the last marker was read that moved the partition's now."""

    def start(self, state: InFlight, now: float) -> None:
        """Go by this state, which now begins to read markers."""
        self._state = state
        self._now_read_at = self._marker_read_at = now

    def marker_read(self, now_before_ms: int, now: float) -> None:
        """Note that markers were read; before them the partition's now was `now_before_ms`."""
        self._marker_read_at = now
        self._tick_sent_at = None
        if self._state.now_ms != now_before_ms:
            self._now_read_at = now

    def tick_sent(self, now: float) -> None:
        """Note that a tick is under way."""
        self._tick_sent_at = now

    def follow_tick(self, tick: Tick) -> None:
        """Take the broker's time from this tick, which was written."""
        self._last_tick = tick

    def set_right(self, tick: Tick, now: float) -> float:
        """Follow the tick; returns by how many s a clock was too far ahead of the broker's, 0 if none was.

        The partition's clock is set back if it is too far ahead itself, which means that the broker's
        clock has gone back.
        """
        self.follow_tick(tick)
        broker_ms, state = tick.latest_ms(now), self._state
        ahead_s = max(state.now_ms, state.highest_clamped_ms) / 1000 - broker_ms / 1000
        if state.now_ms > broker_ms + self._lead_ms:
            state.set_back(broker_ms)
        state.highest_clamped_ms = 0
        return ahead_s if ahead_s * 1000 > self._lead_ms else 0.0

    def limit_timestamps(self, now: float) -> None:
        """Before markers are applied, limit their timestamps by the broker's clock (rule R23)."""
        if self._last_tick is not None:
            self._state.latest_ms = self._last_tick.latest_ms(now) + self._lead_ms

    def seconds_to_tick(self, now: float, silence_s: float) -> float:
        """How long until a tick, or another one, may be needed; infinite while nothing is waiting."""
        sent_at = self._tick_sent_at
        tick_in_s = 0.0 if sent_at is None else sent_at + _TICK_TIMEOUT_S - now
        if self._state.highest_clamped_ms:  # a tick tells whose clock is wrong
            last = self._last_tick
            return max(tick_in_s, 0.0 if last is None else last.asked_at + _TICK_TIMEOUT_S - now)
        next_due_ms = self._state.next_due_ms()
        if next_due_ms is None:
            return float("inf")
        due_in_s = (next_due_ms - self._state.now_ms) / 1000 - (now - self._now_read_at)
        # Markers with timestamps of a slow clock do not tell that time passes, however many there are.
        silent_from = min(self._marker_read_at, self._now_read_at + _STANDS_STILL_S)
        return max(due_in_s, silent_from + silence_s - now, tick_in_s)

    def now_ms(self, now: float) -> int:
        """The partition's now, carried forward."""
        return self._state.now_ms + max(0, int((now - self._now_read_at) * 1000))

    def seconds_since(self, time_ms: int, now: float) -> float:
        """How many seconds ago a time was by this clock, carried forward; 0 if it is still to come."""
        return max(0.0, (self._state.now_ms - time_ms) / 1000 + (now - self._now_read_at))
