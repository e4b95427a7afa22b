"""Finds messages that have a start marker already, so that this client does not start them once more.

To start a message is to write its start marker: "a client took this message". An earlier client of the
partition may have started messages and crashed before it committed their offsets. Or this client has started
a message, and was not told that Kafka wrote the start marker. A tracker redelivers such a message if nobody
finishes it. A commit says from which markers offset a client must read to find these messages (rule R10 of
docs/rules.md); see `offset_commits`.

The logs may have been cut back since; see `commit_check`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmqpy.core.clock import Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError, KmqError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.assigned_partition import AssignedPartition, StartsFound
from kmqpy.kafka.client.commit_check import CommitCheck, PartitionEnds
from kmqpy.kafka.client.offset_commits import Commit, commit_of
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.log_cuts import LogCuts, offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_headers, read_marker
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

_READ_COMMIT_TIMEOUT_S = 10.0
"""A partition whose committed offset Kafka has not told after this time backs off."""
_READ_MARKERS_TIMEOUT_S = 2.0
"""If Kafka gives no marker of a partition for this long, that partition backs off (rule R18). The other
partitions wait meanwhile."""

_DISBELIEVED_AFTER_S = 3.0
"""For so long Kafka must say that a log never had what a commit names."""
_ASKED_AGAIN_AFTER_S = 0.5

_LOOK_BACK = 10_000
"""After an election, so many markers before those that a commit leads to are read, too: these may tell cuts
that the commit does not know, and the last copy that a tracker has made."""
_MAX_GAP = 100
"""A start marker of a message at least so far beyond the end of the log is forged, or of another log: the
first message that a cut takes away stands at the end of the log, or behind a few control records."""

WriteAssignmentTicks = Callable[[Sequence[Marker]], Collection[int]]
"""Writes assignment ticks; returns the partitions whose tick Kafka has not confirmed yet.

