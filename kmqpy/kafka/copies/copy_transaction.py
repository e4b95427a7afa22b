"""Writes copies, and the end markers of their originals, in one Kafka transaction.

Readers see either both or neither, so a process that is killed at any point loses and duplicates no message.
One exception is mended by others: a late request may end a transaction too early (see open_claims).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.markers.claim_headers import CLAIM_ID, COPIES_TO
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, KafkaSettings

_COPY_SETTINGS: KafkaSettings = {"message.max.bytes": 100_000_000, "compression.type": "zstd"}
"""Settings of the producers: only the topics' limits count (rule R7 of docs/rules.md). Topics limit
compressed bytes, and zstd makes a copy about as small as its original with any codec."""
# Kafka, or librdkafka, refuses one record.
_RECORD_ERRORS = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
}
_NO_TOPIC_ERRORS = {
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}


class NewRecord(NamedTuple):
    """A record to append; for partition -1 the partitioner chooses the partition."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class TransactionClaim(Protocol):
    """The first record of a transaction, which names all messages that the transaction may end.

    It is one record before all others (R28), and it decides within the transaction (R27 of docs/rules.md).
    """

    @property
    def record(self) -> NewRecord:
        """The record to append to the markers topic."""

    def decide(self, position: int) -> Sequence[NewRecord]:
        """Decide which messages are copied, now that the record stands at markers offset `position`.

        Returns records for the markers topic that name the messages that the transaction leaves alone; empty
        if there are none. Raises TransactionCancelled if it can't decide.
        """


class TransactionAborted(Exception):
    """A record or a request failed, so the transaction was aborted: nothing of it happened.

    cause           the error of Kafka
    topic           the topic whose records failed
    by_message      True: one record is at fault; the caller can split the batch to find it
    by_predecessor  True: the sequence numbers of an aborted transaction are at fault; the same batch can
                    succeed now
    """

    def __init__(self, cause: KafkaError, topic: str) -> None:
        super().__init__(cause.name())
        self.cause = cause
        self.topic = topic
        self.by_message = cause.code() in _RECORD_ERRORS
        self.by_predecessor = cause.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER


class TransactionCancelled(Exception):
    """The claim or `may_go_on` forbade to commit, so the transaction was aborted: nothing of it happened."""


class ClaimOvertaken(TransactionCancelled):
    """The claim decided after the copies were written, and leaves one of their originals alone."""


class ProducerUnusable(Exception):
    """The producer can't go on, or the outcome of its transaction is unknown: the caller must open a new one.

    `errors` are those of Kafka, the first one first. Rule R1 of docs/rules.md: verify before
    trying again; R6: a fenced producer proves no successor.
    """

    def __init__(self, text: str, *errors: KafkaError | None) -> None:
        super().__init__(text)
        self.errors = errors


def open_producer(
    connection: KafkaConnection, transactional_id: str, timeout_ms: int, doing: str, within_s: float
) -> Producer:
    """Open a producer for transactions, which fences all older ones with this `transactional_id`.

    Kafka refuses the writes of fenced producers, and aborts the transactions that they left open.

    timeout_ms  after this time Kafka aborts an open transaction; also the time limit for sending a record
    doing       what error messages begin with

    Raises Unavailable and other errors of kmqpy if Kafka does not open it within `within_s` seconds.
    """
    producer = librdkafka.new_producer(
        connection,
        {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "message.timeout.ms": timeout_ms,
            "linger.ms": 5,
            **_COPY_SETTINGS,
        },
    )
    with kafka_errors.translating(doing, connection):
        producer.init_transactions(within_s)
    return producer


