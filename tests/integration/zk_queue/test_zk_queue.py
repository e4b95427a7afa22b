"""The unit of work on a real ZooKeeper; test_zk_queue_faults.py kills and cuts."""

import itertools
import re
import threading

import pytest
from zk_support import drained, forbid, put, put_below, until

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import AccessDenied, Closed, ConfigError, MessageError, QueueNotFound, RolledBack
from kmqpy.zookeeper.queue import (
    AtLeastOnce,
    ConsumeOnce,
    ConsumeTimes,
    Listener,
    TransactionOutcome,
)


def test_takes_and_puts_of_several_queues_happen_together(make):
    queue = make()
    put(queue, b"a", b"b", b"c")
    put(queue, b"x", target="other")
    with queue.transaction() as tx:
        assert [tx.try_take("in").body, tx.try_take("other").body, tx.try_take("in").body] == [
            b"a",
            b"x",
            b"b",
        ]
        tx.put("out", b"1")
        tx.put("other", b"2")
        assert queue.size("out") == 0
        tx.commit()
        assert tx.outcome is TransactionOutcome.COMMITTED
    assert (drained(queue), drained(queue, "out"), drained(queue, "other")) == ([b"c"], [b"1"], [b"2"])


def test_leaving_without_commit_rolls_back(make):
    queue = make()
    put(queue, b"a")
    with pytest.raises(ZeroDivisionError), queue.transaction() as tx:  # noqa: PT012
        tx.try_take("in")
        tx.put("out", b"1")
        1 / 0  # noqa: B018
    assert tx.outcome is TransactionOutcome.ROLLED_BACK
    assert (drained(queue), queue.size("out")) == ([b"a"], 0)


def test_put_makes_no_network_call(make):
    queue = make()
    tx = queue.transaction()
    calls = []
    queue.session.zk._call, call = lambda *args: calls.append(args), queue.session.zk._call
    tx.put("out", b"1")
    queue.session.zk._call = call
    assert calls == []
    assert tx.rollback() is TransactionOutcome.ROLLED_BACK


def test_what_one_took_nobody_else_gets_until_it_is_given_back(make):
    queue, other = make(), make()
    put(queue, b"a")
    tx = queue.transaction()
    assert tx.try_take("in").body == b"a"
    assert tx.try_take("in") is None
    assert drained(queue) == drained(other) == []
    tx.rollback()
    until(lambda: drained(other) == [b"a"])


def test_many_are_taken_in_order_with_few_requests(make):
    queue = make()
    put(queue, *(b"%d" % n for n in range(250)))
    zk = queue.session.zk
    call, multis = zk._call, []

    def counted(request, result):
        if type(request).__name__ == "Transaction":
            multis.append(request)
        return call(request, result)

    zk._call = counted
    with queue.transaction() as tx:
        assert [item.body for item in tx.try_take_many("in", 150)] == [b"%d" % n for n in range(150)]
        assert len(multis) == 2
        assert [item.body for item in tx.try_take_many("in", 1_000)] == [b"%d" % n for n in range(150, 250)]
        assert tx.try_take_many("in", 1) == []
        tx.commit()
    assert queue.size("in") == 0


@pytest.fixture
def requests_of(monkeypatch):
    """Which requests a queue sends from now on, by their names in kazoo."""

    def counted(queue):
        sent = []
        zk = queue.session.zk
        call = zk._call

        def note(request, result):
            sent.append(type(request).__name__)
            return call(request, result)

        monkeypatch.setattr(zk, "_call", note)
        return sent

    return counted


