"""Takes records from a queue topic as a member of its consumer group.

Holds what is about positions: the group, commits, what a crashed member had started (rule R10), or
this one without knowing it, partitions that have to wait (rule R18). Used by one thread at a time.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.throttle import Throttle
from kmqpy.errors import AccessDenied, DecodeError, Fenced, KmqError, TopicError
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.markers.codec import INT64_MAX, Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import ascends, by_partition, read_marker
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import TopicIds
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

COMMIT_EVERY_S = 0.2
COMMIT_EVERY_MESSAGES = 10_000
_IDLE_AFTER_S = 1.0
_RECOVERY_TIMEOUT_S = 10.0
_LOOK_TIMEOUT_S = 2.0
"""How long one markers partition that gives nothing may keep the others waiting (rule R18)."""
_PAUSE = Backoff(0.2, 2, 10, jitter=0)
"""Before a partition that could not be recovered is tried again."""
_LEAVE_TIMEOUT_S = 5.0
_OUTCOME_TIMEOUT_S = 2.0
"""How long a rebalance may be kept waiting for start markers of unknown outcome."""
_OUTCOME_POLL_S = 0.02
_COMPLAIN_EVERY_S = 10.0
_FATAL = {KafkaError._FATAL, KafkaError._FENCED, KafkaError.FENCED_INSTANCE_ID}
_METADATA = re.compile(
    r"kmq1:(?P<v1>[0-9]{1,19})|kmq2:(?P<v2>[0-9]{1,19}|-):(?P<queue>[^:]+):(?P<markers>[^:]+)"
)
"""The commit's metadata: the markers offset after the last start that it covers, or `-` when that is not
known, and the ids of the queue topic and the markers topic. Older versions of kmqpy wrote no ids."""


@dataclass
class _Partition:
    """What this member knows of a partition that it has."""

    ids_since: float = 0.0
    """Recovery waits until the topic ids are known as of this monotonic time; at first, the assignment's."""
    log_end: int = INT64_MAX
    """A commit above this is ignored: the log was truncated, or the topic recreated."""
    recovered: bool = False
    recovered_from: int | None = None
    """The markers offset from which `started` was read."""
    started: OffsetRuns = field(default_factory=OffsetRuns)
    """Offsets from the committed one on that were started before, by a predecessor or in vain."""
    markers_end: int = 0
    """Where the markers ended when they were read last: this member's starts stand behind that."""
    unknown: set[int] = field(default_factory=set)
    """Offsets whose start markers this member may have written or not."""
    pending: int = 0
    """Records returned by poll that are neither taken nor rewound yet."""
    position: int = 0
    """The lowest offset that may come next; what is below has come already."""
    skipped_to: int = 0
    too_early: int | None = None
    """A record that came before the recovery; it must be read again."""
    held_back: tuple[int, int] | None = None
    """Some of a batch failed: the markers offset before it, and its highest queue offset."""
    next_offset: int | None = None
    markers_offset: int | None = None
    committed: int | None = None
    wait_until: float = 0.0
    failures: int = 0


