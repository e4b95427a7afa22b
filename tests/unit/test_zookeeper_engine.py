"""The ZooKeeper engine over znodes in memory, beside the memory engine: other processes, lost answers."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from zookeeper_tree import MemoryZnodes, Tree, engine_over, queue_in

from kmqpy.errors import ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.storages.engine import ANY_TAKE, Counts, MessageRow, NewRow, TakeRef
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.zookeeper import directory, draft, live_queue, rows
from kmqpy.storages.zookeeper.body_cache import BodyCache
from kmqpy.storages.zookeeper.directory import Directory, Pages, PageSummary, read_table, summary
from kmqpy.storages.zookeeper.rows import Row, Status, page_bytes, read_pack, read_page
from kmqpy.testing import ManualClock


def shown(rows, known=None):
    """Rows as they can be compared: with the memory engine's ids, and without places, which differ."""
    return [row._replace(id=known[row.id] if known else row.id, place=0) for row in rows]


def some_by_id(chance, ours, theirs, known):
    """The takes of both sides, some of them with ANY_TAKE, and some messages that perhaps nobody took."""
    pairs = [
        [one._replace(take=ANY_TAKE) for one in pair] if chance.random() < 0.3 else pair
        for pair in zip(ours, theirs, strict=True)
    ]
    for row_id in chance.sample([*known], min(len(known), chance.choice([0, 0, 3]))):
        if all(one.id != row_id for one, _ in pairs):
            pairs.append([TakeRef(row_id, ANY_TAKE), TakeRef(known[row_id], ANY_TAKE)])
    return [one for one, _ in pairs], [one for _, one in pairs]


PAGES_MADE_AGAIN = (2394, 2832, 4464)
"""At-most-once: a page is made again under the path of one that somebody could not delete or knew as gone."""