def test_threads_that_share_a_session_list_once_and_never_meet(make, requests_of):
    queue = make()
    put(queue, *(b"%d" % n for n in range(240)))
    sent, together, found = requests_of(queue), threading.Barrier(8), []
    listing = queue.source("in")._items.names

    def slow_listing():
        names = listing()
        SYSTEM_CLOCK.sleep(0.1)  # the others want it meanwhile
        return names

    queue.source("in")._items.names = slow_listing

    def take():
        with queue.transaction() as tx:
            together.wait()
            found.extend(item.body for item in tx.try_take_many("in", 30))
            together.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(b"%d" % n for n in range(240))
    rollbacks = 240
    assert sent.count("Transaction") == 8 + rollbacks
    assert sent.count("GetChildren") == 2


def test_what_a_thread_is_about_to_lock_no_other_thread_tries(make):
    queue = make()
    put(queue, *(b"%d" % n for n in range(20)))
    source = queue.source("in")
    drawn = source.draw(5, source.begin())
    with queue.transaction() as tx:
        assert [item.body for item in tx.try_take_many("in", 50)] == [b"%d" % n for n in range(5, 20)]
        source.give_back(drawn)
        assert [item.body for item in tx.try_take_many("in", 50)] == [b"%d" % n for n in range(5)]


def test_a_process_that_meets_another_takes_further_back(make, requests_of):
    one, two = make(), make()
    put(one, *(b"%d" % n for n in range(500)))
    with two.transaction() as tx:
        tx.try_take("in")  # it knows what there is
    with one.transaction() as first, two.transaction() as second:
        assert len(first.try_take_many("in", 50)) == 50
        sent = requests_of(two)
        assert len(second.try_take_many("in", 50)) == 50
        # All of a run, those of it that are free by a new list of the locks, and the rest of another run.
        assert (sent.count("Transaction"), sent.count("GetChildren")) == (3, 1)


@pytest.mark.parametrize("server", ["newer", "older", "cuts"])
def test_items_are_read_together_or_one_by_one_where_the_server_is_old(
    make, monkeypatch, requests_of, server
):
    if server == "older":
        monkeypatch.setattr("kmqpy.zookeeper.multi_read._MultiRead.type", 4711)  # no server knows it
    elif server == "cuts":
        too_large = b"x" * 2**21
        monkeypatch.setattr("kmqpy.zookeeper.multi_read._MultiRead.serialize", lambda _: too_large)
    queue = make()
    put(queue, *(b"%d" % n for n in range(30)), b"")
    with queue.transaction() as tx:
        sent = requests_of(queue)
        assert [item.body for item in tx.try_take_many("in", 50)] == [*(b"%d" % n for n in range(30)), b""]
    reads = {name: sent.count(name) for name in ("GetData", "_MultiRead")}
    assert reads == (
        {"GetData": 1, "_MultiRead": 3} if server == "newer" else {"GetData": 31, "_MultiRead": 0}
    )


@pytest.mark.parametrize("policy", [AtLeastOnce(), ConsumeTimes(3)])
def test_large_items_are_read_in_several_answers(make, requests_of, policy):
    """Also where the small znodes of a policy are read between."""
    queue = make(policy=policy)
    for _ in range(12):
        put(queue, b"x" * 400_000)
    with queue.transaction() as tx:
        tx.try_take("in")
        sent = requests_of(queue)
        assert len(tx.try_take_many("in", 11)) == 11
        assert sent.count("_MultiRead") >= 5


def test_a_znode_of_commits_that_somebody_deleted_is_made_again(make, zk):
    queue = make()
    put(queue, b"a")
    parent = f"{queue.settings.root}/.transactions"
    [name] = zk.get_children(parent)
    zk.delete(f"{parent}/{name}")
    put(queue, b"b")
    put(queue, b"c")
    zk.set(f"{parent}/{name}", b"somebody")
    put(queue, b"d")
    assert drained(queue) == [b"a", b"b", b"c", b"d"]
    assert zk.get_children(parent) == [name]


