"""Redelivers due messages of one partition, in Kafka transactions of limited size.

A copy is the record with which a tracker redelivers or dead-letters a message; the original is the record
that the copy replaces. The copies and the end markers of their originals are in the same transaction. After a
tracker was killed at any point, its successor reads either both or neither, and never makes a duplicate. If a
late request has ended a transaction too early, mend() adds what is missing (rule R37 of docs/rules.md).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.copies.copy_transaction import (
    ClaimOvertaken,
    CopyTransaction,
    NewRecord,
    ProducerUnusable,
    TransactionAborted,
    TransactionCancelled,
    open_producer,
)
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.copies.torn_transactions import find_copies
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE, Marker, Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.late_operations import CopyHeaders
from kmqpy.kafka.markers.log_cuts import NO_CUTS, offset_of
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery.claim import Claim
from tracker.redelivery.failures import Failures
from tracker.redelivery.known_log import KnownLog, LastSeen
from tracker.redelivery.last_attempts import PartitionAttempts
from tracker.redelivery.markers_since_plan import MarkersSincePlan
from tracker.redelivery.originals import OriginalsReader
from tracker.redelivery.redelivery_plan import EXPIRED, Copy, batches, copy_of, halves
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

_NOT_REACHED_RETRY_S = 0.05
"""redeliver() stops early after some failures, for example after too many refusals. It makes the messages
that it has neither finished nor failed due again after this time."""
_MAX_IMMEDIATE_RETRIES = 3
"""redeliver() tries a batch again at once, at most this many times in a row, when the batch failed because an
earlier transaction was aborted."""
_MAX_REFUSED_PER_CALL = 20
"""redeliver() sends at most this many messages whose copies Kafka has refused before. _send_all() also stops
after this many new refusals. Each refused copy needs a transaction of its own, and other messages wait
meanwhile."""
_MAX_CLAIM_IDS = 1_000
"""A redeliverer knows the claims of its last transactions, this many, until the main loop reads them."""
_LANE_AWAY_S = 30.0
"""So long after a failure to write to the retry lane, copies stay in their own lane (rule R47)."""
_REFUSED_RETRY_S = 0.2
"""This time replaces `_NOT_REACHED_RETRY_S` for a message whose copy Kafka has refused before."""
_TOPIC_GONE_S = 10.0
"""mend() believes that the dead-letter topic is gone, and its records with it, when Kafka has said so for so
long: a broker that was just started may not know a topic for a moment."""
_TOPIC_POLL_S = 0.2


@dataclass
class RedeliveryResult:
    """The outcome of one call of redeliver() for its messages.

    A message that is in `redelivered`, `dead_lettered`, `gone`, `taken_late` or `acknowledged` has an end
    marker, and the transaction with this marker is committed.

    redelivered, dead_lettered  the copies of messages that were redelivered or dead-lettered
    gone                        offsets of messages that Kafka does not have any more
    taken_late                  offsets of messages that were finished before a client took them
    acknowledged                offsets of copies that became no dead letters: an earlier consumer has
                                acknowledged them
    held                        by offset of a message that the queue's `retry_delays` hold back: for how many
                                ms. A marker says so
    unread                      how many copies became dead letters before it was known whether they are
                                acknowledged
    failed                      by offset of a message that is in flight still: seconds until it is due again
    undecodable_counts, undecodable_ancestors
                                for how many copies this header of the original could not be decoded
    doubtful                    a record that is not there any more, or can't be read now: the log may have
                                been cut back (rule R39)
    new_end                     where the log ends since the partition has another leader: it may have been
                                cut back before that (rule R39), so nothing was written
    broken                      True if the tracker must take the partition over again before any other work
    dead_letter_problem         why nothing was dead-lettered, if the dead-letter topic is missing
    lane_problem                why copies stay in their own lane, if the retry lane can't be written
    problem                     why other messages failed
    refused                     texts about the copies that Kafka refused
    """

    redelivered: list[Copy] = field(default_factory=list)
    dead_lettered: list[Copy] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    taken_late: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    unread: int = 0
    failed: dict[int, float] = field(default_factory=dict)
    undecodable_counts: int = 0
    undecodable_ancestors: int = 0
    doubtful: LastSeen | None = None
    new_end: LogEnd | None = None
    broken: bool = False
    dead_letter_problem: str | None = None
    lane_problem: str | None = None
    problem: str | None = None
    refused: list[str] = field(default_factory=list)

    @property
    def copies(self) -> list[Copy]:
        """All copies that were committed: redeliveries and dead letters."""
        return self.redelivered + self.dead_lettered


class Redeliverer:
    """Redelivers messages of one partition with a transactional producer.

    The `transactional.id` is derived from the partition, so that `open` fences every earlier owner: Kafka
    refuses all writes of producers that were opened before.

    queue   the settings of the queue; the main loop replaces them when they have changed
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        partition: int,
        settings: TrackerSettings,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.queue = queue
        self._connection = connection
        self._partition = partition
        self._settings = settings
        self._clock = clock
        self._producer: Producer | None = None
        self.failures = Failures()
        """Messages that could not be redelivered. Not to be changed while redeliver() runs."""
        self._position = 0
        self._now_ms = INT64_MAX
        self._since_plan: MarkersSincePlan | None = None
        self._last_attempts: PartitionAttempts | None = None
        self._taken_late: frozenset[int] = frozenset()
        self._lane_away_until = -math.inf
        self._log = KnownLog()
        self._claim_ids: dict[bytes, bool] = {}
        """The claims of the last transactions that were not read yet, the last one last; each with True."""
        self.aborted_claims: dict[bytes, bool] = {}
        """The claims of the last transactions that were aborted. A late request may have committed a part."""
        self._last_copies: dict[str, int] = {}
        """By topic, the offset of the last copy there. None in topics where an earlier transaction of this
        `transactional.id` may hang (rule R38): the end of the next one ends it, too."""

    def open(self, timeout_s: float) -> None:
        """Open the producer: fences earlier owners, aborts their open transactions. Raises KmqError."""
        self.close()
        self._last_copies = {}
        self._producer = open_producer(
            self._connection,
            f"kmq-tracker-{self.queue.name}-{self._partition}",
            self._settings.effective_transaction_timeout_ms,
            f"take over {self.queue.name}-{self._partition}",
            timeout_s,
        )

    def close(self) -> None:
        """Drop the producer and the records that it has not sent, without waiting."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def redeliver(
        self,
        entries: Sequence[Entry],
        reader: OriginalsReader,
        may_go_on: Callable[[], bool],
        exists: Callable[[str], bool],
        position: int = 0,
        taken_late: frozenset[int] = frozenset(),
        last_attempts: PartitionAttempts | None = None,
        log: KnownLog | None = None,
        now_ms: int = INT64_MAX,
    ) -> RedeliveryResult:
        """Redeliver or dead-letter the messages of `entries`; the result names the messages that failed.

        position       the markers offset up to which markers were read when `entries` were due. A message is
                       left alone that a marker between this offset and the claim ends, gives more time, or
                       asks to dead-letter (rule R27)
        taken_late     offsets of `entries` that get an end marker and no copy: they were finished before a
                       client, which did not know this, took them again (rule R30 of docs/rules.md)
        last_attempts  tells which copies get an end marker and no dead letter: an earlier consumer has
                       acknowledged them (rule R32)
        log            what was known of the queue's log when `entries` were due
        now_ms         the partition's now then
        may_go_on      called before the transactions begin, and before each commit, when all records of the
                       transaction are written: False if the records may have gone to topics other than those
                       of `entries` (rule R24), or if this tracker may not redeliver any more
        exists         whether Kafka has this topic, with this partition

        Dead letters have transactions of their own, so that a missing dead-letter topic does not hold back
        other messages (rule R7).
        """
        outcome = RedeliveryResult()
        self._taken_late = taken_late
        self._log = log or KnownLog()
        by_offset = {entry.offset: entry for entry in entries}
        self._position, self._last_attempts, self._now_ms = position, last_attempts, now_ms
        self._since_plan = MarkersSincePlan(reader, self.queue, self._partition, by_offset, position)
        # Messages that were refused before come last, one by one, and only a few: they hardly delay others.
        refused = [offset for offset in by_offset if self.failures.refusal(offset)]
        fresh = by_offset.keys() - set(refused)
        for offsets, alone in ((fresh, False), (refused[:_MAX_REFUSED_PER_CALL], True)):
            some = {offset: by_offset[offset] for offset in sorted(offsets)}
            if not some or outcome.broken:
                continue
            try:
                self._redeliver_some(some, alone, outcome, reader, may_go_on, exists)
            except ProducerUnusable as error:
                outcome.broken = True
                outcome.problem = str(error)
        outcome.broken |= self._producer is None
        self._since_plan = None  # else it would keep all entries in memory until the next call
        done = {copy.entry.offset for copy in outcome.copies}
        done |= {*outcome.gone, *outcome.taken_late, *outcome.acknowledged, *outcome.held}
        for offset in by_offset.keys() - done - outcome.failed.keys():
            outcome.failed[offset] = (
                _REFUSED_RETRY_S if self.failures.refusal(offset) else _NOT_REACHED_RETRY_S
            )
        self.failures.forget(done)
        return outcome

    def expects_claim(self, claim_id: bytes) -> bool:
        """Return True, once, for the claim of one of the last transactions. For any thread."""
        return self._claim_ids.pop(claim_id, False)

    def mend(
        self,
        torn: Sequence[TornClaim],
        may_go_on: Callable[[], bool],
        exists: Callable[[str], bool],
        log: KnownLog | None = None,
    ) -> int:
        """Write the end markers that torn transactions of the partition lack; returns how many.

        These are the messages whose copies can be read. The others of the transactions have no copy. `log` is
        what is known of the queue's log. Raises KmqError, also because of `may_go_on` and
        `exists`.
        """
        log = log or KnownLog()
        partition, ends = self._partition, list[NewRecord]()
        mended = 0
        for topic in (self.queue.name, *self._other_topics()):
            claims = [claim for claim in torn if claim.topic == topic]
            if not claims or (topic != self.queue.name and self._is_gone(topic, exists)):
                continue
            found = find_copies(
                self._connection,
                self.queue.name,
                topic,
                [partition],
                {partition: claims},
                self._clock,
                log.cuts if topic == self.queue.name else NO_CUTS,
            )
            for copies in found.values():
                ends += self._ends(copies, topic)
                mended += len(copies)
        if not ends:
            return 0
        if log.last_epoch >= 0:  # told when the torn transactions were over
            ends.insert(0, NewRecord(partition, *codec.encode(codec.tick(partition, epoch=log.last_epoch))))
        try:
            with self._transaction(self.queue.name) as transaction:
                transaction.execute([], lambda _: ends, may_go_on)
        except (ProducerUnusable, TransactionAborted, TransactionCancelled) as error:
            raise Unavailable(f"end markers of copies were not written: {error}") from error
        return mended

    def _other_topics(self) -> list[str]:
        """The topics to which copies of this queue's, or lane's, messages may have gone."""
        lanes = [lane for lane in self.queue.lane_markers if lane != self.queue.name]
        return [*lanes, self.queue.dead_letter_topic]

    def _is_gone(self, topic: str, exists: Callable[[str], bool]) -> bool:
        """Return True once a topic has not existed for `_TOPIC_GONE_S`, and False when it exists."""
        deadline = self._clock.monotonic() + _TOPIC_GONE_S
        while not exists(topic):
            if self._clock.monotonic() > deadline:
                return True
            self._clock.sleep(_TOPIC_POLL_S)
        return False

    def _redeliver_some(
        self,
        entries: dict[int, Entry],
        alone: bool,
        outcome: RedeliveryResult,
        reader: OriginalsReader,
        may_go_on: Callable[[], bool],
        exists: Callable[[str], bool],
    ) -> None:
        """Redeliver `entries`, in order of their offsets; `alone`: each in a transaction of its own."""
        try:
            wanted = [entry for offset, entry in entries.items() if offset not in self._taken_late]
            offsets = sorted({offset_of(entry.offset) for entry in wanted})
            fetched = reader.fetch(self.queue.name, self._partition, offsets)
        except KafkaException as exception:
            outcome.problem = f"originals can't be read: {kafka_errors.error_name(exception)}"
            outcome.failed |= {offset: self.failures.note(offset) for offset in entries}
            return
        if fetched.end <= self._last_copies.get(self.queue.name, -1):
            del self._last_copies[self.queue.name]
        copies: list[Copy] = []
        lane = self._lane(exists, outcome)
        unreachable = _numbers(wanted, fetched.out_of_reach)
        for entry, original in self._log.originals(wanted, fetched.found):
            offset = entry.offset
            if original is None:
                unreachable.append(offset)
                continue
            try:
                refusal = self.failures.refusal(offset)
                about = self.queue, self._partition, refusal, self._position, self._now_ms, lane
                copies.append(copy_of(entry, original, *about))
            except Exception as error:  # a bug of kmqpy with this one message (rule R21)
                _log.exception("copy failed", extra={"queue": self.queue.name, "offset": offset})
                outcome.problem = f"offset {offset_of(offset)}: no copy can be made of it: {error!r}"
                outcome.failed[offset] = self.failures.note(offset)
        outcome.undecodable_counts += sum(copy.undecodable_count for copy in copies)
        outcome.undecodable_ancestors += sum(copy.undecodable_ancestors for copy in copies)
        outcome.failed |= {offset: self.failures.note(offset) for offset in unreachable}
        seen = (self._log.last_seen(entries[number]) for number in unreachable)
        outcome.doubtful = next(filter(None, seen), outcome.doubtful)
        live = [copy for copy in copies if not (copy.dead_letter or copy.held_ms)]
        held = [copy for copy in copies if copy.held_ms]
        dead = [copy for copy in copies if copy.dead_letter]
        ended = sorted([*_numbers(wanted, fetched.gone), *(self._taken_late & entries.keys())])
        self._send_all(live, ended, alone, outcome, may_go_on)
        if held:
            self._send_all(held, [], alone, outcome, may_go_on)
        if dead and not exists(self.queue.dead_letter_topic):
            outcome.dead_letter_problem = f"topic {self.queue.dead_letter_topic} does not exist"
            outcome.failed |= {copy.entry.offset: self.failures.note(copy.entry.offset) for copy in dead}
        elif dead:
            self._send_all(dead, [], alone, outcome, may_go_on)

    def _lane(self, exists: Callable[[str], bool], outcome: RedeliveryResult) -> str:
        """The lane to which copies go now: the retry lane, unless it can't be written (rule R47)."""
        lane = self.queue.copies_topic
        if lane != self.queue.name and self._clock.monotonic() < self._lane_away_until:
            outcome.lane_problem = f"topic {lane} could not be written"
        elif lane != self.queue.name and not exists(lane):
            outcome.lane_problem = f"topic {lane} does not exist, or has no partition {self._partition}"
        else:
            return lane
        return self.queue.name

    def _send_all(
        self,
        copies: list[Copy],
        ended_only: list[int],
        alone: bool,
        outcome: RedeliveryResult,
        may_go_on: Callable[[], bool],
    ) -> None:
        most = 1 if alone else self._settings.max_batch_messages
        pending = batches(copies, most, self._settings.max_batch_bytes)
        if ended_only and not pending:
            pending = [[]]
        again = refused = 0
        if pending and not may_go_on():
            return
        while pending and refused < _MAX_REFUSED_PER_CALL and self._producer is not None:
            batch = pending.pop(0)
            try:
                claim = self._transact(batch, ended_only, may_go_on)
            except TransactionCancelled as cancelled:
                outcome.problem = str(cancelled) or outcome.problem
                return
            except TransactionAborted as error:
                if error.by_predecessor and again < _MAX_IMMEDIATE_RETRIES:
                    again += 1
                    pending.insert(0, batch)
                    continue
                if error.by_message and len(batch) > 1:
                    smaller, larger = halves(batch)
                    pending = [smaller, *pending, larger]
                    continue
                offsets = [copy.entry.offset for copy in batch] or ended_only
                if not error.by_message and self._note_lane(error.topic):
                    # To their own lane, before the retry lane is tried again.
                    outcome.failed |= dict.fromkeys(offsets, _NOT_REACHED_RETRY_S)
                    outcome.problem = str(error)
                    return
                outcome.failed |= {offset: self.failures.note(offset) for offset in offsets}
                if not error.by_message or not batch:
                    outcome.problem = str(error)
                    return
                refused += 1
                about = batch[0], self.queue, error.topic, error
                outcome.refused.append(self.failures.note_refusal(*about))
                continue  # the refused message is due later; the others go on
            again = 0
            outcome.acknowledged += sorted(claim.acknowledged)
            outcome.unread += claim.unread
            for offset in ended_only:
                if offset not in claim.dropped:
                    (outcome.taken_late if offset in self._taken_late else outcome.gone).append(offset)
            ended_only = []
            for copy in _copies_to_make(batch, claim):
                if copy.held_ms:
                    outcome.held[copy.entry.offset] = copy.held_ms
                    continue
                (outcome.dead_lettered if copy.dead_letter else outcome.redelivered).append(copy)

    def _transact(self, batch: list[Copy], ended_only: Sequence[int], may_go_on: Callable[[], bool]) -> Claim:
        """Commit the copies of `batch` and end markers of `ended_only`; returns the claim.

        The claim tells which messages of the batch were not copied.
        """
        # Whether copies are acknowledged must be known before they are written as dead letters. And where
        # copies of an earlier transaction hang, whose originals are ended, an abort behind them loses them.
        if all(copy.last_copy is None for copy in batch) and self._topic_of(batch) in self._last_copies:
            with suppress(ClaimOvertaken):
                return self._transact_once(batch, ended_only, may_go_on, decide_first=False)
        return self._transact_once(batch, ended_only, may_go_on, decide_first=True)

    def _topic_of(self, batch: list[Copy]) -> str:
        # All copies of a batch go to one topic; messages that are held back have none.
        return (batch[0].topic if batch and not batch[0].held_ms else "") or self.queue.name

    def _note_lane(self, topic: str) -> bool:
        """Note that a transaction with copies in this topic has failed; returns True for the retry lane."""
        if topic in (self.queue.name, self.queue.markers_topic, self.queue.dead_letter_topic):
            return False
        self._lane_away_until = self._clock.monotonic() + _LANE_AWAY_S
        return True

    def _transact_once(
        self,
        batch: list[Copy],
        ended_only: Sequence[int],
        may_go_on: Callable[[], bool],
        *,
        decide_first: bool,
    ) -> Claim:
        topic = self._topic_of(batch)
        made: list[int] = []
        holds = any(copy.held_ms for copy in batch)  # then of each of them
        last_copies = {one.entry.offset: one.last_copy for one in batch if one.last_copy is not None}
        claim = self._claim(
            sorted({*(copy.entry.offset for copy in batch), *ended_only}), last_copies, holds=holds
        )

        def ends(places: Sequence[Place | None]) -> Iterable[NewRecord]:
            if holds:
                return self._held(_copies_to_make(batch, claim))
            made.extend(-1 if place is None else place[1] for place in places)
            cut = topic == self.queue.name and self._log.cuts
            numbered = [self._numbered(place) for place in places] if cut else places
            copied = dict(
                zip((copy.entry.offset for copy in _copies_to_make(batch, claim)), numbered, strict=True)
            )
            remaining = [offset for offset in ended_only if offset not in claim.dropped]
            finished_before = [offset for offset in remaining if offset in self._taken_late]
            vanished = [offset for offset in remaining if offset not in self._taken_late]
            return itertools.chain(
                self._ends(copied, topic),
                self._ends(dict.fromkeys(vanished), topic),
                self._ends(dict.fromkeys(finished_before), topic, TAKEN_LATE),
                self._ends(dict.fromkeys(sorted(claim.acknowledged)), topic, ACKNOWLEDGED),
            )

        def may_commit() -> bool:
            # Nobody may read a retry lane any more that the queue has lost meanwhile.
            known = (self.queue.name, self.queue.dead_letter_topic, self.queue.copies_topic)
            return topic in known and may_go_on()

        with self._transaction(topic) as transaction:
            copies = [] if holds else self._copies(batch, claim)
            transaction.execute(copies, ends, may_commit, claim, decide_first=decide_first)
        if made:
            self._last_copies[topic] = max(made)
        return claim

    @contextmanager
    def _transaction(self, topic: str) -> Iterator[CopyTransaction]:
        """A transaction that makes copies in `topic`. After it, the producer may have been given up."""
        if self._producer is None:
            raise ProducerUnusable("no producer")
        timeout_s = self._settings.effective_transaction_timeout_ms / 1000
        transaction = CopyTransaction(self._producer, topic, self.queue.markers_topic, timeout_s, self._clock)
        _add_last(self._claim_ids, transaction.claim_id)
        try:
            yield transaction
        except ProducerUnusable as error:
            if any(one is not None and one.code() == KafkaError._TIMED_OUT for one in error.errors):
                self._note_lane(topic)
            raise
        except TransactionCancelled:
            _add_last(self.aborted_claims, transaction.claim_id)
            raise
        except TransactionAborted as error:
            _add_last(self.aborted_claims, transaction.claim_id)
            cause = KafkaException(error.cause)
            if error.topic in self._other_topics():
                librdkafka.refresh_partition(self._producer, error.topic, self._partition, cause)
            raise
        finally:
            if self._producer.may_end_again:
                about = {"queue": self.queue.name, "partition": self._partition}
                _log.info("producer given up: Kafka may get the end of its transaction twice", extra=about)
                self.close()

    def _claim(self, offsets: Sequence[int], last_copies: Mapping[int, CopyHeaders], *, holds: bool) -> Claim:
        assert self._since_plan is not None
        within_s = self._settings.effective_transaction_timeout_ms / 2000
        return Claim(
            *(self._partition, offsets, self._since_plan, self._last_attempts, within_s, last_copies),
            self._taken_late,
            self._log.epoch,
            unsure=not self._log.whole,
            holds=holds,
        )

    def _copies(self, batch: list[Copy], claim: Claim) -> Iterator[NewRecord]:
        for copy in _copies_to_make(batch, claim):
            yield NewRecord(self._partition, copy.key, copy.value, copy.headers)

    def _held(self, copies: Iterable[Copy]) -> Iterator[NewRecord]:
        """The markers with which messages wait for as long as `retry_delays` says."""
        for (held_ms, reason), alike in itertools.groupby(copies, _hold_of):
            offsets = [copy.entry.offset for copy in alike]
            about: Any = {"redeliver_after_ms": held_ms, "reason": reason, "by_tracker": True}
            if self.queue.writes_ranges and len(offsets) > 1:
                markers = codec.ranges(self._partition, Op.NACK, offsets, **about)
            else:
                markers = [Marker(self._partition, offset, Op.NACK, **about) for offset in offsets]
            for marker in markers:
                yield NewRecord(self._partition, *codec.encode(marker))

    def _ends(
        self, copies: Mapping[int, Place | None], copy_topic: str, reason: str | None = None
    ) -> Iterator[NewRecord]:
        return end_markers(
            *(self.queue.name, self._partition, copies),
            copy_topic=copy_topic,
            ranges=self.queue.writes_ranges,
            reason=reason,
        )

    def _numbered(self, place: Place | None) -> Place | None:
        """Partition and number of the copy that was written to this place of the queue."""
        return place and (place[0], self._log.cuts.number_of(place[1]))


def _add_last(ids: dict[bytes, bool], claim_id: bytes) -> None:
    ids[claim_id] = True
    for oldest in list(ids)[:-_MAX_CLAIM_IDS]:
        ids.pop(oldest, None)


def _numbers(entries: Iterable[Entry], offsets: Collection[int]) -> list[int]:
    """The numbers of the messages that stand, or stood, at these offsets."""
    if not (among := set(offsets)):
        return []
    return [entry.offset for entry in entries if offset_of(entry.offset) in among]


def _hold_of(copy: Copy) -> tuple[int, str | None]:
    """For how many ms a message is held back, and why."""
    return copy.held_ms, copy.entry.reason if copy.entry.state is EntryState.FAILED else EXPIRED


def _copies_to_make(batch: list[Copy], claim: Claim) -> list[Copy]:
    """Return the copies of `batch` that the claim has not left out."""
    if not claim.not_copied:
        return batch
    return [copy for copy in batch if copy.entry.offset not in claim.not_copied]
