"""One turn of a partition in an executor: read its markers on, redeliver what is due, say what to keep.

An executor keeps no state between turns. What it is given (an earlier turn's head and buckets) is a
function of the markers up to some offset, so any executor can do the turn, and do it again: before
anything is redelivered it takes the partition over as a tracker does (fence, verify, read up to a tick
written after the fencing, rule R1), and then the end markers of whatever an earlier try has committed
have been read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from confluent_kafka import KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import KmqError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.markers.replay import Applied, QueueEnd, replay_markers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.partition.start_position import StartPosition, start_position
from tracker.reading.queue_ends import QueueEnds
from tracker.redelivery.originals import OriginalsReader
from tracker.redelivery.redeliverer import SOON_S, Redeliverer, RedeliveryResult
from tracker.redelivery.tick_writer import TickWriter
from tracker.settings import TrackerSettings
from tracker.spark.buckets import BucketedState, Damaged, Head
from tracker.spark.mandate import Mandate
from tracker.spark.markers_reader import MarkersReader
from tracker.spark.report import Report

_TICK_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 10.0
_TOPICS_FOR_S = 2.0
"""How long an answer about the topics holds."""
_PAUSE_S = 0.1
"""At least, between two rounds of redelivery of turns that linger."""
_MAX_LINGERING = 32
"""Turns: each may have a producer open."""
_LEAST_READ_S = 0.5
"""For reading, however short turns are: some records must come in each."""
_CATCH_UP_S = 2.0
"""For reading up to a tick, whatever is left of the turn; longer only where a transaction is open."""
_SNAPSHOT_ROWS = 4_000
_SNAPSHOT_MAX_BYTES = 500_000
"""Of ZooKeeper's 1 MB in a packet."""
_SHORTER = "the markers topic is shorter than what was read of it"


@dataclass(frozen=True)
class Task:
    """What executors are told: for whom they work, and on what.

    tracker_id  the member in ZooKeeper that holds the leader znodes
    turn_s      after which a turn ends, about, though there is more to do
    linger_s    how long turns go on, at the most, for what is due soon
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    queue: QueueSettings
    tracker_id: str
    settings: TrackerSettings
    turn_s: float = 10.0
    linger_s: float = 0.0


class Store(Protocol):
    """Where the state of the partition at hand is between turns."""

    def head(self) -> str | None:
        """What was given to set_head."""
        ...

    def set_head(self, text: str) -> None:
        """Keep this."""
        ...

    def load(self, bucket: int) -> str | None:
        """The text of a bucket, None when there is none."""
        ...

    def save(self, bucket: int, text: str | None) -> None:
        """Keep this; None removes it."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class _Anchor(NamedTuple):
    """A partition's now, exact at this moment of our monotonic clock."""

    now_ms: int
    at_s: float


class Executor:
    """Does turns, one at a time; keeps connections between them, and nothing that matters."""

    def __init__(self, task: Task, clock: Clock = SYSTEM_CLOCK) -> None:
        self.task = task
        self.clock = clock
        connection = task.connection
        self.mandate = Mandate(task.zookeeper, connection.root, task.tracker_id, clock)
        self.markers = MarkersReader(connection, clock)
        self.originals = OriginalsReader(connection, clock)
        self.tick_writer = TickWriter(connection)
        self.queue_ends = QueueEnds(connection)
        self._topics = Topics(connection)
        self._topics_seen: tuple[QueueTopics, float] | None = None
        self._redeliverers: dict[int, Redeliverer] = {}
        self.anchors: dict[int, _Anchor] = {}

    def close(self) -> None:
        """Let go of everything."""
        self.mandate.close()
        self.markers.close()
        self.originals.close()
        self.queue_ends.close()

    def turns(self, stores: Mapping[int, Store]) -> list[Report]:
        """A turn of each of these partitions; then they linger together for what is due soon.

        What could not be done is in the reports, and the next turns try again.
        """
        turns = [_Turn(self, partition, store) for partition, store in stores.items()]
        lingers = self.task.linger_s > 0 and len(turns) <= _MAX_LINGERING
        try:
            for turn in turns:
                turn.begin()
                if not lingers or turn.due_in_s() > self.task.linger_s:
                    turn.end()
            if lingers:
                self._linger(turns)
            for turn in turns:
                turn.end()
        finally:
            for turn in turns:
                turn.close()
        return [turn.report for turn in turns]

    def _linger(self, turns: list[_Turn]) -> None:
        """Between batches nobody redelivers, and that is a second: it is worth waiting here."""
        end = self.clock.monotonic() + self.task.linger_s
        while True:
            due_in_s = min((turn.due_in_s() for turn in turns), default=math.inf)
            wait_s = max(_PAUSE_S, due_in_s)
            if self.clock.monotonic() + wait_s > end:
                return
            self.clock.sleep(wait_s)
            for turn in turns:
                if turn.due_in_s() <= 0 and self.clock.monotonic() < end:
                    turn.go_on()

    # --- what a turn works with -----------------------------------------------------------------------

    def redeliverer(self, partition: int) -> Redeliverer:
        """Kept, since it remembers what was refused; its producer is of a turn."""
        found = self._redeliverers.get(partition)
        if found is None:
            task = self.task
            found = Redeliverer(task.connection, task.queue, partition, task.settings)
            self._redeliverers[partition] = found
        return found

    def topics(self) -> QueueTopics:
        """The queue's topics as they are, or were a moment ago; raises TopicError, Unavailable."""
        now = self.clock.monotonic()
        if self._topics_seen is None or now - self._topics_seen[1] > _TOPICS_FOR_S:
            self._topics_seen = (self._topics.check(self.task.queue), now)
        return self._topics_seen[0]

    def dead_letters_exist(self) -> bool:
        """Asked so that no broker creates the topic by itself."""
        try:
            return self.topics().dead_letters is not None
        except KmqError:
            return False