def test_many_leave_out_what_others_have_and_what_is_gone(make, zk):
    one, two = make(), make(policy=ConsumeTimes(2))
    put(one, b"a", b"b", b"c", b"d", b"e")
    with one.transaction() as first, two.transaction() as second:
        assert two.settings.root == one.settings.root
        assert [item.body for item in second.try_take_many("in", 1)] == [b"a"]  # its list has all of them
        first.try_take("in")
        zk.delete(f"{one.settings.root}/in/items/item-0000000002")
        assert [(item.body, item.taken) for item in second.try_take_many("in", 9)] == [(b"d", 1), (b"e", 1)]
        second.commit()
        first.commit()
    assert one.size("in") == 0
    with pytest.raises(ConfigError, match="limit"):
        one.transaction().try_take_many("in", 0)


def test_many_in_strict_order_stop_where_somebody_has_one(make):
    queue = make(strict_fifo=True)
    put(queue, b"a", b"b", b"c", b"d")
    with queue.transaction() as first, queue.transaction() as second:
        assert [item.body for item in first.try_take_many("in", 2)] == [b"a", b"b"]
        assert second.try_take_many("in", 2) == []
        assert [item.body for item in first.try_take_many("in", 2)] == [b"c", b"d"]


def test_the_layout_is_as_documented_and_nothing_is_left(make, zk):
    queue = make(policy=ConsumeTimes(3))
    root = queue.settings.root
    put(queue, b"a")
    put(queue, b"b", priority=5)
    tx = queue.transaction()
    assert [tx.try_take("in").body, tx.try_take("in").body] == [b"b", b"a"]
    assert sorted(zk.get_children(root)) == [".transactions", "in", "other", "out"]
    assert sorted(zk.get_children(f"{root}/in")) == ["dlq", "items", "locks", "meta"]
    assert sorted(zk.get_children(f"{root}/in/items")) == ["item-0000000000", "item-p5-0000000001"]
    locks = sorted(zk.get_children(f"{root}/in/locks"))
    assert locks[0::2] == ["lock-0000000000", "lock-0000000001"]
    assert locks[1].split(".") == ["lock-0000000000", zk.get(f"{root}/in/locks/lock-0000000000")[0].decode()]
    assert zk.exists(f"{root}/in/locks/{locks[1]}").ephemeralOwner
    assert zk.get(f"{root}/in/meta/meta-0000000000")[0].startswith(b'{"taken": 1, "not_before_ms": ')
    tx.commit()
    put(queue)
    assert len(zk.get_children(f"{root}/.transactions")) == 1, "commits one after another share a znode"
    queue.close()
    until(lambda: not zk.get_children(f"{root}/.transactions"))
    assert [zk.get_children(f"{root}/in/{name}") for name in ("items", "locks", "meta", "dlq")] == [[]] * 4


def test_a_transaction_that_has_ended_can_not_be_used(make):
    queue = make()
    tx = queue.transaction()
    tx.commit()
    tx.commit()
    assert tx.rollback() is TransactionOutcome.COMMITTED
    with pytest.raises(Closed, match="committed already"):
        tx.put("in", b"a")
    done = queue.transaction()
    assert done.rollback() is done.rollback() is TransactionOutcome.ROLLED_BACK
    with pytest.raises(Closed, match="rolled back already"):
        done.commit()


def test_closing_the_queue_gives_everything_back_and_invalidates_transactions(make):
    queue, other = make(), make()
    put(queue, b"a")
    tx = queue.transaction()
    tx.try_take("in")
    queue.close()
    for use in (lambda: tx.put("in", b"a"), lambda: tx.try_take("in"), tx.commit, queue.transaction):
        with pytest.raises(Closed, match="closed"):
            use()
    assert tx.rollback() is TransactionOutcome.ROLLED_BACK
    until(lambda: drained(other) == [b"a"])


def test_a_commit_too_large_is_refused_before_anything_is_sent(make):
    queue = make()
    tx = queue.transaction()
    for _ in range(12_000):
        tx.put("out", b"x" * 100)
    with pytest.raises(MessageError, match=r"commit: \d+ bytes in one request.*jute.maxbuffer"):
        tx.commit()
    assert tx.outcome is None
    assert tx.rollback() is TransactionOutcome.ROLLED_BACK
    assert queue.size("out") == 0


