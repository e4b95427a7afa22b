"""Tests of sends with a dedup id: the storage takes one message per id and window."""

from __future__ import annotations

from typing import Any

import pytest

from kmqpy.errors import ConfigError, MessageError, NotSupported
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.target import (
    ALIKE,
    LEASE_S,
    PAST_LEASE_S,
    MakeQueue,
    Target,
    assert_dead,
    assert_sizes,
    at_once,
    new_name,
    skip_without,
    take,
    take_one,
)


@pytest.fixture
def unique(kmq_storage: Storage, make_queue: MakeQueue) -> MakeQueue:
    """make_queue(), for a storage that knows dedup ids."""
    skip_without(kmq_storage.capabilities, "dedup")
    return make_queue


def test_a_storage_without_dedup_ids_says_so(kmq_storage: Storage) -> None:
    settings: list[dict[str, Any]] = [{"dedup_until": "acknowledged"}, {"dedup_by": "body"}]
    if kmq_storage.capabilities.dedup:
        for wrong in ({"dedup_until": "soon"}, {"dedup_by": "key"}, {"dedup_window_ms": -1}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                kmq_storage.create(new_name(), **wrong)
        return
    for wanted in settings:
        with pytest.raises(NotSupported, match=next(iter(wanted))):
            kmq_storage.create(new_name(), **wanted)
    kmq_storage.create(name := new_name())
    with kmq_storage.open(name) as queue, pytest.raises(NotSupported, match="dedup_id"):
        queue.send("x", dedup_id="d")


def test_a_second_send_with_an_id_stores_nothing(unique: MakeQueue) -> None:
    queue = unique()
    first = queue.send("1", dedup_id="a\N{SNOWMAN}")
    assert queue.send("2", dedup_id="a\N{SNOWMAN}", delay=1, key="k") == first
    other = queue.send("3", dedup_id="b")
    assert len({first, other, queue.send("4"), queue.send("5")}) == 4
    queue.ack(take(queue, 4, lease=60), confirmed=True)
    assert queue.send("6", dedup_id="b") == other
    assert_sizes(queue, waiting=0, in_flight=0)
    for wrong in ("", "x" * 201, "a\0", "\ud800", 5):
        with pytest.raises(MessageError, match="dedup_id"):
            queue.send("x", dedup_id=wrong)  # type: ignore[arg-type]


def test_ids_that_look_alike_are_others(unique: MakeQueue) -> None:
    queue = unique()
    given = [OutgoingMessage("x", dedup_id=one) for one in ALIKE]
    ids = queue.send_many(given)
    assert len({*ids}) == len(ALIKE)
    assert queue.send_many(given) == ids


def test_an_id_is_known_whatever_became_of_its_message(unique: MakeQueue) -> None:
    queue = unique()
    ids = [queue.send(one, dedup_id=one) for one in "abc"]
    first, second, _ = take(queue, 3, lease=60)
    queue.ack(first, confirmed=True)
    queue.dead_letter(second, confirmed=True)
    assert queue.purge() == 1
    assert [queue.send(one, dedup_id=one) for one in "abc"] == ids
    assert queue.dead_letters.redrive() == 1
    assert queue.send("b", dedup_id="b") == ids[1]
    assert_sizes(queue, waiting=1, in_flight=0)


def test_ids_are_unique_within_a_batch(unique: MakeQueue) -> None:
    queue = unique()
    before = queue.send("0", dedup_id="z")
    ids = queue.send_many(
        [OutgoingMessage(name, dedup_id=name[0]) for name in ("a1", "b1", "a2", "z2", "b2", "c1")]
    )
    assert (ids[2], ids[4], ids[3]) == (ids[0], ids[1], before)
    assert [one.body for one in take(queue, 4)] == [b"0", b"a1", b"b1", b"c1"]
    assert queue.receive(wait=0) == []


def test_an_id_is_free_again_after_its_window(kmq_target: Target, unique: MakeQueue) -> None:
    queue = unique(dedup_window_ms=round(LEASE_S * 1000))
    first = queue.send("1", dedup_id="a")
    kmq_target.pass_time(PAST_LEASE_S)
    second = queue.send("2", dedup_id="a")
    assert second != first
    assert queue.send("3", dedup_id="a") == second
    assert queue.size() == 2


def test_without_a_window_an_id_counts_within_a_batch(unique: MakeQueue) -> None:
    queue = unique(dedup_window_ms=0)
    first, second = queue.send_many([OutgoingMessage("1", dedup_id="a"), OutgoingMessage("2", dedup_id="a")])
    assert first == second != queue.send("3", dedup_id="a")
    assert [one.body for one in take(queue, 2)] == [b"1", b"3"]


def test_a_unique_job_is_unique_until_it_is_acknowledged(kmq_target: Target, unique: MakeQueue) -> None:
    queue = unique(dedup_until="acknowledged", dedup_window_ms=1)
    first = queue.send("1", dedup_id="a")
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.send("2", dedup_id="a") == first
    message = take_one(queue, lease=60)
    assert queue.send("3", dedup_id="a") == first
    queue.nack(message, confirmed=True)
    assert queue.send("4", dedup_id="a") == first
    queue.ack(take_one(queue), confirmed=True)
    second = queue.send("5", dedup_id="a")
    assert second != first
    queue.dead_letter(take_one(queue), confirmed=True)
    third = queue.send("6", dedup_id="a")
    assert third not in (first, second)
    assert_dead(queue, 1)
    queue.purge()
    assert queue.send("7", dedup_id="a") not in (first, second, third)


def test_a_job_whose_last_lease_has_ended_is_unique_no_more(kmq_target: Target, unique: MakeQueue) -> None:
    queue = unique(dedup_until="acknowledged", max_redeliveries=0)
    first = queue.send("1", dedup_id="a")
    queue.extend(take_one(queue, lease=60), lease=LEASE_S, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.send("2", dedup_id="a") != first  # before anybody else looks
    assert_dead(queue, 1)


def test_a_redriven_job_is_unique_again_unless_another_one_is(kmq_target: Target, unique: MakeQueue) -> None:
    queue = unique(dedup_until="acknowledged", dedup_window_ms=1)
    first, second = queue.send("1", dedup_id="a"), queue.send("2", dedup_id="b")
    for one in take(queue, 2):
        queue.dead_letter(one, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    for number in range(30):  # sends remove keys whose time is over
        queue.send("other", dedup_id=f"c{number}")
    other = queue.send("3", dedup_id="b")
    assert queue.dead_letters.redrive() == 2
    assert queue.send("4", dedup_id="a") == first
    assert queue.send("5", dedup_id="b") == other != second


def test_equal_bodies_can_be_the_same_message(unique: MakeQueue) -> None:
    queue = unique(dedup_by="body")
    first = queue.send("x")
    assert queue.send("x") == first
    assert queue.send("x", dedup_id="own") != first
    assert queue.send_many(["y", "x", "y"])[1] == first
    assert queue.size() == 3


def test_of_sends_at_a_time_one_is_stored(kmq_target: Target, unique: MakeQueue) -> None:
    queue = unique()

    def send(number: int) -> list[str]:
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            found = []
            for step in range(10):
                names = [str((step + at) % 12) for at in range(3 + number % 2)]
                sent = own.send_many([OutgoingMessage(name, dedup_id=name) for name in names])
                found += [f"{name} {sent_id}" for name, sent_id in zip(names, sent, strict=True)]
            return found

    pairs = {pair for found in at_once(4, send) for pair in found}
    assert len(pairs) == 12
    assert_sizes(queue, waiting=12, in_flight=0)


def test_a_queue_that_is_made_again_knows_no_ids(kmq_storage: Storage, unique: MakeQueue) -> None:
    name = unique().name
    queue: Queue = kmq_storage.open(name)
    first = queue.send("1", dedup_id="a")
    kmq_storage.delete(name)
    kmq_storage.create(name)
    assert kmq_storage.open(name).send("2", dedup_id="a") != first
