"""One Kafka transaction of copies and of the end markers of their originals.

Readers see either both or neither, so that a process killed at any point loses and duplicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy.kafka import librdkafka
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection

_BY_MESSAGE = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
}
_NO_TOPIC = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}


class NewRecord(NamedTuple):
    """A record to append; partition -1: the partitioner's choice."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Claim(Protocol):
    """The first record of a transaction: it names everything that the transaction is to end (rule R28)."""

    @property
    def record(self) -> NewRecord:
        """The record, of the markers topic."""

    def decide(self, position: int) -> Sequence[NewRecord]:
        """Decide which messages are copied, now that the record stands at markers offset `position`.

        Returns records for the markers topic that name the messages that are not copied after all; empty if
        all are copied. Raises TransactionCancelled.
        """


class TransactionAborted(Exception):
    """The transaction was aborted; nothing of it happened.

    topic           the topic whose records failed
    by_message      one record is at fault: split the batch to find it
    by_predecessor  an aborted transaction left sequence numbers behind: the same batch can work now
    """

    def __init__(self, cause: KafkaError, topic: str) -> None:
        super().__init__(cause.name())
        self.cause = cause
        self.topic = topic
        self.by_message = cause.code() in _BY_MESSAGE
        self.by_predecessor = cause.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER


class TransactionCancelled(Exception):
    """The transaction was aborted, since it must not be committed; nothing of it happened."""


class ClaimOvertaken(TransactionCancelled):
    """The transaction was aborted: it had copied what its claim, which decided after that, leaves alone."""


class ProducerUnusable(Exception):
    """The producer can't go on, or the outcome is unknown: open a new one (rules R1, R6).

    `errors`: Kafka's, the first of them being what went wrong first.
    """

    def __init__(self, text: str, *errors: KafkaError | None) -> None:
        super().__init__(text)
        self.errors = errors


def open_producer(
    connection: KafkaConnection, transactional_id: str, timeout_ms: int, doing: str, within_s: float
) -> Producer:
    """A producer that fences every other one of `transactional_id` and aborts what these left open.

    timeout_ms  after which Kafka aborts a transaction by itself
    doing       begins error messages

    Raises Unavailable and the like when it can't be opened within `within_s` seconds.
    """
    producer = librdkafka.new_producer(
        connection,
        {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "message.timeout.ms": timeout_ms,
            "linger.ms": 5,
            **librdkafka.COPY_SETTINGS,
        },
    )
    with librdkafka.kafka_errors(doing, connection):
        producer.init_transactions(within_s)
    return producer


class CopyTransaction:
    """Appends copies to `topic` and the end markers of their originals to `markers_topic`, or nothing."""

    def __init__(self, producer: Producer, topic: str, markers_topic: str, timeout_s: float) -> None:
        self.topic = topic
        self.markers_topic = markers_topic
        self._producer = producer
        self._timeout_s = timeout_s
        self._failures: list[tuple[KafkaError, str]] = []
        self._places: list[Place | None] = []
        self._claim_position = -1

    def execute(
        self,
        copies: Iterable[NewRecord],
        ends: Callable[[Sequence[Place | None]], Iterable[NewRecord]],
        may_go_on: Callable[[], bool] = lambda: True,
        claim: Claim | None = None,
        *,
        decide_first: bool = True,
    ) -> None:
        """Write everything, ask `may_go_on`, commit.

        copies        iterated once the claim has decided
        ends          called when the copies are written, with the partition and offset of each, in their
                      order; None where Kafka does not tell
        claim         written first; it decides which messages are copied
        decide_first  False: the claim decides behind the copies, so that nothing waits until the claim is
                      written by itself. If it then leaves anything alone, ClaimOvertaken is raised

        Raises TransactionAborted, TransactionCancelled (by `may_go_on` or the claim) or ProducerUnusable.
        """
        producer, timeout_s = self._producer, self._timeout_s
        topic = self.topic
        written = False
        try:
            producer.begin_transaction()
            if claim is not None:
                topic = self.markers_topic
                self._produce_one(topic, claim.record, self._note_claim)
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
            if cancelled:
                producer.abort_transaction(timeout_s)
            elif not unsent:
                producer.commit_transaction(timeout_s)  # says what is wrong where a record has failed
        except KafkaException as exception:
            error = librdkafka.error_of(exception)
            known_to_fail = bool(self._failures) or _refused(error)
            if error is None or error.fatal() or not (error.txn_requires_abort() or known_to_fail):
                raise ProducerUnusable(librdkafka.error_name(exception), error) from exception
            self._abort(error)
            # The messages after a refused one fail, too, with errors that tell less.
            causes = [cause for cause in (*self._failures, (error, topic)) if cause[0].code() in _BY_MESSAGE]
            raise TransactionAborted(*(causes[0] if causes else (error, topic))) from exception
        except TransactionCancelled:
            self._abort(KafkaError(KafkaError._TIMED_OUT))
            raise
        except Exception as exception:
            if written:
                raise
            # librdkafka can't be given one of the records (rule R21).
            error = KafkaError(KafkaError.INVALID_RECORD, repr(exception))
            self._abort(error)
            raise TransactionAborted(error, topic) from exception
        if unsent:
            error = KafkaError(KafkaError._TIMED_OUT)
            raise ProducerUnusable(error.name(), error)
        if cancelled:
            raise TransactionCancelled

    def _flush_claim(self) -> None:
        """Wait until the claim is written."""
        if self._producer.flush(self._timeout_s):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if self._failures:
            raise KafkaException(self._failures[0][0])

    def _abort(self, error: KafkaError) -> None:
        """Abort because of `error`. Kafka answers only if nobody has taken over (rule R1)."""
        try:
            self._producer.abort_transaction(self._timeout_s)
        except KafkaException as failed:
            raise ProducerUnusable(
                librdkafka.error_name(failed), error, librdkafka.error_of(failed)
            ) from failed

    def _produce_copies(self, copies: Iterable[NewRecord]) -> None:
        for index, copy in enumerate(copies):
            self._places.append(None)
            self._produce_one(self.topic, copy, partial(self._note_copy, index))

    def _produce(self, topic: str, records: Iterable[NewRecord]) -> None:
        report = partial(self._note, topic)
        for record in records:
            self._produce_one(topic, record, report)

    def _produce_one(self, topic: str, record: NewRecord, report: Any) -> None:
        headers: Any = list(record.headers)
        while True:
            try:
                self._producer.produce(
                    topic, record.value, record.key, record.partition, on_delivery=report, headers=headers
                )
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _note_claim(self, error: KafkaError | None, record: Any) -> None:
        self._note(self.markers_topic, error, record)
        if error is None:
            self._claim_position = record.offset()

    def _note_copy(self, index: int, error: KafkaError | None, record: Any) -> None:
        if error is not None:
            self._failures.append((error, self.topic))
        elif (offset := record.offset()) is not None:
            self._places[index] = record.partition(), offset

    def _note(self, topic: str, error: KafkaError | None, _record: Any) -> None:
        if error is not None:
            self._failures.append((error, topic))


def _refused(error: KafkaError | None) -> bool:
    """Return True for an error of produce() itself, before anything was sent."""
    return error is not None and (error.code() in _BY_MESSAGE or error.code() in _NO_TOPIC)
