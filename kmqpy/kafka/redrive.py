"""Moves dead letters out of the dead-letter topic, in short transactions of copies and end markers.

A copy is the record with which a redrive appends a dead letter to the queue again; an end marker finishes a
dead letter. All redrives and purges of a queue use one `transactional.id`: when a run begins, Kafka refuses
all later writes of the run before it (fencing) and aborts the transaction that this run has left open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from kmqpy import message as m
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.throttle import Throttle
from kmqpy.errors import DecodeError, KmqError, Unavailable, Unfinished
from kmqpy.kafka import kafka_errors
from kmqpy.kafka.copies.copy_headers import redriven_headers
from kmqpy.kafka.copies.copy_transaction import (
    CopyTransaction,
    NewRecord,
    ProducerUnusable,
    TransactionAborted,
    TransactionCancelled,
    open_producer,
)
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.copies.torn_transactions import Copies, find_copies
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers.claim_headers import DROPPED, naming_tick
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_PARTITION,
    first_place,
    int_header,
    is_or_was_lane,
    origin_queue,
    size_of,
)
from kmqpy.kafka.places import Place, message_id
from kmqpy.kafka.redrive_claims import FinishedDeadLetters, RedriveClaim
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import CurrentSettings
from kmqpy.kafka.topic_names import dead_letter_queue

_log = logging.getLogger(__name__)

_MAX_TRANSACTION_BYTES = 4_000_000
"""A batch gets no more dead letters once its copies have this size (the last copy may exceed it)."""
_TIMEOUT_S = 10.0
"""The transaction of a killed run holds back readers of the queue for up to this time; then Kafka aborts it.
The next run aborts it at once."""
_OPEN_TIMEOUT_S = 30.0
"""Seconds within which Kafka must let a run begin."""

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
_MAX_TRIES = 4
"""Tries of one transaction before the run stops. The first try after a message that Kafka has refused can
fail by its sequence numbers."""

_ancestors_throttle = Throttle(60.0)


class DeadLetterMove(NamedTuple):
    """One dead letter to be finished by an end marker.

    number  that of the dead letter in its partition, see log_cuts
    epoch   the leader epoch of its record; None: Kafka names none
    id      the id of the message, for those whom Kafka refuses the copy
    copy    the message that a redrive appends to the queue in the same transaction; None: a purge drops it
    """

    partition: int
    number: int
    epoch: int | None
    id: str
    copy: NewRecord | None = None

    @property
    def size(self) -> int:
        """Estimated bytes of the copy; 0 without one."""
        if self.copy is None:
            return 0
        return size_of(self.copy.key, self.copy.value, self.copy.headers)


class KnownEnds(NamedTuple):
    """What the caller of a run knows of a partition of the dead letters.

    read_to  the markers offset up to which it has read which dead letters are finished
    cuts     those of the dead letters' log
    """

    read_to: int
    cuts: LogCuts = NO_CUTS


def letter_id(record: Any) -> str:
    """The id of the message that became a dead letter; without headers that name it, its place."""
    first = first_place(message_headers(record))
    if first is None:  # another program has written it
        return f"{record.topic()}:{record.partition()}:{record.offset()}"
    return message_id(*first)


def move_of(record: Any, cuts: LogCuts, copy: NewRecord | None = None) -> DeadLetterMove:
    """The move of a dead letter whose log has these cuts."""
    number = cuts.number_of(record.offset())
    return DeadLetterMove(record.partition(), number, record.leader_epoch(), letter_id(record), copy)


def redrive_move(
    record: Any, queue: QueueSettings, partitions: int, cuts: LogCuts, lane: str = ""
) -> DeadLetterMove:
    """Make the move that sends a dead letter (`record`) back to `queue`, as if it was never delivered.

    `lane` is the lane to which it goes; empty: the main lane.

    The copy goes to the partition from which the dead letter came or, without a header that says so, to the
    partition with the same number as the dead letter's own. If that is not one of the `partitions` of
    `queue`, the partitioner chooses.
    """
    headers = message_headers(record)
    partition = origin_partition(headers, queue)
    if partition is None:
        partition = record.partition()
    if not 0 <= partition < partitions:
        partition = -1
    place = RecordPlace(record.topic(), record.partition(), cuts.number_of(record.offset()))
    try:
        ancestors = read_ancestors(m.last_header(headers, ANCESTORS), place)
    except DecodeError as error:
        ancestors = ()
        if _ancestors_throttle.allows(place.topic):
            _log.warning("dead letter %d-%d: ignored: %s", place.partition, place.offset, error)
    new_headers = redriven_headers(headers, place, queue, ancestors, lane or queue.name)
    copy = NewRecord(partition, record.key(), record.value(), new_headers)
    return move_of(record, cuts, copy)


def origin_partition(headers: m.Headers, queue: QueueSettings) -> int | None:
    """The partition of `queue` from which a dead letter came; None if its headers do not say so."""
    if not is_or_was_lane(origin_queue(headers) or "", queue):
        return None
    return int_header_or_none(headers, DEAD_LETTER_PARTITION)


def int_header_or_none(headers: m.Headers, name: str) -> int | None:
    """The header `name` as a number; None when it is absent or can't be read."""
    try:
        return int_header(headers, name)
    except DecodeError:
        return None