class _Turn:
    """A turn of one partition."""

    def __init__(self, executor: Executor, partition: int, store: Store) -> None:
        self.report = Report(partition)
        self._executor = executor
        self._queue = executor.task.queue
        self._partition = partition
        self._store = store
        self._clock = executor.clock
        self._deadline = 0.0
        self._redeliverer = executor.redeliverer(partition)
        self._ranges = False
        self._epoch: int | None = None
        self._head: Head | None = None
        self._state: BucketedState | None = None  # to be kept
        self._fenced = self._caught_up = False
        self._goes_on = False
        self._queue_end = QueueEnd(0, 0)

    def begin(self) -> None:
        """Read what is new, and redeliver what is due."""
        self._deadline = self._clock.monotonic() + self._executor.task.turn_s
        with self._reporting():
            self._begin()

    def go_on(self) -> None:
        """The same once more."""
        with self._reporting():
            # Asked first, or whoever has the partition by now would be fenced for nothing.
            self._goes_on = self._may_go_on()
            if self._goes_on:
                self._redeliver()

    def due_in_s(self) -> float:
        """When there is more to do, by the broker's clock carried forward; infinite: not in this turn."""
        anchor = self._executor.anchors.get(self._partition)
        if not self._goes_on or self._state is None or anchor is None:
            return math.inf
        due_ms = self._state.next_due_ms()
        return math.inf if due_ms is None else (due_ms - self._now_ms(anchor)) / 1000

    def end(self) -> None:
        """Keep the state that it led to."""
        with self._reporting():
            self._keep()
        self._state = None
        self.close()

    def close(self) -> None:
        """Let go of the partition."""
        self._redeliverer.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """After an error nothing is done any more, and nothing kept; it is in the report."""
        try:
            yield
        except Damaged as error:
            # Nothing is lost: the next turn begins at the safe offset in ZooKeeper.
            self._store.clear()
            self.report.problem = f"stored state thrown away: {error}"
        except KmqError as error:
            self.report.problem = str(error)
        except KafkaException as exception:
            found = librdkafka.error_of(exception)
            self.report.problem = f"Kafka: {found.name() if found is not None else exception}"
        else:
            return
        self.report.active = self._goes_on = False
        self._state = None

    def _begin(self) -> None:
        mandate, name = self._executor.mandate, self._queue.name
        self._epoch = mandate.epoch(name, self._partition)
        if self._epoch is None:
            return
        self.report.owned = True
        topic_id = self._executor.topics().markers.topic_id
        text = self._store.head()
        head = Head.from_json(text) if text is not None else None
        if (head is None or head.epoch != self._epoch or head.topic_id != topic_id) and not self._fence():
            return
        self._head, begin = self._begin_at(head, topic_id)
        self._state = BucketedState(self._head, self._store.load)
        self._state.max_hold_ms, self._state.max_delay_ms = self._queue.max_hold_ms, self._queue.max_delay_ms
        if begin is not None:
            self._state.restore(begin.at.in_flight)
        self._ranges = self._redeliverer.ranges = self._head.ranges
        self._redeliver()

    # --- where to begin -------------------------------------------------------------------------------

    def _begin_at(self, head: Head | None, topic_id: str) -> tuple[Head, StartPosition | None]:
        """The head to go on from; with what ZooKeeper says where that is newer, or all there is."""
        low, end = self._executor.markers.bounds(self._queue.markers_topic, self._partition)
        if head is not None and head.topic_id != topic_id:
            head = None
        if head is not None and head.position >= low and not self._fenced:
            return head, None
        stored = self._executor.mandate.stored_offset(self._queue.name, self._partition)
        if head is not None and head.position <= end and not _is_newer(stored, head, end):
            if head.position < low:
                # What is in flight is known all the same.
                self.report.problem = "markers were deleted before they were read; raise their retention"
                self.report.markers_lost += 1
                head = replace(head, position=low, missed_markers=True, missed_until_ms=INT64_MAX)
            return head, None
        begin = start_position(stored, topic_id, low, end)
        at = begin.at
        if begin.problem is not None:
            self.report.problem = begin.problem
        self.report.markers_lost += begin.markers_lost
        self._store.clear()
        return Head(topic_id, at.offset, at.now_ms, missed_markers=at.missed_markers), begin

    def _fence(self) -> bool:
        """Fence predecessors, then look again whether the partition is the driver's."""
        self._redeliverer.open(_OPEN_TIMEOUT_S)
        self.report.takeovers += 1
        self._fenced = True
        return self._executor.mandate.epoch(self._queue.name, self._partition) == self._epoch

    # --- reading and redelivering -----------------------------------------------------------------------

    def _redeliver(self) -> None:
        state, head = self._state, self._head
        assert state is not None
        assert head is not None
        self._goes_on = False
        _, end = self._executor.markers.bounds(self._queue.markers_topic, self._partition)
        if end < state.position:
            raise Damaged(_SHORTER)
        read_by = max(self._deadline, self._clock.monotonic() + _LEAST_READ_S)
        self._read(state, end, read_by)
        in_time = self._clock.monotonic() < read_by
        if (self._caught_up or not self._fenced) and not self._may_be_due(state):
            self.report.active = self._goes_on = in_time
            return
        if not self._fenced and not self._fence():
            return
        if not self._catch_up(state):
            return
        self._caught_up = True
        self._head = head = replace(head, epoch=self._epoch or 0)
        if state.missed_markers and head.missed_until_ms == INT64_MAX:
            # By then every message whose take was missed has been acknowledged or has had its time.
            self._head = replace(head, missed_until_ms=state.now_ms + self._queue.longest_ms)
        self.report.active = True
        limit = self._executor.task.settings.max_batch_messages * 5
        # Once in any case: taking over may have needed all the time of a short turn.
        while entries := state.take_due(limit):
            outcome = self._redeliverer.redeliver(
                entries, self._executor.originals, self._may_go_on, self._executor.dead_letters_exist
            )
            self._note(outcome)
            if outcome.broken:
                return  # the next turn takes over again before anything else (rules R1, R6)
            for offset, delay_s in outcome.failed.items():
                state.retry(offset, int(delay_s * 1000))
            # Our own end markers. What became due meanwhile is for later: others wait for theirs.
            if not self._catch_up(state):
                return
            more = len(entries) == limit or (outcome.copies and SOON_S in outcome.failed.values())
            if not more or self._clock.monotonic() >= self._deadline:
                break
        self._goes_on = True

    def _catch_up(self, state: BucketedState) -> bool:
        """Read up to a tick that is written now: its time is the new now; False when it takes too long."""
        topic = self._queue.markers_topic
        tick = self._executor.tick_writer.send_tick(topic, self._partition, _TICK_TIMEOUT_S)
        written_at = self._clock.monotonic()
        self.report.ticks += 1
        if tick.markers_offset < state.position:
            raise Damaged(_SHORTER)
        self._read(state, tick.markers_offset + 1, self._clock.monotonic() + _CATCH_UP_S)
        if state.position <= tick.markers_offset:
            self.report.problem = "markers up to now can't be read yet; a transaction may be open"
            return False
        self._executor.anchors[self._partition] = _Anchor(state.now_ms, written_at)
        return True

    def _read(self, state: BucketedState, end: int, deadline: float) -> None:
        topic, report = self._queue.markers_topic, self.report
        reader = self._executor.markers
        for records in reader.read(topic, self._partition, state.position, end, deadline):
            while records:
                applied = replay_markers(state, self._partition, records, self._queue_end)
                self._ranges = self._redeliverer.ranges = self._ranges or applied.in_ranges > 0
                report.markers += applied.records
                report.late_acks += applied.late_acks
                report.undecodable_markers += len(applied.undecodable)
                report.unsupported_markers += len(applied.newer)
                self._complain(applied)
                records = records[applied.records :]
                if records:  # the next one names a message beyond the known end of the queue
                    place = self._queue.name, self._partition
                    highest = read_marker(records[0]).highest
                    end = self._executor.queue_ends.end_beyond(place, highest)
                    # Where that one does not exist, it took a while to make sure.
                    self._queue_end = QueueEnd(end, 0 if end > highest else records[-1].offset() + 1)

    def _complain(self, applied: Applied) -> None:
        for kind, found in (
            ("undecodable marker skipped", applied.undecodable),
            ("marker of a newer kmqpy", applied.newer),
            ("marker that could not be applied", applied.failed),
        ):
            if found:
                at, error = found[0]
                self.report.problem = f"{kind}, at {at}: {error}"

    def _may_be_due(self, state: BucketedState) -> bool:
        """Whether a lease is over, or probably is by the broker's clock carried forward."""
        due_ms = state.next_due_ms()
        if due_ms is None:
            return False
        anchor = self._executor.anchors.get(self._partition)
        if due_ms <= state.now_ms or anchor is None:
            return True
        return due_ms <= self._now_ms(anchor)

    def _now_ms(self, anchor: _Anchor) -> float:
        return anchor.now_ms + (self._clock.monotonic() - anchor.at_s) * 1000

    def _may_go_on(self) -> bool:
        """Asked before each transaction; the fencing covers what happens after."""
        try:
            epoch = self._executor.mandate.epoch(self._queue.name, self._partition)
        except KmqError as error:
            self.report.problem = str(error)
            return False
        return epoch == self._epoch

    def _note(self, outcome: RedeliveryResult) -> None:
        report = self.report
        report.redelivered += len(outcome.redelivered)
        report.dead_lettered += len(outcome.dead_lettered)
        report.lost_to_retention += len(outcome.gone)
        report.undecodable_counts += outcome.undecodable_counts
        now_ms = self._now_ms(self._executor.anchors[self._partition])
        report.lateness += [max(0.0, now_ms - copy.entry.due_ms) / 1000 for copy in outcome.copies]
        for problem in (outcome.problem, outcome.dead_letter_problem, *outcome.refused[:1]):
            if problem:
                report.failures += 1
                report.problem = problem

    # --- what is kept -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        state, head = self._state, self._head
        if state is None or head is None:
            return
        report, since_ms = self.report, state.oldest_since_ms()
        if (state.now_ms if since_ms is None else since_ms) > head.missed_until_ms:
            state.missed_markers = False
        if state.pinned:
            report.problem = report.problem or "markers of a newer kmqpy; update this tracker"
        self._redeliverer.forget_ended(state.may_hold)
        report.problem = report.problem or "; ".join(self._redeliverer.refused())
        report.topic_id, report.missed_markers = head.topic_id, state.missed_markers
        report.offset, report.now_ms = state.safe_offset(), state.safe_now_ms()
        report.in_flight = len(state)
        report.oldest_s = 0.0 if since_ms is None else max(0.0, (state.now_ms - since_ms) / 1000)
        head = replace(
            head,
            position=state.position,
            now_ms=state.now_ms,
            pinned=state.pinned_at,
            missed_markers=state.missed_markers,
            ranges=self._ranges,
            snapshot_at=self._snapshot(state, head.snapshot_at),
        )
        found, texts = state.changes()
        for bucket, text in texts.items():
            self._store.save(bucket, text)
        self._store.set_head(replace(head, buckets=found).to_json())

    def _snapshot(self, state: BucketedState, last: int) -> int:
        """Give ZooKeeper a snapshot now and then, where the safe offset lies far behind."""
        report, after = self.report, self._executor.task.settings.snapshot_after_markers
        if min(state.position - report.offset, state.position - last) <= after or state.rows > _SNAPSHOT_ROWS:
            return last
        offset, now_ms, rows = state.snapshot(_SNAPSHOT_ROWS)
        text = snapshot.pack(rows)
        if len(text) < _SNAPSHOT_MAX_BYTES:
            report.offset, report.now_ms, report.in_flight_rows = offset, now_ms, text
        return state.position


def _is_newer(stored: StoredOffset | None, head: Head, end: int) -> bool:
    """Whether another has stored where it was after `head`, which may know what can't be read any more."""
    return stored is not None and stored.markers_id == head.topic_id and head.position < stored.offset <= end


_EXECUTORS: dict[str, Executor] = {}
"""Of this process, by queue."""


def executor_for(task: Task) -> Executor:
    """This process's executor for `task`; one of an earlier task of the same queue is closed."""
    found = _EXECUTORS.get(task.queue.name)
    if found is None or found.task != task:
        if found is not None:
            found.close()
        found = _EXECUTORS[task.queue.name] = Executor(task)
    return found
