"""Curator's queues on a real ZooKeeper; tests/interop/test_curator.py runs Curator itself beside them."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from zk_support import Cable, forbid, put_below, until

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Cluster
from kmqpy.errors import Closed, ConfigError, MessageError
from kmqpy.zookeeper.curator import ErrorMode, QueueBuilder
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.chaos.proxy import Cut, Proxy


def test_the_defaults_are_curators(builder, path):
    options = builder()
    assert options.puts_in_background
    assert not builder(max_items=3).puts_in_background
    assert builder(max_items=3, put_in_background=True).puts_in_background
    assert (options.final_flush_s, options.lock_path, options.refresh_on_watch) == (5.0, None, False)
    assert builder(lock_path="/locks").error_mode is ErrorMode.REQUEUE
    assert (options.build_queue().guarantee, builder(lock_path="/l").build_queue().guarantee) == (
        "at most once",
        "at least once",
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"error_mode": ErrorMode.DELETE}, "error_mode: needs lock_path"),
        ({"lock_path": "relative"}, "lock_path: 'relative'"),
        ({"max_items": 0}, "max_items: 0"),
        ({"min_items_before_refresh": -1}, "min_items_before_refresh: -1"),
    ],
)
def test_wrong_options_are_refused(builder, options, problem):
    with pytest.raises(ConfigError, match=problem):
        builder(**options)


def test_the_lock_path_is_not_the_queue(builder, path):
    with pytest.raises(ConfigError, match="must not be the path"):
        builder(lock_path=path)


def test_use_before_start_a_second_start_and_use_after_close(builder):
    queue = builder().build_queue()
    with pytest.raises(ConfigError, match="call start"):
        queue.put(b"a")
    queue.start()
    with pytest.raises(ConfigError, match="started before"):
        queue.start()
    queue.close()
    queue.close()
    with pytest.raises(Closed):
        queue.put(b"a")
    with pytest.raises(ConfigError, match="started before"):
        queue.start()


def test_at_most_once_a_failed_item_is_gone_and_at_least_once_it_is_requeued(builder, zk, path):
    seen = []

    def fail(item):
        seen.append(item)
        raise ValueError

    with builder(consumer=fail).build_queue() as queue:
        queue.put(b"a")
        until(lambda: seen == [b"a"] and not zk.get_children(path))
    locks = path + "-locks"
    with builder(consumer=fail, lock_path=locks, error_mode=ErrorMode.DELETE).build_queue() as queue:
        queue.put(b"b")
        until(lambda: b"b" in seen and not zk.get_children(path))
    with builder(consumer=fail, lock_path=locks).build_queue() as queue:
        queue.put(b"c")
        until(lambda: seen.count(b"c") > 3)
    assert len(zk.get_children(path)) == 1
    assert zk.get_children(locks) == []


@pytest.mark.parametrize("locks", [True, False])
def test_foreign_and_corrupt_znodes_stay_with_one_warning_each(builder, zk, path, caplog, locks):
    seen = []
    zk.ensure_path(path)
    zk.create(f"{path}/foreign", b"x")
    zk.create(f"{path}/queue-0000000000", b"corrupt")
    options = builder(consumer=seen.append, lock_path=path + "-locks" if locks else None)
    with options.build_queue() as queue:
        for n in range(5):
            queue.put(b"%d" % n)
            until(lambda: len(seen) == n + 1)  # noqa: B023 - called at once
    assert sorted(zk.get_children(path)) == ["foreign", "queue-0000000000"]
    warnings = [record.getMessage() for record in caplog.records if "left alone" in record.getMessage()]
    assert len(warnings) == 2
    assert not locks or zk.get_children(path + "-locks") == []


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(("spoil", "told"), [(put_below, "znodes of others"), (forbid, "may not read")])
def test_an_unusable_item_stays_with_one_warning(builder, zk, path, caplog, locks, spoil, told):
    seen = []
    with builder(put_in_background=False).build_queue() as queue:
        queue.put(b"bad")
    spoil(zk, f"{path}/queue-0000000000")
    with builder(consumer=seen.append, lock_path=path + "-locks" if locks else None).build_queue() as queue:
        for n in range(3):
            queue.put(b"%d" % n)
            until(lambda: len(seen) == n + 1)  # noqa: B023 - called at once
    assert b"bad" not in seen
    assert zk.get_children(path) == ["queue-0000000000"]
    assert [
        record.getMessage().count(told) for record in caplog.records if "queue-0" in record.getMessage()
    ] == [1]


def test_a_delay_beyond_what_threads_can_wait_ends_no_consumer(builder):
    seen = []
    with builder(consumer=seen.append, put_in_background=False).build_delay_queue() as queue:
        queue.put_until(b"never", 2**63 - 1)
        until(lambda: queue.last_message_count == 1)
        SYSTEM_CLOCK.sleep(0.05)
        queue.put(b"now")
        until(lambda: seen == [b"now"])


def test_a_consumer_makes_a_lock_path_again_that_somebody_removed(builder, zk, path):
    seen = []
    options = builder(consumer=seen.append, lock_path=path + "-locks", put_in_background=False)
    with options.build_queue() as queue:
        zk.delete(path + "-locks")
        queue.put(b"a")
        until(lambda: seen == [b"a"])


class Json:
    """A serializer."""

    def serialize(self, item):
        return json.dumps(item).encode()

    def deserialize(self, data):
        return json.loads(data)


def test_a_serializer_makes_the_items_and_what_it_can_not_read_stays(builder, zk, path, caplog):
    seen = []
    with builder(put_in_background=False).build_queue() as queue:
        queue.put(b"no json")
    with builder(serializer=Json(), consumer=seen.append, put_in_background=False).build_queue() as queue:
        queue.put({"a": 1})
        until(lambda: seen == [{"a": 1}])
    assert zk.get_children(path) == ["queue-0000000000"]
    assert "the serializer failed (JSONDecodeError)" in caplog.text


def test_a_consumer_survives_the_removal_of_the_queue_and_does_not_ask_all_the_time(builder, zk, path):
    seen, listings = [], []
    get = zk.get_children_async
    zk.get_children_async = lambda *args: listings.append(args) or get(*args)
    with builder(consumer=seen.append, put_in_background=False).build_queue() as queue:
        zk.delete(path)
        until(lambda: len(listings) > 3)
        begun, before = SYSTEM_CLOCK.monotonic(), len(listings)
        until(lambda: len(listings) > before + 2)
        assert SYSTEM_CLOCK.monotonic() - begun > 1
        queue.put(b"a")
        until(lambda: seen == [b"a"])


def test_an_executor_consumes_in_parallel_and_a_thread_factory_makes_the_thread(builder):
    meeting, made = threading.Barrier(3), []

    def factory(run):
        made.append(threading.Thread(target=run))
        return made[0]

    with builder(put_in_background=False).build_queue() as producer:
        for _ in range(3):  # all before they are listed: an executor has the items of one listing
            producer.put(b"a")
    with ThreadPoolExecutor(3) as executor:
        options = builder(consumer=lambda _: meeting.wait(60), executor=executor, thread_factory=factory)
        with options.build_queue() as queue:
            until(lambda: not queue.children())
    assert len(made) == 1


def test_close_leaves_what_an_executor_has_not_begun(builder, path):
    began, go_on, consumed = threading.Event(), threading.Event(), []

    def consume(item):
        consumed.append(item)
        began.set()
        go_on.wait(60)

    with builder(put_in_background=False).build_queue() as producer:
        for _ in range(20):
            producer.put(b"a")
    with ThreadPoolExecutor(1) as executor:
        queue = builder(consumer=consume, executor=executor, lock_path=path + "-locks").build_queue()
        queue.start()
        began.wait(60)
        closer = threading.Thread(target=queue.close)
        closer.start()
        until(queue._closed.is_set)
        go_on.set()
        closer.join(60)
    assert consumed == [b"a"]


def test_remove_by_id_spares_what_is_being_consumed(builder, path):
    consuming, go_on = threading.Event(), threading.Event()

    def consume(_item):
        consuming.set()
        go_on.wait(60)

    options = builder(lock_path=path + "-locks", put_in_background=False)
    with options.build_id_queue() as queue:
        for item_id in ("a", "a", "b", "a/x"):
            queue.put_with_id(b"1", item_id)
        with builder(consumer=consume, lock_path=path + "-locks").build_id_queue():
            consuming.wait(60)
            assert queue.remove_by_id("a") == 1
            assert queue.remove_by_id("a/x") == 1
            assert queue.remove_by_id("nothing") == 0
            go_on.set()
            until(lambda: not queue.children())


def test_a_delayed_item_waits_for_its_time(builder):
    seen = []
    with builder(consumer=seen.append, put_in_background=False).build_delay_queue() as queue:
        now = SYSTEM_CLOCK.wall_ms()
        queue.put_until(b"never", now + 3_600_000)
        queue.put_until(b"soon", now + 300)
        queue.put(b"now")
        until(lambda: len(seen) == 2)
        assert SYSTEM_CLOCK.wall_ms() >= now + 300
    assert seen == [b"now", b"soon"]


@pytest.mark.parametrize("refresh", [0, 100])
def test_a_priority_queue_notices_more_urgent_items_after_so_many(builder, refresh):
    seen, first, go_on = [], threading.Event(), threading.Event()

    def consume(item):
        seen.append(item)
        first.set()
        go_on.wait(60)

    with builder(put_in_background=False).build_priority_queue(0) as producer:
        for name in (b"a", b"b"):
            producer.put_with_priority(name, 5)
        with builder(consumer=consume).build_priority_queue(refresh) as queue:
            first.wait(60)
            producer.put_with_priority(b"urgent", -1)
            until(lambda: queue._children.stale)
            go_on.set()
            until(lambda: len(seen) == 3)
    assert seen == ([b"a", b"urgent", b"b"] if refresh == 0 else [b"a", b"b", b"urgent"])


def test_the_consumer_is_told_of_the_connection_and_survives_a_lost_session(builder, zk, zookeeper, path):
    class Consumer:
        def __init__(self):
            self.items, self.states = [], []

        def consume(self, item):
            self.items.append(item)

        def connection_changed(self, state):
            self.states.append(state)

    consumer = Consumer()
    with (
        Proxy() as proxy,
        connect((cable := Cable(proxy, zookeeper)).connection, 1_000) as client,
        builder(client, consumer=consumer, lock_path=path + "-locks").build_queue(),
        builder(put_in_background=False).build_queue() as producer,
    ):
        producer.put(b"a")
        until(lambda: consumer.items == [b"a"])
        session = client.client_id[0]
        client.create(path + "-mine", ephemeral=True)
        cable.cut(Cut.REFUSE)
        until(lambda: not zk.exists(path + "-mine"))
        cable.heal()
        until(lambda: "LOST" in consumer.states and consumer.states[-1] == "CONNECTED")
        assert client.client_id[0] != session
        producer.put(b"b")
        until(lambda: consumer.items == [b"a", b"b"])
    assert consumer.states[0] == "SUSPENDED"


def test_last_message_count_is_what_was_listed(builder):
    seen = []
    with builder(put_in_background=False).build_queue() as producer:
        for _ in range(7):
            producer.put(b"a")
    with builder(consumer=lambda item: seen.append(queue.last_message_count)).build_queue() as queue:
        until(lambda: len(seen) == 7)
    assert seen[0] == 7


def test_zookeeper_may_remove_an_empty_container(queue_name):
    """Parents are containers: with this interval, the server removes them soon after the queue is gone."""
    with (
        Cluster(brokers=0, jvm_options=["-Dznode.container.checkIntervalMs=100"]) as own,
        connect(ZooKeeperConnection(hosts=own.zookeeper), 4_000) as zk,
    ):
        options = QueueBuilder(zk=zk, path="/a/b/queue", put_in_background=False)
        with options.build_queue() as queue:
            queue.put(b"a")
            zk.delete("/a/b/queue", recursive=True)
            until(lambda: not zk.exists("/a"))
            assert queue.put(b"b")
            assert len(zk.get_children("/a/b/queue")) == 1


def test_a_serializer_that_makes_no_bytes_is_an_error(builder, zk, path):
    class Text(Json):
        def serialize(self, item):
            return str(item)

    with builder(serializer=Text()).build_queue() as queue, pytest.raises(MessageError, match="returned str"):
        queue.put(5)
    assert zk.get_children(path) == []


def test_order_delay_and_requeue_path_are_fields_of_the_builder(builder, zk, path):
    seen, due = [], threading.Event()

    def fail_once(item):
        seen.append(item)
        if len(seen) == 1:
            raise ValueError

    with builder(put_in_background=False).build_queue() as producer:
        for n in range(3):
            producer.put(b"%d" % n)
    options = builder(
        consumer=fail_once,
        lock_path=path + "-locks",
        order=lambda names: sorted(names, reverse=True),
        due_ms=lambda _name: 0 if due.is_set() else SYSTEM_CLOCK.wall_ms() + 50,
        requeue_prefix=lambda name: f"queue-0-again-{name[-2:]}-",
    )
    with options.build_queue() as queue:
        until(lambda: queue.last_message_count == 3)
        assert seen == []
        due.set()
        until(lambda: len(seen) == 4)
    assert seen == [b"2", b"1", b"0", b"2"]
    with pytest.raises(ConfigError, match="order: 5 can't be called"):
        builder(order=5)
