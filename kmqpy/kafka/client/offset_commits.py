"""Says which offsets a queue's consumer group commits, and when. Pure: no I/O, no clock.

A commit says two things. Its offset is the next queue offset, as in any consumer group. Its metadata says
from which markers offset a successor (the next client of the partition) must read to find every start marker
of messages at or after that queue offset (rule R10 of docs/rules.md). It also names the ids of the queue
topic and the markers topic, so that a client notices a recreated topic (rule R24), and the leader epoch and
the cuts of the log, so that it notices a log that was cut back (rule R39).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from confluent_kafka import TopicPartition

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts
from kmqpy.kafka.topic_identity import TopicIds

COMMIT_EVERY_S = 0.2
"""A commit is due this many seconds after the last one."""
COMMIT_EVERY_MESSAGES = 10_000
"""A commit is due earlier when this many messages may be committed."""
_METADATA = re.compile(
    r"kmq1:(?P<v1>[0-9]{1,19})"
    r"|kmq[23]:(?P<v2>[0-9]{1,19}|-):(?P<queue>[^:]+):(?P<markers>[^:]+)"
    r"(:(?P<epoch>[0-9]{1,10}):(?P<cuts>[0-9<@,]*):(?P<markers_epoch>[0-9]{0,10}))?"
)
"""The markers offset, or `-` where it is not known, the ids of the queue topic and the markers topic, and if
it is known, the leader epoch of the queue partition with its cuts, and that of the markers partition. Older
versions of kmqpy wrote less."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the queue's group: the next queue offset, and the markers offset from which to read.

    `markers_offset` is None where it is not known, because another kind of client made the commit. `epoch` is
    the highest leader epoch that the queue partition's log had when the message before `offset` stood there;
    None where it is not known. `cuts` are the cuts of the log. `markers_epoch` is the same as `epoch` for the
    markers partition, and the start marker before `markers_offset`; also None where there is no such marker.
    """

    offset: int
    markers_offset: int | None
    epoch: int | None = None
    cuts: LogCuts = NO_CUTS
    markers_epoch: int | None = None

    def cut_back(self, cut: Cut) -> Commit:
        """Return this commit for a log with this cut: no message at or behind the cut was taken."""
        return replace(self, offset=min(self.offset, cut.start), cuts=self.cuts.with_cut(cut))

    def within(self, end: int, epoch: int | None) -> Commit:
        """Return what can be true of this commit, of a log that ends at `end` and has this leader epoch.

        Somebody else may have written epochs that the log never had, or an offset beyond its end. An offset
        beyond the end is true all the same if the log was cut back since: then somebody was elected leader,
        and the log has a higher epoch than the commit. `epoch`: None or -1 is not known.
        """
        latest = INT64_MAX if epoch is None or epoch < 0 else epoch
        commit, cuts = self, self.cuts.up_to(latest)
        if cuts != self.cuts or (self.epoch or 0) > latest:
            commit = replace(self, epoch=None, cuts=cuts)
        may_be_cut = commit.epoch is not None and commit.epoch < latest
        return commit if commit.offset <= end or may_be_cut else Commit(0, 0)

    def with_cuts(self, cuts: LogCuts) -> Commit:
        """Return this commit for a log with these cuts, too.

        A commit without an epoch is of another kind of client, and may have been made after the log was cut.
        """
        commit = self
        for cut in self.cuts.new_in(cuts):
            commit = commit.cut_back(cut) if self.epoch is not None else commit
        return replace(commit, cuts=commit.cuts.merged(cuts))


def commit_metadata(commit: Commit, ids: TopicIds) -> str:
    """Return the metadata of a commit, as `_METADATA` describes them."""
    written = "-" if commit.markers_offset is None else commit.markers_offset
    if commit.epoch is None:
        return f"kmq2:{written}:{ids.queue}:{ids.markers}"
    markers_epoch = "" if commit.markers_epoch is None else commit.markers_epoch
    return f"kmq3:{written}:{ids.queue}:{ids.markers}:{commit.epoch}:{commit.cuts}:{markers_epoch}"


def commit_of(place: TopicPartition, ids: TopicIds) -> Commit | None:
    """Return the commit that Kafka gives, or None if there is none, or if it names another queue topic.

    If the commit names another markers topic, its markers offset counts as 0. A commit without ids, which an
    older kmqpy or another kind of client has made, is accepted: it cannot belong to an earlier topic of the
    same name, because Kafka deletes commits together with their topic.
    """
    if place.offset < 0:
        return None
    found = _METADATA.fullmatch(place.metadata or "")
    if found is None:
        return Commit(place.offset, None)
    if found["queue"] not in (None, ids.queue):
        return None
    epoch, cuts = _log_of(found["epoch"], found["cuts"])
    markers_epoch = int(found["markers_epoch"]) if found["markers_epoch"] else None
    if found["markers"] not in (None, ids.markers):
        return Commit(place.offset, 0, epoch, cuts)
    digits = found["v1"] or found["v2"]
    is_known = digits != "-" and int(digits) <= INT64_MAX
    return Commit(place.offset, int(digits) if is_known else None, epoch, cuts, markers_epoch)


def _log_of(epoch: str | None, cuts: str | None) -> tuple[int | None, LogCuts]:
    try:
        return (None, NO_CUTS) if epoch is None else (int(epoch), LogCuts.parse(cuts or ""))
    except ValueError:
        return None, NO_CUTS


class CommitSchedule:
    """Says when the next commit is due: after 200 ms, or after 10,000 messages if that is earlier."""

    def __init__(self, now: float) -> None:
        self._last_at = now
        self.uncommitted = 0
        """The number of messages that may be committed since the last commit."""

    def add(self, count: int) -> None:
        """Note that `count` more messages may be committed."""
        self.uncommitted += count

    def is_due(self, now: float) -> bool:
        return self.uncommitted >= COMMIT_EVERY_MESSAGES or now - self._last_at >= COMMIT_EVERY_S

    def note_commit(self, now: float) -> None:
        """Note that a commit is made now, and start again."""
        self._last_at = now
        self.uncommitted = 0


@dataclass(frozen=True, slots=True)
class _StartsAhead:
    """Start markers that commits must let a successor find; they name messages up to `last_offset`.

    The start markers stand at or after `markers_offset`. Until commits have passed `last_offset`, no commit
    may name a higher markers offset (rule R10).
    """

    markers_offset: int
    last_offset: int


class PartitionCommits:
    """Computes the next commit of one assigned partition.

    The caller notes each message that comes from Kafka as received or as skipped, in the order of offsets.
    """

    def __init__(self) -> None:
        self._next_offset: int | None = None
        self._markers_offset: int | None = None
        self._pending = 0
        """The number of messages received whose start markers are not confirmed yet."""
        self._skipped_to = 0
        """The offset after the last message skipped. A commit passes that message only when no message is
        pending."""
        self._found: _StartsAhead | None = None
        """Start markers that were found when the markers were read."""
        self._uncertain: _StartsAhead | None = None
        """Start markers of this member that failed; Kafka may have written some of them after all."""
        self._last_made: int | None = None
        self._begun_at: int | None = None
        self.has_started = False
        """True once a start marker of this member stands before the markers offset of the next commit."""

    @property
    def next_offset(self) -> int | None:
        """The queue offset of the next commit; None while there is nothing to commit."""
        return self._next_offset

    @property
    def markers_offset(self) -> int | None:
        """The markers offset after the last confirmed start marker; before that, the predecessor's."""
        return self._markers_offset

    @property
    def uncertain_from(self) -> int:
        """The markers offset from which to look for start markers that failed, after mark_uncertain()."""
        assert self._uncertain is not None
        return self._uncertain.markers_offset

    @property
    def is_due(self) -> bool:
        """True if the next commit has another queue offset than the last one."""
        return self._next_offset is not None and self._next_offset != self._last_made

    def begin(self, markers_offset: int | None, offset: int | None = None) -> None:
        """Go on from a commit with this markers offset: without newer start markers, commits repeat it.

        `offset` is the queue offset of that commit, for renew().
        """
        self._markers_offset = markers_offset
        self._begun_at = offset

    def receive(self, count: int) -> None:
        """Note messages whose start markers will be written."""
        self._pending += count

    def skip(self, offset: int) -> None:
        """Note a message that is not received, because it has a start marker or is deleted."""
        self._skipped_to = offset + 1
        if not self._pending:
            self._next_offset = offset + 1

    def pass_over(self, count: int, last_offset: int) -> None:
        """Note that `count` messages up to `last_offset`, received before, will have no start markers."""
        self._pending -= count
        self._skipped_to = max(self._skipped_to, last_offset + 1)
        if not self._pending:
            self._next_offset = self._skipped_to

    def mark_started(self, offset: int, markers_offset: int, count: int) -> None:
        """Note that the start markers of `count` messages up to `offset` are confirmed.

        `markers_offset` is the markers offset of the last of them.
        """
        self._pending -= count
        self._next_offset = offset + 1 if self._pending else max(offset + 1, self._skipped_to)
        self._markers_offset = max(markers_offset + 1, self._markers_offset or 0)
        self.has_started = True

    def mark_uncertain(self, last_offset: int, markers_end: int) -> None:
        """Note that start markers of messages up to `last_offset` failed, and may be written all the same.

        `markers_end` is where the markers partition ended when it was last read.
        """
        before = markers_end if self._markers_offset is None else self._markers_offset
        self._uncertain = _merge(self._uncertain, _StartsAhead(before, last_offset))

    def mark_found(self, markers_offset: int, last_offset: int) -> None:
        """Note start markers of messages up to `last_offset`, which were read from `markers_offset` on."""
        self._found = _merge(self._found, _StartsAhead(markers_offset, last_offset))

    def rewind(self) -> None:
        """Forget the pending messages and those skipped after them: they come from Kafka again."""
        self._pending = 0
        self._skipped_to = 0

    def begin_markers_anew(self) -> None:
        """Let commits name the beginning of the markers topic, which was recreated."""
        self._markers_offset = 0
        self.has_started = False
        if self._found is not None:
            self._found = replace(self._found, markers_offset=0)
        if self._uncertain is not None:
            self._uncertain = replace(self._uncertain, markers_offset=0)

    def make(self) -> Commit:
        """Return the next commit, and note that it is made."""
        offset = self._next_offset
        assert offset is not None
        self._last_made = offset
        self._found = _unless_passed(offset, self._found)
        self._uncertain = _unless_passed(offset, self._uncertain)
        floors = [starts.markers_offset for starts in (self._found, self._uncertain) if starts is not None]
        if self._markers_offset is not None:
            floors.append(self._markers_offset)
        return Commit(offset, min(floors, default=None))

    def repeat(self) -> None:
        """Let the last commit be made again, because it failed."""
        self._last_made = None

    def renew(self) -> None:
        """Let the last commit, or else that of the predecessor, be made again before it expires."""
        self._last_made = None
        if self._next_offset is None:
            self._next_offset = self._begun_at


def _merge(earlier: _StartsAhead | None, later: _StartsAhead) -> _StartsAhead:
    """Return one entry for both. The start markers of `earlier` begin first."""
    if earlier is None:
        return later
    return replace(earlier, last_offset=max(earlier.last_offset, later.last_offset))


def _unless_passed(next_offset: int, starts: _StartsAhead | None) -> _StartsAhead | None:
    """Return `starts`, or None if a commit of `next_offset` has passed all of their messages."""
    return None if starts is None or next_offset > starts.last_offset else starts
