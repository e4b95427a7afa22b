"""Trackers that share, lose and regain partitions, on a real ZooKeeper."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NotEmptyError
from leadership_support import ALL, PARTITIONS, SESSION_MS, epochs, owned, stop_thread, until
from zk_support import Cable

from kmqpy.core.clock import SystemClock
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.registry_entries import StoredOffset, TrackerInfo
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.chaos.proxy import Cut, Proxy
from tracker.leadership.assignment import capacity
from tracker.leadership.leadership import Leadership
from tracker.leadership.registry_view import RegistrySnapshot


def shared(*members: Leadership) -> bool:
    """Whether every partition has one owner and nobody has too many."""
    parts = [owned(member) for member in members]
    bound = capacity(PARTITIONS, len(members))
    return (
        set().union(*parts) == ALL
        and sum(map(len, parts)) == PARTITIONS
        and all(len(part) <= bound for part in parts)
        and not any(member.snapshot().releasing for member in members)
    )


def crash(leadership: Leadership) -> None:
    """Leave like a killed process: the session is not closed, it has to expire."""
    stop_thread(leadership)
    client = leadership._zk
    client._stopped.set()
    with contextlib.suppress(OSError):
        client._connection._socket.shutdown(socket.SHUT_RDWR)
    client._safe_close()
    client.close()


def end_session(leadership: Leadership, hosts: str) -> None:
    """End a session from outside: the server tells its owner that it has expired."""
    other = KazooClient(hosts, client_id=leadership._zk.client_id)
    other.start()
    other.stop()
    other.close()


def test_trackers_share_and_a_third_takes_its_part(registry, join):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a = join("a")
    until(lambda: owned(a) == ALL)
    b = join("b")
    until(lambda: shared(a, b), a, b)
    before = epochs(a)
    c = join("c")
    until(lambda: shared(a, b, c) and owned(c), a, b, c)
    assert registry.owners("q") == {
        p: name for name, member in zip("abc", (a, b, c), strict=True) for _, p in owned(member)
    }
    assert [tracker.id for tracker in registry.trackers()] == ["a", "b", "c"]
    kept = epochs(a)
    assert all(before[partition] == epoch for partition, epoch in kept.items())
    assert all(member.may_redeliver() for member in (a, b, c))


def test_nothing_moves_before_its_owner_lets_go(registry, join):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a = join("a")
    until(lambda: owned(a) == ALL)
    b = join("b", takeover_delay=0.1)
    until(lambda: a.snapshot().releasing)
    time.sleep(0.5)
    assert owned(a) == ALL
    assert owned(b) == set()


def test_a_graceful_stop_hands_over_at_once(registry, join):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a, b = join("a", session_timeout_ms=40_000), join("b")
    until(lambda: shared(a, b), a, b)
    a.close()
    assert owned(a) == set()
    assert not a.may_redeliver()
    assert until(lambda: owned(b) == ALL) < 20  # its session would end after 26 s at the earliest


def test_a_crashed_tracker_is_replaced_when_its_session_ends(registry, join, record_property):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a, b = join("a"), join("b")
    until(lambda: shared(a, b), a, b)
    crash(a)
    took = until(lambda: owned(b) == ALL)
    record_property("failover_s", took)
    assert took < SESSION_MS / 1000 + 15  # on a busy machine, too


CHILD = """
import sys, time
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.leadership import Leadership
hosts, root, session_ms = sys.argv[1], sys.argv[2], int(sys.argv[3])
zookeeper = ZooKeeperConnection(hosts=hosts)
leadership = Leadership(zookeeper, "child", root=root, session_timeout_ms=session_ms).start(10)
last = None
while True:
    now = (leadership.may_redeliver(), len(leadership.snapshot().owned))
    if now != last:
        print(*now, flush=True)
        last = now
    for partition in leadership.snapshot().releasing:
        leadership.release(*partition)
    time.sleep(0.002)
