"""Lists the dead letters of a queue, sends them back to the queue (redrive), or throws them away (purge).

The dead letters are a queue of their own with a markers topic: a dead letter is finished when it has an end
marker there. A redrive or purge first fences the run before it (Kafka then refuses that run's writes), and
only then reads which dead letters are finished. So, however often a run is killed, read_committed readers of
the queue see every dead letter that is sent back exactly once.

If two queues have one dead-letter topic, each lists and moves its own dead letters only.
"""

from __future__ import annotations

import builtins
import heapq
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import (
    ConfigError,
    DecodeError,
    KmqError,
    QueueNotFound,
    TopicError,
    Unavailable,
    UnsupportedMarker,
)
from kmqpy.kafka import kafka_errors, librdkafka, partition_reader
from kmqpy.kafka.group_commits import add_cuts_of_letters
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.markers.records import message_headers, read_marker
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    ORIGINAL_TIMESTAMP,
    is_dead_letter_of,
)
from kmqpy.kafka.redrive import (
    DeadLetterMove,
    KnownEnds,
    RedriveRun,
    int_header_or_none,
    letter_id,
    move_of,
    redrive_move,
)
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection
from kmqpy.kafka.settings_mirror import settings_of
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import Topics
from kmqpy.kafka.unfinished_letters import UnfinishedLetters
from kmqpy.queue import DeadLetter
from kmqpy.queue.arguments import check_redrive

_log = logging.getLogger(__name__)

_REDRIVE_BATCH = 1_000
_PURGE_BATCH = 10_000
"""A transaction of a redrive has at most `_REDRIVE_BATCH` dead letters, and one of a purge `_PURGE_BATCH`."""
_STALL_TIMEOUT_S = 30.0
"""Reading fails after this many seconds without records from Kafka, or with an open transaction of others."""
_POLL_S = 0.1
_VISIBLE_TIMEOUT_S = 5.0
"""Seconds that a redrive or purge waits, at its end, until readers see its last commit."""
_VISIBLE_POLL_S = 0.01
_ID = re.compile(
    r"(?:[a-z]{1,9}[1-9]?:)?[0-9]{1,10}-[0-9]{1,19}|[a-zA-Z0-9._-]{1,249}:[0-9]{1,10}:[0-9]{1,19}"
)

