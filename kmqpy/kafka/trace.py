"""Follows a message through Kafka: finds the message, its copies, and the markers of each.

A copy is a record with which a tracker or a redrive appends a message again. Of the markers topics, a trace
reads only the part that can have markers of the message: from the message's timestamp until LATE_MS after its
last end marker, or to the end of the log. Anybody can write headers: a record counts as a copy if the end
marker of its original names it and the copy names its original. Other such headers are ignored.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kmqpy.core.int64 import INT64_MAX
from kmqpy.core.throttle import Throttle
from kmqpy.errors import ConfigError, DecodeError, ReceiptError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.group_commits import commits_in_log
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.life import MessageLife, RecordFacts, SeenMarker, build_life, shown
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY, RecordPlace, read_ancestors, read_copies
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts, offset_of
from kmqpy.kafka.markers.message_filter import MessageFilter
from kmqpy.kafka.markers.records import message_headers, read_headers
from kmqpy.kafka.message_headers import DEAD_LETTER_REASON, ORIGINAL_TIMESTAMP, int_header
from kmqpy.kafka.places import Place
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import markers_topics
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.message import last_header

_log = logging.getLogger(__name__)

LATE_MS = 60_000
"""Milliseconds after the end of a message in which a trace still reads markers, because some come late."""
_SENDER_CLOCK_LEAD_MS = 60_000
"""Milliseconds by which the clock of a sender may be ahead of the broker's clock."""
_MAX_RECORDS = 10_000
"""A trace follows about this number of copies of a message at most, and ignores further copies."""
_PLACE = re.compile(r"(?:([a-zA-Z0-9._-]{1,249}):)?([0-9]{1,10})[:-]([0-9]{1,19})")
_LOG_APPEND_TIME = 2
_forged_headers_throttle = Throttle(60.0)

Progress = Callable[[int], None]
"""Called with the number of records that were read so far, after each batch."""


def trace(
    connection: KafkaConnection, queue: QueueSettings, message: str, *, progress: Progress = lambda _: None
) -> MessageLife:
    """The life of a message.

    Args:
        connection: Where Kafka is.
        queue: The settings of its queue.
        message: A receipt, `partition:offset` or `partition-offset`; `topic:partition:offset` names a record
            of the dead-letter topic, or of the queue topic. The record may be the message itself or any of
            its copies.
        progress: Called with the number of records read so far.

    Raises:
        ReceiptError: For a receipt of another queue or topic, and for a message that never existed.
        ConfigError: For another topic.
        QueueNotFound: There is no such queue.
        TopicError: A topic of the queue is missing, or was recreated without the other.
        Unavailable: The storage does not answer.
    """
    return trace_all(connection, queue, [message], progress=progress)[0]


def trace_all(
    connection: KafkaConnection,
    queue: QueueSettings,
    messages: Iterable[str],
    *,
    progress: Progress = lambda _: None,
) -> list[MessageLife]:
    """The lives of messages; see trace().

    Args:
        connection: Where Kafka is.
        queue: The settings of their queue.
        messages: Each as for trace().
        progress: As for trace().
    """
    tracer = _Tracer(connection, queue, progress)
    return [tracer.life(tracer.place_of(message)) for message in messages]


def find_by_key(
    connection: KafkaConnection,
    queue: QueueSettings,
    key: bytes,
    since_ms: int,
    *,
    limit: int = 100,
    progress: Progress = lambda _: None,
) -> list[str]:
    """The first messages with this key, as `partition:offset`, oldest first.

    Leaves out a copy if one of its ancestors was found, too.

    Args:
        connection: Where Kafka is.
        queue: The settings of the queue.
        key: The key.
        since_ms: From when on, in ms since 1970.
        limit: The most to return.
        progress: As for trace().

    Raises:
        QueueNotFound: There is no such queue.
        TopicError: A topic of the queue is missing, or was recreated without the other.
        Unavailable: The storage does not answer.
    """
    topics = Topics(connection)
    lanes = {lane.name: lane for lane in reversed(queue.lanes())}
    there = {name: topics.check(lane) for name, lane in lanes.items()}
    cuts = {name: _cuts(connection, lane, there[name]) for name, lane in lanes.items()}
    found: list[Any] = []
    read = 0

    def visit(_partition: int, records: list[Any]) -> bool:
        nonlocal read
        read += len(records)
        progress(read)
        found.extend(record for record in records if record.key() == key)
        return False

    for name in lanes:
        since = dict.fromkeys(range(there[name].partitions), since_ms)
        partition_reader.scan_since(connection, name, since, visit)
    found.sort(key=lambda record: (record.timestamp()[1], record.partition(), record.offset()))
    messages: dict[str, None] = {}
    known: set[RecordPlace] = set()
    for record in found:
        topic, partition = record.topic(), record.partition()
        place = RecordPlace(topic, partition, cuts[topic][partition].number_of(record.offset()))
        if known.isdisjoint(_ancestors_of(record, place)):
            messages[shown(queue.name, place)] = None
        known.add(place)
    return list(messages)[:limit]


