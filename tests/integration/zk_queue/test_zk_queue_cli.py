"""`kmq zookeeper stats` and `kmq zookeeper dlq`."""

import json

import pytest
from zk_support import put

from kmqpy.cli.app import run
from kmqpy.zookeeper.queue import ConsumeOnce, ZkQueueStats


@pytest.fixture
def kmq(zookeeper, capsys):
    def call(*args):
        code = run(["zookeeper", *args, "--zookeeper", zookeeper.hosts, "-o", "json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return call


@pytest.fixture
def queue(make):
    """`in` with a dead letter, a taken item and a free one."""
    made = make(policy=ConsumeOnce())
    put(made, b"dead")
    with made.transaction() as tx:
        tx.try_take("in")
    with made.transaction() as tx:
        assert tx.try_take("in") is None
    put(made, b"a", b"b")
    with made.transaction() as tx:
        tx.try_take("in")
        yield made


def test_stats_count_items_taken_ones_and_dead_letters(kmq, queue):
    root = queue.settings.root
    assert queue.stats("in") == ZkQueueStats(queue="in", items=2, taken=1, dead=1)
    code, shown, _ = kmq("stats", "--queue-root", root)
    assert (code, [one["queue"] for one in shown]) == (0, ["in", "other", "out"])
    assert kmq("stats", "in", "--queue-root", root)[1] == [{"queue": "in", "items": 2, "taken": 1, "dead": 1}]
    code, _, err = kmq("stats", "nowhere", "--queue-root", root)
    assert code
    assert "nowhere" in err
    assert kmq("stats", "--queue-root", f"{root}-none")[:2] == (0, [])


def test_dead_letters_are_listed_redriven_and_purged(kmq, queue):
    root = ("--queue-root", queue.settings.root)
    [listed] = kmq("dlq", "list", "in", *root)[1]
    assert (listed["name"], listed["taken"], listed["body"]) == ("item-0000000000", 1, "dead")
    code, done, err = kmq("dlq", "redrive", "in", "item-0000000000", "item-0000000099", *root)
    assert (code, done["redriven"]) == (1, 1)
    assert "dlq list in" in err
    assert kmq("dlq", "list", "in", *root)[1] == []
    with queue.transaction() as tx:
        assert [one.body for one in tx.try_take_many("in", 3)] == [b"b", b"dead"]
    with queue.transaction() as tx:
        tx.try_take_many("in", 3)
    assert kmq("dlq", "purge", "in", "--yes", *root)[:2] == (0, {"queue": "in", "purged": 2})