def test_the_largest_commit_that_passes_the_check_is_accepted_by_the_server(make):
    queue = make(session_timeout_ms=10_000)
    low, high = 4_000, 12_000
    while high - low > 1:
        middle = (low + high) // 2
        tx = queue.transaction()
        for _ in range(middle):
            tx.put("out", b"x" * 100)
        multi = tx._multi(queue.records.borrow())
        try:
            from kmqpy.zookeeper.packets import check_multi

            check_multi(multi, queue.settings.max_packet_bytes, "commit")
            low = middle
        except MessageError:
            high = middle
    put(queue, *[b"x" * 100] * low, target="out")
    assert queue.size("out") == low


def test_missing_queues_are_refused(make):
    queue = make()
    tx = queue.transaction()
    with pytest.raises(QueueNotFound, match="nothing-here"):
        tx.try_take("nothing-here")
    tx.put("nothing-here", b"a")
    with pytest.raises(RolledBack, match=r"nothing-here.*init"):
        tx.commit()
    assert tx.outcome is TransactionOutcome.ROLLED_BACK
    with pytest.raises(ConfigError, match="a/b"):
        tx = queue.transaction().put("a/b", b"a")


def test_an_item_that_somebody_deleted_ends_in_a_rollback(make, zk):
    queue = make()
    put(queue, b"a", b"b")
    tx = queue.transaction()
    tx.try_take("in")
    item = tx.try_take("in")
    tx.put("out", b"1")
    zk.delete(f"{queue.settings.root}/in/items/{item.name}")
    with pytest.raises(RolledBack, match="is gone"):
        tx.commit()
    assert (drained(queue), queue.size("out")) == ([b"a"], 0)


def test_items_come_by_priority_then_order(make):
    queue = make()
    put(queue, b"a", b"b")
    put(queue, b"high", priority=9)
    put(queue, b"middle", priority=4)
    assert drained(queue) == [b"high", b"middle", b"a", b"b"]
    with pytest.raises(ConfigError, match="priority: 10"):
        queue.transaction().put("in", b"a", priority=10)


def test_foreign_znodes_are_left_alone(make, zk):
    queue = make()
    zk.create(f"{queue.settings.root}/in/items/foreign", b"x")
    zk.create(f"{queue.settings.root}/in/locks/foreign", b"x")
    put(queue, b"a")
    assert drained(queue) == [b"a"]
    assert zk.exists(f"{queue.settings.root}/in/items/foreign")


def unusable(zk, root, which):
    """Make the first item of `in` one that can't be taken."""
    if which.endswith("meta"):
        zk.create(f"{root}/in/meta/meta-0000000000", b"{}")
    path = f"{root}/in/meta/meta-0000000000" if which.endswith("meta") else f"{root}/in/items/item-0000000000"
    (put_below if which.startswith("below") else forbid)(zk, path)
    return path


ERRORS = {"below": (ConfigError, "znodes of others below it"), "unreadable": (AccessDenied, "may not read")}


@pytest.mark.parametrize(
    ("policy", "which"),
    [
        (AtLeastOnce(), "below item"),
        (AtLeastOnce(), "unreadable item"),
        (ConsumeTimes(2), "below item"),
        (ConsumeTimes(2), "unreadable meta"),
        (ConsumeTimes(2), "below meta"),
    ],
)
def test_an_item_that_can_not_be_taken_holds_up_no_other_and_is_told_once(make, zk, policy, which, caplog):
    queue = make(policy=policy)
    put(queue, b"a", b"b", b"c", b"d")
    path = unusable(zk, queue.settings.root, which)
    for limit in (2, 9):
        with queue.transaction() as tx:
            assert tx.try_take_many("in", limit)
            tx.commit()
    for _ in range(2):
        with queue.transaction() as tx:
            assert tx.try_take("in") is None
    [told] = [record.getMessage() for record in caplog.records if "can't be taken" in record.getMessage()]
    assert re.search(f"queue in: .* znode {path}: .*{ERRORS[which.split()[0]][1]}", told)
    assert (queue.size("in"), zk.get_children(queue.paths("in").locks)) == (1, [])