def _cuts(connection: KafkaConnection, queue: QueueSettings, there: QueueTopics) -> Mapping[int, LogCuts]:
    """The cuts of the queue topic's logs, by partition, as far as the group's commits tell of them."""
    commits = commits_in_log(connection, queue, range(there.partitions), there.ids)
    return defaultdict(lambda: NO_CUTS, {partition: commit.cuts for partition, commit in commits.items()})


class _Tracer:
    """Finds messages of one queue, their copies and the markers of both, and builds lives from them.

    The offset in the place of a record is its number; see log_cuts.
    """

    def __init__(self, connection: KafkaConnection, queue: QueueSettings, progress: Progress) -> None:
        self._connection = connection
        self._queue = queue
        self._progress = progress
        topics = Topics(connection)
        found = topics.check(queue)
        self._cuts = _cuts(connection, queue, found)
        names = markers_topics(queue)
        there = topics.describe([*names, *names.values()])
        self._partitions = {
            name: there[name].partitions
            for name, markers in names.items()
            if name in there and markers in there
        }
        self._topic_ids = {name: topic.topic_id for name, topic in there.items()}
        self._markers_topics = names
        self._read = 0
        self._records: dict[RecordPlace, Any] = {}
        """The records that were looked for; None: Kafka has no record at this place (any more)."""
        self._markers: dict[RecordPlace, list[SeenMarker]] = {}
        self._known_bounds: dict[tuple[str, int], tuple[int, int]] = {}

    def place_of(self, message: str) -> RecordPlace:
        """The place that a receipt or a text like `topic:0:42` names; raises ReceiptError, ConfigError."""
        found = _PLACE.fullmatch(message) if isinstance(message, str) else None
        if found is None:
            receipt = Receipt.parse(message)
            if receipt.queue not in self._queue.lane_markers:
                raise ReceiptError(
                    f"receipt: it belongs to queue {receipt.queue!r}, not to {self._queue.name!r}"
                )
            if receipt.topic_id != self._topic_ids.get(receipt.queue):
                raise ReceiptError(
                    f"receipt: it belongs to another topic named {receipt.queue!r}, deleted since"
                )
            place = RecordPlace(receipt.queue, receipt.partition, receipt.offset)
        else:
            lane = f"{self._queue.name}__{found[1]}"  # of an id
            topic = lane if lane in self._queue.lane_markers else found[1] or self._queue.name
            place = RecordPlace(topic, int(found[2]), int(found[3]))
            if place.topic not in self._partitions:
                raise ConfigError(
                    f"message: {place.topic!r} is not a topic of messages of {self._queue.name!r}"
                )
            # A number behind a cut names its message already; an offset names what stands there now.
            if place.topic == self._queue.name and place.offset == offset_of(place.offset):
                place = place._replace(offset=self._cuts[place.partition].number_of(place.offset))
        if place.offset > INT64_MAX or not self._has(place):
            raise ReceiptError(f"message: there is no {shown(self._queue.name, place)} in {place.topic!r}")
        return place

    def life(self, place: RecordPlace) -> MessageLife:
        """The life of the message at `place`, or of which the record at `place` is a copy."""
        self._markers.clear()
        self._fetch([place])
        known = [*self._ancestors(place), place]
        self._fetch(known)
        self._read_markers(known)
        chain = self._chain(known)
        facts = {one: _facts(record) for one in chain if (record := self._records.get(one)) is not None}
        lost, lanes = set(filter(self._is_lost, chain)), self._queue.lane_markers
        return build_life(self._queue.name, chain, facts, self._markers, lost, lanes)

    # --- records ------------------------------------------------------------------------------------

    def _has(self, place: RecordPlace) -> bool:
        """Return True if Kafka has such a record, or may have had it."""
        if place.partition >= self._partitions.get(place.topic, 0):
            return False
        return self._is_lost(place) or offset_of(place.offset) < self._bounds(*place[:2])[1]

    def _is_lost(self, place: RecordPlace) -> bool:
        """Return True if the record stood behind a cut, in the former log; another may stand there now."""
        return place.topic == self._queue.name and not self._cuts[place.partition].is_current(place.offset)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset and the end of a log, as the tracer has first read them."""
        if (topic, partition) not in self._known_bounds:
            found = partition_reader.bounds(self._connection, topic, [partition], uncommitted=True)
            self._known_bounds[topic, partition] = found[partition]
        return self._known_bounds[topic, partition]

    def _fetch(self, places: Iterable[RecordPlace]) -> None:
        """Read those of these records that exist into `_records`."""
        by_topic: dict[str, dict[Place, RecordPlace]] = {}
        for place in places:
            if place in self._records:
                continue
            self._records[place] = None
            if place.partition < self._partitions.get(place.topic, 0) and not self._is_lost(place):
                by_topic.setdefault(place.topic, {})[place.partition, offset_of(place.offset)] = place
        for topic, some in by_topic.items():
            for found, record in partition_reader.read_at(self._connection, topic, some).items():
                self._records[some[found]] = record

    def _ancestors(self, place: RecordPlace) -> Sequence[RecordPlace]:
        record = self._records.get(place)
        return () if record is None else _ancestors_of(record, place)

    def _is_copy(self, copy: RecordPlace, original: RecordPlace) -> bool:
        """Return True if `copy` names `original`, or if Kafka has deleted `copy`; else log a warning."""
        ancestors = self._ancestors(copy)
        believed = (
            ancestors[-1] == original
            if ancestors
            else self._records.get(copy) is None and self._has(copy)  # Kafka has deleted it
        )
        if not believed:
            _warn(original, f"its end marker names {shown(self._queue.name, copy)}, which is no copy of it")
        return believed

    def _chain(self, known: Sequence[RecordPlace]) -> list[RecordPlace]:
        """The records of the message: it and its copies, each before its own copies.

        `known`: the record that the user named, after its ancestors. If the markers of an ancestor name other
        copies than the record after it in `known`, the records up to this ancestor are left out, with a
        warning.
        """
        self._fetch(seen.copy for some in self._markers.values() for seen in some if seen.copy is not None)
        first = 0
        for index in range(len(known) - 1, 0, -1):
            if not self._leads_to(known[index - 1], known[index]):
                named = shown(self._queue.name, known[index - 1])
                _warn(known[index], f"it names {named} as an ancestor, which has no such copy")
                first = index
                break
        chain: dict[RecordPlace, None] = {}
        for one in known[first:]:
            self._add_with_copies(one, chain)
        return list(chain)

    def _add_with_copies(self, place: RecordPlace, chain: dict[RecordPlace, None]) -> None:
        """Add to `chain`: the record at `place`, its copies, their copies and so on."""
        pending = [place]
        while pending:
            place = pending.pop()
            if place not in chain:
                chain[place] = None
                copies = [seen.copy for seen in self._markers.get(place, ()) if seen.copy is not None]
                pending += [copy for copy in copies if self._is_copy(copy, place)]

    def _leads_to(self, original: RecordPlace, copy: RecordPlace) -> bool:
        """Return True if `copy` descends from `original` by copies, or if the markers can't tell."""
        copies: dict[RecordPlace, None] = {}
        self._add_with_copies(original, copies)
        if copy in copies:
            return True
        ends = [seen for seen in self._markers.get(original, ()) if seen.marker.op is Op.END]
        if ends:
            return any(end.marker.by_tracker and end.copy is None for end in ends)
        markers = self._markers_topics.get(original.topic, "")
        return self._has(original) and self._bounds(markers, original.partition)[0] > 0

    # --- markers ------------------------------------------------------------------------------------

    def _read_markers(self, known: Sequence[RecordPlace]) -> None:
        """Read the markers of these records, and those of all copies that the markers name."""
        since_ms = self._sent_after_ms(known)
        wanted: dict[tuple[str, int], dict[int, int]] = {}
        for place in known:
            record = self._records.get(place)
            since_ms = since_ms if record is None else _appended_ms(record)
            wanted.setdefault(place[:2], {})[place.offset] = since_ms
        while wanted:
            log, times_ms = wanted.popitem()
            if log[1] >= self._partitions.get(log[0], 0):
                continue
            reading = _LogReading(log, times_ms)
            self._scan_log(reading)
            self._markers |= reading.found
            for copy, at_ms in reading.elsewhere.items():
                if copy not in self._markers and len(self._markers) < _MAX_RECORDS:
                    wanted.setdefault(copy[:2], {})[copy.offset] = at_ms

    def _sent_after_ms(self, known: Sequence[RecordPlace]) -> int:
        """A time before which the first of `known` was not sent, by the oldest record that Kafka still has.

        0 if that record does not say so, or if there is none.
        """
        for place in known:
            record = self._records.get(place)
            if record is not None:
                try:
                    said = int_header(message_headers(record), ORIGINAL_TIMESTAMP)
                except DecodeError:
                    return 0
                return max(0, (said or 0) - _SENDER_CLOCK_LEAD_MS)
        return 0

    def _scan_log(self, reading: _LogReading) -> None:
        topic, partition = reading.log

        def visit(_partition: int, records: list[Any]) -> bool:
            self._read += len(records)
            self._progress(self._read)
            return reading.take(records)

        partition_reader.scan_since(
            self._connection, self._markers_topics[topic], {partition: reading.since_ms}, visit
        )