"""


@pytest.fixture
def child(cluster, root) -> Iterator[subprocess.Popen]:
    """A tracker in a process of its own; prints may_redeliver and how many it owns on change."""
    arguments = [sys.executable, "-c", CHILD, cluster.zookeeper, root, str(SESSION_MS)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], text=True)
    with process:
        yield process
        process.kill()


def test_a_killed_process_is_replaced(registry, join, child, record_property):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    b = join("b")
    until(lambda: len(registry.owners("q")) == PARTITIONS and shared_with_child(registry, b), b)
    os.kill(child.pid, signal.SIGKILL)
    took = until(lambda: owned(b) == ALL)
    record_property("failover_s", took)
    assert took < SESSION_MS / 1000 + 15  # on a busy machine, too


def shared_with_child(registry: Registry, other: Leadership) -> bool:
    owners = list(registry.owners("q").values())
    return owners.count("child") > 0 and owners.count("b") == len(owned(other))


def test_a_paused_process_knows_at_once_that_its_time_is_over(registry, join, child):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    b = join("b")
    until(lambda: len(registry.owners("q")) == PARTITIONS and shared_with_child(registry, b), b)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: owned(b) == ALL)
    while select.select([child.stdout], [], [], 0)[0]:
        os.read(child.stdout.fileno(), 65536)  # what it said before
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdout.readline().startswith("False")
    # It comes back as a new member, with nothing, and gets its part again.
    until(lambda: 0 < len(owned(b)) < PARTITIONS and shared_with_child(registry, b), b)


@pytest.fixture
def cable(cluster):
    with Proxy() as proxy:
        yield Cable(proxy, ZooKeeperConnection(hosts=cluster.zookeeper.split(",")[0]))


def test_cut_off_it_stops_before_another_takes_over(registry, join, cable):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a = join("a", cable.connection.hosts)
    until(lambda: owned(a) == ALL and a.may_redeliver())
    b = join("b")
    until(lambda: shared(a, b), a, b)
    before = epochs(a)
    cable.cut(Cut.BLACKHOLE)
    stopped = until(lambda: not a.may_redeliver())
    assert stopped < SESSION_MS / 1000  # before the server can end the session
    assert not owned(b) & before.keys()
    with pytest.raises(Unavailable, match=cable.connection.hosts):
        a.verify(*next(iter(before)))
    until(lambda: owned(b) == ALL)
    assert not a.may_redeliver()
    cable.heal()
    until(lambda: shared(a, b) and a.may_redeliver(), a, b)
    assert all(epoch > max(before.values()) for epoch in epochs(a).values())


def test_a_short_cut_costs_nothing(registry, join, cable):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a = join("a", cable.connection.hosts, session_timeout_ms=4_000)
    until(lambda: owned(a) == ALL and a.may_redeliver())
    before = epochs(a)
    a._zk._connection._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: not a.snapshot().connected or not a.may_redeliver())
    until(lambda: a.snapshot().connected and a.may_redeliver())
    assert epochs(a) == before


def test_a_session_that_ended_takes_everything_and_a_new_one_regains_it(registry, join, cluster):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a = join("a")
    until(lambda: owned(a) == ALL)
    before = epochs(a)
    end_session(a, cluster.zookeeper)
    until(lambda: owned(a) == ALL and a.may_redeliver() and min(epochs(a).values()) > max(before.values()))


class Jumping(SystemClock):
    """Time that passes while nothing runs, as when the process is paused."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def test_redelivery_is_allowed_for_two_thirds_of_a_session_at_most(registry, join):
    clock = Jumping()
    a = join("a", clock=clock, session_timeout_ms=6_000)
    until(a.may_redeliver)
    clock.ahead += 1.0
    assert a.may_redeliver()  # verified at least every 1.5 s
    clock.ahead += 4.0
    assert not a.may_redeliver()
    until(a.may_redeliver)


def test_nothing_of_a_queue_that_was_marked_meanwhile_is_acquired(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 1)
    a = join("a", queues=frozenset())
    stop_thread(a)
    stat = zk.exists(f"{root}/queues/q")
    tree = RegistrySnapshot({}, frozenset(), {}, {"q": stat.version}, {})
    zk.set(f"{root}/queues/q", b"marked")
    assert not a._leaders.acquire([("q", 0)], tree)
    assert zk.get_children(f"{root}/queues/q/partitions/0") == []


def test_a_late_release_does_not_touch_the_znode_of_a_successor(registry, join, zk, root):
    """The request reaches ZooKeeper in a new session; the member znode went with the old one."""
    registry.register(QueueSettings(name="q"), 1)
    a = join("a")
    until(lambda: owned(a))
    stop_thread(a)
    a.release("q", 0)
    leader = zk.exists(f"{root}/queues/q/partitions/0/leader")
    zk.delete(f"{root}/trackers/a")
    a._give_up(RegistrySnapshot({}, frozenset(), {}, {}, {("q", 0): leader}), leader.ephemeralOwner)
    assert registry.owners("q") == {0: "a"}


def test_the_server_may_grant_a_shorter_session(registry, join):
    a = join("a", session_timeout_ms=600_000)
    assert a._session.certain_s < 600 * 2 / 3


def test_a_znode_of_an_older_session_is_not_ours(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 1)
    leader = f"{root}/queues/q/partitions/0/leader"
    zk.create(leader, b"a", ephemeral=True)
    a = join("a", takeover_delay=0.1)
    time.sleep(0.5)
    assert owned(a) == set()
    assert not a.verify("q", 0)
    assert not a.write_offsets({("q", 0): StoredOffset(1, "t", 1)})
    zk.delete(leader)
    until(lambda: owned(a) == {("q", 0)})


def test_the_same_id_waits_for_the_end_of_the_older_session(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 1)
    stale = TrackerInfo("a", "host", 1, None, kafka_ok=True)
    zk.create(f"{root}/trackers/a", stale.to_json(), ephemeral=True, makepath=True)
    zk.create(f"{root}/queues/q/partitions/0/leader", b"a", ephemeral=True)
    timer = threading.Timer(
        0.5,
        lambda: [zk.delete(path) for path in (f"{root}/queues/q/partitions/0/leader", f"{root}/trackers/a")],
    )
    timer.start()
    a = join("a")
    until(lambda: owned(a) == {("q", 0)} and a.may_redeliver())
    timer.join()