@pytest.mark.parametrize(
    "seed",
    [
        *range(15),
        *(pytest.param(seed, marks=pytest.mark.breadth) for seed in range(15, 60)),
        *PAGES_MADE_AGAIN,
    ],
)
def test_it_does_what_memory_does_with_several_processes_and_lost_answers(seed, monkeypatch):
    """`known` gives the memory engine's id for each of ours."""
    chance, by_id = random.Random(seed), random.Random(seed)
    monkeypatch.setattr(draft, "PAGE_ROWS", chance.choice([2, 5, 200]))
    monkeypatch.setattr(draft, "MOST_PAGES_PER_COMMIT", chance.choice([2, 20]))
    monkeypatch.setattr(directory, "MOST_PAGES_WITHOUT_TABLE", chance.choice([0, 2, 32]))
    monkeypatch.setattr(directory, "MOST_CHANGED_PAGES", chance.choice([0, 2, 32]))
    monkeypatch.setattr(live_queue, "_IDS_PER_DRAW", chance.choice([3, 10_000]))
    monkeypatch.setattr(live_queue, "_CONFLICT_BACKOFF", SimpleNamespace(delay=lambda _: 0.0))
    clock = ManualClock()
    tree = Tree(clock)
    settings = {
        "max_redeliveries": chance.choice([None, 0, 2]),
        "requeue_to": chance.choice(["back", "front"]),
        "redelivery": chance.choice(["automatic", "automatic", "manual"]),
        "delivery": "at-least-once" if chance.random() < 0.7 else "at-most-once",
    }
    queue = queue_in(tree, **settings)
    model = MemoryEngine(clock)
    model.create_queue(StoredQueueSettings(name="q", **settings))
    expected = model.find_queue("q")

    def lose():
        return chance.choice(["never"] * 8 + ["before", "after"])

    engines = [engine_over(MemoryZnodes(tree, lose)) for _ in range(3)]
    for engine in engines:
        engine._bodies = BodyCache(chance.choice([0, 50, 2**20]))
    known: dict[int, int] = {}
    takes: list[tuple[MessageRow, MessageRow]] = []
    is_forgetful = settings["delivery"] == "at-most-once"
    for _ in range(120):
        engine = chance.choice(engines)
        some = chance.sample(takes, min(len(takes), chance.randint(0, 6)))
        sides = [[one for one, _ in some], [one for _, one in some]]
        ours, theirs = ([TakeRef(row.id, row.take) for row in side] for side in sides)
        gone, model_gone = sides if is_forgetful else ([], [])
        # Leases that end in the same ms are in order within a commit; takes by id make many such.
        if draft.MOST_PAGES_PER_COMMIT > 2 and seed not in PAGES_MADE_AGAIN and not is_forgetful:
            ours, theirs = some_by_id(by_id, ours, theirs, known)
        match chance.randint(0, 11):
            case 0 | 1 | 2:
                new = [
                    NewRow(
                        b"%d" % chance.randint(0, 99),
                        chance.choice([None, b"", b"key"]),
                        chance.choice([(), (("a", b"\xff"), ("b", None))]),
                        chance.choice([0, 0, 500]),
                        chance.choice([0, 0, 9]),
                    )
                    for _ in range(chance.randint(1, 12))
                ]
                known.update(zip(engine.put(queue, new), model.put(expected, new), strict=True))
            case 3 | 4:
                limit = chance.randint(1, 8)
                while limit:  # a take may give less than it could, not other rows
                    found = engine.take(queue, limit, 1_000).rows
                    wanted = model.take(expected, len(found) or limit, 1_000).rows
                    assert shown(found, known) == shown(wanted)
                    takes += zip(found, wanted, strict=True)
                    limit = limit - len(found) if found else 0
            case 5:
                assert engine.finish(queue, ours) == model.finish(expected, theirs)
            case 6:
                how = {"delay_ms": chance.choice([0, 700]), "count": chance.random() < 0.5, "reason": "no"}
                assert engine.give_back(queue, ours, **how, gone=gone) == model.give_back(
                    expected, theirs, **how, gone=model_gone
                )
            case 7:
                lost, model_lost = engine.extend(queue, ours, 3_000), model.extend(expected, theirs, 3_000)
                assert [ours.index(one) for one in lost] == [theirs.index(one) for one in model_lost]
            case 8:
                assert engine.bury(queue, ours, "bad", gone=gone) == model.bury(
                    expected, theirs, "bad", gone=model_gone
                )
            case 9:
                clock.advance(chance.choice([0.001, 0.4, 1.0, 5.0]))
            case 10:
                name = chance.choice(["release_all", "purge", "purge_dead"])
                assert getattr(engine, name)(queue) == getattr(model, name)(expected)
            case 11:
                limit = chance.choice([None, 1, 3])
                assert engine.redrive(queue, ids=None, limit=limit) == model.redrive(
                    expected, ids=None, limit=limit
                )
        assert engine.counts(queue) == model.counts(expected)
        assert shown(engine.peek(queue, 5), known) == shown(model.peek(expected, 5))
        assert shown(engine.taken_rows(queue, limit=4), known) == shown(model.taken_rows(expected, limit=4))
        for with_bodies in (True, False):
            found = engine.dead_rows(queue, 3, with_bodies=with_bodies)
            assert shown(found, known) == shown(model.dead_rows(expected, 3, with_bodies=with_bodies))
    for end in ("purge", "purge_dead"):
        getattr(engines[0], end)(queue)
    assert [*tree.znodes] == ["/generation"], "nothing is left of messages that are gone"


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_many_threads_change_a_queue(delivery, monkeypatch):
    monkeypatch.setattr(draft, "PAGE_ROWS", 3)
    tree = Tree(ManualClock())
    queue = queue_in(tree, delivery=delivery)
    engine = engine_over(MemoryZnodes(tree))
    bodies: list[bytes] = []

    def put(thread):
        for number in range(40):
            engine.put(queue, [NewRow(b"%d %d" % (thread, number))] * 2)

    def take():
        deadline = time.monotonic() + 60
        while len(bodies) < 4 * 80:
            assert time.monotonic() < deadline
            found = engine.take(queue, 3, 60_000).rows
            engine.taken_rows(queue, limit=10)
            if delivery == "at-least-once":
                assert engine.finish(queue, [TakeRef(one.id, one.take) for one in found]) == len(found)
            bodies.extend(one.body for one in found)

    with ThreadPoolExecutor(8) as threads:
        for one in [threads.submit(put, thread) for thread in range(4)] + [
            threads.submit(take) for _ in range(4)
        ]:
            one.result()
    assert Counter(bodies) == {b"%d %d" % (thread, number): 2 for thread in range(4) for number in range(40)}
    assert engine.counts(queue) == Counts(ready=0, delayed=0, in_flight=0, dead=0)