class _LogReading:
    """Finds the markers of some messages of one partition, and of their copies in this partition.

    log        the topic and the partition of the messages
    times_ms   by offset of each message: a time before which the message has no markers
    found      the markers of each message and copy
    elsewhere  the copies in other partitions, each with a time before which it has no markers
    """

    def __init__(self, log: tuple[str, int], times_ms: dict[int, int]) -> None:
        self.log = log
        self.since_ms = min(times_ms.values())
        self.found: dict[RecordPlace, list[SeenMarker]] = {}
        self.elsewhere: dict[RecordPlace, int] = {}
        self._filter = MessageFilter(log[1], ())
        self._unfinished: set[int] = set()
        self._last_end_ms = 0
        for offset in times_ms:
            self._follow(offset)

    def take(self, records: Sequence[Any]) -> bool:
        """Take in the next records of the markers partition; returns True when no more are needed."""
        for record, marker, about in self._filter.pick(records):
            for offset in about:
                copy = _copy_named(record, marker, offset, self.log[0])
                seen = SeenMarker(record.offset(), record.timestamp()[1], marker, copy)
                self.found[RecordPlace(*self.log, offset)].append(seen)
                self._note_marker(offset, seen)
        return not self._unfinished and records[-1].timestamp()[1] > self._last_end_ms + LATE_MS

    def _follow(self, offset: int) -> None:
        self.found[RecordPlace(*self.log, offset)] = []
        self._unfinished.add(offset)
        self._filter.add([offset])

    def _note_marker(self, offset: int, seen: SeenMarker) -> None:
        if seen.marker.op is Op.END:
            self._unfinished.discard(offset)
            self._last_end_ms = max(self._last_end_ms, seen.timestamp_ms)
        elif seen.marker.op is Op.TAKE:
            self._unfinished.add(offset)
        if seen.copy is None or len(self.found) + len(self.elsewhere) >= _MAX_RECORDS:
            return
        if seen.copy[:2] != self.log:
            self.elsewhere[seen.copy] = seen.timestamp_ms - _SENDER_CLOCK_LEAD_MS
        elif seen.copy not in self.found:
            self._follow(seen.copy.offset)


