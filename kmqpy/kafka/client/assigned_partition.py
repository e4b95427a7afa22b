"""Keeps the state of one partition that Kafka has assigned to a group member. Pure: no I/O, no clock.

The phases of a partition are RECOVERING -> ACTIVE -> CHECKING -> ACTIVE -> ... When a member has to start a
partition over, it replaces the AssignedPartition by a new one, which is RECOVERING.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kmqpy.core.backoff import Backoff
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.client.commit_check import PartitionEnds
from kmqpy.kafka.client.offset_commits import Commit, PartitionCommits
from kmqpy.kafka.client.twins import Twins
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts, offset_of
from kmqpy.kafka.markers.named_copies import NamedCopies
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import ascends

_RETRY_BACKOFF = Backoff(0.2, 2, 10, jitter=0)
"""The pause before the markers of a partition are read again, in seconds. It doubles with each failure."""


class ReceivePhase(Enum):
    """The phase of an assigned partition: the work that comes before its messages are received.

    Rules R10 and R18 are those of docs/rules.md.
    """

    RECOVERING = auto()
    """The client reads which messages have a start marker of an earlier client (rule R10)."""
    CHECKING = auto()
    """Start markers of this client failed. The client reads which of them Kafka has written after all (rule
    R18)."""
    ACTIVE = auto()
    """The client receives messages."""


@dataclass(slots=True)
class StartsFound:
    """The start markers that a client has read in one partition, for messages from some queue offset on.

    started    offsets of the messages that have a start marker
    in_flight  offsets of the messages whose last take is followed by neither an end marker nor a delay marker
    end        the markers offset at which the markers partition ended
    complete   False: start markers may be missing, because the markers offset to begin at was unknown, or
               because Kafka has deleted markers at or after it
    epoch      the highest leader epoch in an assignment tick so far: messages that are taken behind it have
               this one or a lower one; None if no tick says so
    by_epoch   the messages in `started`, by this epoch
    beyond     by this epoch, the numbers that start markers name soon behind the end of the log: they are
               cut away or forged
    cuts       the cuts of the queue partition's log that ticks name
    copies     the highest copy that trackers have written, as their end markers say
    markers_epoch  the latest leader epoch of the markers partition; None: not known
    newer      True: a tick names a leader epoch, or a start marker a message, that the queue partition does
               not have, as far as is known
    """

    started: OffsetRuns = field(default_factory=OffsetRuns)
    in_flight: OffsetRuns = field(default_factory=OffsetRuns)
    end: int = 0
    complete: bool = True
    epoch: int | None = None
    by_epoch: dict[int | None, OffsetRuns] = field(default_factory=dict)
    beyond: dict[int | None, OffsetRuns] = field(default_factory=dict)
    cuts: LogCuts = NO_CUTS
    copies: NamedCopies = field(default_factory=NamedCopies)
    markers_epoch: int | None = None
    newer: bool = False


class AssignedPartition:
    """The state of one partition that is assigned to a group member.

    Its methods name messages by their offsets, except where they say that they take or return numbers; see
    log_cuts.

    assigned_at  monotonic time of the assignment; the markers are read when the topic ids are known as of
                 this time or later
    log_end      the end of the queue partition, if it is known. A commit above it is ignored, because the log
                 was truncated or the topic was recreated (deleted and made again under the same name)
    must_seek    True: librdkafka does not go on from the commit by itself when the partition becomes ACTIVE
    doubted      offset and leader epoch of the record that has made the partition start over; if they are
                 wrong still, they are damaged
    """

    def __init__(
        self,
        assigned_at: float,
        *,
        log_end: int = INT64_MAX,
        must_seek: bool = False,
        doubted: tuple[int, int | None] | None = None,
    ) -> None:
        self.assigned_at = assigned_at
        self.doubted = doubted
        self.must_seek = must_seek
        self.phase = ReceivePhase.RECOVERING
        self.commits = PartitionCommits()
        self.twins = Twins()
        """In a queue that collapses: what was taken and may have twins that wait."""
        self.position = 0
        """The lowest queue offset that may come next. A message below this offset has come before, and is
        ignored."""
        self.end_at_begin = 0
        """The last stable offset when the partition was begun; 0 before that."""
        self.cuts = NO_CUTS
        """The cuts of the log, which say which number the message at an offset has."""
        self.epoch: int | None = None
        """The highest leader epoch of the log that is known to this member; None: none is."""
        self.markers_epoch: int | None = None
        """The same of the markers."""
        self._given_epoch: int | None = None
        """The same in the commit of the predecessor."""
        self._log_end = log_end
        self._started = OffsetRuns()
        """Numbers, from the committed offset on, of messages that already have a start marker; the client
        skips them."""
        self._uncertain: set[int] = set()
        """Numbers of messages whose start markers failed; Kafka may have written some of them after all."""
        self._markers_end = 0
        """Where the markers partition ended when it was last read. Start markers that this member writes
        afterwards have this markers offset or a higher one."""
        self._retry_at = 0.0
        self._failures = 0
        self.stands_still = False
        """True: the record at `position` is damaged. The partition is ACTIVE, but nothing comes from it."""

    # --- receiving --------------------------------------------------------------------------------

    def expects(
        self, offsets: Sequence[int], log_start: int, epoch: int | None = None, log_end: int = INT64_MAX
    ) -> bool:
        """Return True if receive() would return True for each of these offsets; the usual case.

        Then receive_expected() notes all of them at once. After False, look at each of them with receive().
        `epoch` is the leader epoch of the last record, the highest of all.
        """
        next_offset = self.commits.next_offset
        return (
            self.phase is ReceivePhase.ACTIVE
            and not self._started
            and next_offset is not None
            and next_offset >= log_start
            and offsets[0] >= self.position
            and offsets[-1] < log_end
            and not self.shows_new_epoch(epoch)
            and ascends(offsets)
        )

    def receive_expected(self, offsets: Sequence[int]) -> None:
        """Note that these messages came, for which expects() has returned True. The client receives them."""
        self.commits.receive(len(offsets))
        self.position = offsets[-1] + 1

    def receive(self, offset: int, log_start: int) -> bool:
        """Note that a message came; returns True if the client receives the message.

        The client does not receive a message that came before the partition was ACTIVE, that came a second
        time, that has a start marker, or that was deleted since it was fetched.
        """
        if self.phase is not ReceivePhase.ACTIVE:
            self.must_seek = True
            return False
        if offset < self.position:
            # If a pause, resume or seek overtakes librdkafka's look-up of the offset to begin at, librdkafka
            # repeats the look-up half a second later and goes back to that offset.
            return False
        self.position = offset + 1
        if offset < log_start or self.cuts.number_of(offset) in self._started:
            self.commits.skip(offset)
            return False
        self.commits.receive(1)
        return True

    def shows_new_epoch(self, epoch: int | None) -> bool:
        """Return True if a record with this leader epoch shows that the log may have been cut back.

        Kafka has elected a leader since the epoch was read; then the log may lack what it had before.
        """
        return epoch is not None and self.epoch is not None and epoch > self.epoch

    def shows_new_log(self, ends: PartitionEnds) -> bool:
        """Return True if the log, or that of the markers, may have been cut back, going by their ends."""
        return self.phase is ReceivePhase.ACTIVE and (
            ends.queue.offset < self.position
            or self.shows_new_epoch(ends.queue.epoch)
            or (self.markers_epoch is not None and (ends.markers.epoch or 0) > self.markers_epoch)
        )

    def shows_another_log(self, offset: int, log_end: int) -> bool:
        """Return True if the message is of a recreated topic: the log ends below the offset read before."""
        return self.phase is ReceivePhase.ACTIVE and offset < self.position and log_end < self.position

    def stand_still(self, now: float) -> None:
        """Receive nothing for a while, because the next record is damaged; for longer each time."""
        self.stands_still = True
        self.back_off(now)

    def tries_again(self, now: float) -> bool:
        """Return True once the pause of stand_still() is over: the next record can be fetched again."""
        if not self.stands_still or now < self._retry_at:
            return False
        self.stands_still = False
        return True

    # --- start markers ----------------------------------------------------------------------------

    def mark_started(self, number: int, markers_offset: int, count: int) -> None:
        """Let `count` messages up to `number` be committed. The last start marker is at `markers_offset`."""
        self.commits.mark_started(offset_of(number), markers_offset, count)
        self._failures = 0

    def mark_uncertain(self, numbers: Sequence[int]) -> None:
        """Note that start markers of these ascending numbers failed; Kafka may have written some of them.

        Call this before `mark_started` for other messages of the same batch, and call `rewind` afterwards.
        """
        self.commits.mark_uncertain(offset_of(numbers[-1]), self._markers_end)
        self._uncertain.update(numbers)

    def rewind(self, number: int, now: float) -> None:
        """Receive messages from `number` on again, after a back-off and a check of failed start markers."""
        self.phase = ReceivePhase.CHECKING
        self.commits.rewind()
        self.twins.clear()
        self.position = offset_of(number)
        self.back_off(now)

    def continues_at(self, markers_offset: int) -> bool:
        """Return True if a start marker written at this markers offset comes after all those known so far."""
        known = max(self._markers_end, self.commits.markers_offset or 0)
        return markers_offset < 0 or markers_offset >= known  # -1: Kafka does not say where

    def begin_markers_anew(self) -> None:
        """Forget the markers offsets of the former markers topic, because the topic was recreated."""
        self._markers_end = 0
        self.commits.begin_markers_anew()

    # --- reading the markers ----------------------------------------------------------------------

    def needs_markers(self, now: float) -> bool:
        """Return True if the partition is not ACTIVE and no back-off runs: its markers have to be read."""
        return self.phase is not ReceivePhase.ACTIVE and now >= self._retry_at

    def back_off(self, now: float) -> None:
        """Put off the next read of the markers, for longer after each failure."""
        self._failures += 1
        self._retry_at = now + _RETRY_BACKOFF.delay(self._failures)

    def recover_from(self, commit: Commit | None) -> Commit:
        """Return the commit to recover from: the predecessor's, or the beginning if that is unusable."""
        if commit is not None and (commit.epoch is not None or commit.offset <= self._log_end):
            return commit  # with an epoch, it tells whether the log was cut back
        self.must_seek = True  # librdkafka may have begun at a commit of a former topic of this name
        return Commit(0, 0)

    def finish_recovery(self, commit: Commit, found: StartsFound) -> None:
        """Become ACTIVE from `commit` on. The client skips the messages in `found.started`."""
        self.phase = ReceivePhase.ACTIVE
        self._failures = 0
        # Not where the first record stood that has come: the log may have been cut back since.
        self.position = commit.offset
        self.epoch, self.cuts = commit.epoch, commit.cuts
        self.markers_epoch, self._given_epoch = found.markers_epoch, commit.markers_epoch
        self.commits.begin(commit.markers_offset, commit.offset)
        self._add_found(commit.markers_offset, found)

    @property
    def check_from(self) -> tuple[int, int]:
        """The markers offset to read from while CHECKING, and the lowest offset of an uncertain message."""
        return self.commits.uncertain_from, offset_of(min(self._uncertain))

    def finish_check(self, found: StartsFound) -> list[int]:
        """Become ACTIVE again. The client skips the messages in `found.started`.

        Returns the numbers of the uncertain messages that are in flight. No caller was handed these messages,
        so these deliveries must count as no attempts.
        """
        orphaned = [number for number in sorted(self._uncertain) if number in found.in_flight]
        self.phase = ReceivePhase.ACTIVE
        self._uncertain = set()
        self._add_found(self.commits.uncertain_from, found)
        return orphaned

    def _add_found(self, markers_offset: int | None, found: StartsFound) -> None:
        if found.started:
            assert markers_offset is not None
            self.commits.mark_found(markers_offset, offset_of(found.started.highest))
        self._started.update(found.started)
        self._markers_end = found.end

    # --- committing -------------------------------------------------------------------------------

    def make_commit(self) -> Commit:
        """Return the next commit, and note that it is made."""
        commit = replace(
            self.commits.make(),
            epoch=self.epoch,
            cuts=self.cuts,
            markers_epoch=self.markers_epoch if self.commits.has_started else self._given_epoch,
        )
        self._started.discard_below(self.cuts.number_of(commit.offset))
        return commit