@pytest.mark.parametrize("with_one_too_large", [False, True])
def test_changes_of_several_threads_are_one_commit_and_one_that_fails_fails_alone(with_one_too_large):
    tree = Tree(ManualClock())
    queue = queue_in(tree)
    znodes = MemoryZnodes(tree)
    engine = engine_over(znodes)
    engine.put(queue, [NewRow(b"a")])
    live = engine._live(queue)
    before = znodes.commits
    with ThreadPoolExecutor(5) as threads:
        with live._lock:
            asked = [
                threads.submit(engine.put, queue, [NewRow(b"b")]),
                threads.submit(engine.take, queue, 1, 1_000),
                threads.submit(engine.put, queue, [NewRow(b"c")] * 3),
            ]
            if with_one_too_large:
                asked.append(threads.submit(engine.put, queue, [NewRow(b"d" * 2**21)]))
            while len(live._requests) < len(asked):
                time.sleep(0.001)
        if with_one_too_large:
            with pytest.raises(MessageError):
                asked.pop().result()
        first, taken, others = (one.result() for one in asked)
    assert len({*first, *others}) == 4
    assert len(taken.rows) == 1
    assert engine.counts(queue) == Counts(ready=4, delayed=0, in_flight=1, dead=0)
    assert znodes.commits == before + (3 if with_one_too_large else 1)


@pytest.mark.parametrize("put_first", [False, True])
def test_a_take_beside_a_put_does_not_wait_for_the_next_one(put_first):
    tree = Tree(ManualClock())
    queue = queue_in(tree)
    engine = engine_over(MemoryZnodes(tree))
    live = engine._live(queue)
    engine.counts(queue)
    calls = [lambda: engine.put(queue, [NewRow(b"x")]), lambda: engine.take(queue, 1, 1_000)]
    with ThreadPoolExecutor(2) as threads:
        with live._lock:
            asked = []
            for call in calls if put_first else reversed(calls):
                asked.append(threads.submit(call))
                while len(live._requests) < len(asked):
                    time.sleep(0.001)
        taken = asked[1 if put_first else 0].result()
    assert taken.rows or engine.wait(queue, taken, 60)
    assert len(taken.rows) + len(engine.take(queue, 1, 1_000).rows) == 1


def test_a_lost_answer_to_the_changes_of_several_threads_doubles_none(monkeypatch):
    monkeypatch.setattr(live_queue, "COMMITS_REMEMBERED", 0)  # nobody can tell what happened
    tree = Tree(ManualClock())
    queue = queue_in(tree)
    engine = engine_over(MemoryZnodes(tree, lambda: "before"))
    live = engine._live(queue)
    with ThreadPoolExecutor(2) as threads:
        with live._lock:
            asked = [threads.submit(engine.put, queue, [NewRow(b"x")]) for _ in range(2)]
            while len(live._requests) < 2:
                time.sleep(0.001)
        for one in asked:
            with pytest.raises(Unavailable, match="not known whether"):
                one.result()
    assert engine_over(MemoryZnodes(tree)).counts(queue).ready == 0


def row(row_id: int, **more) -> Row:
    values = {"pack": 1, "nth": 0, "priority": 0, "status": Status.READY, "take": 0, "requeues": 0}
    times = {"place": row_id, "enqueued_ms": 5, "first_enqueued_ms": 5}
    return Row(id=row_id, **{**values, **times, **more})


