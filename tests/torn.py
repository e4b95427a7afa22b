"""Tears transactions apart, as a request of an earlier transaction does that comes late."""

from itertools import islice
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.kafka.copies.copy_transaction import CopyTransaction, ProducerUnusable


def tear(monkeypatch: Any, copies: int, *, after: int = 0) -> list[bool]:
    """Tear the next transaction that has a claim; the list that it returns is empty until then.

    copies  how many copies of the transaction become visible, with its claim and without end markers
    after   how many transactions with a claim are let be first
    """
    real, happened, passed = CopyTransaction.execute, [], []

    def execute(transaction: Any, made: Any, *args: Any, **more: Any) -> None:
        claim = more.get("claim") or (args[2] if len(args) > 2 else None)
        if happened or claim is None or len(passed) < after:
            passed.append(claim)
            real(transaction, made, *args, **more)
            return
        producer = transaction._producer
        producer.begin_transaction()
        transaction._produce_claim(claim.record)
        producer.flush(10)
        claim.decide(transaction._claim_position)
        transaction._produce_copies(islice(made, copies))
        producer.commit_transaction(10)
        happened.append(True)
        raise ProducerUnusable("refused", KafkaError(KafkaError.INVALID_TXN_STATE))

    monkeypatch.setattr(CopyTransaction, "execute", execute)
    return happened
