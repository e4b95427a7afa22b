"""Tests of queues whose groups share the takers: fair=True, max_in_flight_per_group=…."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, NotSupported
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.group_checker import CapChecker
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    PATIENCE_S,
    MakeQueue,
    Target,
    assert_sizes,
    at_once,
    new_name,
    skip_without,
)


@pytest.fixture
def shared(kmq_storage: Storage, make_queue: MakeQueue) -> MakeQueue:
    """A function that makes queues, on a storage that can make fair ones."""
    skip_without(kmq_storage.capabilities, "fair")
    return make_queue


def _send(queue: Queue, *names: str, one_by_one: bool = False) -> None:
    """Send messages whose body is the name, and whose group is its first letter."""
    messages = [OutgoingMessage(name, group=name[0]) for name in names]
    for some in [[one] for one in messages] if one_by_one else [messages]:
        queue.send_many(some)


def _take(queue: Queue, limit: int = 1) -> list[Message]:
    return [*queue.receive(limit, wait=0, lease=60)]


def _bodies(messages: Sequence[Message]) -> list[str]:
    return [one.body.decode() for one in messages]


def test_a_storage_that_is_not_fair_says_so(kmq_storage: Storage) -> None:
    settings: list[dict[str, Any]] = [{"fair": True}, {"max_in_flight_per_group": 3}]
    if not kmq_storage.capabilities.fair:
        for one in settings:
            with pytest.raises(NotSupported, match=next(iter(one))):
                kmq_storage.create(new_name(), **one)
        return
    for one in settings:
        for wrong in ({"delivery": "at-most-once"}, {"collapse": True}, {"order": "group"}):
            with pytest.raises(ConfigError, match=next(iter(one))):
                kmq_storage.create(new_name(), **one, **wrong)
    with pytest.raises(ConfigError, match="max_in_flight_per_group"):
        kmq_storage.create(new_name(), max_in_flight_per_group=0)
    with pytest.raises(ConfigError, match="fair_by"):
        kmq_storage.create(new_name(), fair_by="noise")


@pytest.mark.parametrize("one_by_one", [False, True])
def test_groups_with_fewer_in_flight_come_first(shared: MakeQueue, one_by_one: bool) -> None:
    queue = shared(fair=True)
    _send(queue, *(f"a{number}" for number in range(40)), one_by_one=one_by_one)
    assert _bodies(_take(queue, 3)) == ["a0", "a1", "a2"]
    queue.send("alone")
    _send(queue, "b0", "b1", "b2", "b3", "c0", one_by_one=one_by_one)
    first = _take(queue, 2)
    assert _bodies(first) == ["alone", "b0"]
    assert _bodies(_take(queue, 1)) == ["c0"]
    assert _bodies(_take(queue, 3)) == ["b1", "b2", "a3"]
    queue.ack(first[1], confirmed=True)
    assert _bodies(_take(queue, 1)) == ["b3"]
    assert_sizes(queue, waiting=36, in_flight=9)


def test_groups_are_compared_however_much_of_them_is_in_flight(shared: MakeQueue) -> None:
    queue = shared(fair=True)
    _send(queue, *(f"a{number}" for number in range(200)))
    assert len(_take(queue, 150)) == 150
    _send(queue, *(f"b{number}" for number in range(200)))
    assert {one.group for one in _take(queue, 140)} == {"b"}
    assert _bodies(_take(queue, 5)) == [f"b{number}" for number in range(140, 145)]
    assert sorted(_bodies(_take(queue, 7))) == ["a150", *(f"b{number}" for number in range(145, 151))]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_only_noisy_groups_come_after_others_where_that_is_asked_for(
    kmq_storage: Storage, shared: MakeQueue, one_by_one: bool
) -> None:
    queue = shared(fair=True, fair_by="noise")
    _send(queue, *(f"a{number}" for number in range(60)), "b0", one_by_one=one_by_one)
    (a0, *_) = _take(queue, 29)
    _send(queue, "b1", "c0")
    assert _bodies(_take(queue, 1)) == ["a29"]
    assert _bodies(_take(queue, 2)) == ["b0", "b1"]
    assert _bodies(_take(queue, 3)) == ["c0", "a30", "a31"]
    queue.send_many(["alone"] * 300)
    assert _bodies(_take(queue, 300)) == ["alone"] * 300
    queue.ack(a0, confirmed=True)  # of what is in flight, less than a tenth is left
    _send(queue, "d0")
    assert _bodies(_take(queue, 2)) == ["a32", "a33"]
    kmq_storage.alter(queue.name, fair_by="in_flight")
    assert _bodies(_take(queue, 1)) == ["d0"]


def test_many_of_a_group_in_one_take_are_no_noise_beside_many_others(shared: MakeQueue) -> None:
    queue = shared(fair=True, fair_by="noise")
    queue.send_many(["alone"] * 400)
    assert len(_take(queue, 400)) == 400
    _send(queue, *(f"a{number}" for number in range(40)))
    assert len(_take(queue, 35)) == 35
    queue.send_many(["alone"] * 40)  # more than a take looks at
    assert _bodies(_take(queue, 1)) == ["a35"]


@pytest.mark.parametrize(
    "settings",
    [{"fair": True}, {"fair": True, "fair_by": "noise"}, {"fair": True, "max_in_flight_per_group": 35}],
)
def test_a_backlog_that_keeps_the_takers_busy_delays_no_other_group(
    shared: MakeQueue, settings: dict[str, Any]
) -> None:
    queue = shared(**settings)
    _send(queue, *(f"a{number}" for number in range(100)))
    busy = [one for _ in range(35) for one in _take(queue)]
    for number in range(20):
        _send(queue, f"b{number}", f"c{number}")
        queue.ack(busy.pop(0), confirmed=True)
        quiet = [_take(queue)[0], _take(queue)[0]]
        assert sorted(_bodies(quiet)) == [f"b{number}", f"c{number}"]
        queue.ack(quiet, confirmed=True)
        busy += _take(queue)
        assert busy[-1].group == "a"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_of_a_group_as_many_are_in_flight_as_may_be(
    kmq_target: Target, shared: MakeQueue, one_by_one: bool
) -> None:
    queue = shared(max_in_flight_per_group=2)
    _send(queue, *(f"a{number}" for number in range(8)), "b0", one_by_one=one_by_one)
    queue.send_many(["alone"] * 3)
    first = _take(queue, 20)
    assert sorted(_bodies(first)) == ["a0", "a1", "alone", "alone", "alone", "b0"]
    _send(queue, "b1", "b2")
    others = _take(queue, 20)
    assert _bodies(others) == ["b1"]
    a0, a1 = (one for one in first if one.group == "a")
    queue.ack(a0, confirmed=True)
    (a2,) = _take(queue, 20)
    assert _bodies([a2]) == ["a2"]
    queue.nack(a1, delay=600, confirmed=True)
    (a3,) = _take(queue, 20)
    assert _bodies([a3]) == ["a3"]
    queue.dead_letter(a2, a3, confirmed=True)
    assert _bodies(_take(queue, 20)) == ["a4", "a5"]
    queue.extend([one for one in first if one.group != "a"], lease=LEASE_S, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)  # b0 is in flight no more
    assert [one for one in _bodies(_take(queue, 20)) if one != "alone"] == ["b2"]
    assert_sizes(queue, waiting=4, in_flight=7)


def test_what_comes_back_is_let_wait_with_its_group(kmq_target: Target, shared: MakeQueue) -> None:
    queue = shared(fair=True, max_in_flight_per_group=2, requeue_to="front")
    sent = [
        OutgoingMessage("a0", group="a", delay=LEASE_S),
        *(OutgoingMessage(f"a{n}", group="a") for n in (1, 2, 3)),
    ]
    queue.send_many(sent)
    a1, a2 = _take(queue, 9)
    assert _bodies([a1, a2]) == ["a1", "a2"]
    kmq_target.pass_time(PAST_LEASE_S)
    assert _take(queue, 9) == []
    queue.nack(a2, confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a0"]
    assert queue.extend(queue.receipt(a2.id), lease=60) == []  # whoever names it takes it
    queue.ack(a1, confirmed=True)
    assert _take(queue, 9) == []
    queue.ack(queue.receipt(a2.id), confirmed=True)
    assert _bodies(_take(queue, 9)) == ["a3"]
    assert queue.release_all() == 2
    assert _bodies(_take(queue, 9)) == ["a0", "a3"]
    assert queue.purge() == 2
    _send(queue, "a4", "a5", "a6")
    assert _bodies(_take(queue, 9)) == ["a4", "a5"]


@pytest.mark.parametrize("settings", [{"fair": True}, {"max_in_flight_per_group": 2}])
def test_behind_what_is_taken_by_its_id_come_others_of_its_group(
    shared: MakeQueue, settings: dict[str, Any]
) -> None:
    queue = shared(**settings)
    _send(queue, "a0", "a1", "a2", "b0")
    assert queue.extend(queue.receipt(queue.peek()[0].id), lease=60) == []
    assert sorted(_bodies(_take(queue, 2))) == ["a1", "b0"]


def test_shares_can_be_altered(kmq_storage: Storage, shared: MakeQueue) -> None:
    queue = shared(max_in_flight_per_group=1)
    _send(queue, *(f"a{number}" for number in range(8)))
    assert _bodies(_take(queue, 9)) == ["a0"]
    kmq_storage.alter(queue.name, max_in_flight_per_group=3, fair=True)
    taken = _take(queue, 9)
    assert _bodies(taken) == ["a1", "a2"]
    kmq_storage.alter(queue.name, max_in_flight_per_group=1)
    queue.ack(taken, confirmed=True)
    assert _take(queue, 9) == []
    kmq_storage.alter(queue.name, max_in_flight_per_group=None)
    assert _bodies(_take(queue, 2)) == ["a3", "a4"]
    _send(queue, "b0")
    assert _bodies(_take(queue, 1)) == ["b0"]
    assert kmq_storage.describe(queue.name).settings["fair"] is True
    plain = shared()
    with pytest.raises(ConfigError, match="fair"):
        kmq_storage.alter(plain.name, fair=True)


def test_shares_have_no_priorities(shared: MakeQueue) -> None:
    with pytest.raises(NotSupported, match="priority"):
        shared(fair=True).send("x", group="g", priority=1)


def test_many_takers_keep_to_the_cap(kmq_target: Target, shared: MakeQueue) -> None:
    """With failures, dead letters and takers that let leases end, several takers and senders at a time."""
    queue = shared(fair=True, max_in_flight_per_group=2, max_redeliveries=3)
    checker = CapChecker(2)
    takers, groups, rounds = 4, 5, 20
    total = 2 * groups * rounds
    finished: set[str] = set()
    abandoned: list[Message] = []
    lock = threading.Lock()
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S

    def work(number: int) -> None:
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            if number < 2:
                for at in range(rounds):
                    names = [f"{group} {number}-{at}" for group in range(groups)]
                    _send(own, *names, one_by_one=number == 0)
                return
            while len(finished) < total and SYSTEM_CLOCK.monotonic() < deadline:
                messages = own.receive(number, wait=0.05, lease=LEASE_S if number == 2 else 60)
                checker.handed_out([one.group or "" for one in messages])
                if number > 2:
                    SYSTEM_CLOCK.sleep(0.003)  # as if they were handled, while others take
                checker.ended([one.group or "" for one in messages])
                if number == 2 and messages and messages[0].attempts == 1 and len(abandoned) < 3:
                    abandoned.extend(messages)
                    kmq_target.pass_time(PAST_LEASE_S)  # as if it had been killed
                    continue
                failed = [one for one in messages if one.attempts == 1 and one.body.endswith(b"3")]
                dead = [one for one in messages if one.body.endswith(b"-7")]
                own.nack(failed, confirmed=True)
                own.dead_letter(dead, confirmed=True)
                done = [one for one in messages if one not in failed and one not in dead]
                own.ack(done, confirmed=True)
                with lock:
                    finished.update(one.body.decode() for one in [*done, *dead])

    at_once(2 + takers, work)
    assert checker.problems == []
    assert len(finished) == total
    assert_sizes(queue, waiting=0, in_flight=0)