def test_an_id_in_use_is_a_clear_error(registry, join, cluster, root):
    join("a")
    twin = Leadership(
        ZooKeeperConnection(hosts=cluster.zookeeper), "a", root=root, session_timeout_ms=SESSION_MS
    )
    with pytest.raises(Unavailable, match="another session is registered"):
        twin.start(0.5)


def test_zookeeper_away_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address):
            Leadership(ZooKeeperConnection(hosts=address), "a", session_timeout_ms=SESSION_MS).start(0.5)


def test_an_id_that_is_no_znode_name_is_refused():
    with pytest.raises(ConfigError, match="tracker_id"):
        Leadership(ZooKeeperConnection(hosts="127.0.0.1:1"), "a/b")


def test_queues_come_grow_and_go_while_it_runs(registry, join):
    a = join("a")
    assert a.snapshot().connected
    registry.register(QueueSettings(name="q"), 2)
    until(lambda: owned(a) == {("q", 0), ("q", 1)})
    assert a.snapshot().queues["q"] == registry.get("q")
    registry.register(QueueSettings(name="q", max_redeliveries=7), 3)
    until(lambda: len(owned(a)) == 3)
    assert a.snapshot().queues["q"].settings.max_redeliveries == 7
    remover = threading.Thread(target=registry.remove, args=("q", 5))
    remover.start()
    until(lambda: len(a.snapshot().releasing) == 3)
    assert a.snapshot().queues["q"].deleting
    until(lambda: not remover.is_alive(), a)
    remover.join()
    until(lambda: "q" not in a.snapshot().queues)
    assert owned(a) == set()
    assert registry.queues() == []


def test_only_the_named_queues_are_served(registry, join):
    registry.register(QueueSettings(name="q"), 2)
    registry.register(QueueSettings(name="other"), 2)
    a = join("a", queues=frozenset({"q"}))
    b = join("b", queues=frozenset({"other"}))
    until(lambda: owned(b) == {("other", 0), ("other", 1)})
    until(lambda: owned(a) == {("q", 0), ("q", 1)})
    assert list(a.snapshot().queues) == ["q"]
    b.close()
    time.sleep(0.3)
    assert registry.owners("other") == {}


def test_without_kafka_a_tracker_withdraws(registry, join):
    registry.register(QueueSettings(name="q"), PARTITIONS)
    a, b = join("a"), join("b")
    until(lambda: shared(a, b), a, b)
    a.set_kafka_ok(False)
    until(lambda: owned(b) == ALL, a, b)
    assert [tracker.kafka_ok for tracker in registry.trackers()] == [False, True]
    a.set_kafka_ok(True)
    until(lambda: shared(a, b), a, b)


def test_the_next_in_rank_stands_in_and_keeps_it(registry, join, zk, root):
    """A member that takes nothing, though everything is proposed to it as well."""
    registry.register(QueueSettings(name="q"), PARTITIONS)
    idle = TrackerInfo("idle", "host", 1, None, kafka_ok=True)
    zk.create(f"{root}/trackers/idle", idle.to_json(), ephemeral=True, makepath=True)
    a = join("a", takeover_delay=0.4)
    until(lambda: 0 < len(owned(a)) < PARTITIONS)
    until(lambda: owned(a) == ALL)
    time.sleep(1.2)  # over a full re-check
    assert a.snapshot().releasing == frozenset()
    zk.delete(f"{root}/trackers/idle")
    registry.register(QueueSettings(name="q", max_redeliveries=1), PARTITIONS)
    until(lambda: a.snapshot().queues["q"].settings.max_redeliveries == 1)
    assert owned(a) == ALL


def test_a_queue_that_is_gone_is_dropped_quietly(registry, join, zk, root):
    registry.register(QueueSettings(name="q"), 2)
    a = join("a")
    until(lambda: len(owned(a)) == 2)

    def deleted() -> bool:
        with contextlib.suppress(NotEmptyError):  # it takes a partition again meanwhile
            zk.delete(f"{root}/queues/q", recursive=True)
        return not zk.exists(f"{root}/queues/q")

    until(deleted)
    assert not a.write_offsets({("q", 0): StoredOffset(4, "t", 1)})
    until(lambda: not owned(a) and not a.snapshot().queues)
    a.release("q", 0)
    assert not a.verify("q", 0)
    assert registry.queues() == []


def test_release_leaves_the_snapshot_at_once_and_a_later_grant_is_new(registry, join):
    registry.register(QueueSettings(name="q"), 1)
    a = join("a")
    until(lambda: owned(a))
    before = epochs(a)["q", 0]
    a.release("q", 0)
    assert owned(a) == set() or epochs(a)["q", 0] > before
    until(lambda: owned(a))  # it is proposed to us, so it comes back
    assert epochs(a)["q", 0] > before
