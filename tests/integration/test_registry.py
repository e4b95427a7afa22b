"""The queue registry on a real ZooKeeper."""

import logging
import socket
import threading
import time

import pytest

from kmqpy.config import QueueSettings
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.registry import RegisteredQueue, Registry, StoredOffset, TrackerInfo, connect


@pytest.fixture
def zk(cluster):
    with connect(cluster.zookeeper, 2_000) as client:
        yield client


@pytest.fixture
def root(queue_name):
    return f"/kmq-{queue_name}"


@pytest.fixture
def registry(zk, root):
    return Registry(zk, root)


def test_a_registered_queue_is_found(registry):
    settings = QueueSettings(name="orders", max_redeliveries=None, redeliver_after_ms=7)
    assert registry.queues() == []
    registry.register(settings, 3)
    assert registry.get("orders") == RegisteredQueue(settings, 3)
    assert registry.queues() == [RegisteredQueue(settings, 3)]
    assert registry.owners("orders") == {}
    assert registry.offsets("orders") == {}


def test_registering_again_replaces_settings_and_grows(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 2)
    zk.create(f"{root}/queues/orders/partitions/1/offset", StoredOffset(5, "t", 1).to_json())
    changed = QueueSettings(name="orders", max_redeliveries=9)
    registry.register(changed, 4)
    assert registry.get("orders") == RegisteredQueue(changed, 4)
    assert registry.offsets("orders") == {1: StoredOffset(5, "t", 1)}


def test_shrinking_is_refused(registry):
    registry.register(QueueSettings(name="orders"), 3)
    with pytest.raises(ConfigError, match="has 3 and can't shrink to 2"):
        registry.register(QueueSettings(name="orders"), 2)
    with pytest.raises(ConfigError, match="at least 1"):
        registry.register(QueueSettings(name="mail"), 0)


def test_many_register_the_same_queue_at_once(cluster, root):
    def register(partitions):
        with connect(cluster.zookeeper, 2_000) as client:
            Registry(client, root).register(QueueSettings(name="orders"), partitions)

    threads = [threading.Thread(target=register, args=(5,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with connect(cluster.zookeeper, 2_000) as client:
        assert Registry(client, root).get("orders").partitions == 5


def test_unknown_queues(registry):
    for call in (registry.get, registry.owners, registry.offsets, registry.remove):
        with pytest.raises(QueueNotFound, match="'nope' is not registered"):
            call("nope")


def test_an_unreadable_queue_does_not_hide_the_others(registry, zk, root, caplog):
    for name in ("a", "b", "c"):
        registry.register(QueueSettings(name=name), 1)
    zk.set(f"{root}/queues/b", b"{")
    with caplog.at_level(logging.ERROR):
        assert [queue.settings.name for queue in registry.queues()] == ["a", "c"]
    assert [record.queue for record in caplog.records] == ["b"]
    with pytest.raises(ConfigError, match="'b': not JSON"):
        registry.get("b")
    registry.register(QueueSettings(name="b"), 1)
    assert len(registry.queues()) == 3


def test_settings_under_another_name_are_refused(registry, zk, root):
    registry.register(QueueSettings(name="a"), 1)
    zk.set(f"{root}/queues/a", QueueSettings(name="b").to_json())
    with pytest.raises(ConfigError, match="those of 'b'"):
        registry.get("a")


def test_trackers_and_owners(registry, zk, root, caplog):
    registry.register(QueueSettings(name="orders"), 3)
    info = TrackerInfo("t1", "host", 17, frozenset({"orders"}), kafka_ok=False)
    zk.create(f"{root}/trackers/t1", info.to_json(), ephemeral=True, makepath=True)
    zk.create(f"{root}/trackers/t2", b"?", ephemeral=True)
    zk.create(f"{root}/queues/orders/partitions/2/leader", b"t1", ephemeral=True)
    assert registry.trackers() == [info]
    assert "'t2': not JSON" in caplog.text
    assert registry.owners("orders") == {2: "t1"}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"offset": "1", "topic_id": "t", "now_ms": 1}'])
def test_an_unreadable_offset_counts_as_absent(registry, zk, root, caplog, data):
    registry.register(QueueSettings(name="orders"), 2)
    zk.create(f"{root}/queues/orders/partitions/0/offset", data)
    zk.create(f"{root}/queues/orders/partitions/1/offset", StoredOffset(1, "t", 2).to_json())
    assert registry.offsets("orders") == {1: StoredOffset(1, "t", 2)}
    assert "treated as absent" in caplog.text


def test_removal_without_owners(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 2)
    zk.create(f"{root}/queues/orders/partitions/1/offset", b"{}")
    registry.remove("orders", 5)
    assert registry.queues() == []
    assert zk.get_children(f"{root}/queues") == []


def test_removal_of_an_unreadable_queue(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 2)
    zk.set(f"{root}/queues/orders", b"{")
    registry.remove("orders", 5)
    assert zk.get_children(f"{root}/queues") == []


def test_removal_waits_for_the_owners_and_names_them(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 3)
    zk.create(f"{root}/queues/orders/partitions/1/leader", b"t1", ephemeral=True)
    zk.create(f"{root}/queues/orders/partitions/2/leader", b"t2", ephemeral=True)
    with pytest.raises(Unavailable, match="partition 1 by t1, partition 2 by t2"):
        registry.remove("orders", 0.2)
    assert registry.get("orders").deleting
    with pytest.raises(TopicError, match="being removed"):
        registry.register(QueueSettings(name="orders"), 3)
    for partition in (1, 2):
        zk.delete(f"{root}/queues/orders/partitions/{partition}/leader")
    registry.remove("orders", 5)
    assert registry.queues() == []


def test_what_is_done_when_the_owners_have_let_go_comes_before_the_removal(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 1)
    leader = f"{root}/queues/orders/partitions/0/leader"
    zk.create(leader, b"t1", ephemeral=True)
    found = []

    def released():
        found.append((zk.exists(leader), registry.get("orders").deleting))
        if len(found) == 1:
            raise Unavailable("topics stay")

    with pytest.raises(Unavailable, match="by t1"):
        registry.remove("orders", 0.1, released=released)
    assert found == []
    zk.delete(leader)
    with pytest.raises(Unavailable, match="topics stay"):
        registry.remove("orders", 5, released=released)
    assert registry.get("orders").deleting
    registry.remove("orders", 5, released=released)
    assert found == [(None, True)] * 2
    assert registry.queues() == []


def test_zookeeper_away_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with (
            pytest.raises(Unavailable, match=f"ZooKeeper at {address} does not answer"),
            connect(address, 2_000, timeout=0.5),
        ):
            pass
        assert time.monotonic() - started < 5


def test_a_closed_session_is_unavailable(cluster, root):
    with connect(cluster.zookeeper, 2_000) as client:
        registry = Registry(client, root)
    with pytest.raises(Unavailable, match=cluster.zookeeper):
        registry.queues()