Progress = Callable[[int, int], None]
"""Called with (done, total) after each transaction. The total is an upper bound until the end, because only
reading shows which offsets hold dead letters of this queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDeadLetter(DeadLetter):
    """A DeadLetter that knows its place, and the topic, partition and offset of the record that it copies.

    Without headers that name the message, because another program has written the dead letter, the id is
    `topic:partition:offset`, its place. A null Kafka value reads as an empty body. A field
    whose header is absent or unreadable is None. A reason `refused: …` says why Kafka took no copy.

    Attributes:
        partition: Where it lies in the topic of the dead letters.
        offset: Where in the partition.
        origin_topic: The topic of the record that it copies.
        origin_partition: That record's partition.
        origin_offset: That record's offset.
    """

    partition: int
    offset: int
    origin_topic: str | None = None
    origin_partition: int | None = None
    origin_offset: int | None = None


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """The outcome of run_redrive().

    redriven   how many dead letters are back in the queue
    not_found  the given ids that name no dead letter of the queue, or a finished one
    refused    the ids of dead letters that Kafka refuses in the queue topic, as too large; they stay dead
               letters
    """

    redriven: int
    not_found: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class KafkaDeadLetters(Closeable):
    """Lists and moves the dead letters of one queue, see kmqpy.queue.DeadLetters; for one thread at a time.

    The dead-letter topic may hold dead letters of other queues, too. A header of each says from which queue
    it came. A dead letter without this header belongs to the queue after which the topic is named
    (`<queue>__undelivered`) or, if the topic has another name, to every queue that has the topic. `origin`:
    the name of the queue from which the dead letters came, if not this one; its former name for example.

    Every method may raise Unavailable, and TopicError when a topic is missing. It needs memory for one
    batch, and at most a bit for each dead letter.
    """

    def __init__(
        self,
        queue: QueueSettings,
        connection: KafkaConnection,
        clock: Clock = SYSTEM_CLOCK,
        *,
        origin: str = "",
    ) -> None:
        self._connection = check_connection(connection)
        self._queue = queue = settings_of(queue, connection)
        self._origin = origin
        self._dead = dead_letter_queue(queue)
        self._clock = clock
        self._guard = ForkGuard(f"the reader of the dead letters of queue {queue.name!r}")
        self._topics = Topics(connection)
        self._reader: Consumer | None = None

    def close(self) -> None:
        """Release the connection."""
        if self._reader is not None and not self._guard.inherited:
            self._reader.close()
            self._reader = None

    def list(self, limit: int = 100) -> builtins.list[KafkaDeadLetter]:
        """The oldest `limit` dead letters that are not finished, oldest first, without body and headers."""
        return self._oldest(limit, with_body=False)

    def peek(self, limit: int = 100) -> builtins.list[KafkaDeadLetter]:
        """Like list(), with body and headers."""
        return self._oldest(limit, with_body=True)

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """See DeadLetters.redrive. Raises Unfinished when the redrive was stopped halfway."""
        check_redrive(ids, limit)
        if limit is not None:
            wanted = [letter.id for letter in self.list(limit)]
        elif ids is not None:
            wanted = [one for one in ids if isinstance(one, str) and _ID.fullmatch(one)]
        else:
            return self.run_redrive().redriven
        return self.run_redrive(wanted).redriven if wanted else 0

    def run_redrive(
        self, ids: Iterable[str] | None = None, *, rate: float | None = None, progress: Progress | None = None
    ) -> RedriveResult:
        """Send dead letters back to the queue as if never delivered: all of now, or those with these `ids`.

        `rate`: the most messages in a second; None: no limit. Up to 1,000 messages of one partition appear in
        the queue together; with a rate, those of a quarter of a second. Dead letters that others finish
        meanwhile are left out. A later redrive or purge of the same queue stops this one.

        Raises ConfigError for a bad rate or id before anything is moved, Unfinished when the redrive was
        stopped halfway: another run_redrive() moves the rest.
        """
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"rate: {rate!r} must be a number above 0, of messages per second")
        at_once = _REDRIVE_BATCH if rate is None else min(_REDRIVE_BATCH, max(1, int(rate / 4)))
        wanted = None if ids is None else {_checked_id(one) for one in ids}
        found: set[str] = set()
        lane = self._lane()
        partitions = self._partitions(lane)
        with RedriveRun("redrive", self._queue, self._connection, self._clock, lane) as run:
            waiting = self._find_waiting(partitions[self._dead.name], fenced=True)
            self._mend(run, waiting)

            def steps() -> Iterator[DeadLetterMove]:
                for part in waiting:
                    for record in self._own_records(part):
                        if wanted is None or (one := letter_id(record)) in wanted:
                            cuts = part.ended.cuts
                            yield redrive_move(record, self._queue, partitions[lane], cuts, lane)
                        if wanted is not None and one in wanted:
                            found.add(one)
                            if found == wanted:
                                return

            def report() -> None:
                if progress is not None:
                    left = sum(len(part.offsets) for part in waiting)
                    progress(run.done, run.done + len(run.refused) + left)

            known = {part.partition: KnownEnds(part.read_to, part.ended.cuts) for part in waiting}
            run.move(steps(), known=known, at_once=at_once, rate=rate, progress=report)
        self._wait_until_visible(partitions[self._dead.name])
        _log.info("dead letters redriven", extra={"queue": self._queue.name, "count": run.done})
        return RedriveResult(run.done, tuple(sorted((wanted or set()) - found)), tuple(run.refused))

    def purge(self) -> int:
        """Throw away all dead letters that the queue has now; returns how many.

        The purge first finishes the dead letters with end markers. Then it deletes the records of each
        partition, up to the first unfinished dead letter of another queue. A redrive that runs is stopped, so
        that no dead letter is both sent back and thrown away.

        Raises Unfinished when the purge was stopped halfway: another purge() finishes the rest.
        """
        partitions = self._partitions()[self._dead.name]
        with RedriveRun("purge", self._queue, self._connection, self._clock) as run:
            waiting = self._find_waiting(partitions, fenced=True)
            self._mend(run, waiting)
            ends = {part.partition: part.end for part in waiting if part.end > part.first}

            def keep(record: Any) -> None:
                ends[record.partition()] = min(ends[record.partition()], record.offset())

            steps = (
                move_of(record, part.ended.cuts)
                for part in waiting
                for record in self._own_records(part, keep)
            )
            known = {part.partition: KnownEnds(part.read_to, part.ended.cuts) for part in waiting}
            run.move(steps, known=known, at_once=_PURGE_BATCH)
            self._topics.delete_records(self._dead.name, ends)
        self._wait_until_visible(partitions)
        _log.info("dead letters purged", extra={"queue": self._queue.name, "count": run.done})
        return run.done

    def _oldest(self, limit: int, *, with_body: bool) -> builtins.list[KafkaDeadLetter]:
        check_limit(limit, "limit")
        partitions = self._partitions()[self._dead.name]
        found = (
            (record.timestamp()[1], record.partition(), record.offset(), self._dead_letter(record, with_body))
            for part in self._find_waiting(partitions, fenced=False)
            for record in islice(self._own_records(part), limit)
        )
        return [entry[3] for entry in heapq.nsmallest(limit, found, key=lambda entry: entry[:3])]

    def _dead_letter(self, record: Any, with_body: bool) -> KafkaDeadLetter:
        headers = message_headers(record)
        body = record.value() or b""
        number = int_header_or_none(headers, DEAD_LETTER_OFFSET)
        return KafkaDeadLetter(
            id=letter_id(record),
            partition=record.partition(),
            offset=record.offset(),
            key=record.key(),
            origin_topic=_text(headers, DEAD_LETTER_TOPIC),
            origin_partition=int_header_or_none(headers, DEAD_LETTER_PARTITION),
            origin_offset=None if number is None else offset_of(number),
            attempts=int_header_or_none(headers, DEAD_LETTER_ATTEMPTS),
            first_enqueued_ms=int_header_or_none(headers, ORIGINAL_TIMESTAMP),
            dead_since_ms=record.timestamp()[1],
            reason=_text(headers, DEAD_LETTER_REASON),
            size=len(body),
            body=body if with_body else b"",
            headers=headers if with_body else (),
        )

    def _lane(self) -> str:
        """The lane to which dead letters go back: the retry lane if there is one (rule R47)."""
        lane = self._queue.copies_topic
        if lane == self._queue.name or lane in self._topics.describe([lane]):
            return lane
        _log.warning("no retry lane; dead letters go to the main lane", extra={"queue": self._queue.name})
        return self._queue.name

    def _partitions(self, *also: str) -> dict[str, int]:
        """The numbers of partitions of the dead-letter topic, its markers topic and the topics `also`."""
        self._guard.raise_if_inherited()
        queue, letters, finished = self._queue.name, self._dead.name, self._dead.markers_topic
        found = {
            name: one.partitions for name, one in self._topics.describe([letters, finished, *also]).items()
        }
        create = f"create it with: kmq queue create {queue}"
        if queue in also and queue not in found:
            raise QueueNotFound(f"queue {queue!r}: there is no such topic; {create}")
        for what, name in (("dead-letter topic", letters), ("dead letters' markers topic", finished)):
            if name not in found:
                raise TopicError(f"queue {queue!r}: its {what} {name!r} does not exist; {create}")
        if found[letters] > found[finished]:
            raise TopicError(
                f"topic {letters!r} has {found[letters]} partitions, but its markers topic has "
                f"{found[finished]}; correct that with: kmq queue alter {queue} --partitions {found[letters]}"
            )
        return found

    def _find_waiting(self, partitions: int, *, fenced: bool) -> builtins.list[UnfinishedLetters]:
        """Read which offsets of each partition of the dead-letter topic are not finished.

        `fenced`: a run that has fenced its predecessors asks. Then the markers are read to the present end of
        their log (rule R1 of docs/rules.md); raises Unavailable if a transaction of others stays open.
        """
        everything = range(partitions)
        bounds = partition_reader.bounds(self._connection, self._dead.name, everything)
        found = [UnfinishedLetters(partition, *bounds[partition]) for partition in everything]
        ends: Mapping[int, tuple[int, int]] = {}
        if fenced:
            topic = self._dead.markers_topic
            ends = partition_reader.bounds(self._connection, topic, everything, uncommitted=True)
        starts = {part.partition: 0 for part in found if part.first < part.end}
        deadline = self._clock.monotonic() + _STALL_TIMEOUT_S
        while starts:
            reached = partition_reader.scan(
                self._connection,
                self._dead.markers_topic,
                starts,
                lambda record: self._discard_finished(found, record, fenced),
                timeout_s=_STALL_TIMEOUT_S,
                clock=self._clock,
            )
            for partition, place in reached.items():
                found[partition].read_to = place.position
            starts = {p: at.position for p, at in reached.items() if fenced and at.end < ends[p][1]}
            if starts and self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"{self._dead.markers_topic}: somebody's transaction stays open in partitions "
                    f"{sorted(starts)}, so what is finished is not known; try again later"
                )
            self._clock.sleep(_POLL_S if starts else 0)
        ended = {part.partition: part.ended for part in found}
        cut = add_cuts_of_letters(self._connection, self._dead, ended)
        if cut:
            _log.error(
                "the log of the dead letters was cut back: some are lost",
                extra={"topic": self._dead.name, "partitions": cut},
            )
        for part in found:
            part.settle()
        return found

    def _mend(self, run: RedriveRun, waiting: Iterable[UnfinishedLetters]) -> None:
        """Finish torn transactions of earlier runs, and take from `waiting` what they have redriven."""
        # Redrives of other queues with the same dead-letter topic mend their own.
        own = self._queue.lane_markers
        torn = {p.partition: [one for one in p.claims.torn() if one.topic in own] for p in waiting}
        if not any(torn.values()):
            return
        topics = self._topics.describe([*own])  # a queue that is deleted has no copies
        redriven = run.mend(torn, {name: topic.partitions for name, topic in topics.items()})
        for part in waiting:
            for offset in map(offset_of, redriven.get(part.partition, ())):
                part.discard(offset, offset + 1)
        _log.warning(
            "a late request had ended transactions of a redrive or purge before they were complete; mended",
            extra={"queue": self._queue.name, "redriven": sum(map(len, redriven.values()))},
        )

    def _wait_until_visible(self, partitions: int) -> None:
        """Wait until readers, list() for example, see the commits of this run.

        Gives up after 5 s, because an open transaction of others may hold readers back, and when Kafka fails.
        """
        topic, everything = self._dead.markers_topic, range(partitions)
        deadline = self._clock.monotonic() + _VISIBLE_TIMEOUT_S
        with suppress(KmqError):  # the redrive or purge itself is done
            written = partition_reader.bounds(self._connection, topic, everything, uncommitted=True)
            while self._clock.monotonic() < deadline:
                visible = partition_reader.bounds(self._connection, topic, everything)
                if all(visible[partition][1] >= end for partition, (_, end) in written.items()):
                    return
                self._clock.sleep(_VISIBLE_POLL_S)

    def _discard_finished(self, waiting: builtins.list[UnfinishedLetters], record: Any, fenced: bool) -> None:
        """Remove from `waiting` the dead letters that this record of the markers topic finishes.

        For a marker of a newer version, raises UnsupportedMarker if `fenced`; else logs and ignores it.
        """
        try:
            marker = read_marker(record)
        except UnsupportedMarker as error:
            text = f"{record.topic()}, partition {record.partition()}, offset {record.offset()}: {error}"
            if fenced:  # the marker may finish dead letters that would be sent back (rule R3)
                raise UnsupportedMarker(f"{text}; upgrade kmqpy and run this again", error.data) from None
            _log.warning(text)
        except DecodeError:
            _log.debug("undecodable marker", extra={"topic": record.topic(), "offset": record.offset()})
        else:
            if marker.op is Op.END and marker.partition < len(waiting):
                waiting[marker.partition].read(marker, record)

    def _own_records(
        self, waiting: UnfinishedLetters, others: Callable[[Any], None] = lambda _: None
    ) -> Iterator[Any]:
        """Yield the waiting dead letters of this queue; call `others` with those of other queues."""
        for record in self._waiting_records(waiting):
            if is_dead_letter_of(message_headers(record), self._queue, self._origin):
                yield record
            else:
                others(record)

    def _waiting_records(self, waiting: UnfinishedLetters) -> Iterator[Any]:
        """Yield the records of `waiting`, in order, and remove all passed offsets. One iterator at a time."""
        for start, stop in list(waiting.pieces()):
            position = start
            for record in self._records(waiting.partition, start, stop):
                wanted = record.offset() in waiting.offsets
                waiting.discard(position, record.offset() + 1)
                position = record.offset() + 1
                if wanted:
                    yield record
            waiting.discard(position, stop)

    def _records(self, partition: int, start: int, stop: int) -> Iterator[Any]:
        """Yield the committed records from `start` to before `stop`, at most the last stable offset.

        Raises Unavailable when Kafka sends nothing for 30 s; errors of `_NOT_RETRIED` are raised at once.
        """
        reader = self._consumer()
        reader.assign([TopicPartition(self._dead.name, partition, start)])
        position = start
        problem = KafkaError(KafkaError._TIMED_OUT)
        deadline = self._clock.monotonic() + _STALL_TIMEOUT_S
        while position < stop:
            record = reader.poll(_POLL_S)
            error = None if record is None else record.error()
            if record is None or (error is not None and error.code() != KafkaError._PARTITION_EOF):
                problem = error or problem
                if (
                    self._clock.monotonic() > deadline
                    or problem.code() in _NOT_RETRIED
                    or kafka_errors.is_damage(problem)
                ):
                    reader.close()  # it may be cut off (kmqpy.kafka.cut_off)
                    self._reader = None
                    doing = f"read {self._dead.name}, partition {partition}"
                    raise kafka_errors.translated(problem, doing, self._connection)
                continue
            offset = record.offset() or 0
            # A log may end in control records; librdkafka reports its end as an event.
            position = offset + (error is None)
            if error is None and offset < stop:
                yield record
            deadline = self._clock.monotonic() + _STALL_TIMEOUT_S

    def _consumer(self) -> Consumer:
        if self._reader is None:
            settings = {
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
                "queued.max.messages.kbytes": 16_384,
            }
            self._reader = librdkafka.new_consumer(self._connection, settings)
        return self._reader


_NOT_RETRIED = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
"""Errors that end the reading of dead letters at once, because waiting does not help."""


def _checked_id(one: str) -> str:
    if not isinstance(one, str) or not _ID.fullmatch(one):
        raise ConfigError(f"id: {one!r} is not that of a dead letter; they look like 0-42")
    return one


def _text(headers: m.Headers, name: str) -> str | None:
    data = m.last_header(headers, name)
    return None if data is None else data.decode("utf-8", "replace")