@pytest.mark.parametrize("which", ["below item", "unreadable item"])
def test_in_strict_order_an_item_that_can_not_be_taken_is_told(make, zk, which):
    queue = make(strict_fifo=True)
    put(queue, b"a", b"b")
    unusable(zk, queue.settings.root, which)
    with queue.transaction() as tx, pytest.raises(ERRORS[which.split()[0]][0]):
        tx.try_take("in")


def test_znodes_that_come_below_a_taken_item_are_the_reason_of_its_rollback(make, zk):
    queue = make()
    put(queue, b"a")
    with queue.transaction() as tx:
        tx.try_take("in")
        put_below(zk, f"{queue.settings.root}/in/items/item-0000000000")
        with pytest.raises(RolledBack, match="znodes of others below it"):
            tx.commit()


def test_locks_that_we_may_not_read_are_told(make, zk):
    queue = make()
    put(queue, b"a")
    forbid(zk, queue.paths("in").locks)
    with queue.transaction() as tx, pytest.raises(AccessDenied):
        tx.try_take("in")


@pytest.mark.parametrize(
    ("parent", "policy"), [("locks", AtLeastOnce()), ("meta", ConsumeOnce()), ("dlq", ConsumeOnce())]
)
@pytest.mark.parametrize("limit", [1, 9])
def test_a_queue_of_which_a_part_is_missing_is_not_taken_for_an_empty_one(make, zk, parent, policy, limit):
    queue = make(policy=policy)
    put(queue, b"a", b"b")
    if parent == "dlq":
        with queue.transaction() as tx:
            assert len(tx.try_take_many("in", 9)) == 2
    zk.delete(f"{queue.settings.root}/in/{parent}", recursive=True)
    with (
        queue.transaction() as tx,
        pytest.raises(QueueNotFound, match=rf"no .*/{parent}; make it with init"),
    ):
        tx.try_take_many("in", limit)
    queue.init("in")
    with queue.transaction() as tx:
        assert len(tx.try_take_many("in", 9)) == (0 if parent == "dlq" else 2)


def test_strict_fifo_hands_nothing_out_before_an_earlier_item(make):
    queue = make(strict_fifo=True)
    put(queue, b"a", b"b", b"c")
    tx = queue.transaction()
    assert [tx.try_take("in").body, tx.try_take("in").body] == [b"a", b"b"]
    assert drained(queue) == []
    tx.rollback()
    assert drained(queue) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("shared", [True, False])
