"""How a transaction of kmqpy that hangs in one partition must be ended, as the other one shows (rule R38).

It is asked about transactions that are over, which are soon made; test_hanging.py has some that hang.
"""

import contextlib
import time
from functools import partial

import pytest
from support import LiveQueue, until

from kmqpy.kafka import partition_reader
from kmqpy.kafka.copies.copy_headers import Origin, redelivery_headers
from kmqpy.kafka.copies.copy_transaction import (
    CopyTransaction,
    NewRecord,
    TransactionCancelled,
    open_producer,
)
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.copies.own_hanging import OwnTransaction, own_transaction
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.hanging import HangingTransaction
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import message_headers
from kmqpy.kafka.topic_names import dead_letter_queue


class Claim:
    """The claim of one message, of which nothing was decided since."""

    record = NewRecord(0, *naming_tick(0, CLAIM, [0]))

    def decide(self, _position: int) -> tuple[()]:
        return ()


def redeliver(queue: LiveQueue, *, commit: bool) -> None:
    """Message 0, as a tracker does."""
    producer = open_producer(queue.connection, f"kmq-tracker-{queue.name}-0", 60_000, "open", 30)
    transaction = CopyTransaction(producer, queue.name, queue.settings.markers_topic, 10)
    copy = NewRecord(0, None, b"a", redelivery_headers((), Origin(0, 0, 0), queue.settings, 1, ()))
    with contextlib.nullcontext() if commit else pytest.raises(TransactionCancelled):
        transaction.execute(
            [copy],
            lambda places: end_markers(queue.name, 0, {0: places[0]}, copy_topic=queue.name),
            lambda: commit,
            Claim(),
        )


def judged(queue: LiveQueue, topic: str, first: int, *, clock_ahead_s: int = 0) -> OwnTransaction | None:
    """What is known of the transaction of this first record; by its timestamp it is that much later."""
    found = []
    reader = partial(partition_reader.scan, limit=1, uncommitted=True)
    reader(queue.connection, topic, {0: first}, found.append)
    since_ms = int((time.time() + clock_ahead_s) * 1000)
    hanging = HangingTransaction(topic, 0, found[0].offset(), 1, since_ms, message_headers(found[0]))
    return own_transaction(queue.connection, queue.settings, hanging)


@pytest.mark.parametrize("commit", [True, False])
def test_r38_it_is_committed_if_it_was_committed_elsewhere(queue, commit):
    queue.send("a")
    redeliver(queue, commit=commit)
    copies = judged(queue, queue.name, 1, clock_ahead_s=300)
    ends = judged(queue, queue.settings.markers_topic, 0)
    assert (copies.commits, ends.commits) == (commit, commit)
    assert (copies.may_be_ended, ends.may_be_ended) == (not commit, True)
    assert copies.transactional_id == ends.transactional_id == f"kmq-tracker-{queue.name}-0"


def test_r38_what_a_redrive_has_sent_back_is_the_redrives(make_queue):
    queue = make_queue(max_redeliveries=0)
    tracker = queue.tracker()
    queue.send("a")
    queue.mark(Marker(0, 0, Op.TAKE, 300))
    until(queue.dead_letters, what=tracker.problems)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert letters.redrive() == 1
    copies = judged(queue, queue.name, 1)
    ends = judged(queue, dead_letter_queue(queue.settings).markers_topic, 0)
    assert (copies.commits, ends.commits) == (True, True)
    assert copies.transactional_id == ends.transactional_id == f"kmq-redrive-{queue.name}"


def test_r38_what_others_have_written_is_not_kmqpys_own(queue):
    queue.send("a")
    assert judged(queue, queue.name, 0) is None
