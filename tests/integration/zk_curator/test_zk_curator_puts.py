"""What puts into Curator's queues do: their limits, in the background, and what can't be put."""

import threading
from dataclasses import replace

import pytest
from zk_support import until

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Closed, ConfigError, MessageError, UnknownOutcome
from kmqpy.zookeeper.curator import ErrorMode
from kmqpy.zookeeper.curator.item_format import encode_items
from kmqpy.zookeeper.session import connect


class Told:
    """A put listener."""

    def __init__(self):
        self.completed, self.failed = [], []

    def put_completed(self, items):
        self.completed.append(list(items))

    def put_failed(self, items, error):
        self.failed.append((list(items), error))


def test_max_items_blocks_until_there_is_room(builder):
    with builder(max_items=2).build_queue() as producer:
        assert producer.put(b"a")
        assert producer.put(b"b")
        assert not producer.put(b"c", timeout=0.1)
        done = threading.Event()
        thread = threading.Thread(target=lambda: producer.put(b"d") and done.set())
        thread.start()
        assert not done.wait(0.1)
        seen = []
        with builder(consumer=seen.append).build_queue():
            until(lambda: len(seen) == 3)
        thread.join()
        assert done.is_set()
    assert seen == [b"a", b"b", b"d"]


def test_closing_frees_a_blocked_put(builder):
    queue = builder(max_items=1).build_queue()
    queue.start()
    queue.put(b"a")
    assert not queue.put(b"b", timeout=0)  # even if no watch has told of the first one yet
    errors = []

    def put():
        try:
            queue.put(b"b")
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    queue.close()
    thread.join(60)
    assert len(errors) == 1


def test_max_items_with_puts_in_the_background_is_warned_of(builder, caplog):
    with builder(max_items=2, put_in_background=True).build_queue():
        assert "max_items is held only roughly" in caplog.text


def test_a_failed_put_in_the_background_is_reported_and_flush_does_not_wait_for_it(builder, zk, path):
    told = Told()
    with builder(put_listeners=(told,)).build_queue() as queue:
        queue.put(b"a")
        queue.put_multi([b"b", b"c"])
        assert queue.flush_puts(60)
        assert told.completed == [[b"a"], [b"b", b"c"]]
        zk.delete(path, recursive=True)
        begun = SYSTEM_CLOCK.monotonic()
        queue.put(b"d")
        assert queue.flush_puts(60), "Curator's waits out its limit here"
        assert SYSTEM_CLOCK.monotonic() - begun < 30
    (items, error), *rest = told.failed
    assert (items, type(error).__name__, rest) == ([b"d"], "NoNodeError", [])


def test_puts_under_way_when_the_connection_closes_are_reported_as_unknown(builder, zookeeper):
    told = Told()
    with connect(zookeeper, 2_000) as client:
        queue = builder(client, put_listeners=(told,), final_flush_s=0).build_queue()
        queue.start()
    queue.put(b"a")
    assert queue.flush_puts(60)
    assert isinstance(told.failed[0][1], UnknownOutcome)
    queue.close()


def test_a_put_in_the_foreground_makes_the_queue_again(builder, zk, path):
    with builder(put_in_background=False).build_queue() as queue:
        zk.delete(path, recursive=True)
        assert queue.put(b"a")
    assert [zk.get(f"{path}/{name}")[0] for name in zk.get_children(path)] == [encode_items([b"a"])]


def test_an_item_too_large_is_refused_before_it_is_sent(builder, zk):
    with builder().build_queue() as queue, pytest.raises(MessageError, match=r"jute.maxbuffer"):
        queue.put(b"x" * 1_100_000)
    assert zk.connected


def test_close_flushes_puts(builder, zk, path):
    with builder().build_queue() as queue:
        for _ in range(300):
            queue.put(b"a")
    assert len(zk.get_children(path)) == 300


@pytest.mark.parametrize("item", [5, None, "text", bytearray(b"x"), [1, 2]])
def test_without_a_serializer_only_bytes_are_items(builder, zk, path, item):
    with builder().build_queue() as queue:
        for put in queue.put, lambda one: queue.put_multi([b"a", one]):
            with pytest.raises(MessageError, match=rf"^item: {type(item).__name__} is not bytes"):
                put(item)
    assert zk.get_children(path) == []


def test_error_mode_and_put_listeners_change_while_the_queue_runs(builder, zk, path):
    seen, first, second = [], Told(), Told()

    def fail(item):
        seen.append(item)
        raise ValueError

    options = builder(consumer=fail, lock_path=path + "-locks", put_in_background=False)
    with replace(options, put_listeners=(first,)).build_queue() as queue:
        queue.add_put_listener(second)
        queue.put(b"a")
        until(lambda: len(seen) > 2)
        queue.set_error_mode(ErrorMode.DELETE)
        until(lambda: not zk.get_children(path))
        queue.remove_put_listener(first)
        queue.remove_put_listener(first)
        queue.put(b"b")
        with pytest.raises(ConfigError, match="error_mode: 'delete'"):
            queue.set_error_mode("delete")
    assert (first.completed, second.completed) == ([[b"a"]], [[b"a"], [b"b"]])
    with pytest.raises(ConfigError, match="lock_path"):
        builder().build_queue().set_error_mode(ErrorMode.DELETE)
