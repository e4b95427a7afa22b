"""Tests of sizes, of messages in flight (orphans), of dead letters, and of purge and release_all."""

from __future__ import annotations

import threading

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, ReceiptError
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    PATIENCE_S,
    MakeQueue,
    Target,
    assert_becomes,
    assert_dead,
    assert_sizes,
    at_once,
    drain,
    own_headers,
    take,
    take_one,
)


def test_the_size_is_what_is_neither_in_flight_nor_dead(queue: Queue) -> None:
    queue.send_many(["x"] * 10)
    messages = take(queue, 4, lease=60)
    queue.dead_letter(messages[0], confirmed=True)
    queue.ack(messages[1], confirmed=True)
    assert_dead(queue, 1)
    assert_sizes(queue, waiting=6, in_flight=2)
    assert [queue.size(limit) for limit in (1, 5, 6, 100)] == [1, 5, 6, 6]
    with pytest.raises(ConfigError):
        queue.size(0)


def test_sizes_are_exact_under_load(queue: Queue) -> None:
    done = threading.Event()
    acked = [0] * 4
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S

    def run(number: int) -> None:
        if number == 0:
            while queue.capabilities.exact_sizes and not done.is_set():
                assert 0 <= queue.size() + queue.in_flight() <= 400
            return
        if number <= 4:
            for _ in range(10):
                queue.send_many(["x"] * 10)
            return
        while not done.is_set() and SYSTEM_CLOCK.monotonic() < deadline:
            messages = queue.receive(3, wait=0.2, lease=60)
            queue.ack(messages, confirmed=True)
            acked[number - 5] += len(messages)
            if sum(acked) >= 400:
                done.set()

    try:
        at_once(9, run)
    finally:
        done.set()
    assert sum(acked) == 400
    assert_sizes(queue, waiting=0, in_flight=0)


def test_orphans_are_all_that_is_taken_and_not_finished(kmq_target: Target, queue: Queue) -> None:
    queue.send_many([b"%d" % number for number in range(1250)])
    taken = take(queue, 1250, lease=60)
    queue.ack(taken[0], confirmed=True)
    orphans = queue.orphans()
    assert {one.receipt for one in orphans} == {one.receipt for one in taken[1:]}
    by_receipt = {one.receipt: one for one in taken}
    for one in orphans:
        assert one.message is not None
        assert (one.message.id, one.message.body) == (
            by_receipt[one.receipt].id,
            by_receipt[one.receipt].body,
        )
        assert one.since_ms < one.lease_until_ms
    queue.ack([one.receipt for one in orphans[:1000]], confirmed=True)
    assert orphans[1000].message is not None
    orphans[1000].message.ack(confirmed=True)
    queue.nack([one.receipt for one in orphans[1001:]], count=False, confirmed=True)
    assert_sizes(queue, waiting=248, in_flight=0)
    assert queue.orphans() == []


def test_orphans_up_to_a_limit_are_those_that_were_sent_first(queue: Queue) -> None:
    queue.send_many(str(n) for n in range(5))
    taken = take(queue, 5, lease=60)
    assert [queue.in_flight(limit) for limit in (3, 9)] == [3, 5]
    found = queue.orphans(limit=2)
    assert len(found) == 2
    if queue.capabilities.fifo:
        assert [one.receipt for one in found] == [one.receipt for one in taken[:2]]
    for bad in (0, -1):
        with pytest.raises(ConfigError, match="limit"):
            queue.orphans(limit=bad)
        with pytest.raises(ConfigError, match="limit"):
            queue.in_flight(bad)


def test_no_two_queues_have_one_unique_id(
    kmq_target: Target, kmq_storage: Storage, make_queue: MakeQueue
) -> None:
    first, second = make_queue(), make_queue()
    with kmq_target.open() as storage, storage.open(first.name) as again:
        assert first.unique_id == again.unique_id != second.unique_id
    kmq_storage.delete(first.name)
    kmq_storage.create(first.name)
    with kmq_storage.open(first.name) as later:
        assert later.unique_id != first.unique_id


def test_orphans_by_the_age_of_the_take(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["a", "b"])
    first = take_one(queue, lease=60)
    kmq_target.pass_time(PAST_LEASE_S)
    before_s = SYSTEM_CLOCK.monotonic()
    second = take_one(queue, lease=60)
    found = [one.receipt for one in queue.orphans(older_than=LEASE_S)]
    is_slow = SYSTEM_CLOCK.monotonic() - before_s > LEASE_S  # so the second one is old, too
    assert found == [first.receipt] or (is_slow and found == [first.receipt, second.receipt])
    assert [one.receipt for one in queue.orphans()] == [first.receipt, second.receipt]
    assert queue.orphans(older_than=3600) == []


def test_orphans_by_the_time_they_were_queued(kmq_target: Target, queue: Queue) -> None:
    queue.send("a")
    kmq_target.pass_time(0.05)
    queue.send("b")
    first, second = sorted(take(queue, 2, lease=60), key=lambda one: one.enqueued_ms)
    found = queue.orphans(queued_before_ms=second.enqueued_ms)
    assert [one.receipt for one in found] == [first.receipt]
    assert len(queue.orphans(queued_before_ms=second.enqueued_ms + 1)) == 2
    assert queue.orphans(queued_before_ms=first.enqueued_ms) == []
    with pytest.raises(ConfigError, match="not both"):
        queue.orphans(1, queued_before_ms=1)


