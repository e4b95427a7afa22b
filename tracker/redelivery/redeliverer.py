"""Redelivers one partition's due messages: one plan, one Kafka transaction.

The copies and the end markers of their originals are in the same transaction, so a tracker that was
killed at any point, or a successor, reads either both or neither and never makes a duplicate.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, Producer

from kmqpy.core.backoff import Backoff
from kmqpy.kafka import librdkafka
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
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE
from kmqpy.kafka.markers.entry import Entry
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery.claim import Claim
from tracker.redelivery.last_attempts import PartitionAttempts
from tracker.redelivery.markers_since_plan import MarkersSincePlan
from tracker.redelivery.originals import OriginalsReader
from tracker.redelivery.redelivery_plan import Copy, Refusal, batches, copy_of, halves
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

SOON_S = 0.05
"""Until the next try of what only had no room."""
_AT_ONCE = 3
"""How often a batch is tried again at once."""
_REFUSED_AT_ONCE = 20
"""Refused copies after which a call ends: each needs a transaction of its own, while others wait."""
_PAUSE = Backoff(0.4, 2, 30, jitter=0)
"""Until the next try of a message that failed."""
_PUT_OFF_S = 0.2
"""Until the next try of a message that was refused before and had no turn in this call."""
_MOST_SHOWN = 10


@dataclass
class RedeliveryResult:
    """The outcome for the entries of one call.

    redelivered, dead_lettered, gone, taken_late, acknowledged
                                       committed: their end markers are in the log
    unread                             how many became dead letters before it was known whether an earlier
                                       consumer has acknowledged them
    failed                             offset -> seconds until the next try
    broken                             take over again before anything else
    refused                            texts about copies that Kafka refused this time
    """

    redelivered: list[Copy] = field(default_factory=list)
    dead_lettered: list[Copy] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    taken_late: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    unread: int = 0
    failed: dict[int, float] = field(default_factory=dict)
    undecodable_counts: int = 0
    undecodable_ancestors: int = 0
    broken: bool = False
    dead_letter_problem: str | None = None
    problem: str | None = None
    refused: list[str] = field(default_factory=list)

    @property
    def copies(self) -> list[Copy]:
        """All copies that were committed."""
        return self.redelivered + self.dead_lettered


class Redeliverer:
    """The transactional producer of one partition, and what is done with it.

    `transactional.id` is the partition's, so opening it fences every predecessor for good. `queue`
    may be replaced when its settings change. `ranges`: end markers may be range markers, because a
    client has written such; before that, there might be JVM trackers about, which don't know them.
    """

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, partition: int, settings: TrackerSettings
    ) -> None:
        self.queue = queue
        self.ranges = False
        self._connection = connection
        self._partition = partition
        self._settings = settings
        self._producer: Producer | None = None
        self._tries: dict[int, int] = {}
        self._refusals: dict[int, Refusal] = {}
        self._position = 0
        self._since_plan: MarkersSincePlan | None = None
        self._last_attempts: PartitionAttempts | None = None
        self._taken_late: frozenset[int] = frozenset()

    def open(self, timeout_s: float) -> None:
        """Fence predecessors and abort what they left open; raises Unavailable and the like."""
        self.close()
        self._producer = open_producer(
            self._connection,
            f"kmq-tracker-{self.queue.name}-{self._partition}",
            self._settings.effective_transaction_timeout_ms,
            f"take over {self.queue.name}-{self._partition}",
            timeout_s,
        )

    def close(self) -> None:
        """Let go of the producer without waiting."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def redeliver(
        self,
        entries: Sequence[Entry],
        reader: OriginalsReader,
        may_go_on: Callable[[], bool],
        dead_letters_exist: Callable[[], bool],
        position: int = 0,
        taken_late: frozenset[int] = frozenset(),
        last_attempts: PartitionAttempts | None = None,
    ) -> RedeliveryResult:
        """Append the copies of `entries`, or dead-letter them; what fails is in the result.

        `taken_late`: those of them that get no copy, since they were finished before they were taken again
        by a client that did not know it (rule R30). They get an end marker and nothing else.

        `position`: the markers offset before which all markers were applied when `entries` were due. Where
        the queue has claims, a message that a marker between that and the claim ends, or gives more time, is
        left alone.

        `last_attempts` tells which copies become no dead letters, since an earlier consumer has acknowledged
        them (rule R32). They get an end marker and nothing else, too.

        `may_go_on` is called before the first transaction, and before each commit, when all records of the
        transaction are written: it tells whether they went to the topics of these entries (rule R24). Dead
        letters have transactions of their own, so that a missing dead-letter topic holds back nothing else
        (rule R7).
        """
        outcome = RedeliveryResult()
        self._taken_late = taken_late
        by_offset = {entry.offset: entry for entry in entries}
        self._position, self._last_attempts = position, last_attempts
        self._since_plan = MarkersSincePlan(reader, self.queue, self._partition, by_offset, position)
        # Messages refused before come last, one by one and few per call, so that they hardly delay others.
        refused = [offset for offset in by_offset if offset in self._refusals]
        fresh = by_offset.keys() - set(refused)
        for offsets, alone in ((fresh, False), (refused[:_REFUSED_AT_ONCE], True)):
            some = {offset: by_offset[offset] for offset in sorted(offsets)}
            if not some or outcome.broken:
                continue
            try:
                self._redeliver_some(some, alone, outcome, reader, may_go_on, dead_letters_exist)
            except ProducerUnusable as error:
                outcome.broken = True
                outcome.problem = str(error)
        self._since_plan = None  # it holds all entries, until this partition has others to redeliver
        done = {copy.entry.offset for copy in outcome.copies}
        done |= {*outcome.gone, *outcome.taken_late, *outcome.acknowledged}
        for offset in by_offset.keys() - done - outcome.failed.keys():
            outcome.failed[offset] = _PUT_OFF_S if offset in self._refusals else SOON_S
        self._forget(done)
        return outcome

    def refused(self) -> list[str]:
        """Texts about messages that can't be copied: the first few, and how many more; for any thread."""
        refusals = sorted(self._refusals.copy().items())
        texts = [_refused_text(offset, refusal) for offset, refusal in refusals[:_MOST_SHOWN]]
        if more := len(refusals) - len(texts):
            texts.append(f"{more} more messages can't be copied")
        return texts

    def forget_ended(self, in_flight: Callable[[int], bool]) -> None:
        """Drop what is remembered of messages no longer in flight; not while `redeliver` runs."""
        self._forget([offset for offset in self._tries if not in_flight(offset)])

    def _forget(self, offsets: Iterable[int]) -> None:
        if not self._tries:
            return
        for offset in offsets:
            self._tries.pop(offset, None)
            self._refusals.pop(offset, None)

    def _redeliver_some(
        self,
        entries: dict[int, Entry],
        alone: bool,
        outcome: RedeliveryResult,
        reader: OriginalsReader,
        may_go_on: Callable[[], bool],
        dead_letters_exist: Callable[[], bool],
    ) -> None:
        """Redeliver entries by offset, in order; `alone`: each in a transaction of its own."""
        try:
            wanted = [offset for offset in entries if offset not in self._taken_late]
            fetched = reader.fetch(self.queue.name, self._partition, wanted)
        except KafkaException as exception:
            outcome.problem = f"originals can't be read: {librdkafka.error_name(exception)}"
            outcome.failed |= {offset: self._backoff(offset) for offset in entries}
            return
        copies: list[Copy] = []
        for offset, original in fetched.found.items():
            try:
                refusal = self._refusals.get(offset)
                copies.append(
                    copy_of(entries[offset], original, self.queue, self._partition, refusal, self._position)
                )
            except Exception as error:  # a bug of kmqpy with this one message (rule R21)
                _log.exception("copy failed", extra={"queue": self.queue.name, "offset": offset})
                outcome.problem = f"offset {offset}: no copy can be made of it: {error!r}"
                outcome.failed[offset] = self._backoff(offset)
        outcome.undecodable_counts += sum(copy.undecodable_count for copy in copies)
        outcome.undecodable_ancestors += sum(copy.undecodable_ancestors for copy in copies)
        outcome.failed |= {offset: self._backoff(offset) for offset in fetched.out_of_reach}
        live = [copy for copy in copies if not copy.dead_letter]
        dead = [copy for copy in copies if copy.dead_letter]
        ended = sorted([*fetched.gone, *(self._taken_late & entries.keys())])
        self._send_all(live, ended, alone, outcome, may_go_on)
        if dead and not dead_letters_exist():
            outcome.dead_letter_problem = f"topic {self.queue.dead_letter_topic} does not exist"
            outcome.failed |= {copy.entry.offset: self._backoff(copy.entry.offset) for copy in dead}
        elif dead:
            self._send_all(dead, [], alone, outcome, may_go_on)

    def _send_all(
        self,
        copies: list[Copy],
        gone: list[int],
        alone: bool,
        outcome: RedeliveryResult,
        may_go_on: Callable[[], bool],
    ) -> None:
        most = 1 if alone else self._settings.max_batch_messages
        pending = batches(copies, most, self._settings.max_batch_bytes)
        if gone and not pending:
            pending = [[]]
        again = refused = 0
        if pending and not may_go_on():
            return
        while pending and refused < _REFUSED_AT_ONCE:
            batch = pending.pop(0)
            try:
                claim = self._transact(batch, gone, may_go_on)
            except TransactionCancelled as cancelled:
                outcome.problem = str(cancelled) or outcome.problem
                return
            except TransactionAborted as error:
                if error.by_predecessor and again < _AT_ONCE:
                    again += 1
                    pending.insert(0, batch)
                    continue
                if error.by_message and len(batch) > 1:
                    smaller, larger = halves(batch)
                    pending = [smaller, *pending, larger]
                    continue
                for offset in [copy.entry.offset for copy in batch] or gone:
                    outcome.failed[offset] = self._backoff(offset)
                if not error.by_message or not batch:
                    outcome.problem = str(error)
                    return
                refused += 1
                outcome.refused.append(self._refuse(batch[0], error))
                continue  # the offender waits by itself; nobody else is held up
            again = 0
            if claim is not None:
                outcome.acknowledged += sorted(claim.acknowledged)
                outcome.unread += claim.unread
            for offset in gone:
                if claim is None or offset not in claim.dropped:
                    (outcome.taken_late if offset in self._taken_late else outcome.gone).append(offset)
            gone = []
            for copy in _kept(batch, claim):
                (outcome.dead_lettered if copy.dead_letter else outcome.redelivered).append(copy)

    def _refuse(self, copy: Copy, error: TransactionAborted) -> str:
        """Note that Kafka refused `copy`; returns a text about it."""
        offset = copy.entry.offset
        before = self._refusals.get(offset)
        times = 0 if before is None else before.times
        if error.topic == self.queue.name:
            times += 1
        elif error.topic == self.queue.dead_letter_topic:
            times = max(0, times - 1)  # next, the queue topic is tried: its limit may have been raised
        why = f"topic {error.topic} takes no copy of about {copy.size} bytes ({error})"
        self._refusals[offset] = refusal = Refusal(times, why)
        return _refused_text(offset, refusal)

    def _transact(
        self, batch: list[Copy], gone: Sequence[int], may_go_on: Callable[[], bool]
    ) -> Claim | None:
        """Commit `batch` and the ends of `gone`; returns its claim, which tells what is not copied."""
        # Copies that are looked up, whether they were acknowledged, are only made when that is known.
        if all(copy.planned_at is None for copy in batch):
            with suppress(ClaimOvertaken):
                return self._transact_once(batch, gone, may_go_on, decide_first=False)
        return self._transact_once(batch, gone, may_go_on, decide_first=True)

    def _transact_once(
        self, batch: list[Copy], gone: Sequence[int], may_go_on: Callable[[], bool], *, decide_first: bool
    ) -> Claim | None:
        if self._producer is None:
            raise ProducerUnusable("no producer")
        dead = any(copy.dead_letter for copy in batch)  # then all of them are
        transaction = CopyTransaction(
            self._producer,
            self.queue.dead_letter_topic if dead else self.queue.name,
            self.queue.markers_topic,
            self._settings.effective_transaction_timeout_ms / 1000,
        )
        last_copies = {one.entry.offset: one.planned_at for one in batch if one.planned_at is not None}
        claim = self._claim(sorted({*(copy.entry.offset for copy in batch), *gone}), last_copies)

        def ends(places: Sequence[Place | None]) -> Iterable[NewRecord]:
            copied = dict(zip((copy.entry.offset for copy in _kept(batch, claim)), places, strict=True))
            left = [offset for offset in gone if claim is None or offset not in claim.dropped]
            late = [offset for offset in left if offset in self._taken_late]
            left = [offset for offset in left if offset not in self._taken_late]
            acknowledged = () if claim is None else sorted(claim.acknowledged)
            return itertools.chain(
                self._ends(copied, transaction.topic),
                self._ends(dict.fromkeys(left), transaction.topic),
                self._ends(dict.fromkeys(late), transaction.topic, TAKEN_LATE),
                self._ends(dict.fromkeys(acknowledged), transaction.topic, ACKNOWLEDGED),
            )

        try:
            transaction.execute(self._copies(batch, claim), ends, may_go_on, claim, decide_first=decide_first)
        except TransactionAborted as error:
            cause = KafkaException(error.cause)
            librdkafka.refresh_partition(self._producer, self.queue.dead_letter_topic, self._partition, cause)
            raise
        return claim

    def _claim(self, offsets: Sequence[int], last_copies: Mapping[int, int]) -> Claim | None:
        if not self.queue.claims or self._since_plan is None:
            return None
        within_s = self._settings.effective_transaction_timeout_ms / 2000
        return Claim(self._partition, offsets, self._since_plan, self._last_attempts, within_s, last_copies)

    def _copies(self, batch: list[Copy], claim: Claim | None) -> Iterator[NewRecord]:
        for copy in _kept(batch, claim):
            yield NewRecord(self._partition, copy.key, copy.value, copy.headers)

    def _ends(
        self, copies: Mapping[int, Place | None], copy_topic: str, reason: str | None = None
    ) -> Iterator[NewRecord]:
        return end_markers(
            *(self.queue.name, self._partition, copies),
            copy_topic=copy_topic,
            ranges=self.ranges,
            reason=reason,
        )

    def _backoff(self, offset: int) -> float:
        tries = self._tries[offset] = self._tries.get(offset, 0) + 1
        return _PAUSE.delay(tries)


def _kept(batch: list[Copy], claim: Claim | None) -> list[Copy]:
    """Return the copies that the claim, once it has decided, lets be made; their offsets ascend."""
    if claim is None or not claim.not_copied:
        return batch
    return [copy for copy in batch if copy.entry.offset not in claim.not_copied]


def _refused_text(offset: int, refusal: Refusal) -> str:
    return f"offset {offset}: {refusal.why}"
