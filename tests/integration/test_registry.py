"""The queue registry on a real ZooKeeper."""

import logging
import socket
import threading
import time

import pytest

from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin import registry_removal
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset, TrackerInfo, partitions_of
from kmqpy.kafka.admin.registry_requests import RegistryRequests
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection


@pytest.fixture
def zk(cluster):
    with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 2_000) as client:
        yield client


def test_a_registered_queue_is_found(registry):
    settings = QueueSettings(name="orders", max_redeliveries=None, lease_ms=700)
    assert registry.queues() == []
    registry.register(settings, 3)
    assert registry.get("orders") == RegisteredQueue(settings, 3)
    assert registry.queues() == [RegisteredQueue(settings, 3)]
    assert registry.owners("orders") == {}
    assert registry.offsets("orders") == {}


def test_all_queues_are_read_at_once(registry, monkeypatch):
    """There may be thousands, and who makes one waits for it."""
    for name in ("a", "b"):
        registry.register(QueueSettings(name=name), 1)
    monkeypatch.setattr(RegistryRequests, "raw", lambda *_: pytest.fail("one by one"))
    assert [one.settings.name for one in registry.queues()] == ["a", "b"]


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
        with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 2_000) as client:
            Registry(client, root).register(QueueSettings(name="orders"), partitions)

    threads = [threading.Thread(target=register, args=(5,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 2_000) as client:
        assert Registry(client, root).get("orders").partitions == 5


def test_unknown_queues_are_refused(registry):
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


def test_trackers_and_owners_are_listed(registry, zk, root, caplog):
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


def test_removal_without_owners_is_complete(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 2)
    zk.create(f"{root}/queues/orders/partitions/1/offset", b"{}")
    registry.remove("orders", 5)
    assert registry.queues() == []
    assert zk.get_children(f"{root}/queues") == []


def test_a_queue_made_anew_while_a_second_call_removes_it_stays(registry, monkeypatch):
    queue = QueueSettings(name="q")
    registry.register(queue, 1)
    mark, released = registry_removal.mark_deleting, []

    def overtaken(znodes, name):
        marked = mark(znodes, name)
        monkeypatch.setattr(registry_removal, "mark_deleting", mark)
        registry.remove(name)
        registry.register(queue, 2)
        return marked

    monkeypatch.setattr(registry_removal, "mark_deleting", overtaken)
    registry.remove(queue.name, on_released=lambda: released.append(1))
    assert released == []
    assert [(one.partitions, one.deleting) for one in registry.queues()] == [(2, False)]


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


class Meddling:
    """A client of ZooKeeper in front of which somebody else does something, once, before a transaction."""

    def __init__(self, zk, meddle):
        self._zk, self._meddle = zk, meddle

    def __getattr__(self, name):
        return getattr(self._zk, name)

    def transaction(self):
        meddle, self._meddle = self._meddle, lambda: None
        meddle()
        return self._zk.transaction()


def test_a_deletion_that_begins_while_a_queue_is_registered_is_not_undone(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 1)
    zk.create(f"{root}/queues/orders/partitions/0/leader", b"t1", ephemeral=True)

    def delete():
        with pytest.raises(Unavailable, match="by t1"):
            registry.remove("orders", 0)

    changed = QueueSettings(name="orders", max_redeliveries=9)
    with pytest.raises(TopicError, match="being removed"):
        Registry(Meddling(zk, delete), root).register(changed, 2)
    assert registry.get("orders") == RegisteredQueue(QueueSettings(name="orders"), 1, deleting=True)


def test_what_others_register_while_a_deletion_begins_is_not_forgotten(registry, zk, root):
    """Only the registry knows the names of a queue's topics, and they are to be deleted."""
    registry.register(QueueSettings(name="orders"), 1)
    zk.create(f"{root}/queues/orders/partitions/0/leader", b"t1", ephemeral=True)
    changed = QueueSettings(name="orders", dead_letter_topic="another")
    with pytest.raises(Unavailable, match="by t1"):
        Registry(Meddling(zk, lambda: registry.register(changed, 2)), root).remove("orders", 0)
    assert registry.get("orders") == RegisteredQueue(changed, 2, deleting=True)


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
        registry.remove("orders", 0.1, on_released=released)
    assert found == []
    zk.delete(leader)
    with pytest.raises(Unavailable, match="topics stay"):
        registry.remove("orders", 5, on_released=released)
    assert registry.get("orders").deleting
    registry.remove("orders", 5, on_released=released)
    assert found == [(None, True)] * 2
    assert registry.queues() == []


def test_zookeeper_away_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with (
            pytest.raises(Unavailable, match=f"ZooKeeper at {address} does not answer"),
            connect(ZooKeeperConnection(hosts=address), 2_000, timeout=0.5),
        ):
            pass
        assert time.monotonic() - started < 20


def test_a_closed_session_is_unavailable(cluster, root):
    with connect(ZooKeeperConnection(hosts=cluster.zookeeper), 2_000) as client:
        registry = Registry(client, root)
    with pytest.raises(Unavailable, match=cluster.zookeeper):
        registry.queues()


PATHS = {  # what others may have made below a queue with 3 partitions, and whether it has a session
    "extra": False,
    "extra/below": False,
    "partitions/x": False,
    "partitions/0007": False,
    "partitions/\u0661": False,
    "partitions/99999": False,
    "partitions/99999/leader": False,
    "partitions/0/extra": False,
    "partitions/0/extra/a/b": True,
    "partitions/0/leader/below": False,
    "partitions/1/offset/below": False,
    "partitions/2/leader": False,
}


@pytest.fixture
def littered(registry, zk, root):
    """The queue "orders", with all kinds of znodes that nobody can use; the path below which all is."""
    registry.register(QueueSettings(name="orders"), 3)
    top = f"{root}/queues/orders"
    zk.create(f"{top}/partitions/0/offset", StoredOffset(1, "t", 2).to_json())
    for path, ephemeral in PATHS.items():
        zk.create(f"{top}/{path}", b"\xff", ephemeral=ephemeral, makepath=True)
    zk.set(f"{top}/partitions/1/offset", b"{")
    return top


def test_r25_znodes_that_nobody_can_use_are_named_and_cleared(registry, zk, root, littered):
    assert registry.get("orders").partitions == 3
    assert registry.owners("orders") == {}
    assert registry.offsets("orders") == {0: StoredOffset(1, "t", 2)}
    found = registry.unusable_znodes("orders")
    assert {one.path.removeprefix(f"{littered}/") for one in found} == {
        *PATHS,
        "partitions/0/extra/a",
        "partitions/0/leader",
        "partitions/1/offset",
    }
    why = {one.path.removeprefix(f"{littered}/"): one.why for one in found}
    assert "without a session" in why["partitions/2/leader"]
    assert "not JSON" in why["partitions/1/offset"]
    assert registry.remove_unusable_znodes(found) == found
    assert registry.unusable_znodes("orders") == []
    assert registry.offsets("orders") == {0: StoredOffset(1, "t", 2)}
    assert registry.get("orders").partitions == 3


def test_r25_what_was_changed_meanwhile_is_not_cleared(registry, zk, littered):
    found = registry.unusable_znodes("orders")
    leader, offset, extra = (
        f"{littered}/{path}" for path in ("partitions/2/leader", "partitions/1/offset", "extra/below")
    )
    zk.delete(leader)
    zk.create(leader, b"t1", ephemeral=True)  # of the same version
    zk.delete(f"{offset}/below")
    zk.set(offset, StoredOffset(3, "t", 4).to_json())
    zk.create(f"{extra}/new")
    kept = {leader, offset, f"{offset}/below", extra, f"{littered}/extra"}
    assert {one.path for one in found} - {one.path for one in registry.remove_unusable_znodes(found)} == kept
    assert registry.owners("orders") == {2: "t1"}
    assert registry.offsets("orders")[1] == StoredOffset(3, "t", 4)


def test_r25_copied_trackers_and_what_can_be_no_queue(registry, zk, root):
    registry.register(QueueSettings(name="orders"), 1)
    info = TrackerInfo("t1", "host", 17, None, kafka_ok=True)
    zk.create(f"{root}/trackers/t1", info.to_json(), makepath=True)
    zk.create(f"{root}/trackers/t1/below")
    zk.create(f"{root}/trackers/t2", info.to_json(), ephemeral=True)
    zk.create(f"{root}/queues/no queue/below", makepath=True)
    assert [tracker.id for tracker in registry.trackers()] == ["t2"]
    found = registry.stray_unusable_znodes()
    assert [one.path.removeprefix(f"{root}/") for one in found] == [
        "queues/no queue/below",
        "queues/no queue",
        "trackers/t1/below",
        "trackers/t1",
    ]
    assert registry.remove_unusable_znodes(found) == found
    assert registry.stray_unusable_znodes() == []
    assert [tracker.id for tracker in registry.trackers()] == ["t2"]


def test_r25_a_queue_is_removed_with_all_that_others_put_below_it(registry, zk, root, littered):
    registry.remove("orders", 5)
    assert zk.get_children(f"{root}/queues") == []


def test_r25_an_ephemeral_leader_is_waited_for_a_copied_one_is_not(registry, zk, littered):
    zk.create(f"{littered}/partitions/1/leader", b"t1\x00\xff" + b"x" * 500_000, ephemeral=True)
    with pytest.raises(Unavailable, match=r"still held: partition 1 by t1\?\ufffdx{1,100}; run"):
        registry.remove("orders", 0.1)


@pytest.mark.parametrize("lost", ["partitions", "partitions/0", "partitions/1"])
def test_r25_a_queue_that_lost_a_partition_can_be_registered_again_or_removed(registry, zk, root, lost):
    registry.register(QueueSettings(name="orders"), 3)
    zk.delete(f"{root}/queues/orders/{lost}", recursive=True)
    assert registry.get("orders").partitions == (0 if lost == "partitions" else 3)
    registry.register(QueueSettings(name="orders"), 3)
    assert sorted(zk.get_children(f"{root}/queues/orders/partitions")) == ["0", "1", "2"]
    zk.delete(f"{root}/queues/orders/{lost}", recursive=True)
    registry.remove("orders", 5)
    assert registry.queues() == []


@pytest.mark.parametrize(
    ("children", "count", "missing"),
    [
        ([], 0, []),
        (["1", "0", "2"], 3, []),
        (["0", "2"], 3, [1]),
        (["1", "2", "3"], 4, [0]),
        (["0", "1", "99999999"], 2, []),
        (["0", "1", "5", "6", "7"], 8, [2, 3, 4]),
        (["0", "x", "01", "\u0661", "-1", "+1", "1_0", " 1", "9" * 5_000], 1, []),
    ],
)
def test_numbered_znodes_are_partitions(children, count, missing):
    assert partitions_of(children) == (count, missing)
