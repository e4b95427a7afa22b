"""kmqpy and the real Curator 5.9.0 on the same queues; curator_jvm.py runs the latter."""

import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.curator import QueueBuilder, QueueSharder, SimpleDistributedQueue, SingleConsumer
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

pytestmark = pytest.mark.interop
JVM = Path(__file__).with_name("curator_jvm.py")
PYTHON = Path(__file__).with_name("curator_python.py")
DEADLINE_S = 60


def until(true):
    end = SYSTEM_CLOCK.monotonic() + DEADLINE_S
    while not true():
        assert SYSTEM_CLOCK.monotonic() < end
        SYSTEM_CLOCK.sleep(0.02)


class Process:
    """A process that runs Curator (or what `script` runs) for any number of sessions."""

    def __init__(self, script=JVM):
        command = [sys.executable, str(script)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._sessions = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            told = json.loads(line)
            self._sessions[told.pop("session")].said.append(told)

    def start(self, mode, **options):
        session = Session(self, len(self._sessions))
        self._sessions.append(session)
        self.tell(session=session.number, mode=mode, **options)
        return session

    def started(self, mode, **options):
        """Start a session and wait until it has said something."""
        session = self.start(mode, **options)
        until(lambda: session.said or self.process.poll() is not None)
        return session

    def tell(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Session:
    """A part that a process plays; `said` grows."""

    def __init__(self, process, number):
        self.process = process
        self.number = number
        self.said = []

    @property
    def items(self):
        return [one["item"] for one in self.said if "item" in one]

    def end(self):
        """Ask it to end, and wait until it has closed everything."""
        self.process.tell(session=self.number)
        until(lambda: any(one.keys() & {"ended", "failed"} for one in self.said))
        assert {"ended": True} in self.said, self.said


@pytest.fixture(scope="module")
def curator():
    """One for all tests that don't kill it: each start costs a second or two."""
    with Process() as process:
        yield process


@pytest.fixture
def zk(cluster):
    with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 4_000) as client:
        yield client


@pytest.fixture
def path(queue_name):
    return f"/curator/{queue_name}/queue"


def znodes(zk, path):
    return {name: zk.get(f"{path}/{name}")[0] for name in sorted(zk.get_children(path))}


class Python:
    """A consumer that collects; "bad" fails."""

    def __init__(self):
        self.items = []

    def __call__(self, item):
        self.items.append(item.decode())
        if item == b"bad":
            raise ValueError("bad")


def builder(zk, path, **options):
    return QueueBuilder(zk=zk, path=path, put_in_background=False, **options)


ITEMS = [["a"], ["", "äö", "c" * 300], []]
KINDS = {
    "queue": ITEMS,
    "id": [["one"], ["two"], ["three"]],
    "priority": [["five"], ["minus"], ["zero"]],
    "delay": [["later"], ["soon"], ["long ago"]],
}


def python_puts(queue, kind, items, extras):
    for number, one in enumerate(items):
        data = [item.encode() for item in one]
        if kind == "queue":
            queue.put_multi(data)
        else:
            put = {"id": "put_with_id", "priority": "put_with_priority", "delay": "put_until"}[kind]
            getattr(queue, put)(data[0], extras[number])


def built(options, kind):
    if kind == "priority":
        return options.build_priority_queue(0)
    return getattr(options, f"build_{'queue' if kind == 'queue' else kind + '_queue'}")()


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_bytes_are_the_same_and_each_consumes_what_the_other_put(zk, cluster, curator, path, kind):
    now = SYSTEM_CLOCK.wall_ms()
    extras = {
        "queue": [],
        "id": ["x/y|z", "x", "x/y|z"],
        "priority": [5, -7, 0],
        "delay": [now - 1_000, now - 500_000, 7],
    }[kind]
    items = KINDS[kind]
    options = {"zookeeper": cluster.zookeeper, "kind": kind, "items": items, "extras": extras}
    curator.start("put", path=path + "-java", **options).end()
    with built(builder(zk, path + "-python"), kind) as queue:
        python_puts(queue, kind, items, extras)
    theirs, ours = znodes(zk, path + "-java"), znodes(zk, path + "-python")
    assert theirs == ours
    assert len(ours) == len(items)

    flat = [item for one in items for item in one]
    order = {"priority": ["minus", "zero", "five"], "delay": ["long ago", "soon", "later"]}.get(kind, flat)
    consumer = Python()
    with built(builder(zk, path + "-java", consumer=consumer, lock_path=path + "-l1"), kind):
        # With locks an item is removed just after it was consumed.
        until(lambda: len(consumer.items) == len(flat) and not zk.get_children(path + "-java"))
    options = {"zookeeper": cluster.zookeeper, "kind": kind, "locks": path + "-l2"}
    theirs = curator.started("consume", path=path + "-python", **options)
    until(lambda: len(theirs.items) == len(flat) and not zk.get_children(path + "-python"))
    theirs.end()
    assert consumer.items == theirs.items == order


def test_side_by_side_with_locks_each_item_is_consumed_once_by_one_of_them(zk, cluster, curator, path):
    count = 200
    consumer = Python()

    def slow(item):
        consumer(item)
        time.sleep(0.002)

    locks = path + "-locks"
    other = curator.started("consume", zookeeper=cluster.zookeeper, path=path, kind="queue", locks=locks)
    with builder(zk, path, consumer=slow, lock_path=locks).build_queue() as queue:
        for n in range(count):
            queue.put(b"%d" % n)
        until(lambda: len(other.items) + len(consumer.items) >= count)
    until(lambda: not zk.get_children(path))
    other.end()
    assert Counter(other.items + consumer.items) == Counter(map(str, range(count)))
    assert other.items
    assert consumer.items
    assert zk.get_children(locks) == []


def killed_while_consuming(session, consumed_by_others):
    """Kill -9 once it has consumed some, while others have work left."""
    until(lambda: len(session.items) >= 20)
    session.process.kill()
    assert len(session.items) + len(consumed_by_others) < COUNT


COUNT = 600


@pytest.mark.parametrize("killed", ["kmqpy", pytest.param("curator", marks=pytest.mark.breadth)])
def test_nothing_is_lost_when_either_is_killed_beside_the_other(zk, cluster, curator, path, killed):
    """Who lives consumes what the killed one had locked, once its session has expired."""
    locks = path + "-locks"
    consumer = Python()

    def slow(item):
        consumer(item)
        time.sleep(0.01)

    with builder(zk, path).build_queue() as queue:
        for n in range(COUNT):
            queue.put(b"%d" % n)
    options = {"zookeeper": cluster.zookeeper, "path": path, "kind": "queue", "locks": locks, "pause_ms": 10}
    with Process(JVM if killed == "curator" else PYTHON) as mortal:
        if killed == "curator":
            dies = mortal.started("consume", **options)
            with builder(zk, path, consumer=slow, lock_path=locks).build_queue():
                killed_while_consuming(dies, consumer.items)
                until(lambda: not zk.get_children(path))
            said = dies.items + consumer.items
        else:
            lives = curator.started("consume", **options)
            dies = mortal.start("consume", **options)
            killed_while_consuming(dies, lives.items)
            until(lambda: not zk.get_children(path))
            lives.end()
            said = lives.items + dies.items
    times = Counter(said)
    assert set(times) == set(map(str, range(COUNT))), "nothing is lost"
    assert sum(times.values()) <= COUNT + 1, "only what was being consumed comes again"
    assert zk.get_children(locks) == []


def test_an_item_that_fails_is_requeued_by_both_under_the_same_bytes(zk, cluster, curator, path):
    with builder(zk, path).build_queue() as queue:
        queue.put_multi([b"bad", b"rest"])
    before = set(znodes(zk, path).values())
    locks = path + "-locks"
    theirs = curator.started("consume", zookeeper=cluster.zookeeper, path=path, kind="queue", locks=locks)
    until(lambda: len(theirs.items) > 1)
    theirs.end()
    assert set(theirs.items) == {"bad"}
    assert set(znodes(zk, path).values()) == before
    consumer = Python()
    with builder(zk, path, consumer=consumer, lock_path=locks).build_queue():
        until(lambda: len(consumer.items) > 1)
    assert set(consumer.items) == {"bad"}
    assert set(znodes(zk, path).values()) == before


def test_one_lock_chooses_the_single_consumer_of_both(zk, cluster, curator, path):
    leader = path + "-leader"
    consumer = Python()
    options = builder(zk, path, consumer=consumer, lock_path=path + "-locks")
    first = curator.started("lead", zookeeper=cluster.zookeeper, path=leader)
    single = SingleConsumer(zk, leader, options.build_queue)
    single.start()
    try:
        with builder(zk, path).build_queue() as queue:
            queue.put(b"a")
        assert not single.leading.wait(1.5)
        first.end()
        until(single.leading.is_set)
        other = curator.start("lead", zookeeper=cluster.zookeeper, path=leader)
        until(lambda: len(zk.get_children(leader)) == 2)
        until(lambda: consumer.items == ["a"])
        assert other.said == []
        single.close()
        until(lambda: other.said)
        other.end()
    finally:
        single.close()


def test_a_single_consumer_and_curators_leader_selector_take_turns_and_keep_the_order(
    zk, cluster, curator, path
):
    leader, count = path + "-leader", 100
    consumer = Python()
    with builder(zk, path).build_queue() as queue:
        for n in range(count):
            queue.put(b"%d" % n)
    options = builder(zk, path, consumer=consumer, lock_path=path + "-locks")
    single = SingleConsumer(zk, leader, options.build_queue)
    with Process() as mortal:
        first = mortal.started("select", zookeeper=cluster.zookeeper, path=leader)
        assert first.said == [{"leads": True}]
        single.start()
        try:
            until(lambda: len(zk.get_children(leader)) == 2)
            second = curator.start("select", zookeeper=cluster.zookeeper, path=leader)
            until(lambda: len(zk.get_children(leader)) == 3)
            assert not single.leading.is_set()
            names = zk.get_children(leader)
            assert all(re.fullmatch(r"(_c_)?[0-9a-f-]{32,36}-lock-[0-9]{10}", name) for name in names)
            mortal.kill()  # its znode goes with its session
            until(single.leading.is_set)
            until(lambda: not zk.get_children(path))
            assert consumer.items == [str(n) for n in range(count)]
            assert second.said == []
            single.close()
            until(lambda: second.said)
            second.end()
        finally:
            single.close()


def test_a_simple_queue_is_the_same_in_both(zk, cluster, curator, path):
    items = ["first", "", "äö"]
    options = {"zookeeper": cluster.zookeeper, "items": items}
    curator.start("simple", path=path + "-java", takes=0, **options).end()
    ours, theirs = (SimpleDistributedQueue(zk, path + end) for end in ("-python", "-java"))
    for item in items:
        ours.offer(item.encode())
    assert znodes(zk, path + "-java") == znodes(zk, path + "-python")
    assert theirs.peek() == b"first"
    assert [theirs.poll(5).decode() for _ in items] == items
    waiting = curator.start("simple", path=path + "-python", takes=4, zookeeper=cluster.zookeeper, items=[])
    until(lambda: len(waiting.items) == 3)
    ours.offer(b"while it waits")
    waiting.end()
    assert waiting.items == [*items, "while it waits"]
    assert ours.poll() is None


def test_sharders_of_both_share_their_queues(zk, cluster, curator, path):
    options = {"zookeeper": cluster.zookeeper, "path": path, "threshold": 8}
    first = curator.started("shard", items=[str(n) for n in range(9)], queues=2, consumes=False, **options)

    def build(one):
        return builder(zk, one).build_queue()

    with QueueSharder(zk, build, path, path + "-leader", threshold=8, check_every_s=0.1) as ours:
        assert {*first.said[0]["paths"]} <= {*ours.paths}  # perhaps it has added one already
        assert all(re.fullmatch(rf"{path}/queue-[0-9a-f-]{{36}}", one) for one in ours.paths)
        ours.check()
        for n in range(9, 18):
            ours.queue().put(b"%d" % n)  # the one that has room, until it is full
        until(lambda: len(ours.paths) > 2)
        second = curator.started("shard", items=[], queues=3, consumes=True, **options)
        until(lambda: len(second.items) == 18)
    for one in (first, second):
        one.end()
    assert sorted(map(int, second.items)) == [*range(18)]