@dataclass
class _Read:
    """What the markers of a partition say of the queue offsets asked for.

    started   there is a start marker
    open      the last one is a take, and there is no end marker behind it
    end       where the markers ended
    """

    started: OffsetRuns = field(default_factory=OffsetRuns)
    open: OffsetRuns = field(default_factory=OffsetRuns)
    end: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the queue's group: the next queue offset, and the markers offset from which to read.

    `markers_offset` is None when another kind of client made it.
    """

    offset: int
    markers_offset: int | None


class GroupMember:
    """A member of the queue's consumer group.

    outcome_known  of a partition: whether no start marker of this client can still reach it; asking
                   triggers the check
    ids_known      of a monotonic time: whether the topic ids were looked up then or later; asking triggers
                   a look-up
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
        instance_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._telemetry = telemetry
        self._ids = ids
        self._outcome_known = outcome_known
        self._ids_known = ids_known
        self._fatal: KmqError | None = None
        self._clock = clock
        self._partitions: dict[int, _Partition] = {}
        self._paused: set[int] = set()
        self._uncommitted = 0
        self._last_commit = clock.monotonic()
        self._last_poll = clock.monotonic()
        self._complaints = Throttle(_COMPLAIN_EVERY_S, clock)
        self._idle = False
        self._stash: list[Any] = []
        self._abandoned: list[Place] = []
        self._static = instance_id is not None
        self._closing = False
        self._revoked = False  # and what follows from it is not assigned yet
        static = {"group.instance.id": instance_id} if instance_id else {}
        self._consumer: Consumer = librdkafka.new_consumer(
            connection,
            {
                "group.id": queue.consumer_group,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 10_000,  # how soon others get the partitions of a killed member
                "heartbeat.interval.ms": 1_000,  # how soon a rebalance is heard of
                "topic.metadata.refresh.interval.ms": 30_000,  # how soon new partitions are seen
                "on_commit": self._on_commit,
                **static,
            },
        )
        with librdkafka.kafka_errors(f"subscribe to {queue.name}", connection):
            self._consumer.subscribe(
                [queue.name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    @property
    def partitions(self) -> list[int]:
        """The partitions that this member has now, and whose messages it may take."""
        return sorted(partition for partition, known in list(self._partitions.items()) if known.recovered)

    def poll(self, max_records: int, wait_s: float) -> tuple[list[Any], dict[int, Sequence[int]]]:
        """Up to `max_records` records, and their offsets by partition; waits at most `wait_s` for the first.

        Records that a crashed predecessor had started are left out: the tracker looks after them. So
        are those that were deleted since they were fetched.
        Raises TopicError when the topic is gone, and Fenced for good when the group goes on without us.
        """
        if self._fatal is not None:
            raise self._fatal
        self._idle = False
        self._prepare()
        # A lone consume(n, t) waits out t even when messages are there.
        records, self._stash = self._stash[:max_records], self._stash[max_records:]
        if not records:
            records = self._consumer.consume(1, wait_s)
        if records and max_records > len(records):
            records += self._consumer.consume(max_records - len(records), 0)
        self._last_poll = self._clock.monotonic()
        log_starts: dict[int, int] = {}
        if not any(map(Record.error, records)):
            offsets = by_partition(records)
            if all(self._takes_all_of(partition, ones, log_starts) for partition, ones in offsets.items()):
                for partition, ones in offsets.items():
                    self._partitions[partition].pending += len(ones)
                    self._partitions[partition].position = ones[-1] + 1
                return records, offsets
        records = [record for record in records if self._is_ours(record, log_starts)]
        # What came before a record that shows that the log is another one is not of that.
        records = [record for record in records if self._partitions[record.partition()].recovered]
        return records, by_partition(records)

    def _takes_all_of(self, partition: int, offsets: Sequence[int], log_starts: dict[int, int]) -> bool:
        """Whether there is nothing to look at in single records of `partition`; the usual case."""
        known = self._partitions.get(partition)
        return (
            known is not None
            and known.recovered
            and not known.started
            and known.next_offset is not None
            and known.position <= offsets[0]
            and ascends(offsets)
            and not self._was_deleted(partition, known.next_offset, log_starts)
        )

    def goes_on(self, last_at: Mapping[int, int]) -> bool:
        """Whether start markers that were written at these markers offsets stand behind all that we know.

        If not, the markers topic was made anew or cut short, which the ids tell up to a second later.
        """
        return all(
            at < 0 or at >= max(known.markers_end, known.markers_offset or 0)  # -1: Kafka does not say where
            for partition, at in last_at.items()
            if (known := self._partitions.get(partition)) is not None
        )

    def taken(self, partition: int, offset: int, markers_offset: int, count: int = 1) -> None:
        """`count` records up to `offset` may be committed.

        Their start markers stand at `markers_offset` or before.
        """
        known = self._partitions.get(partition)
        if known is not None:
            known.pending -= count
            known.next_offset = offset + 1 if known.pending else max(offset + 1, known.skipped_to)
            known.markers_offset = max(markers_offset + 1, known.markers_offset or 0)
            known.failures = 0
            self._uncommitted += count

    def hold_back(self, partition: int, offsets: Sequence[int]) -> None:
        """The starts of some of these ascending offsets failed; whether they were written is unknown.

        Until they have been taken or skipped, commits keep saying where to find those starts (rule
        R10). To be called before `taken`, and to be followed by `rewind`.
        """
        known = self._partitions.get(partition)
        if known is not None:
            behind = known.markers_end if known.markers_offset is None else known.markers_offset
            before, so_far = known.held_back or (behind, offsets[-1])
            known.held_back = (before, max(offsets[-1], so_far))
            known.unknown.update(offsets)

    def rewind(self, partition: int, offset: int) -> None:
        """Read `partition` again from `offset`, after a back-off that grows with each failure.

        Not what was started after all, as the markers say when they have come to rest: the tracker
        looks after that, and may have redelivered it long since.
        """
        known = self._partitions.get(partition)
        if known is None:
            return
        known.pending = 0
        known.skipped_to = 0
        known.recovered = False
        known.too_early = known.position = offset
        self._back_off(known)
        self._seek(partition, offset)
        self._apply_pauses()

    def abandoned(self) -> list[Place]:
        """What was taken after all when its start markers had failed, and is in flight; told once."""
        found, self._abandoned = self._abandoned, []
        return found

    def start_over(self) -> None:
        """Read again whatever was polled and not taken, after an error that came between the two.

        As after an assignment: from the committed offset, without what has a start marker.
        """
        self._stash = []
        self._restart_recovery(self._partitions)

    def follow(self, ids: TopicIds) -> None:
        """These are the ids of the topics now. What was known of topics with other ids counts no more."""
        before, self._ids = self._ids, ids
        if ids.queue != before.queue:
            self._abandoned = []
            self.start_over()
        elif ids != before:
            # Nobody was told yet of a new start, so that commits lead to the first of them.
            for known in self._partitions.values():
                known.markers_end = 0
                known.markers_offset = known.recovered_from = 0
                if known.held_back is not None:
                    known.held_back = (0, known.held_back[1])

    def _restart_recovery(self, partitions: Iterable[int], log_end: int = INT64_MAX) -> None:
        """Recover these partitions as if they had just been assigned."""
        now = self._clock.monotonic()
        for partition in list(partitions):
            self._partitions[partition] = _Partition(ids_since=now, log_end=log_end, too_early=0)

    def maintain(self) -> None:
        """Commit what is due; call it often."""
        now = self._clock.monotonic()
        if self._uncommitted >= COMMIT_EVERY_MESSAGES or now - self._last_commit >= COMMIT_EVERY_S:
            self._commit(asynchronous=True)

    def keep_alive(self) -> None:
        """Stay a member of the group while the user's code is busy; call it about once a second.

        Afterwards `abandoned` may return something new.
        """
        if self._clock.monotonic() - self._last_poll < _IDLE_AFTER_S or self._fatal is not None:
            return
        self._idle = True
        self._prepare()
        came = self._consumer.consume(1, 0)  # may drop some of the stash
        self._stash += came
        for record in came:
            self._raise_if_fatal(record.error())

    def close(self) -> None:
        """Commit and leave the group; a static member keeps its partitions for a while.

        Gives up when Kafka does not answer: then the group notices by itself, when this process has ended
        or after `max.poll.interval.ms`, five minutes.
        """
        if not (_ends(lambda: self._commit(asynchronous=False)) and self._leave()):
            _log.warning("closed without an answer of Kafka", extra={"queue": self._queue.name})

    def _leave(self) -> bool:
        self._closing = True
        # librdkafka hangs for ever, and Python with it, when it is closed in the middle of a rebalance
        # (its issue 4884): first wait for the end of that, or leave the group before.
        deadline = self._clock.monotonic() + _LEAVE_TIMEOUT_S
        if not self._static or not self._is_stable(deadline):
            self._consumer.unsubscribe()
            while self._consumer.assignment() and self._clock.monotonic() < deadline:
                self._consumer.consume(1, 0.02)
        return _ends(self._consumer.close)

    def _is_stable(self, deadline: float) -> bool:
        """Wait until no rebalance is going on; False when it lasts, or nobody can say."""
        group = self._queue.consumer_group
        admin = librdkafka.new_admin(self._connection)
        while (left := deadline - self._clock.monotonic()) > 0:
            try:
                asked = admin.describe_consumer_groups([group], request_timeout=left)[group]
                stable = asked.result(left + 1).state is ConsumerGroupState.STABLE
            except (KafkaException, TimeoutError):
                return False
            self._consumer.consume(1, 0.05)  # runs the callbacks that are due
            if stable and not self._revoked:
                return True
        return False

    def _was_deleted(self, partition: int, offset: int, log_starts: dict[int, int]) -> bool:
        """Whether the log begins behind `offset` by now, after a purge for example."""
        if partition not in log_starts:
            place = TopicPartition(self._queue.name, partition)
            bounds = self._consumer.get_watermark_offsets(place, cached=True)
            log_starts[partition] = 0 if bounds is None else bounds[0]
        return offset < log_starts[partition]

    def _is_ours(self, record: Any, log_starts: dict[int, int]) -> bool:
        error: KafkaError | None = record.error()
        if error is not None:
            self._raise_if_fatal(error)
            if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise TopicError(
                    f"queue {self._queue.name!r}: the topic does not exist; "
                    f"create it with: kmq queue create {self._queue.name}"
                )
            problem = librdkafka.translated(error, f"receive from {self._queue.name}", self._connection)
            if isinstance(problem, AccessDenied):
                raise problem
            _log.warning("receive failed", extra={"queue": self._queue.name, "error": error.name()})
            self._telemetry.failed(self._queue.name, "receive")
            return False
        # A rebalance between two reads may have taken the partition of the first.
        known = self._partitions.get(record.partition())
        if known is None:
            return False
        offset = record.offset()
        if not known.recovered:
            known.too_early = offset if known.too_early is None else known.too_early
            return False
        if offset < known.position:
            end = self._log_end(record.partition())
            if end is not None and end < known.position:
                self._restart_recovery([record.partition()], end)
            # Otherwise librdkafka reads it again. When pause, resume or seek overtake its look-up of where
            # to begin, it repeats that half a second later and goes back there.
            return False
        known.position = offset + 1
        if offset in known.started or self._was_deleted(record.partition(), offset, log_starts):
            known.skipped_to = offset + 1
            if not known.pending:
                known.next_offset = offset + 1
            return False
        known.pending += 1
        return True

    def _raise_if_fatal(self, error: KafkaError | None) -> None:
        """After a fatal error the consumer gets nothing more, and others have its partitions."""
        if error is None or not (error.fatal() or error.code() in _FATAL):
            return
        why = "another client has its instance_id" if self._static else "Kafka does not take it back"
        self._fatal = Fenced(
            f"queue {self._queue.name!r}: this client is no member of group {self._queue.consumer_group} any "
            f"more, {why} ({error.str()}); make a new client, each with an instance_id of its own"
        )
        raise self._fatal

    def _log_end(self, partition: int) -> int | None:
        """Where the log ended when some of it was fetched last."""
        place = TopicPartition(self._queue.name, partition)
        bounds = self._consumer.get_watermark_offsets(place, cached=True)
        return None if bounds is None else bounds[1]

    def _back_off(self, known: _Partition) -> None:
        known.failures += 1
        known.wait_until = self._clock.monotonic() + _PAUSE.delay(known.failures)

    def _seek(self, partition: int, offset: int) -> None:
        self._stash = [record for record in self._stash if record.partition() != partition]
        place = TopicPartition(self._queue.name, partition, offset)
        try:
            self._consumer.seek(place)
        except KafkaException:  # not fetching yet
            self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
            self._paused.discard(partition)

    def _prepare(self) -> None:
        for partition, known in list(self._partitions.items()):
            if (
                known.recovered
                or self._clock.monotonic() < known.wait_until
                or not self._outcome_known(partition)
            ):
                continue
            if not self._ids_known(known.ids_since):
                continue
            if known.unknown:  # not put off while idle: their leases run
                self._find_written_starts(partition, known)
            elif not self._idle:
                self._recover(partition, known)
        self._apply_pauses()

    def _apply_pauses(self) -> None:
        now = self._clock.monotonic()
        wanted = {
            partition
            for partition, known in self._partitions.items()
            if self._idle or not known.recovered or now < known.wait_until
        }
        pause, resume = wanted - self._paused, (self._paused - wanted) & self._partitions.keys()
        if pause:
            self._consumer.pause([TopicPartition(self._queue.name, p) for p in pause])
        if resume:
            self._consumer.resume([TopicPartition(self._queue.name, p) for p in resume])
        self._paused = wanted

    def _recover(self, partition: int, known: _Partition) -> None:
        """Learn which messages from the committed offset on a predecessor had already started."""
        place = TopicPartition(self._queue.name, partition)
        try:
            committed = self._consumer.committed([place], timeout=_RECOVERY_TIMEOUT_S)[0]
            if committed.error is not None:
                raise KafkaException(committed.error)
            commit = commit_of(committed, self._ids)
            if commit is None or commit.offset > known.log_end:
                commit = Commit(0, 0)
                known.too_early = 0  # librdkafka may have begun at a commit of another topic, deleted since
            start = commit.markers_offset
            read = self._read_markers(partition, start, commit.offset)
        except (KafkaException, KmqError) as exception:
            self._not_recovered(partition, known, exception)
            return
        known.started = read.started
        known.markers_end = read.end
        known.recovered = True
        known.failures = 0
        # With no newer start the next commit must keep saying what this one said.
        known.markers_offset = known.recovered_from = start
        known.position = max(known.too_early or 0, commit.offset)
        # librdkafka begins at the commit, whatever topic it is of.
        if known.too_early is not None or commit.offset != max(committed.offset, 0):
            self._seek(partition, known.position)

    def _find_written_starts(self, partition: int, known: _Partition) -> None:
        """Learn which of this member's own start markers were written although they had failed."""
        assert known.held_back is not None
        assert known.too_early is not None
        start = known.held_back[0]
        try:
            read = self._read_markers(partition, start, min(known.unknown))
        except KmqError as exception:
            self._not_recovered(partition, known, exception)
            return
        # They were no attempts: nobody was handed them.
        self._abandoned += [(partition, offset) for offset in sorted(known.unknown) if offset in read.open]
        if not known.started:
            known.recovered_from = start
        known.started.update(read.started)
        known.markers_end = read.end
        known.unknown = set()
        known.recovered = True
        self._seek(partition, known.too_early)

    def _not_recovered(self, partition: int, known: _Partition, exception: Exception) -> None:
        self._back_off(known)
        self._telemetry.failed(self._queue.name, "recovery")
        _log.warning(
            "reading the markers failed; trying again",
            extra={"queue": self._queue.name, "partition": partition, "error": str(exception)},
        )

    def _read_markers(self, partition: int, start: int | None, first_offset: int) -> _Read:
        """What stands at or after `start` of queue offsets >= first_offset; nothing if that is None."""
        read = _Read()
        scan = partial(
            partition_reader.scan,
            self._connection,
            self._queue.markers_topic,
            visit=partial(
                _read_marker,
                first_offset=first_offset,
                read=read,
                # Asked only when the end of the markers is known: valid for all of them (rule R22).
                queue_end=cache(partial(self._queue_end, partition)),
            ),
            # Start markers are never part of a transaction, and an open one must not hold us up.
            uncommitted=True,
            timeout_s=_LOOK_TIMEOUT_S,
            clock=self._clock,
        )
        reached = scan({partition: INT64_MAX if start is None else start})
        if start is not None and start > reached[partition].end:  # the markers topic is a new one
            reached = scan({partition: 0})
        read.end = reached[partition].end
        return read

    def _queue_end(self, partition: int) -> int:
        ends = partition_reader.bounds(
            self._connection, self._queue.name, [partition], _LOOK_TIMEOUT_S, uncommitted=True
        )
        return ends[partition][1]

    def _commit(self, *, asynchronous: bool) -> None:
        self._last_commit = self._clock.monotonic()
        self._uncommitted = 0
        due = [
            (partition, known)
            for partition, known in self._partitions.items()
            if known.next_offset is not None and known.next_offset != known.committed
        ]
        self._commit_these(due, asynchronous=asynchronous)

    def _commit_these(self, due: list[tuple[int, _Partition]], *, asynchronous: bool) -> None:
        if not due:
            return
        offsets = []
        for partition, known in due:
            assert known.next_offset is not None
            known.started.discard_below(known.next_offset)
            # While some of what was recovered lies ahead, a successor must read as far back as we did.
            covered = known.recovered_from if known.started else known.markers_offset
            if known.held_back is not None and known.next_offset > known.held_back[1]:
                known.held_back, known.unknown = None, set()
            if known.held_back is not None:
                covered = min(known.held_back[0], known.held_back[0] if covered is None else covered)
            metadata = commit_metadata(covered, self._ids)
            offsets.append(TopicPartition(self._queue.name, partition, known.next_offset, metadata))
            known.committed = known.next_offset
        try:
            if asynchronous:
                self._consumer.commit(offsets=offsets, asynchronous=True)
            else:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as exception:
            self._commit_failed(librdkafka.error_of(exception))

    def _on_commit(self, error: KafkaError | None, _offsets: list[TopicPartition]) -> None:
        if error is not None and error.code() != KafkaError._NO_OFFSET:
            self._commit_failed(error)

    def _commit_failed(self, error: KafkaError | None) -> None:
        # Harmless by itself: the next commit says the same, and after a crash the markers tell.
        for known in self._partitions.values():
            known.committed = None
        self._telemetry.failed(self._queue.name, "commit")
        if self._complaints.lets_through():  # in a rebalance, those of seconds fail at once
            _log.warning(
                "commit failed; trying again",
                extra={"queue": self._queue.name, "error": error.name() if error else "unknown"},
            )

    @staticmethod
    def _numbers(places: list[TopicPartition]) -> set[int]:
        return {place.partition for place in places}

    def _on_assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        consumer.incremental_assign(places)
        self._revoked = False
        for place in places:
            self._partitions[place.partition] = _Partition(ids_since=self._clock.monotonic())
            self._paused.discard(place.partition)
        self._apply_pauses()
        _log.info(
            "partitions assigned",
            extra={"queue": self._queue.name, "partitions": [p.partition for p in places]},
        )

    def _on_revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        try:
            if not self._closing:  # then the client has waited
                self._wait_for_outcomes(self._numbers(places))
                gone = [(p, self._partitions[p]) for p in self._numbers(places) & self._partitions.keys()]
                self._commit_these(
                    [(p, known) for p, known in gone if known.next_offset is not None], asynchronous=False
                )
        finally:  # confluent-kafka unassigns them after an error, too
            self._on_lost(consumer, places)

    def _wait_for_outcomes(self, partitions: set[int]) -> None:
        """Whoever has them next reads what was started, and must not do so too early (rule R10)."""
        deadline = self._clock.monotonic() + _OUTCOME_TIMEOUT_S
        while [p for p in partitions if not self._outcome_known(p)] and self._clock.monotonic() < deadline:
            self._clock.sleep(_OUTCOME_POLL_S)

    def _on_lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        gone = self._numbers(places)
        for partition in gone:
            self._partitions.pop(partition, None)
        self._paused -= gone
        # When one of them comes back, others have gone on with it.
        self._stash = [record for record in self._stash if record.partition() not in gone]
        self._revoked = True
        consumer.incremental_unassign(places)
        _log.info(
            "partitions given up",
            extra={"queue": self._queue.name, "partitions": [p.partition for p in places]},
        )


def _ends(call: Callable[[], object]) -> bool:
    """Make a call of librdkafka that has no time-out; whether it came to an end."""
    thread = threading.Thread(target=call, name="kmq-close", daemon=True)
    thread.start()
    thread.join(_LEAVE_TIMEOUT_S)
    return not thread.is_alive()


def commit_metadata(markers_offset: int | None, ids: TopicIds) -> str:
    """What a commit says beside the queue offset; see `Commit`."""
    covered = "-" if markers_offset is None else markers_offset
    return f"kmq2:{covered}:{ids.queue}:{ids.markers}"


def commit_of(place: TopicPartition, ids: TopicIds) -> Commit | None:
    """A commit as Kafka gives it; None where there is none, or none of the queue topic of these ids.

    One without ids, which is of an older kmqpy or of another kind of client, is believed: Kafka deletes
    commits together with their topic.
    """
    if place.offset < 0:
        return None
    found = _METADATA.fullmatch(place.metadata or "")
    if found is None:
        return Commit(place.offset, None)
    if found["queue"] not in (None, ids.queue):
        return None
    if found["markers"] not in (None, ids.markers):
        return Commit(place.offset, 0)
    digits = found["v1"] or found["v2"]
    known = digits != "-" and int(digits) <= INT64_MAX
    return Commit(place.offset, int(digits) if known else None)


def _read_marker(record: Any, first_offset: int, read: _Read, queue_end: Callable[[], int]) -> None:
    try:
        marker = read_marker(record)
    except DecodeError:
        return
    if marker.op not in (Op.TAKE, Op.DELAY, Op.END) or marker.highest < first_offset:
        return
    runs = [
        (max(first, first_offset), first + count - max(first, first_offset))
        for first, count in marker.offset_runs
        if first + count > first_offset
    ]
    if marker.op is not Op.END:
        if marker.highest >= queue_end():
            return  # it names messages that don't exist
        read.started.add_runs(runs)
    if marker.op is Op.TAKE:
        read.open.add_runs(runs)
    else:
        read.open.discard_runs(runs)