A tick is an end marker of no message. The assignment tick of a partition says from which queue offset the
client takes messages to which Kafka has assigned the partition.
"""


class _PartitionToActivate(NamedTuple):
    """A partition whose commit and markers were read, so that the partition can become ACTIVE.

    assigned   the state of the partition
    commit     from where the client takes messages
    told       the cuts of the log that all readers of the markers know
    found      the start markers of messages at or after the commit
    begins_at  the queue offset at which librdkafka begins to read
    """

    assigned: AssignedPartition
    commit: Commit
    told: LogCuts
    found: StartsFound
    begins_at: int


class CrashRecovery:
    """Reads the markers of assigned partitions, and then makes the partitions ACTIVE; see ReceivePhase.

    If the markers of a partition can't be read, the partition stays in its phase and its back-off begins:
    call again after the back-off.

    write_assignment_ticks  see WriteAssignmentTicks. The client takes no message of a partition whose tick
                            is not confirmed yet (rule R30)
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        telemetry: Telemetry,
        write_assignment_ticks: WriteAssignmentTicks,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._telemetry = telemetry
        self._write_assignment_ticks = write_assignment_ticks
        self._clock = clock
        self._commit_check = CommitCheck(connection, queue, telemetry, clock)

    def recover(
        self, partitions: Mapping[int, AssignedPartition], consumer: Consumer, ids: TopicIds
    ) -> list[int]:
        """Make these partitions ACTIVE. Messages at or after the commit that have a start marker are skipped.

        Returns the partitions in which librdkafka reads from another offset than `position`. The caller must
        seek in these.
        """
        to_activate: dict[int, _PartitionToActivate] = {}
        for partition, assigned in partitions.items():
            one = self._recover(partition, assigned, consumer, ids)
            if one is not None:
                to_activate[partition] = one
        return self._activate(to_activate) if to_activate else []

    def check(self, partition: int, assigned: AssignedPartition) -> list[Place] | None:
        """Make a partition ACTIVE again; first read which failed start markers Kafka has written after all.

        Returns the messages of these start markers that are in flight. Nobody was handed these messages.
        Returns None if the markers can't be read.
        """
        try:
            found = self._find_starts(partition, *assigned.check_from)
        except KmqError as exception:
            self._back_off(partition, assigned, exception)
            return None
        return [(partition, offset) for offset in assigned.finish_check(found)]

    def _recover(
        self, partition: int, assigned: AssignedPartition, consumer: Consumer, ids: TopicIds
    ) -> _PartitionToActivate | None:
        """Read the commit of a partition and the markers from there on; None if that failed."""
        place = TopicPartition(self._queue.name, partition)
        try:
            committed = consumer.committed([place], timeout=_READ_COMMIT_TIMEOUT_S)[0]
            if committed.error is not None:
                raise KafkaException(committed.error)
            before, ends = self._believed(
                partition, assigned.recover_from(commit_of(committed, ids)), consumer
            )
            commit, found = self._find_in_log(partition, before, ends, consumer)
            assigned.end_at_begin = ends.queue.offset
        except (KafkaException, KmqError) as exception:
            self._back_off(partition, assigned, exception)
            return None
        if (commit.epoch or 0) > (before.epoch or 0):
            # librdkafka may have passed control records behind the commit that were cut away since.
            assigned.must_seek = True
        told = before.cuts.merged(found.cuts)
        return _PartitionToActivate(assigned, commit, told, found, max(committed.offset, 0))

    def _believed(self, partition: int, commit: Commit, consumer: Consumer) -> tuple[Commit, PartitionEnds]:
        """What can be true of a commit, and where the logs end.

        Kafka is asked for a while: a leader that was paused does not know who was elected since.
        """
        until = self._clock.monotonic() + _DISBELIEVED_AFTER_S
        while True:
            ends = self._commit_check.ask(consumer, [partition], _READ_COMMIT_TIMEOUT_S)[partition]
            believed = commit.within(*ends.queue)
            if believed == commit:
                return commit, ends
            if self._clock.monotonic() >= until:
                break
            self._clock.sleep(_ASKED_AGAIN_AFTER_S)
        _log.error(
            "a commit names what its log never had; it is not believed",
            extra={"queue": self._queue.name, "partition": partition, "offset": commit.offset},
        )
        return believed, ends

    def _find_in_log(
        self, partition: int, commit: Commit, ends: PartitionEnds, consumer: Consumer
    ) -> tuple[Commit, StartsFound]:
        """Find start markers, and cuts of the logs; returns the commit for the logs as they are, too.

        Messages that may have stood where the log has others now: that before the commit, the last copies of
        the last transactions, and for each leader epoch that ticks name, the last message that was started.
        """
        given = commit
        commit = self._commit_check.with_markers_cut_back(partition, given, ends.markers)
        lost_markers = commit is not given
        commit = self._commit_check.cut_back(partition, commit, given.offset - 1, commit.epoch, ends.queue)
        epoch = ends.queue.epoch or 0
        look_back = _LOOK_BACK if epoch > (commit.epoch or 0) else 0
        found = self._find_starts(
            partition, commit.markers_offset, commit.offset, epoch, look_back, commit.epoch
        )
        if found.newer:  # or forged
            now = self._commit_check.ask(consumer, [partition], _READ_COMMIT_TIMEOUT_S)[partition]
            if now.queue.epoch != ends.queue.epoch:
                raise Unavailable("a leader was elected while its markers were read; try again")
        found.complete &= not lost_markers
        commit = replace(commit, cuts=given.cuts.merged(found.cuts).merged(commit.cuts))
        for copy in found.copies.last:
            if commit.cuts.is_current(copy.number):
                # Who has written the commit or a tick has looked for it, or it is of an aborted transaction.
                known = max(copy.epoch, found.epoch or 0)
                commit = self._commit_check.cut_back(
                    partition, commit, offset_of(copy.number), known, ends.queue, copy.claim_id
                )
        for of_epoch, numbers in found.by_epoch.items():
            beyond = found.beyond.get(of_epoch) if (of_epoch or 0) < epoch else None
            last = _last_started(commit.cuts, numbers, beyond or OffsetRuns())
            commit = self._commit_check.cut_back(partition, commit, last, of_epoch, ends.queue)
        found.markers_epoch = ends.markers.epoch
        if commit.markers_epoch is not None:  # the marker before commit.markers_offset is still there
            commit = replace(commit, markers_epoch=ends.markers.epoch)
        return replace(commit, epoch=ends.queue.epoch), found

    def _activate(self, to_activate: Mapping[int, _PartitionToActivate]) -> list[int]:
        """Write the assignment ticks of these partitions, then make the partitions ACTIVE (rule R30).

        Trackers must read the assignment ticks before the first start marker. From the offset in a tick on, a
        tracker notes which messages end. A tick also says whether this client may take messages again that
        have ended. It may if it does not know all earlier start markers, as in a group that was set back.
        """
        ticks = [
            codec.assignment_tick(
                partition,
                one.commit.cuts.number_of(one.commit.offset),
                again=not one.found.complete,
                cuts=one.commit.cuts,
                epoch=one.commit.epoch,
            )
            for partition, one in to_activate.items()
        ]
        try:
            unconfirmed = self._write_assignment_ticks(ticks)
        except KmqError:  # the writer is closed, or the topic was recreated
            unconfirmed = to_activate.keys()
        to_seek = []
        for partition, one in to_activate.items():
            assigned, commit, _, found, begins_at = one
            if partition in unconfirmed:
                self._back_off(partition, assigned, Unavailable("its assignment tick is not confirmed"))
                continue
            try:
                if not self._has_told(partition, one):
                    raise Unavailable("somebody else has told a cut of its log before")
            except KmqError as error:
                self._back_off(partition, assigned, error)
                continue
            assigned.finish_recovery(commit, found)
            # librdkafka begins at the committed offset, even if that is of a former topic of this name.
            if assigned.must_seek or commit.offset != begins_at:
                to_seek.append(partition)
        return to_seek

    def _has_told(self, partition: int, one: _PartitionToActivate) -> bool:
        """Return True if all readers of the markers know the cuts of the commit now, by the assignment tick.

        Somebody else may have told the same cut before, with another epoch; the first one counts for readers.
        """
        if one.commit.cuts == one.told:
            return True
        since = self._find_starts(partition, one.found.end, INT64_MAX, latest_epoch=INT64_MAX)
        return one.told.merged(since.cuts).merged(one.commit.cuts) == one.commit.cuts

    def _find_starts(
        self,
        partition: int,
        markers_offset: int | None,
        first_offset: int,
        latest_epoch: int = -1,
        look_back: int = 0,
        epoch: int | None = None,
    ) -> StartsFound:
        return find_starts(
            self._connection,
            self._queue,
            partition,
            markers_offset=markers_offset,
            first_offset=first_offset,
            latest_epoch=latest_epoch,
            look_back=look_back,
            epoch=epoch,
            clock=self._clock,
        )

    def _back_off(self, partition: int, assigned: AssignedPartition, exception: Exception) -> None:
        assigned.back_off(self._clock.monotonic())
        self._telemetry.failed(self._queue.name, "recovery")
        _log.warning(
            "a partition can't be begun; trying again",
            extra={"queue": self._queue.name, "partition": partition, "error": str(exception)},
        )


