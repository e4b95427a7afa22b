"""Names and policies of queues in ZooKeeper; without a server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError
from kmqpy.zookeeper.queue.layout import QueuePaths, in_order, is_item
from kmqpy.zookeeper.queue.policies import AtLeastOnce, ConsumeOnce, ConsumeTimes, Meta, Refusal
from kmqpy.zookeeper.queue.queue import ZkQueueSettings

NOW = 1_000_000


def test_paths():
    paths = QueuePaths("/zms", "q")
    name = "item-p5-0000000007"
    assert paths.parents == ("/zms/q/items", "/zms/q/locks", "/zms/q/meta", "/zms/q/dlq")
    assert (paths.new_item(), paths.new_item(5)) == ("/zms/q/items/item-", "/zms/q/items/item-p5-")
    assert paths.item(name) == "/zms/q/items/item-p5-0000000007"
    assert paths.lock(name) == "/zms/q/locks/lock-0000000007"
    assert paths.owner(name, "uuid") == "/zms/q/locks/lock-0000000007.uuid"
    assert paths.meta(name) == "/zms/q/meta/meta-0000000007"


@pytest.mark.parametrize("name", ["", "a/b", ".transactions", "a\x00"])
def test_names_that_no_queue_can_have(name):
    with pytest.raises(ConfigError, match="queue"):
        QueuePaths("/zms", name)


def test_the_order_is_priority_then_sequence_without_what_is_locked():
    names = ["item-0000000003", "item-p9-0000000004", "item-0000000001", "item-p1-0000000002", "foreign"]
    locks = ["lock-0000000003", "lock-0000000003.uuid", "foreign", "lock-0000000009"]
    assert in_order(names, locks) == ["item-p9-0000000004", "item-p1-0000000002", "item-0000000001"]


def test_a_sequence_that_went_past_31_bits_is_an_item_too():
    assert is_item("item--2147483648")
    assert not is_item("item-p0-0000000001")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_meta(data):
    assert isinstance(Meta.decode(data), Meta)


@pytest.mark.parametrize(
    "data",
    [
        b'{"taken": Infinity}',
        b'{"taken": 1, "not_before_ms": 1e999}',
        b'{"taken": -5}',
        b'{"taken": ' + b"9" * 5_000 + b"}",
        b"[" * 100_000,
    ],
)
def test_a_forged_meta_counts_as_never_taken(data):
    assert Meta.decode(data) == Meta()


@given(st.integers(0, 99), st.integers(0, 2**50))
def test_a_meta_comes_back(taken, not_before_ms):
    meta = Meta(taken=taken, not_before_ms=not_before_ms)
    assert Meta.decode(meta.encode()) == meta


def test_policies():
    assert AtLeastOnce().next(Meta(taken=99), NOW) == Meta(taken=100, not_before_ms=NOW)
    assert not AtLeastOnce().counts
    assert AtLeastOnce(backoff=Backoff(1)).counts
    assert ConsumeOnce() == ConsumeTimes(1)
    assert ConsumeOnce().next(Meta(), NOW) == Meta(taken=1, not_before_ms=NOW)
    assert ConsumeTimes(3).next(Meta(taken=3), NOW) is Refusal.TOO_OFTEN
    with pytest.raises(ConfigError, match="times: 0"):
        ConsumeTimes(0)


def test_the_back_off_grows_with_each_take():
    policy = ConsumeTimes(3, Backoff(1, jitter=0))
    first = policy.next(Meta(), NOW)
    assert first == Meta(taken=1, not_before_ms=NOW + 1_000)
    assert policy.next(first, NOW + 999) is Refusal.NOT_YET
    assert policy.next(first, NOW + 1_000) == Meta(taken=2, not_before_ms=NOW + 3_000)


@pytest.mark.parametrize("policy", [ConsumeTimes(3), ConsumeTimes(3, Backoff(1, maximum=60))])
def test_no_item_is_kept_back_for_longer_than_twice_the_longest_back_off(policy):
    assert policy.next(Meta(taken=1, not_before_ms=NOW + 120_001), NOW).taken == 2


def test_the_longest_back_off_counts_also_where_the_clock_of_the_taker_before_was_ahead():
    policy = ConsumeTimes(3, Backoff(60, maximum=60))
    assert policy.next(Meta(taken=1, not_before_ms=NOW + 60_000 + 5_000), NOW) is Refusal.NOT_YET


@pytest.mark.parametrize("root", ["zms", "/zms/", "/"])
def test_roots(root):
    with pytest.raises(ConfigError, match="root"):
        ZkQueueSettings(root=root)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": 5},
        {"policy": ConsumeTimes},
        {"policies": {"q": "once"}},
        {"policies": {"a/b": ConsumeTimes(1)}},
        {"policies": [ConsumeTimes(1)]},
    ],
)
def test_what_is_no_policy_is_refused(settings):
    with pytest.raises(ConfigError, match=r"^(polic|queue)"):
        ZkQueueSettings(**settings)
