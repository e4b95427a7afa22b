"""Joins a queue's consumer group, receives messages of the partitions assigned, and commits their offsets.

`assigned_partition` keeps the state of each partition. `offset_commits` says what commits contain.
`record_fetcher` fetches records. `crash_recovery` reads which messages have a start marker already.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.core.throttle import Throttle
from kmqpy.errors import AccessDenied, Fenced, KmqError, TopicError
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.client.assigned_partition import AssignedPartition, ReceivePhase
from kmqpy.kafka.client.commit_check import CommitCheck
from kmqpy.kafka.client.crash_recovery import CrashRecovery, WriteAssignmentTicks
from kmqpy.kafka.client.leave_group import leave_group, returns_in_time
from kmqpy.kafka.client.offset_commits import CommitSchedule, commit_metadata
from kmqpy.kafka.client.record_fetcher import RecordFetcher
from kmqpy.kafka.client.start_markers import StartOutcome
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.records import ascending_offsets, offsets_of_records, peak, records_by_partition
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

_MAX_WAIT_WHILE_PREPARING_S = 0.02
"""poll() waits for at most this long while partitions are being assigned or are not ACTIVE."""
_ASSIGNMENT_EXPECTED_FOR_S = 10.0
"""A member without partitions expects an assignment, and polls in short waits, for this long after it joined.
After that it is on standby."""
_IDLE_AFTER_S = 1.0
"""keep_alive() polls Kafka only when the last poll() is longer ago than this."""
_MAX_KEPT = 100
"""serve() pauses all partitions when so many records are kept for poll()."""
_OUTCOME_TIMEOUT_S = 2.0
"""A rebalance goes on after this time, although start markers of unknown outcome are left."""
_OUTCOME_POLL_S = 0.02
_RENEW_AFTER_S, _RENEW_EVERY_S = 10.0, 3600.0
"""Commits of lanes, except those of the main one, are made again so long after an assignment, and then so
often, even if nothing came. Kafka forgets commits for topics to which the group does not subscribe, a week
after they were made by default."""
_WARN_EVERY_S = 10.0
"""The member logs at most one warning of a failed commit in this time."""
_HEARS_WITHIN_S = 1.0
"""So long after its partitions became ACTIVE a member counts as one that has heard of them; see has_heard."""
_LOOK_FOR_CUTS_EVERY_S = 5.0
"""The member asks Kafka this often whether the logs that it reads were perhaps cut back."""
_LOOK_TIMEOUT_S = 0.5
_FATAL_CODES = {KafkaError._FATAL, KafkaError._FENCED, KafkaError.FENCED_INSTANCE_ID}

LogBounds = Callable[[int], tuple[int, int]]
"""Returns where the log of a partition begins and ends."""


class GroupMember:
    """Receives messages of the partitions that the group assigns to this member, and commits offsets.

    outcome_known  outcome_known(partition) is False while Kafka may still append a start marker that this
                   client has sent to the partition; each call of outcome_known() drives that check on
    ids_known      ids_known(moment) is True if the topic ids were read at or after that monotonic time; if
                   not, ids_known() has them read
    write_assignment_ticks
                   see CrashRecovery
    instance_id    makes this a static member: its partitions stay its own for a while after it has left
    leader         the member of the queue's main lane, if this one is of another lane. Then this one joins no
                   group. It has the partitions of its lane that the leader has of the main lane, and gives
                   them up when the leader does. The leader commits its offsets, since Kafka takes them from
                   members only. One thread at a time uses both
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        telemetry: Telemetry,
        *,
        ids: TopicIds,
        outcome_known: Callable[[int], bool],
        ids_known: Callable[[float], bool],
        write_assignment_ticks: WriteAssignmentTicks,
        instance_id: str | None = None,
        leader: GroupMember | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._leader = leader
        self._renew_at = 0.0
        self.has_heard = True
        """False from an assignment until Kafka has answered for the new partitions, or for a second: a client
        takes nothing of lower lanes meanwhile."""
        self._is_answered = False
        """Kafka had answered before the last poll(); librdkafka may have needed a moment to unpack that."""
        self._hears_until = 0.0
        self._lanes = [self]
        """This member and those that it leads."""
        self._connection = connection
        self._queue = queue
        self._telemetry = telemetry
        self._ids = ids
        self._outcome_known = outcome_known
        self._ids_known = ids_known
        self._fatal: KmqError | None = None
        self._clock = clock
        self._partitions: dict[int, AssignedPartition] = {}
        self._commit_schedule = CommitSchedule(clock.monotonic())
        self._last_poll = clock.monotonic()
        self._commit_warnings = Throttle(_WARN_EVERY_S, clock)
        self._idle = False  # True while records would pile up that nobody takes: all partitions are paused
        self._orphaned_starts: list[Place] = []
        self._is_static = instance_id is not None
        self._closing = False
        self._awaits_assignment = False  # after partitions were given up, or join_again()
        self._static_settings = {"group.instance.id": instance_id} if instance_id else {}
        self._recovery = CrashRecovery(connection, queue, telemetry, write_assignment_ticks, clock)
        self._commit_check = CommitCheck(connection, queue, telemetry, clock)
        self._look_at = clock.monotonic() + _LOOK_FOR_CUTS_EVERY_S
        self._consumer = self._new_consumer()
        self._fetcher = RecordFetcher(self._consumer, queue.name)
        if leader is not None:
            leader._lanes.append(self)
            self._follow_leader()

    def _new_consumer(self) -> Consumer:
        consumer = librdkafka.new_consumer(
            self._connection,
            {
                "group.id": self._queue.consumer_group,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 10_000,  # how soon others get the partitions of a killed member
                "heartbeat.interval.ms": 1_000,  # how soon a rebalance is heard of
                "topic.metadata.refresh.interval.ms": 30_000,  # how soon new partitions are seen
                "on_commit": self._on_commit,
                **self._static_settings,
            },
        )
        self._joined_at = self._clock.monotonic()
        if self._leader is not None:
            return consumer
        with kafka_errors.translating(f"subscribe to {self._queue.name}", self._connection):
            consumer.subscribe(
                [self._queue.name],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
        return consumer

    @property
    def partitions(self) -> list[int]:
        """The partitions that are assigned to this member and ACTIVE: those whose messages it receives."""
        return sorted(
            n for n, assigned in list(self._partitions.items()) if assigned.phase is ReceivePhase.ACTIVE
        )

    def assigned(self, partition: int) -> AssignedPartition | None:
        """Return the state of a partition: another object when the partition was begun anew, None if lost."""
        return self._partitions.get(partition)

    def poll(self, max_records: int, wait_s: float) -> tuple[list[Any], Offsets]:
        """Return up to `max_records` records, and their numbers by partition; see log_cuts.

        Waits at most `wait_s` for the first record, and no more than 20 ms while partitions are being
        assigned or are not ACTIVE. First reads the markers of partitions that are new or whose start markers
        failed. Leaves out records that have a start marker already, which trackers look after, and records
        that were deleted since they were fetched.

        Raises TopicError when the topic is gone, AccessDenied, and Fenced for good when the group goes on
        without this member.
        """
        self._check_member()
        # Kafka sends anew what is resumed.
        self._idle = self._idle and self._fetcher.kept > max_records and not self._is_preparing()
        self._look_for_cuts()
        self._prepare()
        if self._is_preparing():
            wait_s = min(wait_s, _MAX_WAIT_WHILE_PREPARING_S)
        if not self.has_heard:
            self.has_heard = self._is_answered or self._are_empty()
            self._is_answered = self._has_answered()
        records = self._fetcher.fetch(max_records, wait_s)
        self.has_heard = self.has_heard or any(one.error() is None for one in records)
        self._last_poll = self._clock.monotonic()
        log_bounds = cache(self._fetcher.log_bounds)
        if not any(map(Record.error, records)):
            parts = records_by_partition(records)
            offsets = {partition: ascending_offsets(ones) for partition, ones in parts.items()}
            if all(
                self._expects(partition, offsets[partition], ones[-1].leader_epoch(), log_bounds)
                for partition, ones in parts.items()
            ):
                for partition, ascending in offsets.items():
                    self._partitions[partition].receive_expected(ascending)
                return records, self._numbers(offsets)
        whole = records_by_partition([one for one in records if one.error() is None])
        wrong = {
            partition: peak(ascending_offsets(ones), self._partitions[partition].position - 1)
            for partition, ones in whole.items()
            if partition in self._partitions
        }
        records = [record for record in records if self._receive_record(record, log_bounds, wrong)]
        # If a record has shown that the topic was recreated, or perhaps cut back, its partition is not ACTIVE
        # any more. The records before it are of the former log, or are fetched again.
        records = [one for one in records if self._partitions[one.partition()].phase is ReceivePhase.ACTIVE]
        return records, self._numbers(offsets_of_records(records))

    @property
    def cuts(self) -> Mapping[int, LogCuts]:
        """The cuts of the partitions whose logs were cut back, by partition."""
        return {partition: one.cuts for partition, one in self._partitions.items() if one.cuts}

    def _numbers(self, offsets: Offsets) -> Offsets:
        """Return the numbers of messages, by partition; see log_cuts."""
        return {
            partition: self._partitions[partition].cuts.numbers_of(ascending)
            for partition, ascending in offsets.items()
        }

    def _is_preparing(self) -> bool:
        """Return True while partitions are being assigned to a new member, or are not ACTIVE."""
        if not self._partitions:
            return self._clock.monotonic() - self._joined_at < _ASSIGNMENT_EXPECTED_FOR_S
        return any(assigned.phase is not ReceivePhase.ACTIVE for assigned in self._partitions.values())

    def _are_empty(self) -> bool:
        """Return True if no partition had messages to receive when it was begun, or if it is late."""
        return self._clock.monotonic() >= self._hears_until or all(
            one.phase is ReceivePhase.ACTIVE and one.position >= one.end_at_begin
            for one in self._partitions.values()
        )

    def _has_answered(self) -> bool:
        """Return True if Kafka has answered a fetch of each partition since it was begun.

        The bounds of a log are those of the last answer.
        """
        return all(
            one.phase is ReceivePhase.ACTIVE
            and one.end_at_begin <= self._fetcher.log_bounds(partition)[1] < INT64_MAX
            for partition, one in self._partitions.items()
            if one.position < one.end_at_begin or one.phase is not ReceivePhase.ACTIVE
        )

    def goes_back_in(self, last_at: Mapping[int, int]) -> list[int]:
        """Return the partitions where start markers at these markers offsets stand before those known so far.

        Their markers topic was recreated or cut back. The topic ids tell which, up to a second later.
        """
        return [
            partition
            for partition, markers_offset in last_at.items()
            if partition in self._partitions and not self._partitions[partition].continues_at(markers_offset)
        ]

    def apply_start_outcome(self, numbers: Offsets, outcome: StartOutcome) -> None:
        """Allow commits past messages with confirmed start markers, and read the other messages again.

        A partition whose start markers failed backs off (rule R18 of docs/rules.md). If Kafka has written
        some of these after all, their messages are not received again: a tracker redelivers them, or has done
        so already.
        """
        for partition, ascending in numbers.items():
            assigned = self._partitions.get(partition)
            if assigned is None:
                continue
            failed = outcome.failed.get(partition)
            confirmed = len(ascending) if failed is None else bisect_left(ascending, failed)
            if failed is not None:
                assigned.mark_uncertain(ascending[confirmed:])
            if confirmed:
                assigned.mark_started(ascending[confirmed - 1], outcome.last_at[partition], confirmed)
                self._commit_schedule.add(confirmed)
            if failed is not None:
                self._rewind(partition, assigned, failed)
        if outcome.failed:
            self._telemetry.failed(self._queue.name, "start markers", len(outcome.failed))
            _log.warning(
                "start markers are not confirmed; their messages will be redelivered",
                extra={"queue": self._queue.name, "partitions": sorted(outcome.failed)},
            )

    def pop_orphaned_starts(self) -> list[Place]:
        """Return messages in flight whose start markers failed, although Kafka wrote them; each only once.

        Nobody was handed these messages.
        """
        found, self._orphaned_starts = self._orphaned_starts, []
        return found

    def start_over(self, partitions: Iterable[int] | None = None) -> None:
        """Read all messages again that were polled and not started, after an error between these two steps.

        These partitions, or all, begin as after an assignment: at the committed offset, without messages that
        have a start marker.
        """
        partitions = list(self._partitions if partitions is None else partitions)
        self._fetcher.drop_ahead(partitions)
        self._restart(partitions)

    def follow(self, ids: TopicIds) -> None:
        """Change to the topics of these ids, and forget what is known of topics with other ids."""
        before, self._ids = self._ids, ids
        if ids.queue != before.queue:
            self._orphaned_starts = []
            self.start_over()
        elif ids != before:
            # From now on commits name the beginning of the new markers topic, where no start marker is noted.
            for assigned in self._partitions.values():
                assigned.begin_markers_anew()

    def maintain(self) -> None:
        """Commit the offsets that may be committed, if a commit is due; call it often."""
        if self._leader is not None and self._clock.monotonic() >= self._renew_at:
            self._renew_at = self._clock.monotonic() + _RENEW_EVERY_S
            for assigned in self._partitions.values():
                assigned.commits.renew()
        if self._commit_schedule.is_due(self._clock.monotonic()):
            self._commit(asynchronous=True)

    def keep_alive(self) -> None:
        """Poll Kafka once a second or so while the user's code is busy, so that the group keeps this member.

        It also checks failed start markers: afterwards `pop_orphaned_starts` may return messages.

        A pause loses what librdkafka has fetched, and after it Kafka may answer first for the lowest lane. So
        higher lanes are paused only when they keep a record: then that one comes first.
        """
        if self._clock.monotonic() - self._last_poll < _IDLE_AFTER_S or self._fatal is not None:
            return
        self._idle = self._idle or self._leader is None or self._fetcher.kept > 0
        self._poll_ahead(recovers=False)

    def serve(self) -> None:
        """Poll Kafka once, without waiting, in place of a poll(), which returns the record that may come.

        So a client that receives from other lanes of the queue learns at once of a rebalance, and that the
        group goes on without it.
        """
        self._check_member()
        self._last_poll = self._clock.monotonic()
        self._idle = self._idle or self._fetcher.kept >= _MAX_KEPT
        self._poll_ahead(recovers=True)

    def _poll_ahead(self, *, recovers: bool) -> None:
        self._look_for_cuts()
        self._prepare(recovers=recovers)
        for record in self._fetcher.fetch_ahead():
            self._raise_if_fatal(record.error())
            if kafka_errors.is_damage(record.error()):
                self._stand_still(record.partition(), record.error().str())

    @property
    def consumer(self) -> Consumer:
        """The consumer of librdkafka, which CutOffCheck looks at."""
        return self._consumer

    def join_again(self) -> None:
        """Join the group with a new consumer, when the former is cut off (never reaches Kafka again).

        The group has removed the former consumer by then.
        """
        _log.warning("joining again: Kafka answers others only", extra={"queue": self._queue.name})
        # The former consumer is not closed: it would try to leave the group. It ends when Python frees
        # it: so of the objects that a kept traceback may refer to, only this member refers to the consumer.
        self._consumer = self._new_consumer()
        for lane in self._lanes[1:]:
            lane._give_up(set(lane._partitions))
        self._forget(self._partitions.keys())
        self._fetcher.change_consumer(self._consumer)
        self._follow_leader()

    def close(self, *, is_away: bool = False) -> None:
        """Commit and leave the group; a static member keeps its partitions for a while.

        Gives up when Kafka does not answer. The group then removes the member by itself: when this process
        has ended, or after `max.poll.interval.ms`, five minutes; or a thread leaves it when Kafka is there
        again. That thread also keeps the end of the process from waiting 7 s for librdkafka. A leader is
        closed after those that follow it.
        """
        commit = partial(self._commit, asynchronous=False)
        is_away = is_away or not librdkafka.answers(self._consumer, self._queue.name)
        if is_away:
            returns_in_time(self._consumer.close, 0)
        if is_away or not (returns_in_time(commit) and self._leave()):
            _log.warning("closed without an answer of Kafka", extra={"queue": self._queue.name})
        if self._leader is not None:
            self._leader._lanes.remove(self)

    # --- polling -----------------------------------------------------------------------------------

    def _expects(
        self, partition: int, offsets: Sequence[int], epoch: int | None, log_bounds: LogBounds
    ) -> bool:
        assigned = self._partitions.get(partition)
        if assigned is None:
            return False
        log_start, log_end = log_bounds(partition)
        return assigned.expects(offsets, log_start, epoch, log_end)

    def _receive_record(self, record: Any, log_bounds: LogBounds, wrong: Mapping[int, int | None]) -> bool:
        """Note a record; returns True if the client receives it. Raises for errors that will not pass.

        `wrong`: by partition, an offset that can't be true.
        """
        error: KafkaError | None = record.error()
        if error is not None:
            self._raise_if_hopeless(error)
            if kafka_errors.is_damage(error):
                self._stand_still(record.partition(), error.str())
                return False
            about = {"queue": self._queue.name, "partition": record.partition(), "error": error.name()}
            _log.warning("receive failed", extra=about)
            self._telemetry.failed(self._queue.name, "receive")
            return False
        # A rebalance between the two reads of fetch() may have revoked the partition of the first record.
        partition, offset = record.partition(), record.offset()
        assigned = self._partitions.get(partition)
        if assigned is None or assigned.stands_still:  # librdkafka goes on at a wrong offset
            return False
        log_start, log_end = log_bounds(partition)
        epoch: int | None = record.leader_epoch()
        is_other = assigned.shows_another_log(offset, log_end)
        if is_other or (
            assigned.phase is ReceivePhase.ACTIVE
            and (offset >= log_end or offset == wrong.get(partition) or assigned.shows_new_epoch(epoch))
        ):
            if assigned.doubted == (offset, epoch):
                why = f"a batch says offset {offset}, leader epoch {epoch}, and lower ones stand behind it"
                self._stand_still(partition, f"{why}, or the log ends at {log_end}, epoch {assigned.epoch}")
            else:
                self._restart([partition], log_end if is_other else INT64_MAX, doubted=(offset, epoch))
            return False
        return assigned.receive(offset, log_start)

    def _stand_still(self, partition: int, why: str) -> None:
        """Receive nothing from a partition whose next record is damaged, until a later try; see is_damage().

        A message that is skipped is lost without a word: so whoever looks after Kafka has to mend it.
        """
        assigned = self._partitions.get(partition)
        if assigned is None or assigned.stands_still:
            return
        assigned.stand_still(self._clock.monotonic())
        self._fetcher.seek(partition, assigned.position)
        self._telemetry.failed(self._queue.name, "damaged log")
        _log.error(
            "a damaged log: its partition stands still; docs/operations.md says what to do",
            extra={
                "queue": self._queue.name,
                "partition": partition,
                "offset": assigned.position,
                "error": why,
            },
        )

    def _raise_if_hopeless(self, error: KafkaError) -> None:
        """Raise for an error that the next try would meet as well."""
        self._raise_if_fatal(error)
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            raise TopicError(
                f"queue {self._queue.name!r}: the topic does not exist; "
                f"create it with: kmq queue create {self._queue.queue_name}"
            )
        problem = kafka_errors.translated(error, f"receive from {self._queue.name}", self._connection)
        if isinstance(problem, AccessDenied):
            raise problem

    def _check_member(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _raise_if_fatal(self, error: KafkaError | None) -> None:
        """Raise Fenced for a fatal error: the consumer receives no more, and others get its partitions."""
        if error is None or not (error.fatal() or error.code() in _FATAL_CODES):
            return
        why = "Kafka does not take it back"
        if self._is_static:
            why = "another client has its instance_id, or Kafka has lost the group's last state"
        self._fatal = Fenced(
            f"queue {self._queue.name!r}: this client is no longer in group {self._queue.consumer_group}, "
            f"because {why} ({error.str()}); make a new client, each with an instance_id of its own"
        )
        raise self._fatal

    def _look_for_cuts(self) -> None:
        """Have the partitions start over whose logs may have been cut back, as far as Kafka tells now."""
        now, partitions = self._clock.monotonic(), self.partitions
        if now < self._look_at or not partitions:
            return
        self._look_at = now + _LOOK_FOR_CUTS_EVERY_S
        try:
            ends = self._commit_check.ask(self._consumer, partitions, _LOOK_TIMEOUT_S)
        except (KafkaException, KmqError):
            return  # the next look is soon
        self._restart([one for one in ends if self._partitions[one].shows_new_log(ends[one])])

    def _rewind(self, partition: int, assigned: AssignedPartition, number: int) -> None:
        assigned.rewind(number, self._clock.monotonic())
        self._fetcher.seek(partition, assigned.position)
        self._apply_pauses()

    def _restart(
        self,
        partitions: Iterable[int],
        log_end: int = INT64_MAX,
        doubted: tuple[int, int | None] | None = None,
    ) -> None:
        """Recover these partitions as if they had just been assigned."""
        now = self._clock.monotonic()
        for partition in list(partitions):
            self._partitions[partition] = AssignedPartition(
                now, log_end=log_end, must_seek=True, doubted=doubted
            )

    # --- reading the markers -----------------------------------------------------------------------

    def _prepare(self, *, recovers: bool = True) -> None:
        """Read the markers of the partitions that need it, then pause all that are not ACTIVE.

        Those of new partitions are left for later if the caller `recovers` none.
        """
        new: dict[int, AssignedPartition] = {}
        for partition, assigned in list(self._partitions.items()):
            if assigned.tries_again(self._clock.monotonic()):
                self._fetcher.seek(partition, assigned.position)
            if not (
                assigned.needs_markers(self._clock.monotonic())
                and self._outcome_known(partition)
                and self._ids_known(assigned.assigned_at)
            ):
                continue
            if assigned.phase is ReceivePhase.CHECKING:  # whatever the caller does, because the leases run
                orphaned = self._recovery.check(partition, assigned)
                if orphaned is not None:
                    self._orphaned_starts += orphaned
                    self._fetcher.seek(partition, assigned.position)
            elif recovers:
                new[partition] = assigned
        for partition in self._recovery.recover(new, self._consumer, self._ids):
            self._fetcher.seek(partition, new[partition].position)
        if new and all(one.phase is ReceivePhase.ACTIVE for one in new.values()):
            self._hears_until = self._clock.monotonic() + _HEARS_WITHIN_S
        self._apply_pauses()

    def _apply_pauses(self) -> None:
        wanted = {
            partition
            for partition, assigned in self._partitions.items()
            if self._idle or assigned.phase is not ReceivePhase.ACTIVE or assigned.stands_still
        }
        self._fetcher.pause_only(wanted, self._partitions.keys())

    # --- committing --------------------------------------------------------------------------------

    def _commit(self, *, asynchronous: bool) -> None:
        self._commit_schedule.note_commit(self._clock.monotonic())
        due = {
            partition: assigned for partition, assigned in self._partitions.items() if assigned.commits.is_due
        }
        self._commit_these(due, asynchronous=asynchronous)

    def _commit_these(self, due: Mapping[int, AssignedPartition], *, asynchronous: bool) -> None:
        offsets = []
        for partition, assigned in due.items():
            commit = assigned.make_commit()
            metadata = commit_metadata(commit, self._ids)
            offsets.append(TopicPartition(self._queue.name, partition, commit.offset, metadata))
        if not offsets:
            return
        consumer = self._consumer if self._leader is None else self._leader.consumer
        try:
            if asynchronous:
                consumer.commit(offsets=offsets, asynchronous=True)
            else:
                consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as exception:
            self._commit_failed(kafka_errors.error_of(exception))

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        if error is not None and error.code() != KafkaError._NO_OFFSET:
            topics = {one.topic for one in offsets}
            for lane in self._lanes:
                if not topics or lane._queue.name in topics:
                    lane._commit_failed(error)

    def _commit_failed(self, error: KafkaError | None) -> None:
        # Harmless: the next commit has these offsets, and after a crash the markers tell what was started.
        for assigned in self._partitions.values():
            assigned.commits.repeat()
        self._telemetry.failed(self._queue.name, "commit")
        if self._commit_warnings.allows():  # in a rebalance, all commits of some seconds fail
            _log.warning(
                "commit failed; trying again",
                extra={"queue": self._queue.name, "error": error.name() if error else "unknown"},
            )

    # --- being assigned and leaving ----------------------------------------------------------------

    @staticmethod
    def _partition_numbers(places: list[TopicPartition]) -> set[int]:
        return {place.partition for place in places}

    def _on_assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._awaits_assignment = False
        self._renew_at = self._clock.monotonic() + _RENEW_AFTER_S
        for place in places:
            self._partitions[place.partition] = AssignedPartition(self._clock.monotonic())
            self.has_heard = self._is_answered = False
        self._hears_until = self._clock.monotonic() + _HEARS_WITHIN_S
        self._fetcher.forget(self._partition_numbers(places))
        # After the partitions are known here: confluent-kafka assigns them even when a signal handler raises.
        consumer.incremental_assign(places)
        self._apply_pauses()
        for lane in self._lanes[1:]:
            lane._follow_leader()
        _log.info(
            "partitions assigned",
            extra={"queue": self._queue.name, "partitions": [p.partition for p in places]},
        )

    def _on_revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        try:
            if not self._closing:  # close() has committed, and the client has waited for the outcomes before
                self._wait_for_outcomes(self._partition_numbers(places))
                for lane in self._lanes:
                    lane._commit_all_of(self._partition_numbers(places))
        finally:  # confluent-kafka unassigns them after an error, too
            self._on_lost(consumer, places)

    def _commit_all_of(self, partitions: set[int]) -> None:
        gone = {p: self._partitions[p] for p in partitions & self._partitions.keys()}
        self._commit_these(
            {p: assigned for p, assigned in gone.items() if assigned.commits.next_offset is not None},
            asynchronous=False,
        )

    def _wait_for_outcomes(self, partitions: set[int]) -> None:
        """Wait until the outcome of all start markers of these partitions is known, for 2 s at most.

        The next owner of the partitions reads the start markers, which must all be in the log by then (rule
        R10).
        """
        deadline = self._clock.monotonic() + _OUTCOME_TIMEOUT_S
        while (
            not all(lane._outcome_known(p) for lane in self._lanes for p in partitions)
            and self._clock.monotonic() < deadline
        ):
            self._clock.sleep(_OUTCOME_POLL_S)

    def _on_lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        for lane in self._lanes[1:]:
            lane._give_up(self._partition_numbers(places))
        self._forget(self._partition_numbers(places))
        consumer.incremental_unassign(places)
        _log.info(
            "partitions given up",
            extra={"queue": self._queue.name, "partitions": [p.partition for p in places]},
        )

    def _follow_leader(self) -> None:
        """Take the partitions that the leader has."""
        if self._leader is None:
            return
        new = self._leader._partitions.keys() - self._partitions.keys()
        if new:
            self._on_assign(self._consumer, self._places(new))

    def _give_up(self, partitions: set[int]) -> None:
        """Give up partitions that the leader gives up; it has committed."""
        gone = partitions & self._partitions.keys()
        if gone:
            self._on_lost(self._consumer, self._places(gone))

    def _places(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(self._queue.name, partition) for partition in partitions]

    def _forget(self, partitions: Iterable[int]) -> None:
        """Forget the state of partitions. When one comes back, other clients have gone on with it."""
        gone = set(partitions)
        for partition in gone:
            self._partitions.pop(partition, None)
        self._fetcher.forget(gone)
        self._awaits_assignment = True

    def _leave(self) -> bool:
        self._closing = True
        if self._leader is not None:
            return returns_in_time(self._consumer.close)
        return leave_group(
            self._consumer,
            self._connection,
            self._queue.consumer_group,
            static=self._is_static,
            in_rebalance=lambda: self._awaits_assignment,
            clock=self._clock,
        )
