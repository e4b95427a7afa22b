"""The state of one owned partition, from its takeover to its release. No I/O: the main loop does that."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.markers.replay import ALL_EXIST, QueueEnd
from kmqpy.kafka.settings import CLOCK_LEAD_MS, QueueSettings
from tracker.leadership.assignment import Partition
from tracker.partition.clock import PartitionClock
from tracker.partition.partition_problems import PartitionProblems
from tracker.redelivery.known_log import CopySearch, KnownLog, LastSeen
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick

_TAKEOVER_PAUSE = Backoff(0.4, 2, 10, jitter=0)
"""The pause before a takeover after a failure: 0.4 s, doubled by each failure in a row, up to 10 s."""


class UnconfirmedAbsence(NamedTuple):
    """Kafka says that a message which a marker names does not exist; the tracker does not believe it yet.

    since   the monotonic time of Kafka's first answer, in seconds
    below   the answers decide about markers below this markers offset
    end     the highest end of the queue among the answers since then
    """

    since: float
    below: int
    end: LogEnd


class TrackingPhase(StrEnum):
    """The phases of an owned partition, in their order."""

    FENCING = "fencing"
    """A takeover is to begin or runs. After any failure this phase comes again."""
    CATCHING_UP = "catching up"
    """The main loop reads markers up to the tick that the takeover has written."""
    ACTIVE = "active"
    """All earlier markers are read; due messages are redelivered."""
    DROPPED = "dropped"
    """This tracker has given the partition up, or lost it."""


class OwnedPartition:
    """The tracker's state of a partition that it owns. Only the main loop changes it.

    A background job of the partition reads `key`, `queue` and `topic_ids`. While it runs (`busy`), only the
    job uses `redeliverer`.

    epoch             the epoch of the leader znode, see LeadershipView
    topic_ids         ids of the queue topic and the markers topic that the state is of
    reading           True while the markers consumer fetches the partition
    retry_at          the monotonic time before which no takeover begins
    catch_up_offset   markers offset of the last takeover's tick
    is_held_back      True if an open transaction kept it from being read when it was written
    stored_offset     the safe offset that was stored last
    stored_end        the `taken_end` that was stored with it
    stored_position   the state's position when this offset was due
    unread            markers that were fetched but not applied, until a newer `queue_end` tells whether the
                      messages exist that they name
    paused            True while fetching is paused because `unread` is long
    markers_epoch     the latest leader epoch of the markers partition whose markers are read; -1: not known
    queue_end         the end offset of the queue that Kafka told last
    taken_end         the offset after the highest message that was taken, and the latest leader epoch in
                      which no unknown cut (rule R39) had taken it away; -1: not known
    intact_end        the log below this offset is the same since the partition had this leader epoch; -1: not
                      known
    doubted_since     the monotonic time since which the log seems to have been cut back, by `last_taken`
                      only; None: it does not
    looks_for_cut     True while a job looks whether the log was cut back
    look_for_cut_at   the monotonic time before which no such job begins
    searches          searches for messages whose copies were cut away; a job does the first one
    ask_at            the monotonic time before which Kafka is not asked for the end again
    asked_at          the monotonic time of the last answer
    ask_failures      how often in a row Kafka did not tell the end
    copies_hang_at    the queue offset at which copies of a tracker's transaction have stood still for long
    not_ended         topic and offset of hanging transactions that a takeover has tried to end in vain
    missed_until_ms   start markers that were never read don't matter any more once the oldest message in
                      flight was taken after this time
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
        self.is_held_back = False
        self.stored_offset: int | None = None
        self.stored_end: LogEnd | None = None
        self.stored_position: int | None = None
        self.unread: list[Any] = []
        self.paused = False
        self.markers_epoch = -1
        self.queue_end = ALL_EXIST
        self.taken_end = LogEnd(0)
        self.intact_end = LogEnd(0)
        self.doubted_since: float | None = None
        self.looks_for_cut = False
        self.look_for_cut_at = 0.0
        self.searches: list[CopySearch] = []
        self._log = KnownLog()
        self.ask_at = 0.0
        self.asked_at = 0.0
        self.ask_failures = 0
        self.absence: UnconfirmedAbsence | None = None
        self.missed_until_ms = INT64_MAX
        self.copies_hang_at: int | None = None
        self.not_ended: set[tuple[str, int]] = set()
        self._read_to = -1

    @property
    def number(self) -> int:
        return self.key[1]

    @property
    def has_topics(self) -> bool:
        """True if `topic_ids` is set: a takeover has begun to read."""
        return self.topic_ids != ("", "")

    def follow(self, queue: QueueSettings) -> None:
        """Use these settings of the queue from now on."""
        self.queue = self.redeliverer.queue = queue
        self.state.max_lease_ms, self.state.max_delay_ms = queue.max_lease_ms, queue.max_delay_ms
        self.state.has_retries = bool(queue.retry_delays)

    def start_reading(
        self, state: InFlight, now: float, below: int = 0, epoch: int = -1, markers_epoch: int = -1
    ) -> None:
        """Replace the state, before the first marker is read.

        epoch          a leader epoch of the queue partition, told after the takes before markers offset
                       `below` were written; -1: not known
        markers_epoch  the latest leader epoch of the markers partition; -1: not known
        """
        self.state = state
        self.markers_epoch = markers_epoch
        self.searches = []  # a job that runs tells by it that it is of another state
        self.taken_end = self.intact_end = LogEnd(0)
        self.doubted_since = None
        self._log = KnownLog().told(below, epoch)
        self.follow(self.queue)
        self.unread = []
        self.absence = None
        self.problems.forget_markers()
        self.redeliverer.failures.forget_ended(lambda _offset: False)  # offsets may be of a recreated topic
        self.reading = True
        self._read_to = -1
        self.clock.start(state, now)

    def catch_up_to(
        self, tick: Tick, queue_end: LogEnd, existed: int = 0, known_end: LogEnd | None = None
    ) -> None:
        """Enter the phase CATCHING_UP until this tick, written after the fencing, has been read.

        `queue_end`: the queue's end, asked for after the tick was written. `existed`: all messages below this
        offset existed before, in a log that was cut back since. `known_end`: see TakeoverResult.
        """
        self.clock.follow_tick(tick)
        self.queue_end = QueueEnd(max(queue_end.offset, existed), 0, queue_end.epoch)
        if self.taken_end.epoch < 0:
            self.taken_end = known_end or LogEnd(0, queue_end.epoch)
        self._log = self._log.told(tick.markers_offset, queue_end.epoch)
        self.catch_up_offset = tick.markers_offset
        self.phase = TrackingPhase.CATCHING_UP
        self.state.claims.expects = None
        # If the partition was read during the takeover, the tick may have been read already.
        self._end_catching_up()

    @property
    def log(self) -> KnownLog:
        """What is known of the queue's log now."""
        epoch, by_clients = self.last_known.epoch, self.last_taken
        if by_clients is not None:
            epoch = min(epoch, by_clients.epoch)
        return replace(self._log, cuts=self.state.cuts, epoch=epoch, whole=not self.searches)

    @property
    def last_known(self) -> LastSeen:
        """The record that would be missing if a cut that is not known had happened: one taken, or a copy."""
        taken = LastSeen(self.taken_end.offset - 1, self.taken_end.epoch)
        copy = self.state.copies.least_sure
        if copy is None:
            return taken
        copied = LastSeen(offset_of(copy.number), copy.epoch, copy.claim_id)
        if taken.epoch < 0:
            return copied
        return min(taken, copied, key=lambda seen: (seen.epoch, -seen.offset))

    @property
    def may_be_cut(self) -> bool:
        """True as long as nobody has looked at `last_known` since the latest election, or a doubt is left."""
        return self.last_known.epoch < self.queue_end.epoch or self.doubted_since is not None

    @property
    def last_taken(self) -> LastSeen | None:
        """The highest message taken, with the epoch that clients tell who write ticks; None: none does."""
        number, epoch = self.state.highest_taken, self.state.takes_epoch
        if number < 0 or epoch < 0:
            return None
        offset = offset_of(number)
        if offset < self.intact_end.offset:
            epoch = max(epoch, self.intact_end.epoch)
        return LastSeen(offset, epoch, is_sure=False)

    def is_intact(self, seen: LastSeen, epoch: int) -> None:
        """Note that no cut before this leader epoch took away this record, which was the last known."""
        self.end_doubt()
        if not seen.is_sure:
            self.intact_end = LogEnd(seen.offset + 1, epoch)
            return
        if self.taken_end.offset <= seen.offset + 1 and self.taken_end.epoch < epoch:
            self.taken_end = self.taken_end._replace(epoch=epoch)
        if seen.offset >= 0:
            self.state.copies.is_intact(self.state.cuts.number_of(seen.offset), epoch)

    @property
    def told_below(self) -> int:
        """It is known which epochs the messages can have whose takes stand before this markers offset."""
        return self._log.epochs[-1][0] if self._log.epochs else 0

    @property
    def log_evidence(self) -> tuple[LogEnd, int]:
        """What tells a successor whether the log was cut back: StoredOffset's `taken_end`, `told_below`."""
        end = LogEnd(self.last_known.offset + 1, self.last_known.epoch)
        elected = end.epoch != self.log.last_epoch  # and nobody has looked yet
        return end, 0 if elected else self.told_below

    def epoch_told(self, epoch: int, below: int, highest_taken: int) -> None:
        """Note the partition's leader epoch, asked for when the markers before `below` were written.

        highest_taken  the highest message that is taken by them
        """
        self._log = self._log.told(below, epoch)
        # Who takes a message by a former number has fetched it before the cut: it may have another epoch.
        if epoch == self.taken_end.epoch and self.state.cuts.is_current(highest_taken):
            self.taken_end = LogEnd(max(self.taken_end.offset, offset_of(highest_taken + 1)), epoch)

    def log_was_cut(self, start: int, end: int, lost: int, now: float) -> None:
        """Show it for a while; what Kafka told of the former log's end does not count any more."""
        epoch = self.state.cuts.cuts[-1].epoch
        self.intact_end = LogEnd(start, epoch)
        # Clients know of no message above those that were taken, so its offset may have been used again.
        self.taken_end = LogEnd(min(self.taken_end.offset, start), epoch)
        self.end_doubt()
        self.queue_end = QueueEnd(0, 0, self.queue_end.epoch)
        self.problems.log_was_cut(
            f"the log of topic {self.queue.name} was cut back: messages from offset {start} to before {end} "
            f"are lost, {lost} of them in flight; see KmqLogCut in docs/operations.md",
            now,
        )

    def give_up_doubt(self) -> None:
        """Note that the messages taken last may have any epoch, until an assignment tick tells one.

        Else each further take of a client that writes no ticks would be in doubt like the one before.
        """
        self.state.takes_epoch = -1
        self.end_doubt()

    def end_doubt(self) -> None:
        """Note that nothing says any more that the log was perhaps cut back."""
        self.doubted_since = self.problems.election = None

    def read(self, at: int, now_before_ms: int, now: float) -> bool:
        """Note that all records up to markers offset `at` were applied; True if that ends catching up."""
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
        failures, self.failures = self.failures, 0
        # Redeliveries from before the fencing were committed and are read by now, or never will be.
        self.state.claims.end_all()
        self.state.claims.expects = self.redeliverer.expects_claim
        self.state.claims.aborted = self.redeliverer.aborted_claims
        if self.state.claims:
            self.failures = failures  # what is torn may be impossible to mend for a while
        self.state.retry_all()
        return True

    def waits_in_vain(self, now: float) -> bool:
        """True if the tick up to which markers are to be read was cut away, as far as one can tell."""
        waits = self.phase is TrackingPhase.CATCHING_UP and not self.unread and not self.is_held_back
        return waits and self.clock.has_lost_tick(now)

    def due(self, limit: int) -> list[Entry]:
        """Up to `limit` messages to redeliver now; they count as in redelivery from then on."""
        if self.phase is not TrackingPhase.ACTIVE or self.busy:
            return []
        return self.state.take_due(limit)

    def wants_tick(self, now: float, silence_s: float) -> bool:
        """True if a lease has probably ended but no marker says so. For when `due` has returned nothing."""
        return self.seconds_to_tick(now, silence_s) <= 0

    def seconds_to_tick(self, now: float, silence_s: float) -> float:
        """See PartitionClock.seconds_to_tick(); infinite unless the partition is active."""
        if self.phase is not TrackingPhase.ACTIVE:
            return float("inf")
        return self.clock.seconds_to_tick(now, silence_s, is_busy=self.busy)

    def take_over_again(self, at: float) -> None:
        """Have the partition taken over again at the monotonic time `at`, before any other work on it.

        No redelivery is retried from memory (rule R1 of docs/rules.md).
        """
        self.phase = TrackingPhase.FENCING
        self.retry_at = at

    def back_off(self, now: float) -> None:
        """Have the partition taken over again after a pause that grows with each failure in a row."""
        self.failures += 1
        self.take_over_again(now + _TAKEOVER_PAUSE.delay(self.failures))

    def tick_written(self, tick: Tick, now: float) -> float:
        """Correct the clock by a tick; returns by how many seconds timestamps were too far ahead, or 0."""
        ahead_s = self.clock.set_right(tick, now)
        if ahead_s:
            self.problems.clock_was_wrong(
                f"timestamps of markers were {ahead_s:g} s ahead of the broker's clock and are limited; "
                f"set message.timestamp.type=LogAppendTime on {self.queue.markers_topic}, or fix that clock",
                now,
            )
        return ahead_s

    def delayed_and_overdue(self, now: float) -> tuple[int, int]:
        """How many messages are delayed, and how many in flight or delayed are past their time."""
        states, overdue = self.state.count(self.clock.now_ms(now))
        return states[EntryState.DELAYED], overdue

    def has_taken(self, offset: int) -> bool:
        """Return True if the message at this offset is in flight."""
        if offset in self.state:  # even if the log was cut, and a client took it that knows no cuts
            return True
        return bool(self.state.cuts) and self.state.cuts.number_of(offset) in self.state

    def forget_ended(self, now: float) -> None:
        """Drop problems that are over, and what the redeliverer remembers of messages not in flight."""
        self.problems.forget_ended(self.state.__contains__, now)
        if not self.busy:
            self.redeliverer.failures.forget_ended(self.state.__contains__)

    def problem_texts(self) -> list[str]:
        """The problems of the partition, as /readyz shows them. For any thread."""
        texts = self.problems.texts(self.queue.markers_topic) + self.redeliverer.failures.refused()
        if self.state.pinned and not self.problems.has_failed_markers:
            texts.append("markers of a newer kmqpy; update this tracker")
        return texts
