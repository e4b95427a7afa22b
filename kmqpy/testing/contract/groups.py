"""Tests of queues with order="group": of a group one message at a time, in the order of the sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError, NotSupported
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.group_checker import GroupChecker, Numbered
from kmqpy.testing.contract.target import (
    ALIKE,
    LEASE_S,
    PAST_LEASE_S,
    PATIENCE_S,
    MakeQueue,
    Target,
    assert_dead,
    assert_sizes,
    at_once,
    new_name,
    skip_without,
)


@pytest.fixture
def grouped(kmq_storage: Storage, make_queue: MakeQueue) -> MakeQueue:
    """A function that makes queues in which the messages of a group are in order."""
    skip_without(kmq_storage.capabilities, "groups")
    return partial(make_queue, order="group")


def _send(queue: Queue, *names: str) -> list[str]:
    """Send messages whose body is the name, and whose group is its first letter."""
    return queue.send_many([OutgoingMessage(name, group=name[0]) for name in names])


def _take(queue: Queue, limit: int = 1) -> list[Message]:
    return [*queue.receive(limit, wait=0, lease=60)]


def _let_expire(target: Target, queue: Queue, messages: Sequence[Message]) -> None:
    """Let the leases of these messages end.

    They are taken with a long one: receive() gives back what came so late that half of its lease is over.
    """
    queue.extend(messages, lease=LEASE_S, confirmed=True)
    target.pass_time(PAST_LEASE_S)


def _bodies(messages: Sequence[Message]) -> list[str]:
    return [one.body.decode() for one in messages]


def test_a_storage_without_groups_says_so(kmq_storage: Storage) -> None:
    if kmq_storage.capabilities.groups:
        for wrong in ({"delivery": "at-most-once"}, {"collapse": True}):
            with pytest.raises(ConfigError, match="order"):
                kmq_storage.create(new_name(), order="group", **wrong)
        with pytest.raises(ConfigError, match="on_dead_letter"):
            kmq_storage.create(new_name(), on_dead_letter="hold")
        return
    with pytest.raises(NotSupported, match="order"):
        kmq_storage.create(new_name(), order="group")
    kmq_storage.create(name := new_name())
    with kmq_storage.open(name) as queue, pytest.raises(NotSupported, match="group"):
        queue.send("x", group="g")


def test_any_queue_keeps_the_group_of_a_message(queue: Queue) -> None:
    skip_without(queue.capabilities, "groups")
    queue.send_many([OutgoingMessage("1", group="g\N{SNOWMAN}"), "2"], group="common")
    queue.send("3")
    messages = _take(queue, 3)
    assert [one.group for one in messages] == ["g\N{SNOWMAN}", "common", None]
    queue.dead_letter(messages[0], confirmed=True)
    assert [one.group for one in queue.dead_letters.list()] == ["g\N{SNOWMAN}"]
    for wrong in ("", "x" * 201, "a\0", "\ud800", 5):
        with pytest.raises(MessageError, match="group"):
            queue.send("x", group=wrong)  # type: ignore[arg-type]


def test_messages_of_a_group_come_one_at_a_time_and_others_go_on(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "b1", "a3", "b2")
    queue.send("alone")
    queue.send("alone too")
    (a1,), (b1,) = _take(queue), _take(queue)
    assert _bodies([a1, b1]) == ["a1", "b1"]
    others = _take(queue, 9)
    assert _bodies(others) == ["alone", "alone too"]
    assert_sizes(queue, waiting=3, in_flight=4)
    assert queue.peek() == []
    queue.ack(a1, confirmed=True)
    assert _bodies(queue.peek()) == ["a2"]
    (a2,) = _take(queue)
    assert _bodies([a2]) == ["a2"]
    _send(queue, "a4", "c1")
    assert _bodies(_take(queue, 9)) == ["c1"]
    queue.ack(b1, a2, confirmed=True)
    assert _bodies(_take(queue, 2)) == ["a3", "a4"]


def test_groups_that_look_alike_wait_for_none_of_each_other(grouped: MakeQueue) -> None:
    queue = grouped()
    for number in "12":
        queue.send_many([OutgoingMessage(number, group=group) for group in ALIKE])
    found = queue.receive(99, wait=0, lease=60, one_per_group=True)
    assert sorted((one.body, one.group) for one in found) == sorted((b"1", group) for group in ALIKE)
    queue.ack(found, confirmed=True)
    assert {one.group for one in _take(queue, 99)} == {*ALIKE}


def test_a_batch_has_messages_of_a_group_in_order(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3", "b1", "b2", "a4")
    batch = _take(queue, 5)
    assert [one for one in _bodies(batch) if one[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert [one for one in _bodies(batch) if one[0] == "b"] == ["b1"]
    _send(queue, "a5")
    queue.ack(batch[1:], confirmed=True)  # whoever acknowledges in another order
    assert _bodies(_take(queue, 9)) == ["b2"]
    queue.ack(batch[0], confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a5"]


def test_what_waits_behind_comes_in_the_same_batch(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, *(f"a{number}" for number in range(8)))
    first = _take(queue, 2)
    assert _take(queue) == []  # now the storage knows that the others wait
    queue.ack(first, confirmed=True)
    assert _bodies(_take(queue, 3)) == ["a2", "a3", "a4"]


def test_a_taker_can_have_one_message_of_each_group(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "b1", "a3")
    queue.send_many(["alone"] * 2)
    messages = queue.receive(9, wait=0, lease=60, one_per_group=True)
    assert sorted(_bodies(messages)) == ["a1", "alone", "alone", "b1"]
    assert queue.receive(9, wait=0, one_per_group=True) == []
    queue.ack(messages, confirmed=True)
    assert _bodies(queue.receive(9, wait=0, one_per_group=True)) == ["a2"]


@pytest.mark.parametrize("how", ["lease", "nack", "release"])
def test_a_message_that_failed_comes_again_before_its_successors(
    kmq_target: Target, grouped: MakeQueue, how: str
) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3")
    first = _take(queue, 2)
    assert _bodies(first) == ["a1", "a2"]
    _send(queue, "b1")
    assert _bodies(_take(queue, 9)) == ["b1"]
    if how == "lease":
        _let_expire(kmq_target, queue, first)
    elif how == "nack":
        queue.nack(first[1], confirmed=True)
        assert _take(queue) == []  # the first one is still in flight
        queue.nack(first[0], confirmed=True)
    else:
        queue.release_all()
    again = _take(queue, 9)
    assert [one for one in _bodies(again) if one[0] == "a"] == ["a1", "a2", "a3"]
    attempts = {one.body.decode(): one.attempts for one in again}
    assert (attempts["a1"], attempts["a2"]) == ((1, 1) if how == "release" else (2, 2))


def test_the_later_one_of_a_batch_that_failed_waits_for_the_first(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3")
    a1, a2 = _take(queue, 2)
    queue.nack(a1, confirmed=True)
    assert _take(queue) == []
    queue.ack(a2, confirmed=True)
    (a1,) = _take(queue, 1)
    assert (_bodies([a1]), a1.attempts) == (["a1"], 2)
    queue.ack(a1, confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a3"]


def test_while_a_message_waits_for_its_retry_its_successors_wait(
    kmq_target: Target, grouped: MakeQueue
) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "b1")
    queue.nack(_take(queue), delay=LEASE_S, confirmed=True)
    (b1,) = _take(queue, 9)
    assert _bodies([b1]) == ["b1"]
    _send(queue, "a3")
    assert _take(queue, 9) == []
    kmq_target.pass_time(PAST_LEASE_S)
    assert _bodies(_take(queue, 9)) == ["a1", "a2", "a3"]


def test_a_delayed_message_holds_up_those_behind_it_only(kmq_target: Target, grouped: MakeQueue) -> None:
    queue = grouped()
    sent = [("a1", 0.0), ("a2", LEASE_S), ("a3", 0.0), ("b1", 0.0)]
    queue.send_many([OutgoingMessage(name, group=name[0], delay=delay) for name, delay in sent])
    first = _take(queue, 9)
    assert _bodies(first) == ["a1", "b1"]
    queue.ack(first, confirmed=True)
    assert _take(queue) == []
    kmq_target.pass_time(PAST_LEASE_S)
    assert _bodies(_take(queue, 9)) == ["a2", "a3"]


def test_a_dead_letter_lets_its_group_go_on(kmq_target: Target, grouped: MakeQueue) -> None:
    queue = grouped(max_redeliveries=0)
    _send(queue, "a1", "a2", "a3", "a4")
    queue.dead_letter(_take(queue), confirmed=True)
    queue.nack(_take(queue), confirmed=True)
    (a3,) = _take(queue)
    assert _bodies([a3]) == ["a3"]
    assert _take(queue) == []
    _let_expire(kmq_target, queue, [a3])
    assert _bodies(_take(queue)) == ["a4"]
    letters = assert_dead(queue, 3)
    assert [one.group for one in letters] == ["a"] * 3
    queue.dead_letters.redrive([letters[0].id])
    _send(queue, "a5")
    queue.ack(queue.orphans()[0].receipt, confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a1", "a5"]


def test_a_batch_that_comes_back_in_pieces_is_handed_out_without_gaps(
    kmq_target: Target, grouped: MakeQueue
) -> None:
    queue = grouped(max_redeliveries=None)
    _send(queue, *(f"a{number}" for number in range(6)))
    a0, a1, a2, a3 = _take(queue, 4)
    queue.nack([a0, a2], confirmed=True)
    assert _take(queue, 9) == []
    _let_expire(kmq_target, queue, [a1, a3])
    assert _bodies(_take(queue, 9)) == [f"a{number}" for number in range(6)]


def test_a_dead_letter_holds_its_group_where_that_is_asked_for(
    kmq_storage: Storage, grouped: MakeQueue
) -> None:
    queue = grouped(on_dead_letter="hold", max_redeliveries=0)
    _send(queue, "a1", "a2", "a3")
    a1, a2 = _take(queue, 2)
    _send(queue, "b1", "c1", "c2")
    queue.dead_letter(a2, confirmed=True)
    queue.ack(a1, confirmed=True)
    others = _take(queue, 9)
    assert sorted(_bodies(others)) == ["b1", "c1", "c2"]
    queue.nack([one for one in others if one.group == "c"], confirmed=True)
    _send(queue, "a4", "c3")
    assert _take(queue, 9) == []
    assert kmq_storage.describe(queue.name).held_groups == 2
    assert queue.dead_letters.redrive([a2.id]) == 1
    again = _take(queue, 9)
    assert [(one.body, one.attempts) for one in again] == [(b"a2", 1), (b"a3", 1), (b"a4", 1)]
    assert queue.dead_letters.purge() == 2
    assert _bodies(_take(queue, 9)) == ["c3"]


def test_a_dead_letter_holds_those_of_its_batch_that_come_back(grouped: MakeQueue) -> None:
    queue = grouped(on_dead_letter="hold")
    _send(queue, "a1", "a2", "a3", "a4")
    a1, a2, a3 = _take(queue, 3)
    queue.dead_letter(a1, confirmed=True)
    queue.nack(a2, confirmed=True)
    assert _take(queue, 9) == []
    queue.ack(a3, confirmed=True)  # its holder may finish what it has
    assert _take(queue, 9) == []
    assert queue.dead_letters.redrive() == 1
    assert _bodies(_take(queue, 9)) == ["a1", "a2", "a4"]


def test_a_group_is_held_until_the_last_of_its_dead_letters_is_gone(
    kmq_storage: Storage, grouped: MakeQueue
) -> None:
    queue = grouped(on_dead_letter="hold")
    _send(queue, "a1", "a2", "a3")
    a1, a2 = _take(queue, 2)
    queue.dead_letter(a1, a2, confirmed=True)
    assert queue.dead_letters.redrive([a2.id]) == 1
    assert _take(queue, 9) == []
    assert queue.purge() == 2
    _send(queue, "a4")
    assert _take(queue, 9) == []
    assert kmq_storage.describe(queue.name).held_groups == 1
    assert queue.dead_letters.redrive() == 1
    assert _bodies(_take(queue, 9)) == ["a1", "a4"]


def test_what_is_acknowledged_late_is_gone_and_its_group_goes_on(
    kmq_target: Target, grouped: MakeQueue
) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3", "a4")
    batch = _take(queue, 3)
    _let_expire(kmq_target, queue, batch)
    (a1,) = _take(queue)
    queue.ack(batch, confirmed=True)  # a1 is somebody else's
    assert _take(queue, 9) == []
    queue.nack(a1, confirmed=True)
    assert [(one.body, one.attempts) for one in _take(queue, 9)] == [(b"a1", 3), (b"a4", 1)]


def test_successors_wait_for_the_delays_of_the_queue(kmq_target: Target, grouped: MakeQueue) -> None:
    queue = grouped(retry_delays=[f"{round(LEASE_S * 1000)}ms"])
    _send(queue, "a1", "a2", "a3", "a4", "b1")
    a1, a2, a3 = _take(queue, 3)
    queue.nack(a2, confirmed=True)
    queue.ack(a1, a3, confirmed=True)
    assert _bodies(_take(queue, 9)) == ["b1"]
    kmq_target.pass_time(PAST_LEASE_S)
    assert _bodies(_take(queue, 9)) == ["a2", "a4"]


def test_what_says_how_a_queue_is_kept_can_not_be_altered(
    kmq_target: Target, kmq_storage: Storage, grouped: MakeQueue
) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3", "b1")
    queue.nack(_take(queue), delay=LEASE_S, confirmed=True)
    (b1,) = _take(queue)
    for one in (
        {"order": "fifo"},
        {"on_dead_letter": "hold"},
        {"dedup_until": "acknowledged"},
        {"dedup_by": "body"},
    ):
        with pytest.raises(ConfigError, match=next(iter(one))):
            kmq_storage.alter(queue.name, **one)
    assert _take(queue, 9) == []
    queue.dead_letter(b1, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert _bodies(_take(queue, 9)) == ["a1", "a2", "a3"]


def test_a_redriven_message_lets_those_before_it_go_on(grouped: MakeQueue) -> None:
    queue = grouped(on_dead_letter="hold")
    ids = _send(queue, "a1", "a2", "a3")
    queue.dead_letter(queue.receipt(ids[1]), confirmed=True)
    assert _take(queue) == []
    assert queue.dead_letters.redrive() == 1
    assert _bodies(queue.peek(9)) == ["a1"]
    assert _bodies(_take(queue, 9)) == ["a1", "a2", "a3"]


def test_what_is_named_by_its_id_is_finished_wherever_it_waits(grouped: MakeQueue) -> None:
    queue = grouped()
    ids = _send(queue, "a1", "a2", "a3", "a4")
    (a1,) = _take(queue)
    assert _take(queue) == []
    queue.ack(queue.receipt(ids[1]), confirmed=True)
    assert queue.extend(queue.receipt(ids[3]), lease=60) == []
    queue.ack(a1, confirmed=True)
    assert _take(queue) == []  # a4 was taken by its id
    queue.ack(queue.receipt(ids[3]), confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a3"]


def test_purge_removes_what_waits_behind(grouped: MakeQueue) -> None:
    queue = grouped()
    _send(queue, "a1", "a2", "a3", "b1")
    _take(queue)
    assert _bodies(_take(queue)) == ["b1"]
    assert queue.purge() == 4
    assert_sizes(queue, waiting=0, in_flight=0)
    _send(queue, "a4", "a5")
    assert _bodies(_take(queue)) == ["a4"]


def test_groups_have_no_priorities(grouped: MakeQueue) -> None:
    queue = grouped()
    with pytest.raises(NotSupported, match="priority"):
        queue.send("x", group="g", priority=1)


def test_a_waiting_receive_hears_that_a_group_goes_on(kmq_target: Target, grouped: MakeQueue) -> None:
    if not kmq_target.real_time:
        pytest.skip("the clock of the storage stands still")
    queue = grouped()
    _send(queue, "a1", "a2")
    (a1,) = _take(queue)

    def job(number: int) -> float:
        began = SYSTEM_CLOCK.monotonic()
        if number:
            SYSTEM_CLOCK.sleep(0.2)
            queue.ack(a1, confirmed=True)
        else:
            assert _bodies(queue.receive(wait=20, lease=60)) == ["a2"]
        return SYSTEM_CLOCK.monotonic() - began

    assert at_once(2, job)[0] < 10


def test_what_a_group_handed_out_outlives_a_killed_server(kmq_target: Target, grouped: MakeQueue) -> None:
    queue = grouped()
    skip_without(queue.capabilities, "durable")
    if kmq_target.kill_server is None:
        pytest.skip("the target has no kill_server")
    _send(queue, "a1", "a2")
    (a1,) = _take(queue)
    kmq_target.kill_server()
    assert _take(queue, 9) == []
    queue.ack(a1, confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a2"]


def test_many_takers_keep_the_order_of_each_group(kmq_target: Target, grouped: MakeQueue) -> None:
    """Messages that are given back, and dead letters, with several takers and senders at a time."""
    queue = grouped(max_redeliveries=3)
    checker = GroupChecker()
    takers, groups, rounds = 4, 6, 12
    sent = {f"{sender}-{group}": rounds for sender in range(2) for group in range(groups)}
    finished: set[Numbered] = set()
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S

    def work(number: int) -> None:
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            if number < 2:
                for sequence in range(rounds):
                    own.send_many(
                        [OutgoingMessage(str(sequence), group=f"{number}-{group}") for group in range(groups)]
                    )
                return
            while len(finished) < len(sent) * rounds and SYSTEM_CLOCK.monotonic() < deadline:
                _handle(own, number, checker, finished)

    at_once(2 + takers, work)
    assert checker.problems == []
    assert checker.unfinished(sent) == {}
    assert_sizes(queue, waiting=0, in_flight=0)


def _handle(queue: Queue, taker: int, checker: GroupChecker, finished: set[Numbered]) -> None:
    """Take a few messages, and finish them or not, as their numbers say."""
    messages = queue.receive(taker, wait=0.05, lease=60)
    named = {one.id: (one.group or "", int(one.body)) for one in messages}
    checker.handed_out([named[one.id] for one in messages])
    for at, message in enumerate(messages):
        name = named[message.id]
        if name[1] % 5 == 3 and message.attempts == 1:
            rest = [one for one in messages[at:] if one.group == message.group]
            checker.back([named[one.id] for one in rest])
            queue.nack(rest, count=True, confirmed=True)
            messages = [one for one in messages if one not in rest or messages.index(one) < at]
            break
    for message in messages:
        name = named[message.id]
        checker.ended([name])
        if name[1] % 7 == 5:
            queue.dead_letter(message, confirmed=True)
        else:
            queue.ack(message, confirmed=True)
        finished.add(name)