class RedriveRun(Closeable):
    """Executes the moves of one redrive or purge, and counts them.

    done     how many dead letters the run has finished for certain
    refused  the ids of the dead letters whose copies Kafka refuses; they stay dead letters
    lane     the lane to which the copies go; empty: the main lane

    Its constructor ends the run before it, and raises Unavailable and the like if Kafka does not allow that.
    """

    def __init__(
        self,
        doing: str,
        queue: QueueSettings,
        connection: KafkaConnection,
        clock: Clock = SYSTEM_CLOCK,
        lane: str = "",
    ) -> None:
        self.lane = lane or queue.name
        self.done = 0
        self.refused: list[str] = []
        self._doing = f"{doing} {queue.name}"
        self._queue = queue
        self._current = CurrentSettings(queue, connection, clock)
        self._dead_letters = dead_letter_queue(queue).name
        self._markers_topic = dead_letter_queue(queue).markers_topic
        self._connection = connection
        self._clock = clock
        self._finished_letters: FinishedDeadLetters | None = None
        self._known: Mapping[int, KnownEnds] = {}
        self._producer = self._open_producer()

    def close(self) -> None:
        """Drop what was not sent, and release the connection that reads."""
        self._producer.purge()
        if self._finished_letters is not None:
            self._finished_letters.close()

    def mend(
        self, torn: Mapping[int, Sequence[TornClaim]], partitions: Mapping[str, int]
    ) -> dict[int, Copies]:
        """Finish torn transactions of earlier runs (rule R37 of docs/rules.md).

        torn        the claims of these transactions, by partition of the dead-letter topic
        partitions  the numbers of partitions of the queue's lanes, as far as these exist

        Writes the end markers of dead letters whose copies are in the queue, and names the others, so that
        nobody looks for their copies again. Returns the dead letters with a copy, by partition, each with the
        place of its copy. Raises KmqError.
        """
        redriven: dict[int, Copies] = {}
        for lane in {claim.topic for claims in torn.values() for claim in claims}:
            there = range(partitions.get(lane, 0))
            here = {part: [one for one in claims if one.topic == lane] for part, claims in torn.items()}
            found = find_copies(self._connection, self._dead_letters, lane, there, here, self._clock)
            for partition, claims in here.items():
                for claim in claims:
                    copies = found.get((partition, claim.id), {})
                    redriven.setdefault(partition, {}).update(copies)
                    others = [one for one in claim.offsets if one not in copies]
                    self._mend_one(partition, copies, others, lane)
        return redriven

    def _mend_one(self, partition: int, copies: Copies, not_copied: Sequence[int], lane: str) -> None:
        markers = [*self._ends(partition, dict(sorted(copies.items())), lane)]
        if not_copied:
            markers.append(NewRecord(partition, *naming_tick(partition, DROPPED, not_copied)))
        try:
            with self._transaction() as transaction:
                transaction.execute([], lambda _: markers)
        except TransactionAborted as error:
            raise self._stopped(error.cause) from error

    def move(
        self,
        steps: Iterable[DeadLetterMove],
        *,
        known: Mapping[int, KnownEnds],
        at_once: int,
        rate: float | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Execute these moves; calls `progress` after each batch.

        known    by partition of the dead-letter topic. Dead letters that others have finished since the
                 caller has read the markers are left out
        at_once  the most moves in one transaction
        rate     the most moves in a second, on average; None: no limit

        Raises Unfinished when the run can't go on. Moves whose transaction was not committed did not happen.
        """
        next_at = self._clock.monotonic()
        self._known = known
        read_to = {partition: one.read_to for partition, one in known.items()}
        self._finished_letters = FinishedDeadLetters(
            self._connection, self._markers_topic, read_to, self._clock
        )
        try:
            for batch in _batches(steps, at_once):
                self._clock.sleep(max(0.0, next_at - self._clock.monotonic()))
                self._commit_batch(batch)
                if rate is not None:
                    next_at = max(next_at, self._clock.monotonic() - 1) + len(batch) / rate
                progress()
        except KmqError as error:
            raise Unfinished(
                f"{self._doing}: stopped after {self.done} dead letters: {error}. "
                "The others are untouched; running it again goes on with them",
                self.done,
            ) from error

    def _commit_batch(self, batch: list[DeadLetterMove]) -> None:
        """Commit `batch`; if Kafka refuses a message, commit all others (rule R7 of docs/rules.md).

        Raises Unavailable and the like if the transaction fails for other reasons, four times or for good.
        """
        for left in reversed(range(_MAX_TRIES)):
            try:
                dropped = self._execute(batch)
            except TransactionCancelled as error:
                if not left:
                    raise Unavailable(str(error)) from error
            except TransactionAborted as error:
                if error.by_message:
                    self._split(batch, error)
                    return
                if not left:
                    raise self._stopped(error.cause) from error
                _log.warning("%s: transaction aborted, trying again: %s", self._doing, error.cause.str())
            else:
                self.done += len(batch) - dropped
                return

    def _split(self, batch: list[DeadLetterMove], error: TransactionAborted) -> None:
        """Commit both halves of a batch that Kafka has refused; note a single dead letter as refused."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._commit_batch(batch[:middle])
            self._commit_batch(batch[middle:])
        else:
            self.refused.append(batch[0].id)
            _log.error("%s: dead letter %s is refused: %s", self._doing, batch[0].id, error.cause.str())

    def _execute(self, batch: list[DeadLetterMove]) -> int:
        """Execute one transaction, of one partition; returns how many dead letters of `batch` it left out.

        Those are the dead letters that others have finished meanwhile. After TransactionAborted and
        TransactionCancelled, nothing of the transaction happened. After another KmqError, its outcome may be
        unknown and this run may write nothing more (rules R1, R6).
        """
        assert self._finished_letters is not None
        claim = RedriveClaim(
            batch[0].partition,
            [step.number for step in batch],
            self._finished_letters,
            _TIMEOUT_S / 2,
            epoch=max((step.epoch for step in batch if step.epoch is not None), default=None),
            cuts=self._known[batch[0].partition].cuts,
        )
        kept = (step for step in batch if step.number not in claim.dropped)  # read after claim.decide()
        copies = (step.copy for step in kept if step.copy is not None)
        with self._transaction() as transaction:
            ends = partial(self._end_markers, batch, claim)
            transaction.execute(copies, ends, self._has_lane, claim=claim)
        return len(claim.dropped)

    def _has_lane(self) -> bool:
        """False if the retry lane may be removed, perhaps with what would be committed there (rule R47)."""
        return self.lane == self._queue.name or self.lane == self._current.recent().copies_topic

    @contextmanager
    def _transaction(self) -> Iterator[CopyTransaction]:
        """A transaction of this run, by a new producer if the end of the last transaction may come once more.

        Raises TransactionAborted and TransactionCancelled, and other errors as KmqError.
        """
        if self._producer.may_end_again:
            self._producer = self._open_producer()
        transaction = CopyTransaction(self._producer, self.lane, self._markers_topic, _TIMEOUT_S, self._clock)
        try:
            yield transaction
        except ProducerUnusable as unusable:
            raise self._stopped(*unusable.errors) from unusable
        except (TransactionAborted, TransactionCancelled):
            raise
        except BaseException:  # Ctrl-C: otherwise readers of the queue wait until the transaction times out
            with suppress(KafkaException):
                self._producer.abort_transaction(_TIMEOUT_S)
            raise

    def _open_producer(self) -> Producer:
        """Open a producer that ends the run before this one, or replaces the run's own.

        If it ends the run after this one, that one stops. What it has moved is left out here, by the claims.
        """
        return open_producer(
            self._connection,
            f"kmq-redrive-{self._queue.name}",
            int(_TIMEOUT_S * 1000),
            self._doing,
            _OPEN_TIMEOUT_S,
        )

    def _end_markers(
        self, batch: list[DeadLetterMove], claim: RedriveClaim, places: Sequence[Place | None]
    ) -> Iterator[NewRecord]:
        copied = iter(places)
        kept = (step for step in batch if step.number not in claim.dropped)
        copies = {step.number: None if step.copy is None else next(copied) for step in kept}
        yield from self._ends(batch[0].partition, copies, self.lane)

    def _ends(self, partition: int, copies: Mapping[int, Place | None], lane: str) -> Iterator[NewRecord]:
        return end_markers(
            self._dead_letters, partition, copies, copy_topic=lane, ranges=self._queue.writes_ranges
        )

    def _stopped(self, *errors: KafkaError | None) -> KmqError:
        if any(error is not None and error.code() in _FENCED for error in errors):
            return Unavailable(
                "another redrive or purge of this queue has taken over, or a transaction took too long"
            )
        return kafka_errors.translated(next(iter(errors), None), "write", self._connection)


def _batches(steps: Iterable[DeadLetterMove], at_once: int) -> Iterator[list[DeadLetterMove]]:
    batch: list[DeadLetterMove] = []
    size = 0
    for step in steps:
        if batch and step.partition != batch[0].partition:  # a claim names messages of one partition
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += step.size
        if len(batch) >= at_once or size >= _MAX_TRANSACTION_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
