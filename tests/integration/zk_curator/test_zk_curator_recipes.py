"""Curator's simple queue, and its sharder of queues."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from zk_support import until

from kmqpy.errors import Closed, MessageError
from kmqpy.zookeeper.curator import QueueSharder, SimpleDistributedQueue
from kmqpy.zookeeper.session import connect


def test_a_simple_queue_hands_each_item_to_one_caller(zk, zookeeper, path):
    queue = SimpleDistributedQueue(zk, path)
    assert (queue.peek(), queue.poll(), queue.take(0.1)) == (None, None, None)
    for n in range(40):
        queue.offer(b"%d" % n)
    assert zk.get_children(path)[0].startswith("qn-")
    assert (queue.peek(), queue.poll()) == (b"0", b"0")
    with connect(zookeeper) as client, ThreadPoolExecutor(4) as pool:
        queues = [queue, SimpleDistributedQueue(client, path)] * 2
        taken = [*pool.map(lambda one: [*iter(one.poll, None)], queues)]
        assert Counter(one for some in taken for one in some) == Counter(b"%d" % n for n in range(1, 40))
        waiting = pool.submit(queues[1].take)
        queue.offer(b"late")
        assert waiting.result(10) == b"late"
    for item in "text", b"x" * 2_000_000:
        with pytest.raises(MessageError):
            queue.offer(item)


def test_a_sharder_adds_a_queue_when_one_is_full(builder, zk, path, caplog):
    options = builder(put_in_background=False)
    parts = [
        QueueSharder(
            zk,
            lambda one: replace(options, path=one).build_queue(),
            path,
            path + "-leader",
            threshold=4,
            check_every_s=3600,
            max_queues=2,
        )
        for _ in range(2)
    ]
    with pytest.raises(Closed):
        parts[0].queue()
    with parts[0] as sharder, parts[1] as other:
        assert sharder.paths == other.paths
        [first] = sharder.paths
        for n in range(4):
            sharder.queue().put(b"%d" % n)
        sharder.check()
        other.check()
        assert len(sharder.paths) == 2
        assert {one.rpartition("/")[2] for one in sharder.paths} == set(zk.get_children(path))
        for n in range(4):
            sharder.queue().put(b"%d" % n)
        assert [len(zk.get_children(one)) for one in sharder.paths] == [4, 4]
        assert other.paths == sharder.paths
        assert first in other.paths
        sharder.check()
        assert "max_queues allows no more" in caplog.text
    assert zk.get_children(path + "-leader") == []


def test_a_sharder_checks_by_itself(builder, zk, path):
    def make(one):
        return replace(builder(put_in_background=False), path=one).build_queue()

    with QueueSharder(zk, make, path, path + "-leader", threshold=1, check_every_s=0.05) as sharder:
        sharder.queue().put(b"a")
        until(lambda: len(sharder.paths) == 2)