def test_eight_threads_with_one_session_or_eight_get_each_item_once(make, shared):
    queue = make()
    sessions = [queue if shared else make() for _ in range(8)]
    put(queue, *[b"%d" % n for n in range(100)])
    found, lock = [], threading.Lock()

    def work(queue):
        while True:
            with queue.transaction() as tx:
                item = tx.try_take("in")
                if item is None and not queue.size("in"):
                    return
                if item is None:
                    continue
                tx.put("out", item.body)
                tx.commit()
                with lock:
                    found.append(item.body)

    threads = [threading.Thread(target=work, args=(one,)) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 100
    assert sorted(drained(queue, "out")) == sorted(found)


def test_a_listener_commits_with_what_it_puts_and_rolls_back_failures(make):
    queue = make()
    seen = []
    lock = threading.Lock()

    def listener(consumer, item):
        with lock:
            seen.append(item.body)
            first = seen.count(item.body) == 1
        consumer.put_on_commit("out", item.body * 2)
        if first:
            raise ValueError("the first time")

    bodies = [b"%d" % n for n in range(10, 20)]
    with Listener(queue, "in", listener, workers=3, backoff=Backoff(0.01)):
        put(queue, *bodies)
        until(lambda: queue.size("out") == 10)
    assert sorted(seen) == sorted(bodies * 2)
    assert sorted(drained(queue, "out")) == sorted(body * 2 for body in bodies)
    assert queue.size("in") == 0
    assert queue.session.zk.connected


def test_a_listener_puts_text(make):
    queue = make()
    with Listener(queue, "in", lambda consumer, item: consumer.put_on_commit("out", "größer")):
        put(queue, b"a")
        until(lambda: queue.size("out") == 1)
    assert drained(queue, "out") == ["größer".encode()]


@pytest.mark.parametrize("body", [5, None, bytearray(b"x"), {"a": 1}, "\ud800"])
def test_what_is_neither_text_nor_bytes_is_no_body(make, body):
    with make().transaction() as tx, pytest.raises(MessageError, match=r"^body: "):
        tx.put("out", body)


def test_a_listener_takes_nothing_before_its_start(make):
    queue = make()
    seen = threading.Event()
    listener = Listener(queue, "in", lambda _consumer, _item: seen.set(), start=False)
    put(queue, b"a")
    assert not seen.wait(0.3)
    listener.start()
    listener.start()
    assert seen.wait(10)
    listener.close()
    with pytest.raises(Closed):
        listener.start()
    Listener(queue, "in", print, start=False).close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((["in", "out"], print), r"^source: .*'in', 'out'"),
        (("a/b", print), r"^queue: 'a/b'"),
        (("in", "print"), r"^listener: 'print' can't be called"),
        (("in", print, {"workers": 0}), r"^workers: 0"),
        (("in", print, {"workers": 1.5}), r"^workers: 1.5"),
        (("in", print, {"backoff": 3}), r"^backoff: 3"),
    ],
)
def test_arguments_of_a_listener_are_checked(make, arguments, error):
    source, listener, *more = arguments
    with pytest.raises(ConfigError, match=error):
        Listener(make(), source, listener, **(more[0] if more else {}))


def test_names_of_commits_of_dead_clients_are_removed_after_a_day(make, zk, monkeypatch):
    queue = make()
    left = f"{queue.settings.root}/.transactions/left"
    zk.create(left)
    zk.create(f"{queue.settings.root}/.transactions/foreign/below", makepath=True)
    queue.init()
    assert zk.exists(left)
    monkeypatch.setattr("kmqpy.zookeeper.queue.queue._UNUSED_RECORD_AFTER_MS", -1)
    queue.init()
    assert not zk.exists(left)


def test_a_name_that_a_commit_uses_again_just_then_is_not_removed(make, zk, monkeypatch):
    """It tells whether that commit happened; without it, the commit would be made twice."""
    queue = make()
    left = f"{queue.settings.root}/.transactions/left"
    zk.create(left)
    monkeypatch.setattr("kmqpy.zookeeper.queue.queue._UNUSED_RECORD_AFTER_MS", -1)
    exists = queue.session.zk.exists

    def exists_and_is_used(path, *args, **kwargs):
        stat = exists(path, *args, **kwargs)
        if path == left:
            zk.set(left, b"the id of a commit")
        return stat

    monkeypatch.setattr(queue.session.zk, "exists", exists_and_is_used)
    queue.init()
    assert zk.get(left)[0] == b"the id of a commit"


def test_a_queue_can_be_listed_while_others_come_and_go(make):
    """More than one listing's worth of items."""
    queue = make()
    put(queue, *[b"%d" % n for n in range(250)])
    bodies = []
    for _ in itertools.repeat(None, 251):
        with queue.transaction() as tx:
            item = tx.try_take("in")
            if item is None:
                break
            bodies.append(int(item.body))
            tx.commit()
    assert bodies == list(range(250))