def test_what_is_redelivered_is_no_orphan(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    take_one(queue)
    kmq_target.pass_time(PAST_LEASE_S)
    assert_becomes(queue, lambda: len(queue.orphans()), 0)


def test_dead_letters_are_kept_with_their_reason(kmq_target: Target, queue: Queue) -> None:
    ids = queue.send_many(["a", "bb"], key="k", headers={"h": "1"})
    first, second = sorted(take(queue, 2, lease=60), key=lambda one: one.body)
    queue.dead_letter(first, reason="bad \ud800body", confirmed=True)
    kmq_target.pass_time(0.01)
    queue.dead_letter(second.receipt, confirmed=True)
    listed, peeked = assert_dead(queue, 2), queue.dead_letters.peek()
    assert [(one.size, one.attempts, one.key) for one in listed] == [(1, 1, b"k"), (2, 1, b"k")]
    assert [one.id for one in listed] == ids
    assert [one.reason for one in listed] == ["rejected: bad ?body", "rejected"]
    assert [(one.body, one.headers) for one in listed] == [(b"", ())] * 2
    assert [(one.body, own_headers(one)) for one in peeked] == [
        (b"a", (("h", b"1"),)),
        (b"bb", (("h", b"1"),)),
    ]
    sent_ms = [first.first_enqueued_ms, second.first_enqueued_ms]
    assert [one.first_enqueued_ms for one in listed] == sent_ms
    assert all(one.dead_since_ms >= max(sent_ms) for one in listed)
    assert len(queue.dead_letters.list(1)) == 1
    queue.ack(first, confirmed=True)
    assert len(queue.dead_letters.list()) == 2
    with pytest.raises(ConfigError):
        queue.dead_letters.list(0)


def test_dead_letters_are_redriven_as_new(kmq_target: Target, make_queue: MakeQueue) -> None:
    queue = make_queue(max_redeliveries=0)
    queue.send_many(["a", "b", "c", "d"])
    taken = take(queue, 4, lease=60)
    for message in taken:
        queue.nack(message, confirmed=True)
        kmq_target.pass_time(0.01)
    assert_dead(queue, 4)
    ids = {one.body: one.id for one in queue.dead_letters.peek()}
    sent_ms = {one.body: one.first_enqueued_ms for one in taken}
    last = ids[taken[3].body]
    assert queue.dead_letters.redrive([last, last, "0", "99999999", "x", ""]) == 1
    assert queue.dead_letters.redrive(limit=1) == 1
    left = {one.id for one in assert_dead(queue, 2)}
    assert left == {ids[one.body] for one in taken[1:3]}
    again = take(queue, 2, lease=60)
    assert {one.body for one in again} == {taken[0].body, taken[3].body}
    for message in again:
        assert message.attempts == 1
        assert message.enqueued_ms > message.first_enqueued_ms == sent_ms[message.body]
    queue.ack(taken, confirmed=True)  # by receipts of takes before the redrive
    assert_sizes(queue, waiting=0, in_flight=2)
    assert queue.dead_letters.redrive() == 2
    assert (queue.dead_letters.redrive(), queue.dead_letters.redrive([])) == (0, 0)
    assert_sizes(queue, waiting=2, in_flight=2)
    for wrong in (0, -1, True):
        with pytest.raises(ConfigError):
            queue.dead_letters.redrive(limit=wrong)


def test_dead_letters_can_be_purged(queue: Queue) -> None:
    queue.send_many(["a", "b", "c"])
    queue.dead_letter(take(queue, 2), confirmed=True)
    assert_dead(queue, 2)
    assert queue.dead_letters.purge() == 2
    assert queue.dead_letters.purge() == 0
    assert_dead(queue, 0)
    assert_sizes(queue, waiting=1, in_flight=0)


def test_purge_removes_all_but_dead_letters(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["x"] * 9)
    # A message that is sent or redelivered during a purge may stay.
    messages = take(queue, 4, lease=LEASE_S if queue.capabilities.immediate else 60)
    queue.dead_letter(messages[0], confirmed=True)
    assert_dead(queue, 1)
    if queue.capabilities.delay:
        queue.nack(messages[1], delay=60, confirmed=True)
    assert queue.purge() == 8
    assert_sizes(queue, waiting=0, in_flight=0)
    assert_dead(queue, 1)
    queue.nack(messages[2], confirmed=True)
    queue.extend(messages[2], lease=60, confirmed=True)
    queue.ack(messages[3], confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert (queue.receive(wait=0), queue.purge()) == ([], 0)
    queue.send("new")
    assert drain(queue, 1) == [b"new"]


def test_release_all_gives_back_what_is_in_flight_uncounted(queue: Queue) -> None:
    queue.send_many(["x"] * 5)
    taken = take(queue, 3, lease=3600, wait=5)  # through a gateway, what came too late is in flight
    assert queue.release_all() == 3
    assert queue.release_all() == 0
    assert_sizes(queue, waiting=5, in_flight=0)
    assert [one.attempts for one in take(queue, 5, lease=60)] == [1] * 5
    queue.ack(taken, confirmed=True)
    assert_sizes(queue, waiting=0, in_flight=5)


def test_a_peeked_dead_letter_has_no_receipt(queue: Queue) -> None:
    queue.send("x")
    queue.dead_letter(take_one(queue), confirmed=True)
    assert_dead(queue, 1)
    with pytest.raises(ReceiptError):
        queue.ack(queue.dead_letters.peek()[0].id)