def _copy_named(record: Any, marker: Marker, offset: int, topic: str) -> RecordPlace | None:
    """The copy that the end marker of message `offset` names; None if it names no possible copy."""
    if marker.op is not Op.END or not marker.by_tracker:
        return None
    data = dict(read_headers(record)[0]).get(COPY)
    if data is None:
        return None
    place = RecordPlace(topic, marker.partition, offset)
    try:
        copy = read_copies(data, topic, marker.count)[list(marker.offsets()).index(offset)]
    except DecodeError as error:
        _warn(place, str(error))
        return None
    if copy[:2] == place[:2] and copy.offset <= offset:
        _warn(place, "its end marker names a copy that stands before it")
        return None
    return copy


def _ancestors_of(record: Any, place: RecordPlace) -> tuple[RecordPlace, ...]:
    try:
        return read_ancestors(last_header(message_headers(record), ANCESTORS), place)
    except DecodeError as error:
        _warn(place, str(error))
        return ()


def _facts(record: Any) -> RecordFacts:
    reason = last_header(message_headers(record), DEAD_LETTER_REASON)
    return RecordFacts(
        record.timestamp()[1], record.key(), None if reason is None else reason.decode("utf-8", "replace")
    )


def _appended_ms(record: Any) -> int:
    """A time before which the record was not appended, by the broker's clock."""
    kind, ms = record.timestamp()
    return int(ms) if kind == _LOG_APPEND_TIME else int(ms) - _SENDER_CLOCK_LEAD_MS


def _warn(place: RecordPlace, text: str) -> None:
    if _forged_headers_throttle.allows(place.topic):
        _log.warning("%s %d:%d: ignored: %s", *place, text)
