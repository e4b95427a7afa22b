"""Policies of queues in ZooKeeper: how often items are handed out, back-offs, dead letters."""

import pytest
from zk_support import drained, forbid, put, put_below

from kmqpy.core.backoff import Backoff
from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound
from kmqpy.zookeeper.queue import (
    AtLeastOnce,
    ConsumeOnce,
    ConsumeTimes,
    Meta,
    Refusal,
    dead_letters,
)


@pytest.fixture
def dead(make):
    """A queue with three dead letters, and these."""
    queue = make(policy=ConsumeOnce())
    put(queue, b"a", b"b", b"c")
    for _ in range(2):
        with queue.transaction() as tx:
            tx.try_take_many("in", 3)
    return queue, queue.dead_letters("in")


def first_dead(zk, queue):
    """The path of a queue's first dead letter."""
    parent = queue.paths("in").dead_letters
    return f"{parent}/{min(zk.get_children(parent))}"


def test_a_dead_letter_with_znodes_of_others_below_it_holds_up_no_other(dead, zk, monkeypatch):
    queue, dead = dead
    put_below(zk, first_dead(zk, queue))
    monkeypatch.setattr(dead_letters, "_REQUESTS_AT_ONCE", 1)
    for call in dead.redrive, dead.purge:
        with pytest.raises(ConfigError, match="znodes of others below it"):
            call()
    assert (len(dead.list()), queue.size("in")) == (1, 2)


@pytest.mark.parametrize("together", [1, 100])
def test_a_dead_letter_that_we_may_not_read_holds_up_no_other(dead, zk, monkeypatch, together):
    monkeypatch.setattr(dead_letters, "_REQUESTS_AT_ONCE", together)
    queue, dead = dead
    forbid(zk, first_dead(zk, queue))
    assert (len(dead.list()), dead.redrive(), queue.size("in")) == (2, 2, 2)
    for call in dead.list, dead.redrive:
        with pytest.raises(AccessDenied):
            call()
    assert dead.purge() == 1


@pytest.mark.parametrize(("policy", "times"), [(ConsumeOnce(), 1), (ConsumeTimes(3), 3)])
def test_after_so_many_times_an_item_goes_to_the_dlq(make, zk, policy, times):
    queue = make(policy=policy)
    put(queue, b"a")
    for number in range(1, times + 1):
        with queue.transaction() as tx:
            assert tx.try_take("in").taken == number
    assert drained(queue) == []
    dlq = f"{queue.settings.root}/in/dlq"
    assert [zk.get(f"{dlq}/{name}")[0] for name in zk.get_children(dlq)] == [b"a"]
    assert queue.size("in") == 0
    assert zk.get_children(f"{queue.settings.root}/in/meta") == []


def test_many_items_in_their_back_off_do_not_hide_the_others(make):
    first, second = (make(policy=AtLeastOnce(backoff=Backoff(3_600, maximum=3_600))) for _ in range(2))
    put(first, *(b"%d" % n for n in range(130)))
    with first.transaction() as tx:
        assert len(tx.try_take_many("in", 120)) == 120
    assert drained(second) == [b"%d" % n for n in range(120, 130)]


def test_dead_letters_are_listed_redriven_and_purged(make):
    queue = make(policy=ConsumeOnce())
    put(queue, *(b"%d" % n for n in range(150)))
    put(queue, b"urgent", priority=5)
    with queue.transaction() as tx:
        assert len(tx.try_take_many("in", 200)) == 151
    assert drained(queue) == []
    dead = queue.dead_letters("in")
    first, second = dead.list(2)
    assert (first.queue, first.body, second.body) == ("in", b"urgent", b"0")
    assert (first.name, first.taken, second.name) == ("item-p5-0000000150", 1, "item-0000000000")
    assert queue.session.zk.exists(queue.paths("in").items).mtime <= first.died_ms
    assert dead.redrive([first.name, first.name, "item-0000009999"]) == 1
    assert dead.purge([first.name, second.name]) == 1
    assert dead.redrive() == 149
    assert (dead.list(), dead.redrive(), dead.purge()) == ([], 0, 0)
    with queue.transaction() as tx:
        items = tx.try_take_many("in", 200)
    assert [item.body for item in items] == [b"urgent", *(b"%d" % n for n in range(1, 150))]
    assert {item.taken for item in items} == {1}


@pytest.mark.parametrize("name", ["../items/item-0000000001", "item-1", "", None])
def test_invalid_names_of_dead_letters_are_refused(make, name):
    dead = make().dead_letters("in")
    for call in dead.redrive, dead.purge:
        with pytest.raises(ConfigError, match=r"names: .* is not the name of a dead letter"):
            call([name])


def test_dead_letters_that_were_numbered_anew_are_read_too(make, zk, dead):
    queue, letters = dead
    zk.create(f"{queue.paths('in').dead_letters}/item-p5-0000000007", b"old")
    old = letters.list()[0]
    assert (old.name, old.body, old.taken) == ("item-p5-0000000007", b"old", None)
    assert (letters.size(), letters.redrive(["item-p5-0000000007"]), letters.size()) == (4, 1, 3)


def test_each_queue_has_its_own_policy(make):
    queue = make(policy=ConsumeTimes(2), policies={"in": ConsumeOnce(), "other": AtLeastOnce()})
    for name in ("in", "out", "other"):
        put(queue, b"a", target=name)
        for _ in range(3):
            with queue.transaction() as tx:
                tx.try_take(name)
    dead = [[(one.name, one.taken) for one in queue.dead_letters(q).list()] for q in ("in", "out", "other")]
    assert dead == [[("item-0000000000", 1)], [("item-0000000000", 2)], []]


class Refuses:
    """A policy of a user: never hands out, and counts nothing."""

    counts = False

    def next(self, meta, now_ms):
        assert isinstance(meta, Meta)
        return Refusal.TOO_OFTEN


def test_a_policy_of_the_user_may_refuse_without_a_count(make):
    queue = make(policies={"in": Refuses()})
    put(queue, b"a")
    assert drained(queue) == []
    assert [(one.body, one.taken) for one in queue.dead_letters("in").list()] == [(b"a", 0)]


def test_dead_letters_of_a_queue_that_is_missing(make):
    dead = make().dead_letters("nowhere")
    for call in dead.list, dead.redrive, dead.purge:
        with pytest.raises(QueueNotFound, match="nowhere"):
            call()


def test_a_back_off_keeps_an_item_back(make, zk):
    queue = make(policy=AtLeastOnce(backoff=Backoff(3_600, maximum=3_600)))
    put(queue, b"a", b"b")
    with queue.transaction() as tx:
        item = tx.try_take("in")
    assert drained(queue) == [b"b"]
    number = item.name.removeprefix("item-")
    zk.set(f"{queue.settings.root}/in/meta/meta-{number}", b'{"taken": 1, "not_before_ms": 0}')
    with queue.transaction() as tx:
        assert tx.try_take("in").taken == 2


@pytest.mark.parametrize("meta", [b"", b"{}", b"[]", b'{"taken": "x"}', b"\xff"])
def test_a_meta_that_is_none_counts_as_never_taken(make, zk, meta):
    queue = make(policy=ConsumeOnce())
    put(queue, b"a")
    zk.create(f"{queue.settings.root}/in/meta/meta-0000000000", meta)
    with queue.transaction() as tx:
        assert tx.try_take("in").taken == 1
        tx.commit()
