"""Redelivers one partition's due messages: one plan, one Kafka transaction.

The copies and the end markers of their originals are in the same transaction, so a tracker that was
killed at any point, or a successor, reads either both or neither and never makes a duplicate.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from kmqpy import kafka, markers
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import Unavailable
from kmqpy.inflight import Entry
from kmqpy.markers import Op
from kmqpy.message import headers_of
from kmqpy.starting import is_fatal
from tracker.plan import Copy, Original, batches, copy_of
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 5.0
_MAX_GAP = 500
"""Offsets to read over rather than seek."""
_MAX_FETCH_BYTES = 32_000_000
_READ_AT_ONCE = 1_000

SOON_S = 0.05
"""Until the next try of what only had no room."""
_AT_ONCE = 3
"""How often a batch is tried again at once."""

_BY_MESSAGE = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
}
_NO_TOPIC = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}


class Aborted(Exception):
    """The transaction was aborted; nothing of it happened.

    `by_message`: a message of the batch is what Kafka refused, not the batch as such.
    `by_predecessor`: what an aborted one before it left behind; the same batch can work now.
    """

    def __init__(self, cause: KafkaError) -> None:
        super().__init__(cause.name())
        self.by_message = cause.code() in _BY_MESSAGE
        self.by_predecessor = cause.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER


class Broken(Exception):
    """The producer can't go on, or the outcome is unknown: take over again (rules R1, R6)."""


@dataclass
class Fetched:
    """Originals by offset; `gone` are those that Kafka has no more.

    `out_of_reach`: can't be read now, for a reason that may last. Nowhere: it was not their turn.
    """

    found: dict[int, Original] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    out_of_reach: list[int] = field(default_factory=list)


