"""Takes messages on executors: reads which ones were taken before, and writes markers.

Spark can evaluate a micro-batch more than once: after a failure or a restart, for a second action, or
speculatively. So a task reads the markers of messages before it takes them (rule R10 of docs/rules.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client.marker_writer import Item, MarkerWriter
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.spark.lanes import Lanes, by_lane, lane_numbers

_log = logging.getLogger(__name__)

MAX_TAKES = 3
"""See SortedOut.deadly."""

_START_TIMEOUT_S = 5.0
"""Start markers have failed if Kafka has not confirmed them after this long."""
_START_RETRY_S = 30.0
"""take() writes failed start markers again for this long; then it raises Unavailable."""
_START_RETRY_PAUSE_S = 0.2
_WRITE_TIMEOUT_S = 10.0
"""How long write() waits for Kafka to confirm the markers; then it logs a warning."""
_MAX_LEASE_SHARE = 0.5
"""If start markers took more than this share of the lease, nothing is handed out: Unavailable is raised."""
_SINGLE_MARKER_SIZES = (1, 9)
"""Lengths of the values of end and start markers of one message: read_taken() skips some by their keys."""


@dataclass(slots=True)
class SortedOut:
    """The offsets of messages that were taken before and must not be handed out.

    finished  acknowledged, redelivered, or dead-lettered
    left      given back, delayed, to be dead-lettered, or overdue: a tracker redelivers or dead-letters them
    deadly    taken MAX_TAKES times in this delivery, while no marker says that the Python worker survived it.
              A message that kills the worker would do so in every evaluation of its micro-batch, so process()
              does not hand it out, but gives it back
    """

    finished: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    deadly: set[int] = field(default_factory=set)


@dataclass(slots=True)
class TakenBefore:
    """The messages of one partition, from offset `first` on, that markers say were taken.

    Spark's markers name messages by their offsets. Markers that name them by numbers (see log_cuts) are
    understood, and ticks that tell that the log was cut back (rule R39 of docs/rules.md): of messages that
    stood behind the cut nothing is known from there on.

    Acknowledged messages need little memory: a reader that begins at the start of a queue meets millions.
    """

    first: int
    start: int = 0
    """The markers offset from which markers were read: no start marker of these messages is before it."""
    highest: int = -1
    """The highest offset that was taken, by a client or a query; -1: none."""
    state: InFlight = field(default_factory=InFlight)
    now_ms: int = 0
    """The partition's now: the largest timestamp read from its markers."""
    _taken: OffsetRuns = field(default_factory=OffsetRuns)
    """All that were ever taken, or delayed."""
    _takes: tuple[OffsetRuns, ...] = field(
        default_factory=lambda: tuple(OffsetRuns() for _ in range(MAX_TAKES))
    )
    """At index n: messages taken more than n times since a marker last said that the worker survived them.

    End markers say this, and extensions that count. When a query has ended, the driver writes extensions that
    don't count: they say nothing about the worker."""

    def note(self, marker: Marker, at: int, timestamp_ms: int) -> None:
        """Apply the marker at markers offset `at`, which names messages by their offsets."""
        if marker.cuts and (new := self.state.cuts.new_in(marker.cuts)):
            start = min(cut.start for cut in new)
            self.highest = min(self.highest, start - 1)
            for known in (self._taken, *self._takes):
                known.discard_from(start)
        if marker.cuts or marker.highest >= self.first:
            self.state.apply(marker, at, timestamp_ms)
        if marker.highest < self.first:
            return
        runs = marker.offset_runs
        if marker.op in (Op.TAKE, Op.DELAY):
            self.highest = max(self.highest, marker.highest)
            takes = OffsetRuns(runs)
            takes.discard_below(self.first)
            self._taken.update(takes)
            for taken in self._takes:
                again = takes & taken
                taken.update(takes)
                takes = again
        elif marker.op is Op.END or (marker.op is Op.EXTEND and marker.counts):
            for taken in self._takes:
                taken.discard_runs(runs)

    def by_offset(self, marker: Marker) -> Marker | None:
        """Return the marker with the offsets of its messages; None if they stood behind a later cut."""
        number = marker.offset
        if offset_of(number) == number:
            return marker
        if not self.state.cuts.is_current(number):
            return None
        runs = tuple((offset_of(first), count) for first, count in marker.runs)
        return replace(marker, offset=offset_of(number), runs=runs)

    def taken(self, offsets: Iterable[int]) -> list[int]:
        """Return which of `offsets` were ever taken."""
        return [offset for offset in offsets if offset in self._taken] if self._taken else []

    def takes(self, offset: int) -> int:
        """Return how often `offset` was taken since the worker last survived it; at most MAX_TAKES."""
        return sum(offset in taken for taken in self._takes)

    def sort_out(self, offsets: Iterable[int]) -> SortedOut:
        """Return which of `offsets` must not be handed out.

        A message that an earlier evaluation took and did not finish may be handed out: the task takes it
        again, which renews its lease.
        """
        found = SortedOut()
        for offset in self.taken(offsets):
            entry = self.state.get(offset)
            if entry is None:
                found.finished.add(offset)
            elif entry.state is not EntryState.LEASED or entry.due_ms <= self.now_ms:
                found.left.add(offset)
            elif self.takes(offset) >= MAX_TAKES:
                found.deadly.add(offset)
        return found


