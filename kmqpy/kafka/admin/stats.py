"""Counts the messages of a queue and lists those in flight, by reading Kafka without joining a group.

A message is *in flight* while it is taken and not finished. A message whose delay (`send(delay=…)`) is not
over counts as waiting, in `depth`, like messages that nobody has taken yet; even after a client has met the
message and written a marker that says so.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError
from kmqpy.kafka import hanging, partition_reader
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.ended_letters import EndedLetters
from kmqpy.kafka.group_commits import add_cuts_of_letters, commits_in_log, log_ends
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts, offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import message_headers, read_marker
from kmqpy.kafka.markers.replay import QueueEnd, replay_markers
from kmqpy.kafka.message_headers import is_dead_letter_of, redelivery_count
from kmqpy.kafka.partition_reader import KeptConsumers, ReadPosition
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import QueueTopics, Topics

COUNT_LIMIT = 10_000
"""To count messages, kmqpy reads at most this many records of a partition. Of the records after these, it
counts the offsets, and the sum is an upper bound."""

_NO_COMMIT = Commit(0, 0)
_HELD_BACK_MS = 10_000
"""What waits behind an open transaction counts if its first record is older than this. The records of younger
ones, most of them copies of messages that still count as in flight, are about to be committed or dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightMessage:
    """A message that was taken and is not finished.

    Attributes:
        receipt: Acknowledges, extends or gives back the message.
        partition: Where the message lies.
        offset: Where in the partition.
        holder: The name of the client that took the message, if the client gave one.
        since_ms: When the client took the message, by the broker's clock (ms since 1970).
        lease_until_ms: When a tracker redelivers the message; for state `delayed`: when the message is due.
        state: `leased`, `delayed`, `released` (nacked) or `dead` (to be dead-lettered now).
        reason: The reason given with the nack or the dead-letter request.
        attempts: Deliveries so far, this one included (a delayed message was not delivered this time); None
            if the message is no longer in its topic.
    """

    receipt: str
    partition: int
    offset: int
    holder: str | None
    since_ms: int
    lease_until_ms: int
    state: EntryState
    reason: str | None
    attempts: int | None


