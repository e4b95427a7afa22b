"""Queues of `zookeeper://` on a real ZooKeeper: znodes of others, interrupted deletions, urls."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from zk_support import expire, until

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages.zookeeper import directory
from kmqpy.storages.zookeeper.znodes import Znodes


def generation(zk, root, name="q") -> str:
    return json.loads(zk.get(f"{root}/names/q-{name}")[0])["generation"]


@pytest.mark.parametrize("name", ["..", "a/b", "zookeeper", "h\u00e4 \u2603", "%2F", "x" * 200])
def test_any_name_is_one_znode(storage, zk, root, name):
    storage.create(name)
    assert storage.list() == [name]
    assert len(zk.get_children(f"{root}/names")) == 1
    with storage.open(name) as queue:
        queue.send("x")
        assert queue.receive()[0].queue == name
    storage.delete(name)
    assert storage.list() == []


def test_nothing_is_left_of_a_deleted_queue(storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        queue.send_many(["x"] * 500)
        queue.dead_letter(queue.receive(3))
        storage.delete("q")
        with pytest.raises(QueueNotFound):
            queue.receive(wait=0)
    assert zk.get_children(f"{root}/queues") == []


def test_what_an_interrupted_deletion_left_is_cleared_later(url, zk, root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with storage_for(url) as storage:
        storage.create("q")
        storage.create("kept")
        with storage.open("q") as queue, storage.open("kept") as kept:
            queue.send_many(["x"] * 300)
            kept.send("y")
        monkeypatch.setattr(Znodes, "clean", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.delete("q")
        monkeypatch.undo()
        assert storage.list() == ["kept"]
        assert len(zk.get_children(f"{root}/queues")) == 2
    with storage_for(url) as later:
        later.create("q")
        assert len(zk.get_children(f"{root}/queues")) == 2
        assert later.describe("kept").ready == 1
        assert later.describe("q").ready == 0


@pytest.mark.parametrize("data", [b"\x02" + b"\x00" * 40, b"\x01", b"{}"])
def test_a_directory_of_somebody_else_is_told_and_holds_up_no_other(storage, zk, root, data):
    for name in ("q", "good"):
        storage.create(name)
    zk.set(f"{root}/queues/{generation(zk, root)}", data)
    with storage.open("q") as queue, storage.open("good") as good:
        for call in (queue.size, lambda: queue.send("x"), lambda: queue.receive(wait=0)):
            with pytest.raises(ConfigError, match=f"znode {root}/queues/.*not one of kmqpy"):
                call()
        good.send("x")
        assert good.size() == 1
    storage.delete("q")  # what the error tells to do
    assert storage.list() == ["good"]


def test_a_damaged_page_or_body_is_told_and_newer_messages_go_on(url, zk, root):
    with queue_for(f"{url}?queue=q&create=true") as queue:
        queue.send_many([f"{i}" for i in range(200)])
        path = f"{root}/queues/{generation(zk, root)}"
    first, second = sorted(zk.get_children(path), key=int)
    zk.set(f"{path}/{first}", b"damaged")
    with queue_for(f"{url}?queue=q") as queue:
        queue.ack(queue.receive(10, wait=0))
        assert [message.body for message in queue.receive(90, wait=0)] == [b"%d" % i for i in range(110, 200)]
        with pytest.raises(ConfigError, match=f"znode {path}/{first}:.*not one of kmqpy"):
            queue.receive(1, wait=0)
        assert queue.size() == 100
    (pack,) = zk.get_children(f"{path}/{second}")
    zk.delete(f"{path}/{second}/{pack}")
    zk.delete(f"{path}/{first}", recursive=True)
    with queue_for(f"{url}?queue=q") as queue, pytest.raises((ConfigError, Unavailable)):
        queue.receive(1, wait=0)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"generation": 5}', b'{"generation": "a/b", "settings": {}}']
)
def test_a_name_of_somebody_else_is_told(storage, zk, root, data):
    storage.create("q")
    zk.set(f"{root}/names/q-q", data)
    zk.create(f"{root}/names/foreign", b"")
    assert storage.list() == ["q"]
    with pytest.raises(ConfigError, match=f"znode {root}/names/q-q"):
        storage.open("q")


@pytest.mark.parametrize("data", [b'{"format": 3, "id": "x"}', b"{}", b"someone else's"])
def test_a_storage_of_somebody_else_or_newer_is_refused(url, zk, root, data):
    zk.create(f"{root}/storage", data, makepath=True)
    with pytest.raises(ConfigError, match=f"znode {root}/storage"):
        storage_for(url)


def test_a_storage_of_the_first_format_is_used_on_and_refused_by_older_clients(url, storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        queue.send("x")
    content = json.loads(zk.get(f"{root}/storage")[0])
    zk.set(f"{root}/storage", json.dumps({**content, "format": 1}).encode())
    with storage_for(url) as opened, opened.open("q") as queue:
        assert queue.receive(wait=0)[0].body == b"x"
    assert json.loads(zk.get(f"{root}/storage")[0]) == {**content, "format": 2}


def test_a_queue_with_a_table_is_kept_and_deleted(url, storage, zk, root, monkeypatch):
    monkeypatch.setattr(directory, "MOST_PAGES_WITHOUT_TABLE", 2)
    storage.create("q")
    with storage.open("q") as queue:
        queue.send_many([f"{i}" for i in range(500)])
        path = f"{root}/queues/{generation(zk, root)}"
        assert "table" in zk.get_children(path)
        with queue_for(f"{url}?queue=q") as other:
            other.send("500")
            bodies = [message.body for message in other.receive(501, wait=0)]
        assert bodies == [b"%d" % i for i in range(501)]
        zk.delete(f"{path}/table")
    with queue_for(f"{url}?queue=q") as queue, pytest.raises(ConfigError, match=f"znode {path}/table"):
        queue.size()
    storage.delete("q")
    assert zk.get_children(f"{root}/queues") == []


@pytest.mark.parametrize("numbers", [b"many", b"-1", b"9" * 19, b"1" * 5_000])
def test_damaged_numbers_are_told(url, zk, root, numbers):
    with storage_for(url) as storage:
        storage.create("q")
        zk.set(f"{root}/ids", numbers)
        with storage.open("q") as queue, pytest.raises(ConfigError, match=f"znode {root}/ids"):
            queue.send("x")


def test_what_does_not_fit_into_a_request_is_refused_and_the_queue_goes_on(storage):
    storage.create("q")
    with storage.open("q") as queue:
        with pytest.raises(MessageError, match="body: 1000000 bytes"):
            queue.send(b"x" * 1_000_000)
        with pytest.raises(MessageError, match=r"bytes in one request.*nothing was sent"):
            queue.send_many([b"x" * 300_000] * 4)
        with pytest.raises(MessageError, match=r"bytes in one request.*nothing was sent"):
            queue.send("x", headers={"large": b"x" * 1_100_000})
        queue.send_many([b"x" * 300_000] * 3)
        assert queue.size() == 3


def test_many_long_reasons_need_several_requests(storage):
    storage.create("q")
    with storage.open("q") as queue:
        for _ in range(3):
            queue.send_many(["x"] * 1_000)
        taken = [message for _ in range(3) for message in queue.receive(1_000, lease=60)]
        queue.nack(taken, reason="\N{SNOWMAN}" * 5_000)
        assert queue.size() == len(taken)
        assert queue.in_flight() == 0


def test_times_are_those_of_the_server(storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        before_ms = zk.set(f"{root}/clock", b"").mtime
        queue.send("x")
        (found,) = queue.peek(1)
        assert before_ms <= found.enqueued_ms <= zk.set(f"{root}/clock", b"").mtime + 1


def test_a_waiting_take_learns_of_a_message_at_once(url):
    with queue_for(f"{url}?queue=q&create=true") as sender, queue_for(f"{url}?queue=q") as taker:
        sender.send("first")
        assert taker.receive(wait=20)[0].body == b"first"
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(taker.receive, wait=50)
            started = SYSTEM_CLOCK.monotonic()
            SYSTEM_CLOCK.sleep(0.3)
            sender.send("second")
            assert waiting.result()[0].body == b"second"
            assert SYSTEM_CLOCK.monotonic() - started < 40


def test_a_waiting_take_survives_the_loss_of_its_session(url):
    with queue_for(f"{url}?queue=q&create=true") as sender, queue_for(f"{url}?queue=q") as taker:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(taker.receive, wait=50)
            started = SYSTEM_CLOCK.monotonic()
            until(lambda: taker._engine._live(taker._queue).watch._is_watched)
            expire(taker._engine._znodes.zk)
            sender.send("x")
            (message,) = waiting.result()
            assert SYSTEM_CLOCK.monotonic() - started < 40
            taker.ack(message)
        assert sender.size() == 0


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("/a//b", "not the path of a znode"),
        ("/../b", "not the path of a znode"),
        ("/zookeeper", "not the path of a znode"),
        ("/x?timout=5s", "did you mean timeout"),
        ("/x?timeout_ms=0", "timeout_ms"),
        ("/x?timeout_ms=1000000d", "timeout_ms: .* at most a day"),
        ("/x?max_packet_bytes=3000000000", "max_packet_bytes: 3000000000"),
        ("/x?max_packet_bytes=5", "max_packet_bytes: 5"),
        ("/x?scheme=magic", "scheme"),
        ("/x?tls=perhaps", "tls"),
    ],
)
def test_a_bad_url_is_one_clear_error(zookeeper, rest, named):
    with pytest.raises(ConfigError, match=named):
        storage_for(f"zookeeper://{zookeeper.hosts}{rest}")


def test_a_server_that_is_away_is_unavailable_in_time():
    with pytest.raises(Unavailable, match="does not answer"):
        storage_for("zookeeper://127.0.0.1:1/x?timeout_ms=300ms")