class CopyTransaction:
    """Appends copies to `topic` and the end markers of their originals to `markers_topic`, or nothing.

    For one call of execute(). `timeout_s` limits each request to Kafka. After execute(), the caller must open
    a new producer if `producer.may_end_again`.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        markers_topic: str,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.topic = topic
        self.markers_topic = markers_topic
        self._producer = producer
        self._timeout_s = timeout_s
        self._clock = clock
        # On the claim and the copies: it tells which belong together if their end markers are missing.
        self.claim_id = secrets.token_hex(8).encode()
        self._failures: list[tuple[KafkaError, str]] = []
        self._places: list[Place | None] = []
        self._claim_position = -1

    def execute(
        self,
        copies: Iterable[NewRecord],
        ends: Callable[[Sequence[Place | None]], Iterable[NewRecord]],
        may_go_on: Callable[[], bool] = lambda: True,
        claim: TransactionClaim | None = None,
        *,
        decide_first: bool = True,
    ) -> None:
        """Write the claim, the copies and the end markers; then ask `may_go_on`, and commit.

        copies        iterated after the claim has decided, or before if `decide_first` is False
        ends          called when the copies are written, with the partition and offset of each copy, in the
                      order of `copies`; None where Kafka does not tell
        may_go_on     called when all records are written; False: the transaction is aborted
        claim         written first; it decides which messages are copied. Only a transaction without copies
                      may have none
        decide_first  False: the claim decides after the copies are written, so that the copies need not wait
                      for the claim. If the claim then leaves a message alone, execute() raises ClaimOvertaken

        Raises TransactionAborted, TransactionCancelled (because of `may_go_on` or the claim) or
        ProducerUnusable.
        """
        producer, timeout_s = self._producer, self._timeout_s
        if producer.may_end_again:
            raise ProducerUnusable("a request that ended an earlier transaction may come once more")
        topic = self.topic
        written = False
        try:
            producer.begin_transaction()
            if claim is not None:
                topic = self.markers_topic
                self._produce_claim(claim.record)
                if decide_first:
                    self._flush_claim()
                    self._produce(topic, claim.decide(self._claim_position))
                topic = self.topic
            self._produce_copies(copies)
            unsent = producer.flush(timeout_s)
            if not unsent and not self._failures:
                topic = self.markers_topic
                if claim is not None and not decide_first and claim.decide(self._claim_position):
                    raise ClaimOvertaken
                self._produce(topic, ends(self._places))
                # Records that are sent after may_go_on() could go to a topic that was recreated meanwhile.
                unsent = producer.flush(timeout_s)
            written = True
            cancelled = not unsent and not self._failures and not may_go_on()
            if not unsent:
                self._end(commit=not cancelled)  # a commit raises if a record has failed
        except KafkaException as exception:
            error = kafka_errors.error_of(exception)
            known_to_fail = bool(self._failures) or _refused(error)
            if error is None or error.fatal() or not (error.txn_requires_abort() or known_to_fail):
                raise ProducerUnusable(kafka_errors.error_name(exception), error) from exception
            self._abort(error)
            # The records after a refused one fail, too, with errors that tell less.
            causes = [
                cause for cause in (*self._failures, (error, topic)) if cause[0].code() in _RECORD_ERRORS
            ]
            raise TransactionAborted(*(causes[0] if causes else (error, topic))) from exception
        except TransactionCancelled:
            self._abort(KafkaError(KafkaError._TIMED_OUT))
            raise
        except Exception as exception:
            if written:
                raise
            # A record of a type or content that librdkafka does not take (rule R21).
            error = KafkaError(KafkaError.INVALID_RECORD, repr(exception))
            self._abort(error)
            raise TransactionAborted(error, topic) from exception
        if unsent:
            error = KafkaError(KafkaError._TIMED_OUT)
            raise ProducerUnusable(error.name(), error)
        if cancelled:
            raise TransactionCancelled

    def _flush_claim(self) -> None:
        """Wait until the claim is written; raises KafkaException."""
        if self._producer.flush(self._timeout_s):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if self._failures:
            raise KafkaException(self._failures[0][0])

    def _abort(self, error: KafkaError) -> None:
        """Abort because of `error`; raises ProducerUnusable if Kafka refuses, as to a fenced producer."""
        try:
            self._end(commit=False)
        except KafkaException as failed:
            raise ProducerUnusable(
                kafka_errors.error_name(failed), error, kafka_errors.error_of(failed)
            ) from failed

    def _end(self, *, commit: bool) -> None:
        """Commit or abort the transaction, and note whether the request for it may come once more."""
        began = self._clock.monotonic()
        try:
            if commit:
                self._producer.commit_transaction(self._timeout_s)
            else:
                self._producer.abort_transaction(self._timeout_s)
        except KafkaException:
            if commit and not self._failures:  # it may have been sent, and no answer was waited for
                self._producer.may_end_again = True
            raise
        finally:
            if self._clock.monotonic() - began >= librdkafka.REPEATED_END_S:
                self._producer.may_end_again = True

    def _produce_claim(self, claim: NewRecord) -> None:
        """Produce the claim, with the headers by which its copies are found."""
        found_by = (CLAIM_ID, self.claim_id), (COPIES_TO, self.topic.encode())
        self._produce_one(self.markers_topic, claim, self._on_claim_delivery, *found_by)

    def _produce_copies(self, copies: Iterable[NewRecord]) -> None:
        claim_id = CLAIM_ID, self.claim_id
        for index, copy in enumerate(copies):
            self._places.append(None)
            self._produce_one(self.topic, copy, partial(self._on_copy_delivery, index), claim_id)

    def _produce(self, topic: str, records: Iterable[NewRecord]) -> None:
        report = partial(self._on_delivery, topic)
        for record in records:
            self._produce_one(topic, record, report)

    def _produce_one(
        self, topic: str, record: NewRecord, report: Any, *more_headers: tuple[str, bytes]
    ) -> None:
        headers: Any = [*record.headers, *more_headers]
        while True:
            try:
                self._producer.produce(
                    topic, record.value, record.key, record.partition, on_delivery=report, headers=headers
                )
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _on_claim_delivery(self, error: KafkaError | None, record: Any) -> None:
        self._on_delivery(self.markers_topic, error, record)
        if error is None:
            self._claim_position = record.offset()

    def _on_copy_delivery(self, index: int, error: KafkaError | None, record: Any) -> None:
        if error is not None:
            self._failures.append((error, self.topic))
        elif (offset := record.offset()) is not None:
            self._places[index] = record.partition(), offset

    def _on_delivery(self, topic: str, error: KafkaError | None, _record: Any) -> None:
        if error is not None:
            self._failures.append((error, topic))


def _refused(error: KafkaError | None) -> bool:
    """Return True for an error with which librdkafka refuses a record before it is sent."""
    return error is not None and (error.code() in _RECORD_ERRORS or error.code() in _NO_TOPIC_ERRORS)