_SUMMED = ("depth", "in_flight", "delayed", "overdue", "dead_letters", "released")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """Counts of one partition.

    Attributes:
        partition: Its number.
        depth: As in QueueStats.
        in_flight: As in QueueStats.
        delayed: As in QueueStats.
        overdue: As in QueueStats.
        dead_letters: As in QueueStats.
        exact: As in QueueStats.
        oldest_ms: As in QueueStats.
        owner: Id of the tracker that has the partition; None: no tracker, or no ZooKeeper to ask.
        stored_offset: The stored markers offset from which the next tracker reads; None: no offset is stored.
        released: As in QueueStats.
    """

    partition: int
    depth: int
    in_flight: int
    delayed: int
    overdue: int
    dead_letters: int
    exact: bool
    oldest_ms: int | None
    owner: str | None = None
    stored_offset: int | None = None
    released: int = 0

    def beside(self, main: PartitionStats | None) -> PartitionStats:
        """The sum of these counts, of another lane, and those of the main lane, whose tracker is named.

        Args:
            main: The counts of the main lane.
        """
        if main is None:
            return self
        return dataclasses.replace(main, **_sum([self, main]))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Counts of a queue, at about one moment.

    Attributes:
        queue: The queue's name.
        depth: Waiting messages: neither in flight nor dead-lettered; delayed messages are included.
        in_flight: Messages taken and not finished.
        delayed: Messages of `depth` that a client has met before their delay was over.
        overdue: Messages in flight or delayed that are past their time, by the later of this machine's clock
            and the partition's now (the latest timestamp of its markers).
        dead_letters: Dead letters that are neither redriven nor purged.
        exact: Whether depth and dead_letters were counted one by one; otherwise both are upper bounds, as
            where an open transaction holds back messages from consumers.
        oldest_ms: When the oldest message that nobody has taken was enqueued (ms since 1970).
        partitions: The counts of each partition; with lanes, those of all lanes.
        released: Messages of `in_flight` that were given back and wait for their redelivery.
        lanes: In a queue with lanes: the counts of each, dead letters only with the main lane.
    """

    queue: str
    depth: int
    in_flight: int
    delayed: int
    overdue: int
    dead_letters: int
    exact: bool
    oldest_ms: int | None
    partitions: tuple[PartitionStats, ...] = field(default=())
    released: int = 0
    lanes: tuple[QueueStats, ...] = ()

    @classmethod
    def of_lanes(cls, lanes: Sequence[QueueStats]) -> QueueStats:
        """The counts of a queue with lanes.

        Args:
            lanes: The counts of each lane; the last is the main lane.
        """
        *others, main = lanes
        if not others:
            return main
        partitions = {one.partition: one for one in main.partitions}
        for lane in others:
            for one in lane.partitions:
                partitions[one.partition] = one.beside(partitions.get(one.partition))
        return dataclasses.replace(cls.of(main.queue, partitions.values()), lanes=tuple(lanes))

    @classmethod
    def of(cls, queue: str, partitions: Iterable[PartitionStats]) -> QueueStats:
        """The sum of the counts of partitions.

        Args:
            queue: The queue's name.
            partitions: What to add up.
        """
        parts = tuple(partitions)
        return cls(queue=queue, partitions=parts, **_sum(parts))


def _sum(parts: Sequence[PartitionStats]) -> dict[str, Any]:
    """The fields that PartitionStats and QueueStats have alike."""
    return {
        **{key: sum(getattr(one, key) for one in parts) for key in _SUMMED},
        "exact": all(one.exact for one in parts),
        "oldest_ms": min((one.oldest_ms for one in parts if one.oldest_ms is not None), default=None),
    }


@dataclass(slots=True)
class _RecordCount:
    """The number of records of one partition that were counted.

    exact      False: `count` is an upper bound
    oldest_ms  the timestamp of the first of these records
    """

    count: int = 0
    exact: bool = True
    oldest_ms: int | None = None


class _MarkersOfQueue:
    """Reads the markers of a queue to their end: which messages are in flight, and which were ever started.

    stored        the stored offsets by partition, from which reading can begin
    commits       the commits of the queue's group, see commits_in_log()
    touched_only  True if `states` is not needed; then reading begins where the commits say
    states_only   True if `touched` and `starts` are not needed

    states   by partition, the messages in flight. Messages that were cut away (rule R39) are not among them
    starts   by partition, the queue offset from which messages may not have been taken yet
    touched  by partition, the queue offsets from there on whose messages have a marker
    """

    def __init__(
        self,
        kept: KeptConsumers,
        queue: QueueSettings,
        there: QueueTopics,
        stored: Mapping[int, StoredOffset],
        commits: Mapping[int, Commit],
        *,
        touched_only: bool = False,
        states_only: bool = False,
    ) -> None:
        self.states: dict[int, InFlight] = {}
        self.starts: dict[int, int] = {}
        self.touched = {partition: OffsetRuns() for partition in range(there.queue.partitions)}
        self._wants_touched, self._wants_states = not states_only, not touched_only
        self._kept = kept
        self._queue = queue
        self._ends: dict[int, QueueEnd] = {}
        starts: dict[int, int] = {}
        bounds = partition_reader.bounds(kept, there.markers.name, self.touched)
        for partition in self.touched:
            safe = stored.get(partition)
            if safe is not None and safe.markers_id != there.markers.topic_id:
                safe = None  # it is an offset of an earlier topic of that name
            position, cuts = (0, NO_CUTS) if safe is None else (safe.offset, safe.cuts)
            low, end = bounds[partition]
            start = position
            if not states_only:
                # The start markers of messages from the committed offset on stand at `covered` or after.
                # Without a commit they may stand anywhere.
                covered = commits.get(partition, _NO_COMMIT).markers_offset
                if covered is not None:
                    # An offset beyond the end is one of an earlier topic.
                    if touched_only and covered <= end:
                        start = position = covered
                        cuts = commits.get(partition, _NO_COMMIT).cuts
                    else:
                        start = min(start, covered)
            starts[partition] = max(start, low)
            # What stands before its position adds to `touched` only. From there on the state drops what ticks
            # say was cut away; of earlier ticks it has the cuts.
            self.states[partition] = InFlight(
                position=max(position, low),
                missed_markers=safe is not None and (safe.missed_markers or safe.offset < low),
                max_lease_ms=queue.max_lease_ms,
                max_delay_ms=queue.max_delay_ms,
                cuts=cuts,
                topic=codec.topic_tag(there.queue.topic_id),
            )
            if safe is not None:
                self.states[partition].restore(safe.in_flight)
        partition_reader.scan_batches(kept, there.markers.name, starts, self._read)
        for partition, state in self.states.items():
            self._finish(partition, state, commits.get(partition, _NO_COMMIT))

    def _finish(self, partition: int, state: InFlight, commit: Commit) -> None:
        """Compute `starts`, and `touched` from the numbers that markers name; see log_cuts."""
        if commit.cuts:  # perhaps no tick has told them yet
            state.apply(codec.tick(partition, commit.cuts), state.position, 0)
        self.starts[partition] = start = commit.with_cuts(state.cuts).offset
        if state.cuts:
            numbers = self.touched[partition]
            self.touched[partition] = touched = OffsetRuns()
            touched.add_runs((offset_of(n), count) for n, count in state.cuts.current_runs(numbers.runs()))
            if self._wants_states:
                # Clients that know no cuts have taken these; what stood there before, ticks have dropped.
                touched.add_runs((offset_of(entry.offset), 1) for entry in state)
        self.touched[partition].discard_below(start)

    def _read(self, partition: int, records: list[Any]) -> None:
        """Take in the next markers of a partition."""
        if not self._ends:
            # Asked for only after the end of the markers is known: each marker before that end names messages
            # below this end of the queue topic, or messages that never were (rule R22 of docs/rules.md).
            ends = log_ends(self._kept, self._queue, self.states)
            self._ends = {one: QueueEnd(end.offset, INT64_MAX, end.epoch) for one, end in ends.items()}
        touched = self.touched[partition] if self._wants_touched else None
        replay_markers(self.states[partition], partition, records, self._ends[partition], touched)


TrackedPartitions = tuple[Mapping[int, str], Mapping[int, StoredOffset]]
"""By partition of a lane: the tracker's id, and the stored offset."""
Tracked = Callable[[QueueSettings], TrackedPartitions]
"""Returns them for a lane."""


