"""The state of one partition that Kafka assigned to a group member. Pure: no I/O, no clock.

Phases: RECOVERING -> ACTIVE -> CHECKING -> ACTIVE -> ... A partition that is started over begins again, as
a new object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kmqpy.core.backoff import Backoff
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.client.offset_commits import Commit, PartitionCommits
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import ascends

_RETRY_BACKOFF = Backoff(0.2, 2, 10, jitter=0)


class ReceivePhase(Enum):
    """The work that comes before messages of a partition are received."""

    RECOVERING = auto()
    """Read the markers for messages that were started before (rule R10)."""
    CHECKING = auto()
    """Start markers failed: read which of them were written all the same (rule R18)."""
    ACTIVE = auto()
    """Nothing: messages are received."""


@dataclass(slots=True)
class StartsFound:
    """The start markers of one partition, for messages from some queue offset on.

    started    the messages that have a start marker
    in_flight  those of them whose last start marker is a take (not a delay), with no end marker after it
    end        where the markers ended
    complete   False: there may have been others, which were not read: where to begin was not known, or some
               markers from there on are deleted
    """

    started: OffsetRuns = field(default_factory=OffsetRuns)
    in_flight: OffsetRuns = field(default_factory=OffsetRuns)
    end: int = 0
    complete: bool = True


class AssignedPartition:
    """The state of one partition that is assigned to a group member.

    assigned_at  monotonic time of the assignment; recovery needs topic ids that were looked up since
    log_end      a commit above it is ignored: the log was truncated, or the topic recreated
    seek_to      read from this offset once ACTIVE, unless the commit is further; None: from the commit on,
                 where librdkafka begins by itself
    """

    def __init__(self, assigned_at: float, *, log_end: int = INT64_MAX, seek_to: int | None = None) -> None:
        self.assigned_at = assigned_at
        self.seek_to = seek_to
        self.phase = ReceivePhase.RECOVERING
        self.commits = PartitionCommits()
        self.position = 0
        """The lowest offset that may come next; what is below has come already."""
        self._log_end = log_end
        self._started = OffsetRuns()
        """Offsets at or after the committed one that the markers say were started before."""
        self._uncertain: set[int] = set()
        """Offsets whose start markers failed and may have been written all the same."""
        self._markers_end = 0
        """Where the markers ended when they were read last: later starts of this member come after that."""
        self._retry_at = 0.0
        self._failures = 0

    # --- receiving --------------------------------------------------------------------------------

    def expects(self, offsets: Sequence[int], log_start: int) -> bool:
        """Return True if all these messages can be received without a look at each; the usual case."""
        next_offset = self.commits.next_offset
        return (
            self.phase is ReceivePhase.ACTIVE
            and not self._started
            and next_offset is not None
            and next_offset >= log_start
            and offsets[0] >= self.position
            and ascends(offsets)
        )

    def receive_expected(self, offsets: Sequence[int]) -> None:
        """Note that these messages came and are received."""
        self.commits.receive(len(offsets))
        self.position = offsets[-1] + 1

    def receive(self, offset: int, log_start: int) -> bool:
        """Note that a message came; returns whether it is received.

        It is not if it came before the partition was active, came a second time, was started before, or was
        deleted since it was fetched.
        """
        if self.phase is not ReceivePhase.ACTIVE:
            if self.seek_to is None:
                self.seek_to = offset
            return False
        if offset < self.position:
            # When pause, resume or seek overtake librdkafka's look-up of where to begin, it repeats that
            # half a second later and goes back there.
            return False
        self.position = offset + 1
        if offset < log_start or offset in self._started:
            self.commits.skip(offset)
            return False
        self.commits.receive(1)
        return True

    def shows_another_log(self, offset: int, log_end: int) -> bool:
        """Return True if a message at `offset` is of a recreated log: one that ends below what was read."""
        return self.phase is ReceivePhase.ACTIVE and offset < self.position and log_end < self.position

    # --- start markers ----------------------------------------------------------------------------

    def mark_started(self, offset: int, markers_offset: int, count: int) -> None:
        """Let `count` messages up to `offset` be committed, whose starts end at `markers_offset`."""
        self.commits.mark_started(offset, markers_offset, count)
        self._failures = 0

    def mark_uncertain(self, offsets: Sequence[int]) -> None:
        """Note that starts of some of these ascending offsets failed; which ones were written is unknown.

        To be called before `mark_started` for others of the same batch, and followed by `rewind`.
        """
        self.commits.mark_uncertain(offsets[-1], self._markers_end)
        self._uncertain.update(offsets)

    def rewind(self, offset: int, now: float) -> None:
        """Read again from `offset` on, after a back-off and once it is known which starts were written."""
        self.phase = ReceivePhase.CHECKING
        self.commits.rewind()
        self.seek_to = self.position = offset
        self.back_off(now)

    def continues_at(self, markers_offset: int) -> bool:
        """True if a new start marker, written at this markers offset, comes after all that are known."""
        known = max(self._markers_end, self.commits.markers_offset or 0)
        return markers_offset < 0 or markers_offset >= known  # -1: Kafka does not say where

    def begin_markers_anew(self) -> None:
        """Go on with a recreated markers topic: what is known of the former one counts no more."""
        self._markers_end = 0
        self.commits.begin_markers_anew()

    # --- reading the markers ----------------------------------------------------------------------

    def needs_markers(self, now: float) -> bool:
        """Return True if its markers have to be read, and no back-off is running."""
        return self.phase is not ReceivePhase.ACTIVE and now >= self._retry_at

    def back_off(self, now: float) -> None:
        """Wait before the next try, longer after each failure."""
        self._failures += 1
        self._retry_at = now + _RETRY_BACKOFF.delay(self._failures)

    def recover_from(self, commit: Commit | None) -> Commit:
        """The commit from which to recover: the predecessor's, or the beginning if that can't be used."""
        if commit is not None and commit.offset <= self._log_end:
            return commit
        self.seek_to = 0  # librdkafka may have begun at a commit of another topic, deleted since
        return Commit(0, 0)

    def finish_recovery(self, commit: Commit, found: StartsFound) -> None:
        """Become active from `commit` on, without the messages that `found` says were started."""
        self.phase = ReceivePhase.ACTIVE
        self._failures = 0
        self.position = max(self.seek_to or 0, commit.offset)
        self.commits.begin(commit.markers_offset)
        self._add_found(commit.markers_offset, found)

    @property
    def check_from(self) -> tuple[int, int]:
        """While CHECKING: the markers offset from which to read, and the lowest queue offset in question."""
        return self.commits.uncertain_from, min(self._uncertain)

    def finish_check(self, found: StartsFound) -> list[int]:
        """Become active again, without the messages that `found` says were started.

        Returns those of them that are in flight although nobody was handed them: it was no attempt.
        """
        orphaned = [offset for offset in sorted(self._uncertain) if offset in found.in_flight]
        self.phase = ReceivePhase.ACTIVE
        self._uncertain = set()
        self._add_found(self.commits.uncertain_from, found)
        return orphaned

    def _add_found(self, markers_offset: int | None, found: StartsFound) -> None:
        if found.started:
            assert markers_offset is not None
            self.commits.mark_found(markers_offset, found.started.highest)
        self._started.update(found.started)
        self._markers_end = found.end

    # --- committing -------------------------------------------------------------------------------

    def make_commit(self) -> Commit:
        """Return the next commit, and note that it is made."""
        commit = self.commits.make()
        self._started.discard_below(commit.offset)
        return commit
