"""When a producer of transactions may be used for another one (rule R36), without Kafka."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka.copies.copy_transaction import (
    CopyTransaction,
    NewRecord,
    ProducerUnusable,
    TransactionAborted,
)
from kmqpy.testing import ManualClock

COPY = NewRecord(0, None, b"copy", [])


class Producer:
    """Can't commit, but abort. `refused`: what the delivery reports of its records say."""

    may_end_again = False

    def __init__(self, refused=None):
        self.refused = refused
        self.begun, self.reports = 0, []

    def begin_transaction(self):
        self.begun += 1

    def produce(self, *_, on_delivery, **__):
        self.reports.append(on_delivery)

    def flush(self, _timeout_s):
        for report in self.reports:
            report(self.refused, Written())
        self.reports.clear()
        return 0

    def commit_transaction(self, _timeout_s):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, txn_requires_abort=True))

    def abort_transaction(self, _timeout_s):
        pass


class Written:
    def partition(self):
        return 0

    def offset(self):
        return 7


def execute(producer):
    CopyTransaction(producer, "q", "q__markers", 10, ManualClock()).execute([COPY], lambda _: [])


def test_r36_a_producer_whose_commit_may_have_been_sent_in_vain_begins_no_other_transaction():
    """It was aborted then; the commit may come late all the same, and would end the next one."""
    producer = Producer()
    with pytest.raises(TransactionAborted):
        execute(producer)
    assert producer.may_end_again
    with pytest.raises(ProducerUnusable, match="may come once more"):
        execute(producer)
    assert producer.begun == 1


def test_a_producer_whose_commit_was_not_sent_is_used_on():
    """librdkafka refuses to commit when a record has failed."""
    producer = Producer(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    for number in (1, 2):
        with pytest.raises(TransactionAborted):
            execute(producer)
        assert not producer.may_end_again
        assert producer.begun == number