def test_what_is_written_is_read():
    page = {
        1: row(1, reason="h\u00e4"),
        2: row(2, status=Status.DEAD, take=3, reason=""),
        7: row(7, priority=9),
    }
    assert read_page(page_bytes(page), "/p") == page
    written = Directory(
        next_id=8,
        end_id=9,
        next_place=10,
        commits=(b"123456781234",),
        pages=Pages({1: summary(page, 4, manual=False)}),
    )
    assert Directory.from_bytes(written.to_bytes(), "/d") == written
    assert written.pages[1] == PageSummary(4, 2, 0, 0, 1, priority=9, place=7, due_ms=0)
    new = [NewRow(b"x", None), NewRow(b"", b"", (("a", None), ("b", b"\xff"))), NewRow(b"\x00" * 9, b"k")]
    found = read_pack(rows.pack_bytes(new), "/pack")
    assert [(one.body, one.key, one.headers) for one in found] == [one[:3] for one in new]


def test_a_long_reason_is_cut_to_whole_characters():
    (found,) = read_page(page_bytes({1: row(1, reason="\u00e4" * 9_999)}), "/p").values()
    assert found.reason == "\u00e4" * 500
    (odd,) = read_page(page_bytes({1: row(1, reason="x" + "\u00e4" * 9_999)}), "/p").values()
    assert odd.reason == "x" + "\u00e4" * 499


@pytest.mark.parametrize("read", [read_page, read_pack, read_table, Directory.from_bytes])
def test_any_bytes_are_read_or_refused_by_name(read):
    chance = random.Random(5)
    good = {
        read_page: page_bytes({1: row(1, reason="why")}),
        read_pack: rows.pack_bytes([NewRow(b"body", b"key", (("a", b"b"),))]),
        read_table: Directory(
            table=b"123456781234", pages=Pages({1: PageSummary(4, 2, 0, 0, 1)})
        ).table_bytes(),
        Directory.from_bytes: Directory(next_id=1, end_id=2, commits=(b"123456781234",)).to_bytes(),
    }[read]
    for _ in range(2_000):
        data = bytearray(good)
        for _ in range(chance.randint(0, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randint(0, len(data))] + chance.randbytes(chance.choice([0, 0, 9]))
        with suppress(ConfigError):
            read(bytes(data), "/some/znode")
    with pytest.raises(ConfigError, match=r"/some/znode.*not one of kmqpy"):
        read(b"\xff", "/some/znode")


def test_a_queue_that_was_deleted_is_not_found():
    tree = Tree(ManualClock())
    queue = queue_in(tree)
    engine = engine_over(MemoryZnodes(tree))
    engine.put(queue, [NewRow(b"x")])
    del tree.znodes["/generation"]
    for call in (
        lambda: engine.put(queue, [NewRow(b"y")]),
        lambda: engine.take(queue, 1, 1),
        lambda: engine.counts(queue),
    ):
        with pytest.raises(QueueNotFound):
            call()


def test_the_cache_keeps_what_was_used_last():
    cache = BodyCache(most_bytes=10)
    for number in range(3):
        cache.keep(("g", number, 0), [rows.Content(b"%d" % number)], 4)
        cache.get(("g", 0, 0))
    assert [cache.get(("g", number, 0)) is not None for number in range(4)] == [True, False, True, False]
    cache.keep(("g", 0, 0), [rows.Content(b"new")], 6)
    assert cache.get(("g", 0, 0)) == [rows.Content(b"new")]
    assert cache.get(("g", 2, 0)) is not None
    cache.remove(("g", 0, 0))
    cache.remove(("g", 0, 0))
    cache.keep(("g", 5, 0), [], 6)
    assert cache.get(("g", 2, 0)) is not None
    cache.keep(("g", 6, 0), [], 11)
    assert cache.get(("g", 6, 0)) is None