class OriginalsReader:
    """Reads records of queue topics by offset; used by one thread at a time."""

    def __init__(self, connection: Connection, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._consumer: Consumer = kafka.consumer(
            connection,
            {
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 10,
                "queued.max.messages.kbytes": 32_768,
            },
        )

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> Fetched:
        """The records at `offsets` (sorted), as far as they can be had now.

        A record is gone (rule R14) when its offset is below the log start, or when reading from it
        or from before gave a higher offset without an error. Raises KafkaException.
        """
        fetched = Fetched()
        low = self.log_start(topic, partition)
        fetched.gone = [offset for offset in offsets if offset < low]
        wanted = list(offsets[len(fetched.gone) :])
        if not wanted:
            return fetched
        self._consumer.assign([TopicPartition(topic, partition, wanted[0])])
        try:
            self._read(topic, partition, wanted, fetched)
        finally:
            self._consumer.unassign()
        return fetched

    def log_start(self, topic: str, partition: int) -> int:
        """The first offset there is; raises KafkaException."""
        place = TopicPartition(topic, partition)
        try:
            bounds = self._consumer.get_watermark_offsets(place, timeout=_FETCH_TIMEOUT_S)
        except KafkaException as exception:
            if not kafka.look_again(self._consumer, topic, partition, exception):
                raise
            bounds = self._consumer.get_watermark_offsets(place, timeout=_FETCH_TIMEOUT_S)
        if bounds is None:  # what librdkafka's binding gives for a time-out
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return int(bounds[0])

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _read(self, topic: str, partition: int, wanted: list[int], fetched: Fetched) -> None:
        found, index, size = fetched.found, 0, 0
        deadline = self._clock.monotonic() + _FETCH_TIMEOUT_S
        while index < len(wanted) and size < _MAX_FETCH_BYTES and self._clock.monotonic() < deadline:
            for record in self._consumer.consume(min(len(wanted) - index, _READ_AT_ONCE), 0.1):
                error = record.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if not index:
                        raise KafkaException(error)
                    fetched.out_of_reach = wanted[index:]
                    return  # what lies before it is good
                position: int = record.offset()  # type: ignore[assignment]
                # What lies below a record, or below the end of what can be read, is not there.
                while wanted[index] < position:
                    fetched.gone.append(wanted[index])
                    index += 1
                    if index == len(wanted):
                        return
                if error is not None:
                    fetched.out_of_reach = wanted[index:]
                    return  # beyond the last stable offset: wait
                if wanted[index] == position:
                    found[position] = original = _original(record)
                    size += len(original.value or b"") + len(original.key or b"")
                    index += 1
                    if index == len(wanted):
                        return
                    deadline = self._clock.monotonic() + _FETCH_TIMEOUT_S
                if wanted[index] - position > _MAX_GAP:
                    self._consumer.seek(TopicPartition(topic, partition, wanted[index]))
                    break


@dataclass
class Outcome:
    """What became of the entries of one call.

    redelivered, dead_lettered, gone   committed: their end markers are in the log
    failed                             offset -> seconds until the next try
    broken                             take over again before anything else
    """

    redelivered: list[Copy] = field(default_factory=list)
    dead_lettered: list[Copy] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    failed: dict[int, float] = field(default_factory=dict)
    undecodable_counts: int = 0
    broken: bool = False
    dead_letter_problem: str | None = None
    problem: str | None = None

    @property
    def copies(self) -> list[Copy]:
        """All that was committed."""
        return self.redelivered + self.dead_lettered


class Redeliverer:
    """The transactional producer of one partition, and what is done with it.

    `transactional.id` is the partition's, so opening it fences every predecessor for good. `queue`
    may be replaced when its settings change. `ranges`: end markers may be range markers, because a
    client has written such; before that, there might be JVM trackers about, which don't know them.
    """

    def __init__(
        self, connection: Connection, queue: QueueSettings, partition: int, settings: TrackerSettings
    ) -> None:
        self.queue = queue
        self.ranges = False
        self._connection = connection
        self._partition = partition
        self._settings = settings
        self._producer: Producer | None = None
        self._tries: dict[int, int] = {}
        self._refused: set[int] = set()

    def open(self, timeout_s: float) -> None:
        """Fence predecessors and abort what they left open; raises Unavailable and the like."""
        self.close()
        timeout_ms = self._settings.effective_transaction_timeout_ms
        producer = kafka.producer(
            self._connection,
            {
                "transactional.id": f"kmq-tracker-{self.queue.name}-{self._partition}",
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": timeout_ms,
                "linger.ms": 5,
                "delivery.report.only.error": True,
                # The topics' limits decide, which are above what send() takes (rule R7).
                "message.max.bytes": 100_000_000,
            },
        )
        with kafka.kafka_errors(f"take over {self.queue.name}-{self._partition}", self._connection):
            producer.init_transactions(timeout_s)
        self._producer = producer

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
    ) -> Outcome:
        """Append the copies of `entries`, or dead-letter them; never raises.

        `may_go_on` is asked before each transaction. Dead letters have transactions of their own,
        so that a missing dead-letter topic holds back nobody (rule R7).
        """
        outcome = Outcome()
        by_offset = {entry.offset: entry for entry in entries}
        try:
            fetched = reader.fetch(self.queue.name, self._partition, sorted(by_offset))
        except KafkaException as exception:
            outcome.problem = f"originals can't be read: {_name(exception)}"
            outcome.failed = {offset: self._backoff(offset) for offset in by_offset}
            return outcome
        copies = [
            copy_of(by_offset[offset], original, self.queue, self._partition)
            for offset, original in fetched.found.items()
        ]
        outcome.undecodable_counts = sum(copy.undecodable_count for copy in copies)
        outcome.failed = {offset: self._backoff(offset) for offset in fetched.out_of_reach}
        live = [copy for copy in copies if not copy.dead_letter]
        dead = [copy for copy in copies if copy.dead_letter]
        try:
            self._send_all(live, fetched.gone, outcome, may_go_on)
            if dead and not dead_letters_exist():
                outcome.dead_letter_problem = f"topic {self.queue.dead_letter_topic} does not exist"
            elif dead:
                self._send_all(dead, [], outcome, may_go_on)
        except Broken as error:
            outcome.broken = True
            outcome.problem = str(error)
        done = {copy.entry.offset for copy in outcome.copies} | {*outcome.gone}
        for offset in by_offset.keys() - done - outcome.failed.keys():
            was_dead = any(copy.entry.offset == offset for copy in dead) and outcome.dead_letter_problem
            outcome.failed[offset] = self._backoff(offset) if was_dead else SOON_S
        if self._tries:
            for offset in done:
                self._tries.pop(offset, None)
        self._refused -= done
        return outcome

    def _send_all(
        self, copies: list[Copy], gone: list[int], outcome: Outcome, may_go_on: Callable[[], bool]
    ) -> None:
        # Alone and last, what was refused before costs the others nothing.
        refused = [copy for copy in copies if copy.entry.offset in self._refused]
        good = [copy for copy in copies if copy.entry.offset not in self._refused]
        pending = batches(good, self._settings.max_batch_messages, self._settings.max_batch_bytes)
        pending += [[copy] for copy in refused]
        again = 0
        if gone and not pending:
            pending = [[]]
        while pending:
            if not may_go_on():
                return
            batch = pending.pop(0)
            try:
                self._transact(batch, gone)
            except Aborted as error:
                if error.by_predecessor and again < _AT_ONCE:
                    again += 1
                    pending.insert(0, batch)
                    continue
                if error.by_message and len(batch) > 1:
                    middle = len(batch) // 2
                    pending[:0] = [batch[:middle], batch[middle:]]
                    continue
                outcome.problem = str(error)
                for copy in batch:
                    outcome.failed[copy.entry.offset] = self._backoff(copy.entry.offset)
                if not error.by_message:
                    return
                self._refused.update(copy.entry.offset for copy in batch)
                continue  # the offender waits by itself; nobody else is held up
            again = 0
            outcome.gone += gone
            gone = []
            for copy in batch:
                (outcome.dead_lettered if copy.dead_letter else outcome.redelivered).append(copy)

    def _transact(self, batch: list[Copy], gone: Sequence[int]) -> None:
        producer = self._producer
        if producer is None:
            raise Broken("no producer")
        errors: list[KafkaError] = []

        def report(error: KafkaError | None, _record: Any) -> None:
            if error is not None:
                errors.append(error)

        copied = sorted(copy.entry.offset for copy in batch)
        try:
            producer.begin_transaction()
            for copy in batch:
                topic = self.queue.dead_letter_topic if copy.dead_letter else self.queue.name
                self._produce(producer, topic, copy.key, copy.value, list(copy.headers), report)
            for key, value, headers in itertools.chain(self._ends(copied), self._ends(gone)):
                self._produce(producer, self.queue.markers_topic, key, value, headers, report)
            producer.commit_transaction(self._settings.effective_transaction_timeout_ms / 1000)
        except KafkaException as exception:
            error = kafka.error_of(exception)
            known_to_fail = bool(errors) or _refused(error)
            kafka.look_again(producer, self.queue.dead_letter_topic, self._partition, exception)
            if error is None or error.fatal() or not (error.txn_requires_abort() or known_to_fail):
                raise Broken(_name(exception)) from exception
            try:
                producer.abort_transaction(self._settings.effective_transaction_timeout_ms / 1000)
            except KafkaException as failed:
                raise Broken(_name(failed)) from failed
            # What one message did also fails those after it, with errors that say less.
            causes = [cause for cause in (error, *errors) if cause.code() in _BY_MESSAGE]
            raise Aborted(causes[0] if causes else error) from exception

    def _ends(self, offsets: Sequence[int]) -> Iterable[tuple[bytes, bytes, markers.Headers]]:
        if self.ranges and len(offsets) > 1:
            found = markers.ranges(self._partition, Op.END, offsets, by_tracker=True)
            return [markers.encode(marker) for marker in found]
        _, value, headers = markers.encode(markers.tick(self._partition))  # but for the key, the same
        return ((markers.encode_key(self._partition, offset), value, headers) for offset in offsets)

    def _produce(
        self,
        producer: Producer,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Any,
        report: Any,
    ) -> None:
        while True:
            try:
                producer.produce(topic, value, key, self._partition, on_delivery=report, headers=headers)
            except BufferError:
                producer.poll(0.05)
            else:
                return

    def _backoff(self, offset: int) -> float:
        tries = self._tries[offset] = self._tries.get(offset, 0) + 1
        return float(min(30.0, 0.2 * 2 ** min(tries, 10)))


