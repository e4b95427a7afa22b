"""Tests of queues with delays of their own before redeliveries (retry_delays)."""

from __future__ import annotations

import pytest

from kmqpy.errors import ConfigError, NotSupported
from kmqpy.queue import Storage
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    MakeQueue,
    Target,
    assert_dead,
    new_name,
    skip_without,
    take_one,
)


def test_a_storage_without_retry_delays_says_so(kmq_storage: Storage) -> None:
    name = new_name()
    if not kmq_storage.capabilities.retry_delays:
        with pytest.raises(NotSupported, match="retry_delays"):
            kmq_storage.create(name, retry_delays=["1s"])
        return
    kmq_storage.create(name, retry_delays="1000ms,60s", retry_max_ms="1h")
    assert tuple(kmq_storage.describe(name).settings["retry_delays"]) == ("1s", "1m")
    kmq_storage.alter(name, retry_delays=["2s"], retry_max_ms=None, retry_jitter=0.5)
    found = kmq_storage.describe(name).settings
    assert (tuple(found["retry_delays"]), found["retry_jitter"]) == (("2s",), 0.5)
    for wrong in (
        {"retry_delays": ["soon"]},
        {"retry_delays": ["8d"]},
        {"retry_delays": ["1s"] * 101},
        {"retry_jitter": 2},
        {"retry_max_ms": 1_000},
    ):
        with pytest.raises(ConfigError, match="retry_"):
            kmq_storage.alter(name, **wrong)
    assert kmq_storage.describe(name).settings == found


@pytest.mark.parametrize("how", ["lease", "nack"])
def test_each_redelivery_waits_as_long_as_the_queue_says(
    kmq_target: Target, kmq_storage: Storage, make_queue: MakeQueue, how: str
) -> None:
    skip_without(kmq_storage.capabilities, "retry_delays")
    queue = make_queue(retry_delays=["0s", f"{round(LEASE_S * 1000)}ms"], max_redeliveries=3)
    assert queue.delays_retries

    def fail() -> None:
        message = take_one(queue)
        if how == "nack":
            queue.nack(message, confirmed=True)
        else:
            kmq_target.pass_time(PAST_LEASE_S)

    queue.send("x")
    fail()
    fail()
    for attempt in (3, 4):
        if how == "nack" or not kmq_target.real_time:
            assert queue.receive(wait=0) == []
            assert (queue.size(), queue.in_flight()) == (1, 0)
        kmq_target.pass_time(PAST_LEASE_S)
        message = take_one(queue)
        assert message.attempts == attempt
        if attempt == 3:
            queue.nack(message, confirmed=True)
    queue.nack(message, confirmed=True)
    assert_dead(queue, 1)


def test_a_nack_with_a_delay_and_one_that_does_not_count_know_better(
    kmq_storage: Storage, make_queue: MakeQueue
) -> None:
    skip_without(kmq_storage.capabilities, "retry_delays")
    queue = make_queue(retry_delays=["1h"])
    queue.send("x")
    queue.nack(take_one(queue), delay=0, confirmed=True)
    queue.nack(take_one(queue), count=False, confirmed=True)
    assert take_one(queue).attempts == 2


def test_a_redriven_message_begins_with_the_first_delay_again(
    kmq_storage: Storage, make_queue: MakeQueue
) -> None:
    skip_without(kmq_storage.capabilities, "retry_delays")
    queue = make_queue(retry_delays=["0s", "1h"], max_redeliveries=1)
    queue.send("x")
    for _ in range(2):
        queue.nack(take_one(queue), confirmed=True)
    assert_dead(queue, 1)
    assert queue.dead_letters.redrive() == 1
    queue.nack(take_one(queue), confirmed=True)
    assert take_one(queue).attempts == 2


def test_altered_delays_count_from_the_next_failure_on(
    kmq_target: Target, kmq_storage: Storage, make_queue: MakeQueue
) -> None:
    skip_without(kmq_storage.capabilities, "retry_delays")
    skip_without(kmq_storage.capabilities, "immediate")  # where trackers hear of it
    queue = make_queue(retry_delays=[f"{round(LEASE_S * 1000)}ms"])
    queue.send("x")
    queue.nack(take_one(queue), confirmed=True)
    kmq_storage.alter(queue.name, retry_delays=["1h"])
    kmq_target.pass_time(PAST_LEASE_S)  # it waits no longer than was said when it failed
    queue.nack(take_one(queue), confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.receive(wait=0) == []
    assert queue.size() == 1
