"""The unit of work under kill -9, lost answers, lost sessions and a killed leader."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zk_support
from kazoo.exceptions import ConnectionLoss
from zk_support import Cable, until

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Cluster
from kmqpy.errors import KmqError, RolledBack, SessionExpired, UnknownOutcome
from kmqpy.zookeeper.queue import Listener, TransactionOutcome, ZkQueue, ZkQueueSettings
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.chaos.proxy import Cut, Proxy

CHILD = Path(__file__).with_name("zk_queue_child.py")
KILLS = int(os.environ.get("KMQ_ZK_KILLS", "20"))


@pytest.fixture
def settings(queue_name):
    return ZkQueueSettings(root=f"/zms-{queue_name}", session_timeout_ms=1_000)


@pytest.fixture
def queue(zookeeper, settings):
    """Looks on; its session outlasts a busy machine."""
    with ZkQueue(zookeeper, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as queue:
        queue.init("in", "out")
        yield queue


@pytest.fixture
def cable(zookeeper):
    with Proxy() as proxy:
        yield Cable(proxy, zookeeper)


def fill(queue, count, target="in"):
    with queue.transaction() as tx:
        for n in range(count):
            tx.put(target, b"%d" % n)
        tx.commit()


def counts(queue):
    queue.session.zk.sync(queue.paths("in").base)  # what others were told is there, on a follower too
    return queue.size("in"), queue.size("out")


def no_locks(queue):
    queue.session.zk.sync(queue.paths("in").base)
    return queue.session.zk.get_children(queue.paths("in").locks) == []


def child(zookeeper, settings, end, request=0, when="before", stdin=subprocess.DEVNULL):
    return subprocess.Popen(
        [sys.executable, str(CHILD), zookeeper.hosts, settings.root, end, str(request), when],
        stdin=stdin,
        stdout=subprocess.PIPE,
    )


# Taking two: list locks, list items, lock, get, lock, get; then commit, or two unlocks. Requests beyond the
# end kill after it.
@pytest.mark.parametrize("end", ["commit", pytest.param("rollback", marks=pytest.mark.breadth)])
def test_kill_9_at_every_request_of_take_commit_and_rollback(queue, zookeeper, settings, end):
    fill(queue, 2 * 16)
    points = [(n, when) for n in range(1, 9) for when in ("before", "after")]
    children = [child(zookeeper, settings, end, *point, stdin=subprocess.PIPE) for point in points]
    for one in children:  # one after the other: children that compete for a lock need more requests
        one.communicate(b"\n", timeout=120)
        assert one.returncode == -9
    until(lambda: no_locks(queue))
    left, put = counts(queue)
    assert (32 - left) * 3 == put * 2, "N taken and K put: both or neither"
    assert put > 0 if end == "commit" else put == 0


@pytest.mark.breadth
def test_take_n_and_put_k_conserves_counts_under_kills(queue, zookeeper, settings):
    """KMQ_ZK_KILLS=200 for the full count."""
    total = 8_000
    for _ in range(4):
        fill(queue, total // 4)
    killed = 0
    while killed < KILLS:
        group = [child(zookeeper, settings, "forever") for _ in range(min(4, KILLS - killed))]
        for number, one in enumerate(group):
            one.stdout.readline()  # it is ready
            SYSTEM_CLOCK.sleep(0.01 * number)
            one.kill()
            one.communicate(timeout=60)
        killed += len(group)
    until(lambda: no_locks(queue))
    left, put = counts(queue)
    assert (total - left) * 3 == put * 2
    with queue.transaction() as tx:
        assert tx.try_take("in") is not None or left == 0


def one_by_one(tx):
    return [tx.try_take("in"), tx.try_take("in")]


def both_at_once(tx):
    return tx.try_take_many("in", 2)


# At once: list locks, list items, lock both, get both; then commit.
@pytest.mark.parametrize(
    ("take", "request_number"),
    [(one_by_one, number) for number in range(1, 8)] + [(both_at_once, number) for number in range(1, 6)],
)
def test_an_answer_lost_at_any_request_is_found_out(queue, settings, cable, take, request_number):
    """Take two, put three: the connection breaks after one request has arrived and before its answer."""
    fill(queue, 4)
    with ZkQueue(cable.connection, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        zk = other.session.zk
        call, count = zk._call, 0

        def lossy(*args):
            nonlocal count
            count += 1
            if count != request_number:
                return call(*args)
            cable.cut(Cut.MUTE)
            result = call(*args)
            SYSTEM_CLOCK.sleep(0.1)
            cable.cut(Cut.REFUSE)
            cable.heal()
            return result

        zk._call = lossy
        outcome = None
        with contextlib.suppress(KmqError), other.transaction() as tx:
            take(tx)
            for _ in range(3):
                tx.put("out", b"x")
            tx.commit()
            outcome = tx.outcome
        assert count >= request_number
        assert tx.outcome in (TransactionOutcome.COMMITTED, TransactionOutcome.ROLLED_BACK)
        assert outcome in (None, TransactionOutcome.COMMITTED)
        expected = (2, 3) if tx.outcome is TransactionOutcome.COMMITTED else (4, 0)
        assert counts(queue) == expected
        if request_number >= 3:  # all but the lists
            assert tx.outcome is TransactionOutcome.COMMITTED
        until(lambda: no_locks(queue))


@pytest.mark.parametrize("request_number", [1, 2])
def test_an_answer_lost_to_a_rollback_leaves_no_lock(queue, settings, cable, request_number):
    """One request for each lock."""
    fill(queue, 2)
    with ZkQueue(cable.connection, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        tx = other.transaction()
        both_at_once(tx)
        call, count = other.session.zk._call, 0

        def lossy(*args):
            nonlocal count
            count += 1
            if count == request_number:
                cable.cut(Cut.MUTE)
            call(*args)
            if count == request_number:
                SYSTEM_CLOCK.sleep(0.1)
                cable.cut(Cut.REFUSE)
                cable.heal()

        other.session.zk._call = lossy
        assert tx.rollback() is TransactionOutcome.ROLLED_BACK
        assert count >= 2
        assert no_locks(queue)
        assert counts(queue) == (2, 0)


def expire(queue):
    """End a queue's session at the server, and wait until the queue knows."""
    number = queue.session.number
    zk_support.expire(queue.session.zk)
    until(lambda: queue.session.number > number)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("take", "request_number"),
    [(one_by_one, 5), (one_by_one, 6)] + [(both_at_once, number) for number in range(1, 6)],
)
def test_a_session_that_expires_at_any_request_takes_all_or_nothing(
    queue, zookeeper, settings, take, request_number, when
):
    """Take two, put three: all of it, if the session ended after the commit had come; else nothing."""
    fill(queue, 4)
    with ZkQueue(zookeeper, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        zk, count = other.session.zk, 0
        call = zk._call

        def expiring(*args):
            nonlocal count
            count += 1
            if count != request_number:
                return call(*args)
            if when == "before":
                expire(other)
                return call(*args)
            result = call(*args)
            SYSTEM_CLOCK.sleep(0.1)
            expire(other)
            return result

        zk._call = expiring
        with contextlib.suppress(KmqError), other.transaction() as tx:
            take(tx)
            for _ in range(3):
                tx.put("out", b"x")
            tx.commit()
        assert count >= request_number
        until(lambda: no_locks(queue))
        expected = (2, 3) if tx.outcome is TransactionOutcome.COMMITTED else (4, 0)
        assert tx.outcome in (TransactionOutcome.COMMITTED, TransactionOutcome.ROLLED_BACK)
        assert counts(queue) == expected
        zk._call = call
        with other.transaction() as tx:  # it goes on in the next session
            until(lambda: zk.connected)
            assert tx.try_take("in") is not None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("request_number", [1, 2])
def test_a_session_that_expires_inside_rollback_leaves_no_lock(
    queue, zookeeper, settings, request_number, when
):
    fill(queue, 2)
    with ZkQueue(zookeeper, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        tx = other.transaction()
        both_at_once(tx)
        tx.put("out", b"x")
        call, count = other.session.zk._call, 0

        def expiring(*args):
            nonlocal count
            count += 1
            if count == request_number and when == "before":
                expire(other)
            result = call(*args)
            if count == request_number and when == "after":
                expire(other)
            return result

        other.session.zk._call = expiring
        assert tx.rollback() is TransactionOutcome.ROLLED_BACK
        assert count >= request_number
        until(lambda: no_locks(queue))
        assert counts(queue) == (2, 0)


_RESUME = struct.Struct(">iiqiqi16s?")
"""Length, protocol, last zxid seen, time-out in ms, session, length of its password, password, read-only."""


def move(queue, zookeeper):
    """Resume a queue's session by another connection, at another server if there are several."""
    zk = queue.session.zk
    session, password = zk.client_id
    host, _, port = zookeeper.hosts.split(",")[-1].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as other:
        other.sendall(_RESUME.pack(_RESUME.size - 4, 0, 0, 15_000, session, 16, password, 0))
        answer = other.recv(100)
    assert struct.unpack_from(">q", answer, 12)[0] == session, "the server knows it"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("request_number", range(1, 6))
def test_a_session_that_moves_to_another_connection_goes_on(queue, zookeeper, settings, request_number, when):
    """The server drops the older connection, and answers no request of it."""
    fill(queue, 4)
    with ZkQueue(zookeeper, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        zk, count = other.session.zk, 0
        call = zk._call

        def moving(*args):
            nonlocal count
            count += 1
            if count == request_number and when == "before":
                move(other, zookeeper)
            result = call(*args)
            if count == request_number and when == "after":
                move(other, zookeeper)
            return result

        zk._call = moving
        with contextlib.suppress(KmqError), other.transaction() as tx:
            both_at_once(tx)
            for _ in range(3):
                tx.put("out", b"x")
            tx.commit()
        assert count >= request_number
        if request_number >= 3:  # all but the lists
            assert tx.outcome is TransactionOutcome.COMMITTED
        assert counts(queue) == ((2, 3) if tx.outcome is TransactionOutcome.COMMITTED else (4, 0))
        until(lambda: no_locks(queue))
        until(lambda: zk.connected)
        assert other.session.number == 1
        assert other.transaction().try_take("in") is not None


def test_a_connection_whose_answers_are_out_of_order_is_made_anew(queue):
    """As those of an ensemble are after a move: the answer to the request before is left out."""
    zk = queue.session.zk
    unanswered = zk.handler.async_result()
    zk._pending.append((None, unanswered, -99))
    with pytest.raises(ConnectionLoss):
        zk.get("/")
    with pytest.raises(ConnectionLoss):
        unanswered.get(timeout=60)
    until(lambda: zk.connected)
    assert (zk.exists("/zookeeper") is not None, queue.session.number) == (True, 1)


@pytest.mark.parametrize("how", [Cut.MUTE, Cut.BLACKHOLE])
def test_a_later_commit_without_an_answer_happens_once(queue, settings, cable, how):
    """It writes the znode of an earlier one; MUTE lets it arrive, BLACKHOLE does not."""
    with ZkQueue(cable.connection, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        fill(other, 1)
        zk = other.session.zk
        call, commits = zk._call, []

        def lossy(request, result):
            if type(request).__name__ != "Transaction" or commits:
                return call(request, result)
            commits.append(request)
            cable.cut(how)
            call(request, result)
            SYSTEM_CLOCK.sleep(0.1)
            cable.cut(Cut.REFUSE)
            cable.heal()
            return None

        zk._call = lossy
        fill(other, 2)
        fill(other, 3)
    assert len(commits) == 1
    assert queue.size("in") == 6


def interrupted_commit(other, cable, how):
    """A transaction of one take and one put whose commit a Ctrl-C interrupts while it is under way."""
    tx = other.transaction()
    tx.try_take("in")
    tx.put("out", b"x")
    cable.cut(how)
    get, other.session.get = other.session.get, interrupt
    with pytest.raises(KeyboardInterrupt):
        tx.commit()
    other.session.get = get
    return tx


def interrupt(*_):
    SYSTEM_CLOCK.sleep(0.1)
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_after_a_ctrl_c_inside_commit_that_did_happen_it_says_so(queue, settings, cable, end):
    fill(queue, 1)
    with ZkQueue(cable.connection, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        tx = interrupted_commit(other, cable, Cut.MUTE)
        until(lambda: queue.size("out") == 1)
        cable.cut(Cut.REFUSE)
        cable.heal()
        if end == "rollback":
            assert tx.rollback() is TransactionOutcome.COMMITTED
        else:
            tx.commit()
        assert tx.outcome is TransactionOutcome.COMMITTED
        assert counts(queue) == (0, 1)


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_after_a_ctrl_c_inside_commit_that_did_not_happen(queue, settings, cable, end):
    fill(queue, 1)
    with ZkQueue(cable.connection, ZkQueueSettings(root=settings.root, session_timeout_ms=15_000)) as other:
        tx = interrupted_commit(other, cable, Cut.BLACKHOLE)
        cable.cut(Cut.REFUSE)
        cable.heal()
        if end == "rollback":
            # What waited in the proxy when the connection was reset may still have arrived.
            expected = {TransactionOutcome.ROLLED_BACK: (1, 0), TransactionOutcome.COMMITTED: (0, 1)}[
                tx.rollback()
            ]
        else:
            tx.commit()
            expected = (0, 1)
        assert counts(queue) == expected
        until(lambda: no_locks(queue))


def test_a_ctrl_c_inside_rollback_ends_it_at_once_and_it_can_be_called_again(queue, monkeypatch):
    fill(queue, 1)
    tx = queue.transaction()
    tx.try_take("in")
    with monkeypatch.context() as patched:
        patched.setattr(queue.session, "get", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tx.rollback()
    assert tx.outcome is None
    assert tx.rollback() is TransactionOutcome.ROLLED_BACK
    assert no_locks(queue)


@pytest.mark.parametrize("committing", [False, True])
def test_rollback_without_a_connection_ends_within_the_session_time_out(queue, settings, cable, committing):
    fill(queue, 1)
    with ZkQueue(cable.connection, settings) as other:
        if committing:
            tx = interrupted_commit(other, cable, Cut.BLACKHOLE)
        else:
            tx = other.transaction()
            tx.try_take("in")
            cable.cut(Cut.BLACKHOLE)
        begun = SYSTEM_CLOCK.monotonic()
        assert tx.rollback() is (TransactionOutcome.UNKNOWN if committing else TransactionOutcome.ROLLED_BACK)
        took = SYSTEM_CLOCK.monotonic() - begun
        assert took < 20  # one second, and what ending a kazoo client takes
        until(lambda: no_locks(queue))
        cable.heal()
        with pytest.raises(KmqError):
            tx.commit()
        until(lambda: other.session.zk.connected)
        if not committing:
            assert other.transaction().try_take("in") is not None


def test_after_a_rollback_without_servers_the_session_is_not_resumed(settings):
    """Sessions outlive a stop of all servers: resumed, this one would keep its locks for good."""
    settings = replace(settings, session_timeout_ms=3_000)  # a client on a busy machine could resume it
    with Cluster(brokers=0) as own:
        connection = ZooKeeperConnection(hosts=own.zookeeper)
        with ZkQueue(connection, settings) as queue:
            queue.init("in", "out")
            fill(queue, 1)
            tx = queue.transaction()
            tx.try_take("in")
            server = own.zookeeper_server()
            server.pause()  # so that the rollback is under way when it dies
            death = threading.Timer(0.3, server.kill)
            death.start()
            assert tx.rollback() is TransactionOutcome.ROLLED_BACK
            death.join()
            server.start()
            with ZkQueue(connection, settings) as other:
                until(lambda: no_locks(other))
            until(lambda: queue.session.zk.connected)
            assert queue.transaction().try_take("in") is not None


def ended(tx):
    """Commit again, until it is known what became of it."""
    with contextlib.suppress(RolledBack, UnknownOutcome):
        tx.commit()
    return tx.outcome is not None


def test_without_a_connection_commit_says_that_it_does_not_know(queue, settings, cable):
    with ZkQueue(cable.connection, settings) as other:
        tx = other.transaction()
        tx.put("out", b"x")
        cable.cut(Cut.BLACKHOLE)
        with pytest.raises(UnknownOutcome, match=r"commit\(\) again"):
            tx.commit()
        cable.heal()
        until(lambda: ended(tx))
        assert queue.size("out") == (1 if tx.outcome is TransactionOutcome.COMMITTED else 0)


def test_an_expired_session_gives_all_back_at_once_and_ends_its_transactions(queue, settings, cable):
    fill(queue, 40)
    with ZkQueue(cable.connection, settings) as other:
        tx, second = other.transaction(), other.transaction()
        for _ in range(20):
            assert tx.try_take("in")
            assert second.try_take("in")
        second.put("out", b"x")
        cable.cut(Cut.REFUSE)
        seen = set()

        def gone():
            seen.add(len(queue.session.zk.get_children(queue.paths("in").locks)))
            return 0 in seen

        end = SYSTEM_CLOCK.monotonic() + 60
        while not gone():
            assert SYSTEM_CLOCK.monotonic() < end
        assert seen == {0, 80}, "all locks go in one step"
        cable.heal()
        until(lambda: other.session.number > 1 and other.session.zk.connected)
        with pytest.raises(SessionExpired):
            tx.try_take("in")
        with pytest.raises(RolledBack, match="has ended"):
            second.commit()
        assert second.outcome is TransactionOutcome.ROLLED_BACK
        assert tx.rollback() is second.rollback() is TransactionOutcome.ROLLED_BACK
        assert counts(queue) == (40, 0)
        with other.transaction() as tx:
            assert tx.try_take("in")
            tx.commit()
    assert counts(queue) == (39, 0)


def test_a_listener_survives_flaps_and_lost_sessions(queue, settings, cable):
    count = 60
    fill(queue, count)

    def slowly(consumer, item):
        SYSTEM_CLOCK.sleep(0.02)
        consumer.put_on_commit("out", item.body)

    with ZkQueue(cable.connection, settings) as other:
        with Listener(other, "in", slowly, workers=2, backoff=Backoff(0.05, maximum=0.2)):
            for number in range(4):
                done = queue.size("out")
                until(lambda: queue.size("out") > done)  # noqa: B023 - called at once
                alive = f"{settings.root}/alive-{number}"
                if number % 2:
                    until(lambda: other.session.zk.connected)
                    other.session.zk.create(alive, ephemeral=True)
                cable.cut(Cut.REFUSE)
                until(lambda: not queue.session.zk.exists(alive))  # noqa: B023 - called at once
                cable.heal()
            until(lambda: counts(queue) == (0, count))
        assert other.session.number > 1
        until(lambda: other.session.zk.connected)  # close() of the listener left it open


@pytest.mark.breadth
def test_a_killed_leader_loses_nothing(queue_name):
    with Cluster(brokers=0, zookeepers=3) as ensemble:
        settings = ZkQueueSettings(root=f"/zms-{queue_name}", session_timeout_ms=4_000)
        with ZkQueue(ZooKeeperConnection(hosts=ensemble.zookeeper), settings) as queue:
            queue.init("in", "out")
            fill(queue, 200)
            stop = threading.Event()

            def work():
                while not stop.is_set():
                    with contextlib.suppress(KmqError), queue.transaction() as tx:
                        if tx.try_take("in") and tx.try_take("in"):
                            tx.put("out", b"x")
                            tx.commit()

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            until(lambda: queue.size("out") >= 5)
            leader = next(n for n in (1, 2, 3) if is_leader(ensemble.zookeeper.split(",")[n - 1]))
            ensemble.zookeeper_server(leader).kill()

            def finished():
                with contextlib.suppress(KmqError):
                    return queue.size("in") < 2
                return False

            until(finished)
            stop.set()
            for thread in threads:
                thread.join()
            until(lambda: no_locks(queue))
            assert counts(queue) == (0, 100)


def is_leader(address):
    with connect(ZooKeeperConnection(hosts=address), 4_000) as zk:
        return "Mode: leader" in zk.command(b"srvr")
