"""The state of one owned partition, from takeover to release. No I/O of its own: the main loop does that."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.replay import ALL_EXIST, QueueEnd
from kmqpy.kafka.settings import CLOCK_LEAD_MS, QueueSettings
from tracker.leadership.assignment import Partition
from tracker.partition.clock import PartitionClock
from tracker.partition.partition_problems import PartitionProblems
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick

_TAKEOVER_PAUSE = Backoff(0.4, 2, 10, jitter=0)
"""Before a takeover that follows one that failed."""


class UnconfirmedAbsence(NamedTuple):
    """Messages that markers below markers offset `below` name don't exist, as far as Kafka says.

    since   the monotonic time of the first answer, in s
    end     the highest end of the queue that was told since then
    """

    since: float
    below: int
    end: int


class TrackingPhase(StrEnum):
    """The phases of an owned partition."""

    FENCING = "fencing"
    """Fencing predecessors; also after a failure, before anything else is done (rule R1)."""
    CATCHING_UP = "catching up"
    """Reading markers up to the tick written after the fencing."""
    ACTIVE = "active"
    """Redelivering."""
    DROPPED = "dropped"
    """Not ours any more."""


class OwnedPartition:
    """The tracker's view of a partition it owns; changed by the main loop only.

    A background job of the partition reads `key`, `queue` and `topic_ids`, and has `redeliverer` to itself.

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
        self.phase = TrackingPhase.FENCING
        self.state = InFlight()
        self.clock = PartitionClock(self.state, lead_ms)
        self.problems = PartitionProblems()
        self.topic_ids = ("", "")
        self.reading = False
        self.busy = False
        self.retry_at = 0.0
        self.failures = 0
        self.catch_up_offset: int | None = None
        self.stored_offset: int | None = None
        self.stored_position: int | None = None
        """The position of the state that was stored last."""
        self.unread: list[Any] = []
        self.paused = False
        self.queue_end = ALL_EXIST
        self.ask_at = 0.0
        self.ask_failures = 0
        self.absence: UnconfirmedAbsence | None = None
        self.missed_until_ms = INT64_MAX
        self._read_to = -1

    @property
    def number(self) -> int:
        """The partition's number."""
        return self.key[1]

    @property
    def has_topics(self) -> bool:
        """True if it is known of which topics the state is."""
        return self.topic_ids != ("", "")

    def follow(self, queue: QueueSettings) -> None:
        """Use these settings of the queue, which may have changed."""
        self.queue = self.redeliverer.queue = queue
        self.state.max_hold_ms, self.state.max_delay_ms = queue.max_hold_ms, queue.max_delay_ms

    def start_reading(self, state: InFlight, now: float) -> None:
        """Begin with this state, before the first marker is read."""
        self.state = state
        self.follow(self.queue)
        self.unread = []
        self.absence = None
        self.problems.forget_markers()
        self.redeliverer.forget_ended(lambda _offset: False)  # the topic may have been recreated
        self.reading = True
        self._read_to = -1
        self.clock.start(state, now)

    def catch_up_to(self, tick: Tick, queue_end: int) -> None:
        """Before redelivering, read up to this tick, which was written after the fencing.

        `queue_end`: where the queue ended after that.
        """
        self.clock.follow_tick(tick)
        self.queue_end = QueueEnd(queue_end, 0)
        self.catch_up_offset = tick.markers_offset
        self.phase = TrackingPhase.CATCHING_UP
        # When reading went on all the while, the tick may have been read already.
        self._end_catching_up()

    def read(self, at: int, now_before_ms: int, now: float) -> bool:
        """Note that the record at markers offset `at` was read; True when that ends catching up."""
        self._read_to = at
        self.clock.marker_read(now_before_ms, now)
        self.problems.tick = None
        return self._end_catching_up()

    def _end_catching_up(self) -> bool:
        if self.phase is not TrackingPhase.CATCHING_UP or self.catch_up_offset is None:
            return False
        if self._read_to < self.catch_up_offset:
            return False
        self.phase = TrackingPhase.ACTIVE
        self.failures = 0
        # Whatever was in redelivery before the fencing either shows as ended now, or never will.
        self.state.retry_all()
        return True

    def due(self, limit: int) -> list[Entry]:
        """Messages to redeliver now."""
        if self.phase is not TrackingPhase.ACTIVE or self.busy:
            return []
        return self.state.take_due(limit)

    def wants_tick(self, now: float, silence_s: float) -> bool:
        """True if a lease is probably over while no marker says so; call it when not `due`."""
        return self.seconds_to_tick(now, silence_s) <= 0

    def seconds_to_tick(self, now: float, silence_s: float) -> float:
        """How long until a tick, or another one, may be needed; infinite while nothing is waiting."""
        return (
            self.clock.seconds_to_tick(now, silence_s) if self.phase is TrackingPhase.ACTIVE else float("inf")
        )

    def take_over_again(self, at: float) -> None:
        """Take the partition over again, at the monotonic time `at`, before anything else.

        Nothing is retried from memory (rule R1).
        """
        self.phase = TrackingPhase.FENCING
        self.retry_at = at

    def back_off(self, now: float) -> None:
        """Take over again after a failure, later with each failure in a row."""
        self.failures += 1
        self.take_over_again(now + _TAKEOVER_PAUSE.delay(self.failures))

    def tick_written(self, tick: Tick, now: float) -> float:
        """Set the clock right by a tick that was written; returns by how many s a clock was too far ahead."""
        ahead_s = self.clock.set_right(tick, now)
        if ahead_s:
            self.problems.clock_was_wrong(
                f"timestamps of markers were {ahead_s:g} s ahead of the broker's clock and are limited; "
                f"set message.timestamp.type=LogAppendTime on {self.queue.markers_topic}, or fix that clock",
                now,
            )
        return ahead_s

    def delayed_and_overdue(self, now: float) -> tuple[int, int]:
        """How many messages are delayed, and how many of these or in flight are past their time."""
        states, overdue = self.state.count(self.clock.now_ms(now))
        return states[EntryState.DELAYED], overdue

    def forget_ended(self, now: float) -> None:
        """Drop problems that are over, and what is remembered of messages no longer in flight."""
        self.problems.forget_ended(self.state.__contains__, now)
        if not self.busy:
            self.redeliverer.forget_ended(self.state.__contains__)

    def problem_texts(self) -> list[str]:
        """The problems of the partition; for any thread."""
        texts = self.problems.texts(self.queue.markers_topic) + self.redeliverer.refused()
        if self.state.pinned and not self.problems.has_failed_markers:
            texts.append("markers of a newer kmqpy; update this tracker")
        return texts