def find_starts(
    connection: KafkaConnection,
    queue: QueueSettings,
    partition: int,
    *,
    markers_offset: int | None,
    first_offset: int,
    latest_epoch: int,
    clock: Clock,
    look_back: int = 0,
    epoch: int | None = None,
) -> StartsFound:
    """Return the start markers from `markers_offset` on, for queue offsets >= `first_offset`.

    Ticks that name leader epochs above `latest_epoch`, the highest that the queue partition has had, are not
    believed. If `markers_offset` is None, finds no start marker and is not complete. If `markers_offset` lies
    beyond the end, reads all markers, because the topic was recreated. Of `look_back` markers before these it
    finds only the cuts and copies that they name. `epoch`: the highest of the messages that were taken
    before, if it is known. Raises Unavailable, TopicError.
    """
    found = StartsFound(epoch=epoch)
    visit = partial(
        _read_marker,
        first_offset=first_offset,
        latest_epoch=latest_epoch,
        found=found,
        # Asked only after the end of the markers is known, so valid for all markers (rule R22).
        queue_end=cache(partial(_queue_end, connection, queue, partition)),
    )
    scan = partial(
        partition_reader.scan,
        connection,
        queue.markers_topic,
        # Start markers are never part of a transaction, and an open transaction must not hold up this read.
        uncommitted=True,
        timeout_s=_READ_MARKERS_TIMEOUT_S,
        clock=clock,
    )
    begin = INT64_MAX if markers_offset is None else max(0, markers_offset - look_back)
    reached = scan({partition: begin}, visit=partial(visit, markers_offset=markers_offset or 0))
    if markers_offset is not None and markers_offset > reached[partition].end:  # the topic was recreated
        reached = scan({partition: 0}, visit=partial(visit, markers_offset=0))
        markers_offset = 0
    for numbers in found.by_epoch.values():
        found.started.update(numbers)
    found.end = reached[partition].end
    found.complete = markers_offset is not None and markers_offset >= reached[partition].low
    return found


