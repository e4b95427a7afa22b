"""The clock of a partition, which goes by the timestamps of its markers (rules R4 and R23 of docs/rules.md).

The partition's now is the largest timestamp that was read from its markers; leases end by it. A tick is an
end marker of no message, written here for its timestamp. The tracker writes a tick when a message may be due
and the markers of others do not move the partition's now on.
"""

from __future__ import annotations

from kmqpy.kafka.markers.inflight import InFlight
from tracker.redelivery.tick_writer import Tick

_TICK_TIMEOUT_S = 2.0
"""If a tick was not read back after this time, another one may be written."""
_MAX_STANDSTILL_S = 1.0
"""If markers are read for this long and the partition's now stands still, a tick may be needed."""
_LOST_AFTER_S = 10.0
"""If no marker was read for this long, nor a tick written, those that are waited for may be cut away."""


class PartitionClock:
    """Estimates the partition's now between markers, decides when a tick is needed, and limits timestamps.

    Each argument `now` is a monotonic time in seconds. `lead_ms` is TrackerSettings.max_clock_lead_ms.
    """

    def __init__(self, state: InFlight, lead_ms: int) -> None:
        self._state = state
        self._lead_ms = lead_ms
        self._last_tick: Tick | None = None
        self._tick_sent_at: float | None = None
        self._marker_read_at = 0.0
        self._now_read_at = 0.0
        """The monotonic time at which a marker last moved the partition's now on."""

    def start(self, state: InFlight, now: float) -> None:
        """Use this state from now on; its first marker is still to be read."""
        self._state = state
        self._now_read_at = self._marker_read_at = now

    def marker_read(self, now_before_ms: int, now: float) -> None:
        """Note that markers were applied; before that, the partition's now was `now_before_ms`."""
        self._marker_read_at = now
        self._tick_sent_at = None
        if self._state.now_ms != now_before_ms:
            self._now_read_at = now

    def tick_sent(self, now: float) -> None:
        """Note that a tick was sent, and is not read back yet."""
        self._tick_sent_at = now

    def follow_tick(self, tick: Tick) -> None:
        """Estimate the broker's time from this tick, which was written, from now on."""
        self._last_tick = tick

    def set_right(self, tick: Tick, now: float) -> float:
        """Follow the tick; returns by how many seconds timestamps were ahead of the broker's clock.

        Returns 0 where that is not more than `lead_ms`. If the partition's now itself is further ahead, it is
        set back to the broker's time: the broker's clock was set back.
        """
        self.follow_tick(tick)
        broker_ms, state = tick.latest_ms(now), self._state
        ahead_s = max(state.now_ms, state.highest_clamped_ms) / 1000 - broker_ms / 1000
        if state.now_ms > broker_ms + self._lead_ms:
            state.set_back(broker_ms)
        state.highest_clamped_ms = 0
        return ahead_s if ahead_s * 1000 > self._lead_ms else 0.0

    def limit_timestamps(self, now: float) -> None:
        """Limit timestamps of the markers applied next to the broker's time + `lead_ms` (rule R23)."""
        if self._last_tick is not None:
            self._state.latest_ms = self._last_tick.latest_ms(now) + self._lead_ms

    def seconds_to_tick(self, now: float, silence_s: float, *, is_busy: bool) -> float:
        """How many seconds until a tick may be needed; infinite while no message waits for its due time.

        One that was redelivered waits for its end marker, which may be cut away (rule R40).

        is_busy  True while a job redelivers messages
        """
        sent_at = self._tick_sent_at
        tick_in_s = 0.0 if sent_at is None else sent_at + _TICK_TIMEOUT_S - now
        if self._state.highest_clamped_ms:  # timestamps were limited: a tick tells which clock is wrong
            last = self._last_tick
            return max(tick_in_s, 0.0 if last is None else last.asked_at + _TICK_TIMEOUT_S - now)
        is_awaiting = self._state.awaits_ends and not is_busy
        lost_in_s = max(self._lost_in_s(now), tick_in_s) if is_awaiting else float("inf")
        next_due_ms = self._state.next_due_ms()
        if next_due_ms is None:
            return lost_in_s
        due_in_s = (next_due_ms - self._state.now_ms) / 1000 - (now - self._now_read_at)
        # Any number of markers with timestamps of a slow clock does not move the partition's now on.
        silent_from = min(self._marker_read_at, self._now_read_at + _MAX_STANDSTILL_S)
        return min(lost_in_s, max(due_in_s, silent_from + silence_s - now, tick_in_s))

    def has_lost_tick(self, now: float) -> bool:
        """True if the last tick was written long ago, and nothing was read since."""
        return self._lost_in_s(now) <= 0

    def has_read_since(self, at: float) -> bool:
        """True if a marker was read after this time."""
        return self._marker_read_at > at

    def _lost_in_s(self, now: float) -> float:
        written_at = 0.0 if self._last_tick is None else self._last_tick.asked_at
        return max(written_at, self._marker_read_at) + _LOST_AFTER_S - now

    def now_ms(self, now: float) -> int:
        """The partition's now, plus the time since a marker last moved it on."""
        return self._state.now_ms + max(0, int((now - self._now_read_at) * 1000))

    def seconds_since(self, time_ms: int, now: float) -> float:
        """How many seconds ago `time_ms` was, by now_ms(); 0 if it is still to come."""
        return max(0.0, (self._state.now_ms - time_ms) / 1000 + (now - self._now_read_at))