def read_taken(
    queue: QueueSettings,
    connection: KafkaConnection,
    markers: RepeatedReader,
    partition: int,
    first: int,
    start: int,
) -> TakenBefore:
    """Read which messages of `partition`, from offset `first` on, were taken; raises Unavailable.

    markers  a reader of the markers topic
    start    a markers offset before which there is no start marker of these messages
    """
    state = InFlight(max_lease_ms=queue.max_lease_ms, max_delay_ms=queue.max_delay_ms)
    found = TakenBefore(first, start, state=state)
    lowest = codec.encode_key(partition, first)[4:]  # bytes that compare as the numbers do
    end = first + 1
    is_asked = False

    def visit(_: int, records: list[Any]) -> bool:
        nonlocal end, is_asked
        for record in records:
            found.now_ms = max(found.now_ms, record.timestamp()[1])
            key, value = record.key(), record.value()
            if value and len(value) in _SINGLE_MARKER_SIZES and key and len(key) == 12 and key[4:] < lowest:
                continue
            try:
                marker = found.by_offset(read_marker(record))
            except DecodeError:
                continue
            if marker is None:
                continue
            if marker.op is not Op.END and marker.highest >= end and not is_asked:
                # Asked only now that the end of the markers is known, so valid for all of them (rule R22 of
                # docs/rules.md).
                bounds = partition_reader.bounds(connection, queue.name, [partition], uncommitted=True)
                end, is_asked = bounds[partition][1], True
            if marker.op is Op.END or marker.highest < end:
                found.note(marker, record.offset(), record.timestamp()[1])
        return False

    markers.scan({partition: start}, visit)
    return found


class Taker:
    """Reads and writes the markers with which the tasks of a Python worker take messages of one queue.

    Used by one thread; see `taker_of`.
    """

    def __init__(self, queue: QueueSettings, connection: KafkaConnection) -> None:
        self._queue = queue
        self._connection = connection
        self._writer = MarkerWriter(connection, queue)
        self._markers = RepeatedReader(connection, queue.markers_topic)
        self._read_from: dict[int, Place] = {}
        """An offset for each partition, and a markers offset before which the messages from that offset on
        have no start markers."""

    def taken_before(self, partition: int, first: int) -> TakenBefore:
        """Read which messages of `partition`, from offset `first` on, were taken; raises Unavailable."""
        next_offset, start = self._read_from.get(partition, (first + 1, 0))
        if next_offset > first:
            ids = Topics(self._connection).check(self._queue).ids
            commit = group_commits(self._connection, self._queue, [partition], ids).get(partition)
            start = commit.markers_offset or 0 if commit is not None and commit.offset <= first else 0
        return read_taken(self._queue, self._connection, self._markers, partition, first, start)

    def take(
        self, offsets: Mapping[int, Sequence[int]], delays: Mapping[Place, int], lease_ms: int
    ) -> dict[int, int]:
        """Write start markers and markers of delays, and wait until Kafka has confirmed them.

        offsets  by partition, the messages to take
        delays   messages to delay, with the ms until they are due

        Returns by partition the markers offset after the last of these markers. Raises Unavailable if some
        are not confirmed in time, or if that took more than _MAX_LEASE_SHARE of the lease.
        """
        began = SYSTEM_CLOCK.monotonic()
        after: dict[int, int] = {}
        to_take: dict[int, Sequence[int]] = {p: ones for p, ones in offsets.items() if len(ones)}
        while to_take or delays:
            started = self._writer.starts.start(
                to_take, delays, lease_ms, None, _START_TIMEOUT_S
            ).wait_until_confirmed()
            for partition, at in started.last_at.items():
                after[partition] = max(after.get(partition, 0), at + 1)
            failed = {
                partition: [offset for offset in ones if offset >= started.failed[partition]]
                for partition, ones in to_take.items()
                if partition in started.failed
            }
            to_take = {partition: ones for partition, ones in failed.items() if ones}
            delays = {
                (partition, offset): ms
                for (partition, offset), ms in delays.items()
                if offset >= started.failed.get(partition, offset + 1)
            }
            if not to_take and not delays:
                break
            if SYSTEM_CLOCK.monotonic() - began > _START_RETRY_S:
                raise Unavailable(
                    f"markers topic {self._queue.markers_topic}: start markers can't be written; "
                    "nothing was handed out"
                )
            SYSTEM_CLOCK.sleep(_START_RETRY_PAUSE_S)
        if SYSTEM_CLOCK.monotonic() - began > lease_ms / 1000 * _MAX_LEASE_SHARE:
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: start markers took most of the lease of "
                f"{lease_ms} ms; nothing was handed out. Choose a longer lease"
            )
        return after

    def remember(self, places: Mapping[int, Place]) -> None:
        """Note the places (offset, markers offset) in `_read_from`, where their offsets are larger."""
        for partition, place in places.items():
            if place[0] > self._read_from.get(partition, (0, 0))[0]:
                self._read_from[partition] = place

    def write(self, operations: Iterable[Item]) -> None:
        """Write nacks, dead-letter requests and extensions, and wait until Kafka has confirmed them.

        Gives up after _WRITE_TIMEOUT_S, with a warning: the messages are redelivered when their leases end.
        """
        self._writer.put(operations)
        if left := self._writer.flush(_WRITE_TIMEOUT_S):
            _log.warning("markers unconfirmed", extra={"queue": self._queue.name, "count": left})