def _queue_end(connection: KafkaConnection, queue: QueueSettings, partition: int) -> int:
    ends = partition_reader.bounds(
        connection, queue.name, [partition], _READ_MARKERS_TIMEOUT_S, uncommitted=True
    )
    return ends[partition][1]


def _read_marker(
    record: Any,
    markers_offset: int,
    first_offset: int,
    latest_epoch: int,
    found: StartsFound,
    queue_end: Callable[[], int],
) -> None:
    try:
        marker = read_marker(record)
    except DecodeError:
        return
    if marker.op is Op.END and marker.by_tracker:
        found.copies.read(marker, read_headers(record)[0])
    is_before = record.offset() < markers_offset
    if max([marker.epoch or 0, *(cut.epoch for cut in marker.cuts.cuts)]) <= latest_epoch:
        found.cuts = found.cuts.merged(marker.cuts)
        if marker.epoch is not None and marker.takes_from is not None and not is_before:
            found.epoch = max(marker.epoch, found.epoch or 0)
    else:
        found.newer = True
    if is_before:
        return
    if marker.op not in (Op.TAKE, Op.DELAY, Op.END) or offset_of(marker.highest) < first_offset:
        return
    # A marker may name messages that don't exist, all or, where the log was cut back, some.
    end = INT64_MAX if marker.op is Op.END else queue_end()
    if offset_of(marker.highest) >= end:
        found.newer = True
        if latest_epoch == 0:  # no leader was elected, so it is a lie
            return
    runs = list(_between(first_offset, end, marker.offset_runs))
    if marker.op is not Op.END:
        found.by_epoch.setdefault(found.epoch, OffsetRuns()).add_runs(runs)
        if beyond := list(_between(end, end + _MAX_GAP, marker.offset_runs)):
            found.beyond.setdefault(found.epoch, OffsetRuns()).add_runs(beyond)
    if marker.op is Op.TAKE:
        found.in_flight.add_runs(runs)
    else:
        found.in_flight.discard_runs(runs)


def _last_started(cuts: LogCuts, started: OffsetRuns, beyond: OffsetRuns) -> int:
    """The highest offset of those `beyond` the log's end, or else `started`, that no known cut took away."""
    last = (offset_of(first) + count - 1 for first, count in cuts.current_runs(started.runs()))
    cut_away = (offset_of(first) for first, _ in cuts.current_runs(beyond.runs()))
    return max(cut_away, default=max(last, default=-1))


def _between(begin: int, end: int, runs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the parts of runs of numbers whose messages stand from offset `begin` to before `end`."""
    for first, count in runs:
        offset = offset_of(first)
        skipped, count = max(0, begin - offset), min(count, end - offset)
        if skipped < count:
            yield first + skipped, count - skipped