class Ticker:
    """Appends ticks, for any thread; raises Unavailable where that fails.

    A fatal error (a broker lost what it had acknowledged, or we may not write yet) ends an idempotent
    producer for good: then another takes its place.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._producer = self._new_producer()
        self._broken = False

    def post_tick(self, topic: str, partition: int) -> None:
        """Append a tick without waiting for it; `poll` now and then."""
        try:
            self._produce(self._current(), topic, partition, lambda *_: None)
        except KafkaException as exception:
            raise _no_tick(topic, partition, exception) from exception

    def send_tick(self, topic: str, partition: int, timeout_s: float) -> int:
        """Append a tick and return its markers offset."""
        producer = self._current()
        offsets: list[int | None] = []

        def report(error: KafkaError | None, record: Any) -> None:
            offsets.append(None if error is not None else record.offset())

        try:
            self._produce(producer, topic, partition, report)
        except KafkaException as exception:
            if not kafka.look_again(producer, topic, partition, exception):
                raise _no_tick(topic, partition, exception) from exception
            self._produce(producer, topic, partition, report)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        while not offsets and SYSTEM_CLOCK.monotonic() < deadline:
            producer.poll(0.02)
        if not offsets or offsets[0] is None:
            raise _no_tick(topic, partition)
        return offsets[0]

    def poll(self) -> None:
        """See what became of those that were posted."""
        self._producer.poll(0)

    def close(self) -> None:
        """Give what was posted a moment to arrive."""
        self._producer.flush(1)

    def _new_producer(self) -> Producer:
        return kafka.producer(self._connection, {"linger.ms": 0, "message.timeout.ms": 5_000})

    def _current(self) -> Producer:
        with self._lock:
            if self._broken:
                _log.error("producer of ticks replaced after a fatal error")
                self._producer, self._broken = self._new_producer(), False
            return self._producer

    def _produce(self, producer: Producer, topic: str, partition: int, done: Callable[..., None]) -> None:
        def report(error: KafkaError | None, record: Any) -> None:
            # Knows not of which producer, which it would keep alive; one replaced for nothing is no harm.
            self._broken = self._broken or is_fatal(error)
            done(error, record)

        key, value, headers = markers.encode(markers.tick(partition))
        try:
            producer.produce(topic, value, key, partition, on_delivery=report, headers=headers)  # type: ignore[arg-type]
        except BufferError:
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
        except KafkaException as exception:
            self._broken = self._broken or is_fatal(kafka.error_of(exception))
            raise


def _no_tick(topic: str, partition: int, why: KafkaException | None = None) -> Unavailable:
    text = f"markers topic {topic}, partition {partition}: a tick could not be written"
    return Unavailable(text if why is None else f"{text}: {_name(why)}")


def _original(record: Any) -> Original:
    return Original(
        record.offset(), record.timestamp()[1], record.key(), record.value(), headers_of(record.headers())
    )


def _refused(error: KafkaError | None) -> bool:
    """Refused by produce() itself, before anything was sent."""
    return error is not None and (error.code() in _BY_MESSAGE or error.code() in _NO_TOPIC)


def _name(exception: KafkaException) -> str:
    error = kafka.error_of(exception)
    return error.name() if error is not None else str(exception)