def _untracked(_lane: QueueSettings) -> TrackedPartitions:
    return {}, {}


def queue_stats(
    connection: KafkaConnection,
    queue: QueueSettings,
    *,
    tracked: Tracked = _untracked,
    topics: Topics | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> QueueStats:
    """Count the messages of `queue` in all of its lanes.

    tracked  tells the trackers, for the result, and the stored offsets, from which markers are read; without
             it, markers are read from the beginning
    topics   describes the topics of the queue; by default a new Topics does

    Raises QueueNotFound, TopicError, Unavailable.
    """
    topics = topics or Topics(connection)
    with KeptConsumers(connection) as kept:
        return QueueStats.of_lanes(
            [_lane_stats(kept, lane, *tracked(lane), topics, clock) for lane in queue.lanes()]
        )


def _lane_stats(
    kept: KeptConsumers,
    queue: QueueSettings,
    owners: Mapping[int, str],
    stored: Mapping[int, StoredOffset],
    topics: Topics,
    clock: Clock,
) -> QueueStats:
    """Count the messages of one lane; dead letters are counted with the main lane."""
    there = topics.check(queue)
    commits = commits_in_log(kept.connection, queue, range(there.partitions), there.ids)
    read = _MarkersOfQueue(kept, queue, there, stored, commits)
    now_ms = clock.wall_ms()
    waiting = _count(kept, queue.name, read.starts, read.touched, now_ms)
    dead = _dead_letters(kept, topics, queue, there, now_ms) if queue.lane_of is None else {}
    parts = []
    for partition, state in read.states.items():
        states, overdue = state.count(max(now_ms, state.now_ms))
        delayed = states[EntryState.DELAYED]
        left, letters = waiting[partition], dead.get(partition, _RecordCount())
        # `left` holds no messages in flight: each lies below the committed offset or has a start marker.
        parts.append(
            PartitionStats(
                partition=partition,
                depth=left.count + delayed,
                in_flight=len(state) - delayed,
                delayed=delayed,
                overdue=overdue,
                dead_letters=letters.count,
                exact=left.exact and letters.exact,
                oldest_ms=left.oldest_ms,
                owner=owners.get(partition),
                stored_offset=stored[partition].offset if partition in stored else None,
                released=states[EntryState.RELEASED],
            )
        )
    return QueueStats.of(queue.name, parts)


def in_flight(
    connection: KafkaConnection,
    queue: QueueSettings,
    *,
    tracked: Tracked = _untracked,
    topics: Topics | None = None,
    limit: int | None = None,
) -> list[InFlightMessage]:
    """Return the first `limit` messages in flight, delayed ones included, in the order of their takes.

    None instead of a limit returns all. Raises QueueNotFound, TopicError, Unavailable.
    """
    topics = topics or Topics(connection)
    with KeptConsumers(connection) as kept:
        found = [_lane_in_flight(kept, lane, tracked(lane)[1], topics, limit) for lane in queue.lanes()]
    return list(itertools.islice(heapq.merge(*found, key=lambda one: one.since_ms), limit))


def _lane_in_flight(
    kept: KeptConsumers,
    queue: QueueSettings,
    stored: Mapping[int, StoredOffset],
    topics: Topics,
    limit: int | None,
) -> list[InFlightMessage]:
    there = topics.check(queue)
    states = _states(kept, queue, there, stored)
    # In each partition, entries in the order of their takes ascend by `since_ms`, too.
    in_order = (zip(itertools.repeat(partition), state.in_order()) for partition, state in states.items())
    listed = list(itertools.islice(heapq.merge(*in_order, key=lambda place: place[1].since_ms), limit))
    places = [(p, offset_of(entry.offset)) for p, entry in listed]
    records = partition_reader.read_at(kept, queue.name, places)
    return [
        _in_flight_message(queue, there.queue.topic_id, p, entry, records.get(place))
        for place, (p, entry) in zip(places, listed, strict=True)
    ]


def waiting_records(
    connection: KafkaConnection, queue: QueueSettings, *, limit: int
) -> tuple[list[Any], Mapping[int, LogCuts]]:
    """Return the `limit` oldest records that nobody has taken yet of a lane, and the cuts of its logs.

    Reads markers from where the group's commits say, or from the beginning where another kind of client
    committed. Raises QueueNotFound, TopicError, Unavailable.
    """
    there = Topics(connection).check(queue)
    commits = commits_in_log(connection, queue, range(there.partitions), there.ids)
    found: list[Any] = []

    def visit(record: Any) -> None:
        if record.offset() not in touched[record.partition()]:
            found.append(record)

    with KeptConsumers(connection) as kept:
        read = _MarkersOfQueue(kept, queue, there, {}, commits, touched_only=True)
        touched = read.touched
        for partition in touched:
            start = touched[partition].first_missing(read.starts[partition])
            passed = touched[partition].count_from(start)
            partition_reader.scan(kept, queue.name, {partition: start}, visit, limit=passed + limit)
    oldest = sorted(found, key=lambda one: (one.timestamp()[1], one.partition(), one.offset()))[:limit]
    return oldest, {partition: commit.cuts for partition, commit in commits.items()}


def open_entries(
    connection: KafkaConnection,
    queue: QueueSettings,
    stored: Mapping[int, StoredOffset] | None = None,
    topics: Topics | None = None,
) -> dict[int, InFlight]:
    """The in-flight state of each partition of a lane; raises QueueNotFound, TopicError, Unavailable."""
    there = (topics or Topics(connection)).check(queue)
    with KeptConsumers(connection) as kept:
        return _states(kept, queue, there, stored or {})


def _states(
    kept: KeptConsumers, queue: QueueSettings, there: QueueTopics, stored: Mapping[int, StoredOffset]
) -> dict[int, InFlight]:
    commits = commits_in_log(kept.connection, queue, range(there.partitions), there.ids)  # they may name cuts
    return _MarkersOfQueue(kept, queue, there, stored, commits, states_only=True).states


def _count(
    kept: KeptConsumers,
    topic: str,
    starts: Mapping[int, int],
    excluded: Mapping[int, OffsetRuns],
    now_ms: int,
    counts: Callable[[Any], bool] = lambda _: True,
) -> dict[int, _RecordCount]:
    """Count the records from `starts` on, without those in `excluded` and those that `counts` refuses.

    Records that an open transaction holds back from readers count, too, if it is older than `_HELD_BACK_MS`.
    """
    counted = {partition: _RecordCount() for partition in starts}
    starts = {partition: excluded[partition].first_missing(start) for partition, start in starts.items()}

    def visit(record: Any) -> None:
        partition = record.partition()
        if record.offset() not in excluded[partition] and counts(record):
            one = counted[partition]
            one.count += 1
            if one.oldest_ms is None:
                one.oldest_ms = record.timestamp()[1]

    def count_each(begins: Mapping[int, int], *, uncommitted: bool = False) -> dict[int, ReadPosition]:
        reached = partition_reader.scan(
            kept, topic, begins, visit, limit=COUNT_LIMIT, uncommitted=uncommitted
        )
        for partition, place in reached.items():
            if not place.done:
                left_out = excluded[partition]
                counted[partition].count += place.end - place.position
                counted[partition].count -= left_out.count_from(place.position) - left_out.count_from(
                    place.end
                )
                counted[partition].exact = False
        return reached

    stable = {partition: place.end for partition, place in count_each(starts).items()}
    old = hanging.open_since_before(kept, topic, stable, now_ms - _HELD_BACK_MS)
    held_back = {partition: max(stable[partition], starts[partition]) for partition in old}
    if held_back:
        count_each(held_back, uncommitted=True)
        for partition in held_back:
            counted[partition].exact = False
    return counted


def _dead_letters(
    kept: KeptConsumers, topics: Topics, queue: QueueSettings, there: QueueTopics, now_ms: int
) -> dict[int, _RecordCount]:
    """Count the queue's dead letters by partition, without those that have an end marker."""
    if there.dead_letters is None:
        return {}
    dead = dead_letter_queue(queue)
    partitions = range(there.dead_letters.partitions)
    ended = {partition: EndedLetters() for partition in partitions}

    def visit(record: Any) -> None:
        try:
            marker = read_marker(record)
        except DecodeError:
            return
        ended[record.partition()].read(marker, record)

    info = topics.describe([dead.markers_topic]).get(dead.markers_topic)
    if info is not None:
        read = {p: 0 for p in partitions if p < info.partitions}
        partition_reader.scan(kept, dead.markers_topic, read, visit)
    add_cuts_of_letters(kept.connection, dead, ended)
    return _count(
        kept,
        dead.name,
        dict.fromkeys(partitions, 0),
        {partition: letters.offsets() for partition, letters in ended.items()},
        now_ms,
        lambda record: is_dead_letter_of(message_headers(record), queue),
    )


def _in_flight_message(
    queue: QueueSettings, topic_id: str, partition: int, entry: Entry, record: Any
) -> InFlightMessage:
    attempts = None
    if record is not None:
        try:
            count = redelivery_count(message_headers(record), queue.redelivery_count_header)
        except DecodeError:
            count = 0
        attempts = count + (entry.state is not EntryState.DELAYED)
    return InFlightMessage(
        receipt=str(Receipt(queue.name, topic_id, partition, entry.offset)),
        partition=partition,
        offset=offset_of(entry.offset),
        holder=entry.holder,
        since_ms=entry.since_ms,
        lease_until_ms=entry.due_ms,
        state=entry.state,
        reason=entry.reason,
        attempts=attempts,
    )
