"""The ZooKeeper engine beside damaged znodes, large pages, slow answers and many other processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from zookeeper_tree import MemoryZnodes, Tree, engine_over, queue_in

from kmqpy.errors import ConfigError, MessageError, Unavailable
from kmqpy.storages.engine import Counts, NewRow, TakeRef
from kmqpy.storages.zookeeper import draft, live_queue, turns
from kmqpy.storages.zookeeper.directory import COMMITS_REMEMBERED, Directory, Pages, summary
from kmqpy.storages.zookeeper.rows import page_bytes, read_page
from kmqpy.storages.zookeeper.turns import Turns
from kmqpy.testing import ManualClock


@pytest.fixture
def tree():
    return Tree(ManualClock())


def engine_on(tree, **more):
    return engine_over(MemoryZnodes(tree, **more))


def taken(engine, queue, limit=1, lease_ms=60_000):
    return [TakeRef(row.id, row.take) for row in engine.take(queue, limit, lease_ms).rows]


def znodes_of(tree, depth):
    """Paths of pages (depth 2) or packs (depth 3)."""
    return [path for path in tree.znodes if path.count("/") == depth]


# --- caches -------------------------------------------------------------------------------------------


def test_more_pages_than_the_cache_keeps_can_be_read_at_once(tree, monkeypatch):
    monkeypatch.setattr(draft, "PAGE_ROWS", 1)
    monkeypatch.setattr(live_queue, "_MOST_CACHED_PAGES", 3)
    queue = queue_in(tree)
    engine = engine_on(tree)
    engine.put(queue, [NewRow(b"x", delay_ms=100) for _ in range(10)])
    tree.clock.advance(1)
    assert len(engine.take(queue, 10, 1_000).rows) == 10
    assert len(engine.taken_rows(queue, limit=10)) == 10


def test_of_each_page_one_version_is_cached(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    for _ in range(50):
        engine.put(queue, [NewRow(b"x")])
        engine.finish(queue, taken(engine, queue))
    assert len(engine._live(queue)._pages) <= 1


# --- what fits into a request -------------------------------------------------------------------------


def test_a_put_does_not_fail_for_the_long_reasons_of_others(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    for _ in range(3):
        engine.put(queue, [NewRow(b"x")] * 1_000)
    refs = taken(engine, queue, 3_000)
    engine.give_back(queue, refs, delay_ms=1_000, count=True, reason="long" * 500)
    tree.clock.advance(2)
    largest = engine.capabilities.max_body_bytes
    engine.put(queue, [NewRow(b"y" * largest)])
    assert engine.counts(queue) == Counts(ready=3_001, delayed=0, in_flight=0, dead=0)


def test_a_put_that_is_too_large_is_refused_once(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    with pytest.raises(MessageError):
        engine.put(queue, [NewRow(b"y" * 2**21)])
    assert engine.counts(queue).ready == 0


def test_puts_of_many_threads_are_one_commit_and_one_page(tree):
    queue = queue_in(tree)
    znodes = MemoryZnodes(tree)
    engine = engine_over(znodes)
    live = engine._live(queue)
    before = znodes.commits
    with ThreadPoolExecutor(40) as threads:
        with live._lock:
            asked = [threads.submit(engine.put, queue, [NewRow(b"x")]) for _ in range(40)]
            while len(live._requests) < len(asked):
                time.sleep(0.001)
        assert len({one.result()[0] for one in asked}) == 40
    assert znodes.commits == before + 1
    assert len(znodes_of(tree, 2)) == 1


def test_a_queue_that_takes_no_more_messages_gives_those_that_it_has(tree, monkeypatch):
    queue = queue_in(tree)
    znodes = MemoryZnodes(tree)
    engine = engine_over(znodes)
    engine.put(queue, [NewRow(b"%d" % number) for number in range(200)])
    refs = taken(engine, queue, 200)
    engine.give_back(queue, refs, delay_ms=0, count=True, reason="long" * 500)
    monkeypatch.setattr(draft, "PAGE_ROWS", 1)
    znodes.max_packet_bytes = 2**18
    with pytest.raises(MessageError) as refused:
        put_until_full(engine, queue)
    refs = taken(engine, queue, 200)
    assert [ref.id for ref in refs[:3]] == [1, 2, 3]
    assert engine.finish(queue, refs) == 200
    assert "is full" in str(refused.value)


def put_until_full(engine, queue):
    for _ in range(200):
        engine.put(queue, [NewRow(b"x")] * 50)


def test_a_message_that_stays_keeps_few_others_bodies(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    engine.put(queue, [NewRow(b"%1000d" % number) for number in range(200)] + [NewRow(b"x" * 100_000)])
    found = engine.take(queue, 300, 60_000).rows
    assert [row.body for row in found] == [b"%1000d" % number for number in range(200)] + [b"x" * 100_000]
    refs = [TakeRef(row.id, row.take) for row in found]
    assert engine.bury(queue, refs[50:51], "bad") == 1
    assert engine.finish(queue, refs[:50] + refs[51:]) == 200
    (path,) = znodes_of(tree, 3)
    assert len(tree.znodes[path][0]) < 40_000
    assert engine_on(tree).dead_rows(queue, 1, with_bodies=True)[0].body == found[50].body


# --- lost answers -------------------------------------------------------------------------------------


class SlowAnswer(MemoryZnodes):
    """Loses one answer, and others commit before it is asked what happened."""

    others = None
    arrives = True

    def send(self, multi, what):
        if self.others is None:
            return super().send(multi, what)
        others, self.others = self.others, None
        self.lose = lambda: "after" if self.arrives else "before"
        answer = super().send(multi, what)
        self.lose = lambda: "never"
        others()
        return answer


@pytest.mark.parametrize("arrives", [True, False])
def test_what_happened_is_known_after_any_number_of_commits_by_others(tree, arrives):
    queue = queue_in(tree)
    slow = SlowAnswer(tree)
    engine, other = engine_over(slow), engine_on(tree)
    engine.put(queue, [NewRow(b"first")])

    def others():
        for _ in range(3 * COMMITS_REMEMBERED):
            other.put(queue, [NewRow(b"other")])

    slow.others, slow.arrives = others, arrives
    engine.put(queue, [NewRow(b"second")])
    assert engine.counts(queue).ready == 2 + 3 * COMMITS_REMEMBERED


def test_after_commits_by_too_many_processes_nobody_says_what_is_not_known(tree):
    queue = queue_in(tree)
    slow = SlowAnswer(tree)
    engine = engine_over(slow)
    engine.put(queue, [NewRow(b"first")])

    def others():
        for _ in range(COMMITS_REMEMBERED):
            engine_on(tree).put(queue, [NewRow(b"other")])

    slow.others = others
    with pytest.raises(Unavailable, match="not known whether"):
        engine.put(queue, [NewRow(b"second")])
    assert engine.counts(queue).ready == 2 + COMMITS_REMEMBERED


def test_a_take_that_found_nothing_and_lost_its_answer_does_not_wait_for_what_came_meanwhile(tree):
    queue = queue_in(tree, max_redeliveries=0)
    slow, other = SlowAnswer(tree), engine_on(tree)
    engine = engine_over(slow)
    other.put(queue, [NewRow(b"first")])
    taken(other, queue, lease_ms=1_000)
    tree.clock.advance(2)  # its lease ends, which makes it a dead letter
    slow.others = lambda: other.put(queue, [NewRow(b"second")])
    found = engine.take(queue, 1, 1_000)
    assert found.rows == []
    assert engine.wait(queue, found, 0.01)
    assert len(engine.take(queue, 1, 1_000).rows) == 1


# --- many others --------------------------------------------------------------------------------------


class Busy(MemoryZnodes):
    """Another process changes the queue before each look at it."""

    def read_directory(self, generation, watch=None):
        path = f"/{generation}"
        data, version = self.tree.znodes[path]
        self.tree.znodes[path] = (data, version + 1)
        return super().read_directory(generation, watch)


def test_reading_ends_while_others_change_the_queue_all_the_time(tree):
    queue = queue_in(tree)
    engine = engine_over(Busy(tree))
    engine.put(queue, [NewRow(b"x")])
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(engine.counts, queue).result(timeout=30).ready == 1


@pytest.mark.parametrize("version", [2**31 - 1, -(2**31), -5])
def test_versions_beyond_those_of_java_wake_as_others_do(tree, version):
    """ZooKeeper counts from 2**31 - 1 on at -2**31."""
    queue = queue_in(tree)
    engine = engine_on(tree)
    data, _ = tree.znodes["/generation"]
    tree.znodes["/generation"] = (data, version)
    found = engine.take(queue, 1, 1_000)
    assert engine.wait(queue, found, 0.01) is False
    assert engine.wait(queue, found, 0.01) is False
    engine.wake(queue)
    assert engine.wait(queue, found, 60)


def test_a_watch_that_has_fired_says_nothing_about_the_version(tree):
    """Two threads wait: one reads the directory again while the other asks whether it has changed."""
    queue = queue_in(tree)
    engine = engine_on(tree)
    watch = engine._live(queue).watch
    found = engine.take(queue, 1, 1_000)
    assert engine.wait(queue, found, 0) is False
    watch._on_change(None)
    watch._is_watched = True  # by the other thread, whose answer is on its way
    assert engine.wait(queue, found._replace(seen=watch.ticket(found.seen)), 0.01)


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_id", [1, 150])
def test_ids_that_were_set_back_name_no_other_message(tree, next_id, monkeypatch):
    monkeypatch.setattr(live_queue, "_IDS_PER_DRAW", 300)
    queue = queue_in(tree)
    engine = engine_on(tree)
    engine.put(queue, [NewRow(b"old")] * 290)
    tree.next_id = next_id
    engine.put(queue, [NewRow(b"new")] * 100)
    assert engine.counts(queue).ready == 390
    refs = taken(engine, queue, 390)
    assert len({ref.id for ref in refs}) == 390
    assert engine.finish(queue, refs) == 390


@pytest.fixture
def damaged(tree, monkeypatch):
    """A queue of three pages of two messages, of which the second page or its pack gets damaged."""
    monkeypatch.setattr(draft, "PAGE_ROWS", 2)
    queue = queue_in(tree, max_redeliveries=0)
    first = engine_on(tree)
    first.put(queue, [NewRow(b"%d" % number) for number in range(6)])
    return queue


def spoil(tree, path, how):
    if how == "missing":
        del tree.znodes[path]
    elif how == "empty":
        tree.znodes[path] = (b"", 7)
    elif how == "of another":
        tree.znodes[path] = (tree.znodes[min(znodes_of(tree, 2))][0], 7)
    else:
        tree.znodes[path] = (b"\xff damaged", 7)


DAMAGE = ["missing", "empty", "of another", "damaged"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_page_hides_no_good_message(tree, damaged, how):
    path = sorted(znodes_of(tree, 2))[1]
    before = engine_on(tree)
    (one,) = taken(before, damaged)
    all_of_them = taken(before, damaged, 5)
    before.release_all(damaged)
    kept = tree.znodes[path]
    spoil(tree, path, how)
    engine = engine_on(tree)
    assert [row.body for row in engine.peek(damaged, 9)] == [b"0", b"1", b"4", b"5"]
    assert [row.body for row in engine.take(damaged, 9, 1_000).rows] == [b"0", b"1", b"4", b"5"]
    for call in (
        lambda: engine.take(damaged, 9, 1_000),
        lambda: engine.peek(damaged, 9),
        lambda: engine.purge(damaged),
        lambda: engine.finish(damaged, [one, *all_of_them]),
    ):
        with pytest.raises(ConfigError, match=f"znode {path}: "):
            call()
    assert engine.counts(damaged) == Counts(ready=2, delayed=0, in_flight=0, dead=0)
    engine.put(damaged, [NewRow(b"6")])
    assert [row.body for row in engine.take(damaged, 9, 1_000).rows] == [b"6"]
    tree.znodes[path] = kept
    assert [row.body for row in engine_on(tree).take(damaged, 9, 1_000).rows] == [b"2", b"3"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_last_page_holds_up_no_put(tree, damaged, how):
    engine = engine_on(tree)
    engine.put(damaged, [NewRow(b"6")])
    path = max(znodes_of(tree, 2), key=lambda one: int(one.split("/")[-1]))
    spoil(tree, path, how)
    engine = engine_on(tree)
    engine.put(damaged, [NewRow(b"7")])
    bodies = [row.body for row in engine.take(damaged, 9, 1_000).rows]
    assert bodies == [b"%d" % number for number in (*range(6), 7)]


@pytest.mark.parametrize("how", ["missing", "empty", "damaged"])
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_a_message_whose_body_is_damaged_becomes_a_dead_letter(tree, how, delivery):
    queue = queue_in(tree, delivery=delivery)
    first = engine_on(tree)
    for body in (b"0", b"1", b"2"):
        first.put(queue, [NewRow(body)])
    path = sorted(znodes_of(tree, 3))[1]
    kept = tree.znodes[path]
    spoil(tree, path, how)
    engine = engine_on(tree)
    assert [row.body for row in engine.take(queue, 9, 1_000).rows] == [b"0", b"2"]
    (dead,) = engine.dead_rows(queue, 9, with_bodies=True)
    assert path in dead.reason
    assert dead.body == b""
    tree.znodes[path] = kept
    assert engine.redrive(queue, ids=None, limit=None) == 1
    assert [row.body for row in engine.take(queue, 9, 1_000).rows] == [b"1"]


def test_a_message_whose_body_was_deleted_by_hand_can_be_finished(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    engine.put(queue, [NewRow(b"0")])
    engine.put(queue, [NewRow(b"1")])
    refs = taken(engine, queue, 2)
    del tree.znodes[min(znodes_of(tree, 3))]
    assert engine.finish(queue, refs) == 2
    assert [*tree.znodes] == ["/generation"]


def test_a_page_that_was_deleted_by_hand_is_told_to_those_who_know_it(tree, damaged):
    engine = engine_on(tree)
    refs = taken(engine, damaged, 6)
    path = sorted(znodes_of(tree, 2))[1]
    del tree.znodes[path]
    with pytest.raises(ConfigError, match=f"znode {path}: .*missing"):
        engine.finish(damaged, refs)
    assert engine.counts(damaged) == Counts(ready=0, delayed=0, in_flight=2, dead=0)


def test_a_znode_of_others_below_a_page_does_not_hold_up_the_last_message(tree):
    queue = queue_in(tree)
    engine = engine_on(tree)
    engine.put(queue, [NewRow(b"0")])
    (path,) = znodes_of(tree, 2)
    tree.znodes[f"{path}/foreign"] = (b"", 0)
    assert engine.finish(queue, taken(engine, queue)) == 1
    assert engine.counts(queue) == Counts(ready=0, delayed=0, in_flight=0, dead=0)
    engine.put(queue, [NewRow(b"1")])
    assert [row.body for row in engine.take(queue, 9, 1_000).rows] == [b"1"]


def test_orphans_of_damaged_bodies_do_not_end_the_list(tree):
    queue = queue_in(tree, redelivery="manual")
    engine = engine_on(tree)
    for number in range(4):
        engine.put(queue, [NewRow(b"%d" % number)])
    taken(engine, queue, 4)
    del tree.znodes[sorted(znodes_of(tree, 3))[1]]
    other = engine_on(tree)
    first = other.taken_rows(queue, limit=2)
    assert len(first) == 2
    assert [row.body for row in other.taken_rows(queue, limit=2, after=first[-1].id)] == [b"3"]


def test_a_directory_that_names_a_page_of_no_znode_is_told(tree):
    queue = queue_in(tree)
    engine_on(tree).put(queue, [NewRow(b"x")])
    data, version = tree.znodes["/generation"]
    found = Directory.from_bytes(data, "/generation")
    (page,) = found.pages.values()
    forged = Directory(next_id=9, end_id=10, pages=Pages({5: page}))
    tree.znodes["/generation"] = (forged.to_bytes(), version)
    with pytest.raises(ConfigError, match="znode /generation/5: "):
        engine_on(tree).take(queue, 1, 1_000)


@pytest.mark.parametrize(
    ("field", "value"), [("next_id", 2**63), ("end_id", 2**62), ("next_place", 2**64 - 1)]
)
def test_numbers_of_a_directory_that_no_queue_reaches_are_told(tree, field, value):
    queue = queue_in(tree)
    engine_on(tree).put(queue, [NewRow(b"x")])
    data, version = tree.znodes["/generation"]
    forged = replace(Directory.from_bytes(data, "/generation"), **{field: value})
    tree.znodes["/generation"] = (forged.to_bytes(), version)
    with pytest.raises(ConfigError, match=r"znode /generation: .*no queue reaches"):
        engine_on(tree).put(queue, [NewRow(b"y")])
    assert tree.next_id < 2**62, "numbers of one queue harm no other"


def forge_row(tree, **values):
    """Change the first message of the only page, and what the directory says of it."""
    (path,) = znodes_of(tree, 2)
    page = read_page(tree.znodes[path][0], path)
    first = min(page)
    page[first] = page[first]._replace(**values)
    tree.znodes[path] = (page_bytes(page), tree.znodes[path][1])
    forge_summary(tree, **summary(page, 0, manual=False)._asdict())


def forge_summary(tree, **values):
    data, version = tree.znodes["/generation"]
    directory = Directory.from_bytes(data, "/generation")
    ((number, found),) = directory.pages.items()
    forged = replace(directory, pages=Pages({number: found._replace(**values)}))
    tree.znodes["/generation"] = (forged.to_bytes(), version)


@pytest.mark.parametrize("field", ["take", "requeues"])
def test_a_message_that_was_taken_as_often_as_none_can_be_is_told(tree, field):
    queue = queue_in(tree)
    engine_on(tree).put(queue, [NewRow(b"x")])
    forge_row(tree, **{field: 2**32 - 1})
    with pytest.raises(ConfigError, match=r"znode /generation/\d+: .*taken too often"):
        engine_on(tree).take(queue, 1, 1_000)


def test_a_page_after_its_last_version_has_the_first_one(tree):
    queue = queue_in(tree)
    engine_on(tree).put(queue, [NewRow(b"x")] * 2)
    forge_summary(tree, version=2**32 - 1)
    engine = engine_on(tree)
    assert engine.finish(queue, taken(engine, queue)) == 1
    assert engine_on(tree).counts(queue).ready == 1


# --- turns --------------------------------------------------------------------------------------------


class Turn(MemoryZnodes):
    """Tells watchers when a process asks for its turn."""

    def __init__(self, tree, watchers):
        super().__init__(tree)
        self.watchers = watchers

    def ask_for_turn(self, asked):
        super().ask_for_turn(asked)
        for watch in self.watchers:
            watch(None)
        self.watchers.clear()

    def turn(self, watch):
        self.watchers.append(watch)
        return super().turn(watch)


def test_who_is_asked_for_a_turn_waits_once_and_only_in_that_queue(tree, monkeypatch):
    pauses, watchers = [], []
    monkeypatch.setattr(turns, "SYSTEM_CLOCK", SimpleNamespace(sleep=pauses.append))
    late, other = Turns(Turn(tree, watchers)), Turns(Turn(tree, watchers))
    for one in (late, other):
        one.give_way("q")
    assert pauses == []
    late.ask("q")
    late.give_way("q")
    assert pauses == []
    other.give_way("q")
    other.give_way("q")
    assert len(pauses) == 1
    late.ask("another")
    other.give_way("q")
    assert len(pauses) == 1


def test_turns_that_cannot_be_read_cost_nothing_else(tree, monkeypatch):
    znodes = MemoryZnodes(tree)

    def away(*_):
        raise Unavailable("away")

    monkeypatch.setattr(znodes, "turn", away)
    monkeypatch.setattr(znodes, "ask_for_turn", away)
    found = Turns(znodes)
    found.ask("q")
    found.give_way("q")


@pytest.mark.parametrize("late_s", [0, 60])
def test_who_comes_too_late_each_time_asks_for_its_turn(tree, monkeypatch, late_s):
    monkeypatch.setattr(live_queue, "_ASK_FOR_TURN_AFTER_S", late_s)
    queue = queue_in(tree)
    slow, other = SlowAnswer(tree), engine_on(tree)
    engine = engine_over(slow)
    send, tries = slow.send, []

    def overtaken(multi, what):
        tries.append(tree.asked)
        if len(tries) <= 12:
            other.put(queue, [NewRow(b"other")])
        return send(multi, what)

    monkeypatch.setattr(slow, "send", overtaken)
    engine.put(queue, [NewRow(b"x")])
    assert tries[0] == b""
    assert tries[-1].startswith(b"generation") == (late_s == 0)
    assert engine.counts(queue).ready == 13
