"""Tests of queues that collapse: of equal messages that nobody has taken yet, one is handed out."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kmqpy.errors import ConfigError, NotSupported
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    MakeQueue,
    Target,
    assert_becomes,
    assert_dead,
    assert_sizes,
    at_once,
    new_name,
    skip_without,
    take,
    take_one,
)

_JOIN_S = 5.0


@pytest.fixture
def collapsing(kmq_storage: Storage, make_queue: MakeQueue) -> MakeQueue:
    """A function that makes queues that collapse."""
    skip_without(kmq_storage.capabilities, "collapse")
    return partial(make_queue, collapse=True)


def _joined_s(queue: Queue, wait_s: float) -> float:
    """How long receive() waits: `wait_s`, or longer where each taker has to join first."""
    return wait_s if queue.capabilities.immediate else _JOIN_S


def _assert_no_other_waits(queue: Queue, in_flight: int) -> None:
    """Assert that only messages in flight are left, when the storage has read on behind these."""

    def look() -> tuple[int, int, int]:
        return len(queue.receive(wait=0)), queue.size(), queue.in_flight()

    assert_becomes(queue, look, (0, 0, in_flight))


def test_a_storage_that_can_not_collapse_says_so(kmq_storage: Storage) -> None:
    name = new_name()
    if kmq_storage.capabilities.collapse:
        kmq_storage.create(name, collapse=True)
        assert kmq_storage.describe(name).settings["collapse"] is True
        with pytest.raises(ConfigError):
            kmq_storage.alter(name, collapse=False)
    else:
        with pytest.raises(NotSupported, match="collapse"):
            kmq_storage.create(name, collapse=True)
        kmq_storage.create(name, collapse=False)
        assert kmq_storage.describe(name).settings["collapse"] is False


def test_equal_messages_that_wait_are_handed_out_once(collapsing: MakeQueue) -> None:
    queue = collapsing()
    ids = queue.send_many(["a", "b", "a", "a", "c", "b"])
    assert queue.size() == 6
    assert len(queue.peek()) == 6
    messages = take(queue, 3, lease=60)
    assert [(one.body, one.id, one.attempts) for one in messages] == [
        (b"a", ids[0], 1),
        (b"b", ids[1], 1),
        (b"c", ids[4], 1),
    ]
    _assert_no_other_waits(queue, in_flight=3)
    queue.ack(messages)
    assert_sizes(queue, waiting=0, in_flight=0)


def test_other_queues_do_not_collapse(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.send_many(["a", "a"])
    assert [one.body for one in take(queue, 2)] == [b"a", b"a"]


def test_json_is_equal_by_its_meaning_and_nothing_else_is(collapsing: MakeQueue) -> None:
    queue = collapsing()
    queue.send_many(['{"a":1.0,"b":"\u00e4"}', '{ "b": "\\u00e4", "a": 1.00 }', '{"a":1,"b":"\u00e4"}'])
    queue.send_many([b"\xff", b"\xff", b"\xfe", "", "", "x ", "x"])
    queue.send("x", key="other key", headers={"h": "1"})  # the body alone counts
    bodies = [one.body for one in take(queue, 7)]
    assert [json.loads(one) for one in bodies[:2]] == [{"a": 1.0, "b": "\u00e4"}, {"a": 1, "b": "\u00e4"}]
    assert bodies[2:] == [b"\xff", b"\xfe", b"", b"x ", b"x"]
    assert queue.receive(wait=0) == []


def test_what_was_handed_out_never_collapses_again(kmq_target: Target, collapsing: MakeQueue) -> None:
    queue = collapsing(max_redeliveries=None)
    first = queue.send("m")
    assert take_one(queue).id == first
    second = queue.send("m")
    assert take_one(queue).id == second
    if queue.capabilities.immediate:
        assert_sizes(queue, waiting=0, in_flight=2)
    kmq_target.pass_time(PAST_LEASE_S)
    third = queue.send("m")
    queue.send("m")
    again = take(queue, 3, lease=60)
    assert sorted((one.id, one.attempts) for one in again) == sorted([(first, 2), (second, 2), (third, 1)])
    queue.ack(again[0], confirmed=True)
    _assert_no_other_waits(queue, in_flight=2)
    queue.nack(again[1:], count=False, confirmed=True)
    assert len(take(queue, 2)) == 2


def test_what_waits_collapses_across_takes(collapsing: MakeQueue) -> None:
    queue = collapsing()
    queue.send_many(["1", "2"])
    assert take_one(queue, lease=60).body == b"1"
    queue.send_many(["1", "2"])
    assert [one.body for one in take(queue, 2, lease=60)] == [b"2", b"1"]
    _assert_no_other_waits(queue, in_flight=3)


def test_a_take_finds_as_many_as_it_may_behind_messages_that_collapse(collapsing: MakeQueue) -> None:
    queue = collapsing()
    queue.send_many([*["a"] * 50, *["b", "a"] * 10, "c", "d", "e"])
    messages = queue.receive(4, lease=60) if queue.capabilities.immediate else take(queue, 4, lease=60)
    bodies = [one.body for one in messages]
    if queue.capabilities.fifo:  # else of several partitions
        assert bodies == [b"a", b"b", b"c", b"d"]
    assert_sizes(queue, waiting=1, in_flight=4)
    assert sorted([*bodies, take_one(queue).body]) == [b"a", b"b", b"c", b"d", b"e"]


def test_of_equal_messages_the_first_in_order_is_handed_out(collapsing: MakeQueue) -> None:
    queue = collapsing()
    skip_without(queue.capabilities, "priority")
    queue.send_many([OutgoingMessage("a"), OutgoingMessage("b"), OutgoingMessage("a", priority=9)])
    messages = take(queue, 2)
    assert [one.body for one in messages] == [b"a", b"b"]
    queue.send_many([OutgoingMessage("b", priority=2), OutgoingMessage("b", key="k", priority=3)])
    assert [one.key for one in take(queue, 1)] == [b"k"]
    assert queue.receive(wait=0) == []


def test_a_delayed_message_collapses_when_it_is_ready(kmq_target: Target, collapsing: MakeQueue) -> None:
    queue = collapsing()
    # Where another process makes delayed messages ready, they do not collapse.
    skip_without(queue.capabilities, "delay", "immediate")
    later = queue.send("m", delay=3 * LEASE_S)
    now = queue.send("m")
    assert [one.id for one in queue.receive(9, lease=60)] == [now]
    assert_sizes(queue, waiting=1, in_flight=1)
    kmq_target.pass_time(2 * LEASE_S + PAST_LEASE_S)
    queue.send("m")
    assert [one.id for one in queue.receive(9)] == [later]
    assert queue.receive(wait=0) == []


def test_dead_letters_that_are_redriven_do_not_collapse(collapsing: MakeQueue) -> None:
    queue = collapsing()
    first = queue.send("m")
    queue.dead_letter(take_one(queue), confirmed=True)
    seen = queue.send("m")
    if queue.capabilities.receipts_by_id:
        queue.dead_letter(queue.receipt(seen), confirmed=True)
    else:
        queue.dead_letter(take_one(queue), confirmed=True)
    assert_dead(queue, 2)
    waits = queue.send("m")
    assert queue.dead_letters.redrive() == 2
    assert sorted(one.id for one in take(queue, 3)) == sorted([first, seen, waits])


def test_what_is_claimed_or_finished_by_its_id_leaves_its_twins(collapsing: MakeQueue) -> None:
    queue = collapsing()
    skip_without(queue.capabilities, "receipts_by_id")
    claimed, finished, waits = queue.send_many(["m"] * 3)
    assert queue.extend(queue.receipt(claimed), lease=60, confirmed=True) == []
    queue.ack(queue.receipt(finished), confirmed=True)
    assert_sizes(queue, waiting=1, in_flight=1)
    assert [one.id for one in queue.receive(9)] == [waits]
    queue.nack(queue.receipt(claimed), count=False, confirmed=True)
    fresh = queue.send("m")
    assert sorted(one.id for one in take(queue, 2)) == sorted([claimed, fresh])


def test_an_at_most_once_queue_collapses_too(collapsing: MakeQueue, kmq_storage: Storage) -> None:
    skip_without(kmq_storage.capabilities, "at_most_once")
    queue = collapsing(delivery="at-most-once")
    queue.send_many(["a", "a", "b", "a"])
    first, _ = messages = queue.receive(9)
    assert [one.body for one in messages] == [b"a", b"b"]
    assert_sizes(queue, waiting=0, in_flight=0)
    queue.nack(first, count=False)
    queue.send_many(["a", "a"])
    assert [one.body for one in queue.receive(9)] == [b"a", b"a"]


def test_a_purged_queue_begins_anew(collapsing: MakeQueue) -> None:
    queue = collapsing()
    queue.send_many(["a", "a", "b"])
    queue.purge()
    assert queue.receive(wait=0) == []
    queue.send_many(["a", "a"])
    assert take_one(queue, lease=60).body == b"a"
    _assert_no_other_waits(queue, in_flight=1)


def test_many_takers_never_get_two_of_equal_messages(kmq_target: Target, collapsing: MakeQueue) -> None:
    queue = collapsing()
    bodies = [b"%d" % (number % 40) for number in range(400)]
    queue.send_many(bodies)

    def work(_: int) -> list[bytes]:
        found: list[bytes] = []
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            while messages := own.receive(3, wait=_joined_s(own, 0), lease=60):
                found += [one.body for one in messages]
        return found

    found = [body for one in at_once(6, work) for body in one]
    assert sorted(found) == sorted({*bodies})
    assert_sizes(queue, waiting=0, in_flight=40)


def test_who_sends_beside_takers_loses_no_message(kmq_target: Target, collapsing: MakeQueue) -> None:
    """What is sent after its twin was handed out comes, and what is sent before may be the twin's."""
    queue = collapsing()
    rounds, kinds = 15, 8

    def work(number: int) -> list[bytes]:
        found: list[bytes] = []
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            for _ in range(rounds):
                if number < 2:
                    own.send_many([b"%d" % kind for kind in range(kinds)])
                else:
                    messages = own.receive(5, wait=_joined_s(own, 0.05), lease=60)
                    found += [one.body for one in messages]
                    if not messages and not own.capabilities.immediate:
                        break
        return found

    found = [body for one in at_once(4, work) for body in one]
    while messages := queue.receive(100, wait=_joined_s(queue, 0), lease=60):
        found += [one.body for one in messages]
    assert {*found} == {b"%d" % kind for kind in range(kinds)}
    assert len(found) <= 2 * rounds * kinds
    assert_sizes(queue, waiting=0, in_flight=len(found))
