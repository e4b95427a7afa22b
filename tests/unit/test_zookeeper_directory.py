"""The directory of a queue in ZooKeeper and its table: what is written, races, damage, other formats."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zookeeper_tree import MemoryZnodes, Tree, engine_over, queue_in

from kmqpy.errors import ConfigError
from kmqpy.storages.engine import Counts, NewRow, TakeRef
from kmqpy.storages.zookeeper import directory, draft
from kmqpy.storages.zookeeper.directory import Directory, Pages, PageSummary
from kmqpy.testing import ManualClock

PATH = "/generation"
TABLE = f"{PATH}/table"


class Watched(MemoryZnodes):
    """Notes what each commit writes; calls `before_table` before a table is read."""

    def __init__(self, tree):
        super().__init__(tree)
        self.writes: list[dict[str, int]] = []
        self.tables_read = 0
        self.before_table = lambda: None

    def send(self, multi, what):
        self.writes.append({path: len(data) for _, path, data, _ in multi})
        return super().send(multi, what)

    def read(self, paths):
        if TABLE in paths:
            self.tables_read += 1
            self.before_table()
        return super().read(paths)


@pytest.fixture
def tree():
    return Tree(ManualClock())


@pytest.fixture
def small(monkeypatch):
    """Two messages a page, at most four pages without a table, and three changed ones."""
    monkeypatch.setattr(draft, "PAGE_ROWS", 2)
    monkeypatch.setattr(directory, "MOST_PAGES_WITHOUT_TABLE", 4)
    monkeypatch.setattr(directory, "MOST_CHANGED_PAGES", 3)


def bodies(engine, queue):
    return [row.body for row in engine.peek(queue, 1_000)]


def put(engine, queue, *numbers):
    engine.put(queue, [NewRow(b"%d" % number) for number in numbers])


def take_and_finish(engine, queue, count=1):
    found = engine.take(queue, count, 60_000).rows
    assert engine.finish(queue, [TakeRef(row.id, row.take) for row in found]) == count
    return [int(row.body) for row in found]


# --- what a change writes -----------------------------------------------------------------------------


def test_a_change_writes_no_more_where_there_are_ten_times_as_many_messages(tree, monkeypatch):
    monkeypatch.setattr(draft, "PAGE_ROWS", 10)
    means = []
    for depth in (1_000, 10_000):
        tree.znodes.clear()
        queue, znodes = queue_in(tree), Watched(tree)
        engine = engine_over(znodes)
        put(engine, queue, *range(depth))
        znodes.writes.clear()
        for number in range(100):
            put(engine, queue, depth + number)
            assert take_and_finish(engine, queue) == [number]
        means.append(sum(sum(write.values()) for write in znodes.writes) / len(znodes.writes))
    assert means[1] < 1.5 * means[0]


def test_the_table_is_written_when_more_pages_have_changed_than_may(tree, small):
    queue, znodes = queue_in(tree), Watched(tree)
    engine = engine_over(znodes)
    put(engine, queue, *range(8))
    assert TABLE not in tree.znodes
    put(engine, queue, 8)
    assert TABLE in znodes.writes[-1]
    for number in range(9, 14):  # which changes three pages
        put(engine, queue, number)
        assert TABLE not in znodes.writes[-1]
    put(engine, queue, 14)
    assert TABLE in znodes.writes[-1]
    assert all(PATH in write for write in znodes.writes)
    assert bodies(engine_over(MemoryZnodes(tree)), queue) == [b"%d" % number for number in range(15)]


def test_the_table_goes_when_there_are_half_as_many_pages_as_need_none(tree, small):
    queue, znodes = queue_in(tree), Watched(tree)
    engine = engine_over(znodes)
    put(engine, queue, *range(10))
    take_and_finish(engine, queue, 5)
    assert TABLE in tree.znodes
    take_and_finish(engine, queue, 1)
    assert TABLE not in tree.znodes
    assert bodies(engine_over(MemoryZnodes(tree)), queue) == [b"6", b"7", b"8", b"9"]
    put(engine, queue, *range(10, 20))
    assert TABLE in tree.znodes
    take_and_finish(engine_over(MemoryZnodes(tree)), queue, 14)
    assert [*tree.znodes] == [PATH]


def test_a_process_that_is_overtaken_reads_a_table_only_where_it_is_another(tree, small):
    queue, znodes = queue_in(tree), Watched(tree)
    engine, other = engine_over(znodes), engine_over(MemoryZnodes(tree))
    put(engine, queue, *range(10))
    put(other, queue, 10)
    put(engine, queue, 11)
    assert znodes.tables_read == 0
    put(other, queue, *range(12, 30))
    put(engine, queue, 30)
    assert znodes.tables_read == 1
    assert bodies(engine, queue) == [b"%d" % number for number in range(31)]


# --- others, and damage -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["another", "none"])
def test_a_table_that_others_replace_while_it_is_read_is_read_again(tree, small, how):
    queue, znodes = queue_in(tree), Watched(tree)
    engine, other = engine_over(znodes), engine_over(MemoryZnodes(tree))
    put(other, queue, *range(20))

    def replaced():
        znodes.before_table = lambda: None
        if how == "another":
            put(other, queue, *range(20, 40))
        else:
            take_and_finish(other, queue, 20)

    znodes.before_table = replaced
    assert engine.counts(queue).ready == (40 if how == "another" else 0)


def test_a_table_that_others_replace_each_time_ends_with_an_error_that_says_so(tree, small):
    queue, znodes = queue_in(tree), Watched(tree)
    engine, other = engine_over(znodes), engine_over(MemoryZnodes(tree))
    put(other, queue, *range(20))
    znodes.timeout_s = 0.0
    znodes.before_table = lambda: put(other, queue, *range(10))
    with pytest.raises(Exception, match="others change it all the time"):
        engine.counts(queue)


@pytest.mark.parametrize("how", ["missing", "empty", "older", "damaged"])
def test_a_damaged_table_is_told_and_can_be_restored(tree, small, how):
    queue = queue_in(tree)
    knows = engine_over(MemoryZnodes(tree))
    put(knows, queue, *range(10))
    older = tree.znodes[TABLE]
    put(knows, queue, *range(10, 20))
    kept = tree.znodes[TABLE]
    tree.znodes[TABLE] = {"empty": (b"", 1), "older": older, "damaged": (b"\xff", 1)}.get(how, kept)
    if how == "missing":
        del tree.znodes[TABLE]
    for call in (lambda engine: engine.counts(queue), lambda engine: put(engine, queue, 99)):
        with pytest.raises(ConfigError, match=f"znode {TABLE}: "):
            call(engine_over(MemoryZnodes(tree)))
    put(knows, queue, 20)
    tree.znodes[TABLE] = kept
    assert bodies(engine_over(MemoryZnodes(tree)), queue) == [b"%d" % number for number in range(21)]


def test_a_table_that_was_deleted_is_told_to_those_who_have_to_write_it(tree, small):
    queue = queue_in(tree)
    engine = engine_over(MemoryZnodes(tree))
    put(engine, queue, *range(10))
    del tree.znodes[TABLE]
    put(engine, queue, 10)
    with pytest.raises(ConfigError, match=f"znode {TABLE}: .*missing"):
        put(engine, queue, *range(11, 30))


# --- older and newer formats --------------------------------------------------------------------------


def as_before_tables(found: Directory) -> bytes:
    """The directory in the first format."""
    header = struct.pack(">BQQQH", 1, found.next_id, found.end_id, found.next_place, len(found.commits))
    pages = [struct.pack(">QIHHHHBQQ", number, *page) for number, page in found.pages.items()]
    return b"".join([header, *found.commits, *pages])


@pytest.mark.parametrize("count", [3, 30])
def test_a_directory_of_the_first_format_is_read_and_made_one_of_this_by_one_commit(
    tree, small, count, monkeypatch
):
    queue, znodes = queue_in(tree), Watched(tree)
    with monkeypatch.context() as patched:
        patched.setattr(directory, "MOST_PAGES_WITHOUT_TABLE", 1_000)
        put(engine_over(MemoryZnodes(tree)), queue, *range(count))
    data, version = tree.znodes[PATH]
    old = as_before_tables(Directory.from_bytes(data, PATH))
    tree.znodes[PATH] = (old, version)
    engine = engine_over(znodes)
    assert bodies(engine, queue) == [b"%d" % number for number in range(count)]
    assert tree.znodes[PATH] == (old, version), "reading changes nothing"
    put(engine, queue, count)
    assert len(znodes.writes) == 1
    assert (TABLE in znodes.writes[0]) == (count == 30)
    assert tree.znodes[PATH][0][0] == 2
    assert bodies(engine_over(MemoryZnodes(tree)), queue) == [b"%d" % number for number in range(count + 1)]
    assert take_and_finish(engine, queue, count + 1) == [*range(count + 1)]
    assert engine.counts(queue) == Counts(ready=0, delayed=0, in_flight=0, dead=0)
    assert [*tree.znodes] == [PATH]


def test_a_directory_of_a_newer_kmqpy_is_refused_and_left_as_it_is(tree):
    queue = queue_in(tree)
    data, version = tree.znodes[PATH]
    tree.znodes[PATH] = newer = (b"\x03" + data[1:], version)
    for call in (lambda one: one.counts(queue), lambda one: put(one, queue, 1)):
        with pytest.raises(ConfigError, match=f"znode {PATH}: it is of a newer kmqpy.*update kmqpy"):
            call(engine_over(MemoryZnodes(tree)))
    assert tree.znodes == {PATH: newer}


SUMMARIES = st.builds(
    PageSummary,
    version=st.just(1),
    ready=st.integers(0, 2),
    delayed=st.just(0),
    taken=st.just(1),
    dead=st.just(0),
    priority=st.integers(0, 2),
    place=st.integers(0, 3),
    due_ms=st.integers(0, 3),
)


@given(st.lists(st.dictionaries(st.integers(1, 6), st.none() | SUMMARIES)), st.booleans())
def test_the_orders_of_pages_are_those_of_pages_read_anew(changes, asked_before):
    pages = Pages({})
    for change in changes:
        before = dict(pages), *((list(pages.ready), list(pages.due)) if asked_before else ())
        made = pages.changed(change)
        anew = Pages({number: page for number, page in {**pages, **change}.items() if page is not None})
        assert (made, list(made.ready), list(made.due)) == (anew, list(anew.ready), list(anew.due))
        assert before == (dict(pages), *((list(pages.ready), list(pages.due)) if asked_before else ()))
        pages = made