def for_executors(connection: KafkaConnection) -> KafkaConnection:
    """Return the connection with PEM files replaced by their text: executors don't have these files."""
    settings = dict(connection.kafka)
    for name in ("ssl.ca", "ssl.certificate", "ssl.key"):
        path = Path(str(settings.get(f"{name}.location", "")))
        if path.is_file():
            del settings[f"{name}.location"]
            settings[f"{name}.pem"] = path.read_text()
    return replace(connection, kafka=settings)


class LaneTakers:
    """Takes messages of numbered partitions (see kmqpy.spark.lanes); has the methods of Taker."""

    def __init__(self, queue: QueueSettings, connection: KafkaConnection) -> None:
        self._lanes = Lanes(queue)
        self._connection = connection
        self._takers: dict[str, Taker] = {}

    def _taker(self, lane: QueueSettings) -> Taker:
        if lane.name not in self._takers:
            self._takers[lane.name] = Taker(lane, self._connection)
        return self._takers[lane.name]

    def taken_before(self, number: int, first: int) -> TakenBefore:
        """See Taker."""
        lane, partition = self._lanes.place(number)
        return self._taker(lane).taken_before(partition, first)

    def take(
        self, offsets: Mapping[int, Sequence[int]], delays: Mapping[Place, int], lease_ms: int
    ) -> dict[int, int]:
        """See Taker."""
        after: dict[int, int] = {}
        for base, lane in self._lanes.bases():
            to_take = {
                number - base: ones for number, ones in offsets.items() if number in lane_numbers(base)
            }
            late = {(p - base, at): ms for (p, at), ms in delays.items() if p in lane_numbers(base)}
            if to_take or late:
                last = self._taker(lane).take(to_take, late, lease_ms)
                after |= {base + partition: at for partition, at in last.items()}
        return after

    def remember(self, places: Mapping[int, Place]) -> None:
        """See Taker."""
        for number, place in places.items():
            lane, partition = self._lanes.place(number)
            self._taker(lane).remember({partition: place})

    def write(self, operations: Iterable[Item]) -> None:
        """See Taker."""
        for base, found in by_lane(operations).items():
            lane, _ = self._lanes.place(base)
            self._taker(lane).write(found)


AnyTaker = Taker | LaneTakers
_takers: dict[str, AnyTaker] = {}


def taker_of(queue: QueueSettings, connection: KafkaConnection) -> AnyTaker:
    """The one Taker of this Python worker for that queue; it lives as long as the worker.

    When the worker is killed, nothing is lost with its Taker: tasks wait until their markers are confirmed.
    """
    # The hash stands for settings that may be secret, and must not be kept as text.
    secret = hash(repr(sorted(connection.kafka.items())))
    key = f"{connection.bootstrap} {secret} {queue.to_json().decode()}"
    if key not in _takers:
        kind = Taker if len(Lanes(queue)) == 1 else LaneTakers
        _takers[key] = kind(queue, connection)
    return _takers[key]
