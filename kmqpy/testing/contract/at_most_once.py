"""Tests of queues that forget a message when it is taken: what is given back is as if it had not been."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from kmqpy.errors import NotSupported, ReceiptError
from kmqpy.queue import Storage
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    MakeQueue,
    Target,
    assert_becomes,
    drain,
    skip_without,
    take,
    take_one,
)


@pytest.fixture
def forgetful(kmq_target: Target, make_queue: MakeQueue) -> MakeQueue:
    """A function that makes at-most-once queues."""
    with kmq_target.open() as storage:
        skip_without(storage.capabilities, "at_most_once")
    return partial(make_queue, delivery="at-most-once")


def test_at_most_once_forgets_what_is_taken(kmq_target: Target, forgetful: MakeQueue) -> None:
    queue = forgetful()
    queue.send_many(["a", "b"])
    message = take_one(queue)
    assert (queue.size(), queue.in_flight()) == (1, 0)
    queue.ack(message)
    with pytest.raises(NotSupported, match="at-most-once"):
        queue.extend(message, lease=LEASE_S)
    for one in (message.receipt, dataclasses.replace(message)):  # they hold no row to put back
        with pytest.raises(ReceiptError, match="at-most-once"):
            queue.nack(one)
        with pytest.raises(ReceiptError, match="at-most-once"):
            queue.dead_letter(one)
    kmq_target.pass_time(PAST_LEASE_S)
    assert len(drain(queue, 1)) == 1
    assert (queue.dead_letters.list(), queue.orphans()) == ([], [])


def test_at_most_once_puts_back_what_is_given_back(kmq_target: Target, forgetful: MakeQueue) -> None:
    queue = forgetful()
    can = queue.capabilities
    priority = 5 if can.priority else 0
    queue.send(b"\0body", key="k", headers=[("a", b"\xff"), ("b", "x")], priority=priority)
    first = take_one(queue)
    kmq_target.pass_time(0.2)
    queue.nack(first)
    assert (queue.size(), queue.in_flight()) == (1, 0)
    second = take_one(queue)
    assert (second.body, second.key, second.headers) == (first.body, first.key, first.headers)
    assert (first.attempts, second.attempts) == (1, 2)
    assert second.first_enqueued_ms == first.first_enqueued_ms
    assert second.enqueued_ms > first.enqueued_ms
    assert second.id == first.id
    if can.priority:
        queue.send("low", priority=priority - 1)
        queue.send("high", priority=priority + 1)
        queue.nack(second, count=False)
        queue.ack(high := take_one(queue))
        assert high.body == b"high"
    else:
        queue.nack(second, count=False)
    third = take_one(queue)
    assert (third.body, third.attempts) == (first.body, 2)
    assert third.enqueued_ms == second.enqueued_ms
    assert queue.size() == int(can.priority)


def test_at_most_once_puts_back_one_message_however_often_it_is_given(forgetful: MakeQueue) -> None:
    queue = forgetful()
    queue.send_many([b"%d" % number for number in range(30)])
    messages = take(queue, 30)
    queue.nack(messages)
    queue.nack(messages)
    queue.nack(messages[:3] * 2)
    assert queue.size() == 30
    assert sorted(map(int, drain(queue, 30))) == [*range(30)]


@pytest.mark.parametrize("requeue_to", ["back", "front"])
def test_at_most_once_puts_back_in_order(requeue_to: str, kmq_storage: Storage, forgetful: MakeQueue) -> None:
    skip_without(kmq_storage.capabilities, "fifo", "immediate")
    if requeue_to == "front":
        skip_without(kmq_storage.capabilities, "requeue_to_front")
    queue = forgetful(requeue_to=requeue_to)
    queue.send_many(["a", "b", "c", "d"])
    first, second, _ = take(queue, 3)
    queue.nack(second)
    queue.nack(first)
    queue.send("e")
    expected = [b"a", b"b", b"d", b"e"] if requeue_to == "front" else [b"d", b"b", b"a", b"e"]
    assert drain(queue, 4) == expected


def test_at_most_once_gives_back_with_a_delay(kmq_target: Target, forgetful: MakeQueue) -> None:
    queue = forgetful()
    skip_without(queue.capabilities, "delay")
    queue.send("x")
    queue.nack(take_one(queue), delay=LEASE_S)
    assert queue.receive(wait=0) == []
    assert queue.size() == 1
    kmq_target.pass_time(PAST_LEASE_S)
    assert take_one(queue).attempts == 2


def test_at_most_once_has_dead_letters_of_what_was_given_back_too_often(forgetful: MakeQueue) -> None:
    queue = forgetful(max_redeliveries=1)
    queue.send("often", key="k", headers={"a": "1"})
    queue.nack(take_one(queue))
    queue.nack(take_one(queue), reason="why")
    assert (queue.size(), queue.in_flight()) == (0, 0)
    queue.send("at once")
    queue.dead_letter(take_one(queue), reason="bad")
    assert_becomes(queue, lambda: len(queue.dead_letters.list()), 2)
    often, at_once = queue.dead_letters.peek()
    assert (often.body, often.attempts, often.reason) == (b"often", 2, "nack: why")
    assert (at_once.body, at_once.attempts, at_once.reason) == (b"at once", 1, "rejected: bad")
    assert often.headers == (("a", b"1"),)
    assert queue.dead_letters.redrive(limit=1) == 1
    message = take_one(queue)
    assert (message.body, message.key, message.attempts) == (b"often", b"k", 1)
