"""Queues of `zookeeper://` among znodes of others, deleted znodes, ACLs and servers that take less."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_acl, make_digest_acl
from zk_support import Cable

from kmqpy.cli.app import run
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import AccessDenied, Closed, ConfigError, QueueNotFound, Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages.zookeeper.znodes import Znodes
from tests.chaos.proxy import Cut, Proxy


def directory(zk, root, name="q") -> str:
    return f"{root}/queues/{json.loads(zk.get(f'{root}/names/q-{name}')[0])['generation']}"


# --- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", ["", ".", "..", "queues", "A" * 32])
def test_a_forged_generation_reaches_no_other_queue(storage, zk, root, forged):
    storage.create("good")
    with storage.open("good") as queue:
        queue.send("x")
    zk.create(f"{root}/names/q-q", json.dumps({"generation": forged, "settings": {}}).encode())
    with pytest.raises(ConfigError, match=f"znode {root}/names/q-q.*delete the znode"):
        storage.delete("q")
    assert storage.describe("good").ready == 1


def test_names_that_no_queue_can_have_are_not_listed(storage, zk, root):
    storage.create("a/b")
    for foreign in ("q-", "q-a%2fb", "q-%FF", "other", "q-x y%20"):
        zk.create(f"{root}/names/{foreign}", b"")
    assert storage.list() == ["a/b"]


def test_a_queue_whose_directory_was_deleted_by_hand_can_be_deleted_and_made_again(storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        queue.send("x")
        zk.delete(directory(zk, root), recursive=True)
        for call in (queue.size, lambda: queue.receive(wait=0), lambda: queue.send("y")):
            with pytest.raises(QueueNotFound):
                call()
    storage.delete("q")
    storage.create("q")
    assert storage.describe("q").ready == 0


def test_a_queue_whose_directory_was_emptied_by_hand_keeps_its_messages(url, storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        queue.send("x")
        path = directory(zk, root)
        data, _ = zk.get(path)
        zk.set(path, b"")
        zk.create(f"{root}/queues/of-others/below", b"", makepath=True)
        with pytest.raises(ConfigError, match=f"znode {path}"):
            queue.receive(wait=0)
        with storage_for(url) as later:  # which deletes what is left of deleted queues
            later.create("later")
        zk.set(path, data)
        assert queue.receive(wait=0)[0].body == b"x"
    assert zk.exists(f"{root}/queues/of-others/below")


def test_znodes_of_others_below_a_queue_hold_up_neither_its_deletion_nor_others(url, storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        queue.send("x")
    path = directory(zk, root)
    (page,) = zk.get_children(path)
    zk.create(f"{path}/{page}/a/b/c", b"", makepath=True)
    storage.delete("q")
    with storage_for(url) as later:
        later.create("q")
    assert storage.describe("q").ready == 0


def test_a_queue_is_deleted_by_a_request_whose_answer_is_lost(storage, zk, root, monkeypatch):
    storage.create("q")
    storage_zk = storage._engine._znodes.zk
    transaction, lost = storage_zk.transaction, []

    def lossy():
        multi = transaction()
        commit = multi.commit_async

        def commit_and_lose():
            result = commit()
            if not lost:
                lost.append(result.get(timeout=10))
                storage_zk._connection._socket.shutdown(2)
                raise __import__("kazoo.exceptions").exceptions.ConnectionLoss
            return result

        multi.commit_async = commit_and_lose
        return multi

    monkeypatch.setattr(storage_zk, "transaction", lossy)
    storage.delete("q")
    assert lost
    assert storage.list() == []
    assert zk.get_children(f"{root}/queues") == []


def test_who_deletes_late_does_not_delete_the_next_queue_of_this_name(url, storage, zk, root, monkeypatch):
    storage.create("q")
    with storage_for(url) as late:
        failed = []
        own = late._engine._znodes.zk
        transaction = own.transaction

        def overtaken():
            own.transaction = transaction
            with monkeypatch.context() as patched:
                patched.setattr(Znodes, "clean", lambda *_: None)
                storage.delete("q")
            storage.create("q")
            return transaction()

        own.transaction = overtaken
        try:
            late.delete("q")
        except QueueNotFound as error:
            failed.append(error)
    assert failed
    assert storage.describe("q").ready == 0


# --- roots --------------------------------------------------------------------------------------------


def test_a_root_that_was_deleted_is_told_and_can_be_used_again(url, storage, zk, root):
    storage.create("q")
    with storage.open("q") as queue:
        zk.delete(root, recursive=True)
        for call in (queue.size, lambda: queue.send("x"), lambda: queue.receive(wait=0)):
            with pytest.raises(QueueNotFound):
                call()
        for call in (storage.list, lambda: storage.create("q")):
            with pytest.raises(ConfigError, match=f"znodes below {root} are missing"):
                call()
    with queue_for(f"{url}?queue=q&create=true") as queue:
        queue.send("x")
        assert queue.receive(wait=0)[0].body == b"x"


@pytest.mark.parametrize("root", ["/a%00b", "/a%0Ab", "/%F0%9F%98%80", "/%EF%BF%BD", "/%C2%80"])
def test_a_root_that_zookeeper_refuses_is_a_wrong_url(zookeeper, root):
    with pytest.raises(ConfigError, match="not the path of a znode"):
        storage_for(f"zookeeper://{zookeeper.hosts}{root}")


def test_a_root_has_any_depth_and_any_letters(url):
    with queue_for(f"{url}/h%C3%A4/%E2%98%83 x/?queue=%F0%9F%98%80&create=true") as queue:
        queue.send("x")
    with queue_for(f"{url}/h%C3%A4/%E2%98%83 x?queue=%F0%9F%98%80") as queue:
        assert queue.receive(wait=0)[0].queue == "\N{GRINNING FACE}"


def test_numbers_that_were_set_back_double_no_message(url, zk, root):
    with queue_for(f"{url}?queue=q&create=true") as queue:
        queue.send_many(["a"] * 3)
        zk.delete(f"{root}/ids")
    with queue_for(f"{url}?queue=q") as queue:
        for _ in range(11):
            queue.send_many(["b"] * 1_000)
        assert queue.size() == 11_003
        assert len({message.id for message in queue.receive(1_000) + queue.receive(1_000)}) == 2_000


# --- ACLs ---------------------------------------------------------------------------------------------

MINE = make_digest_acl("me", "secret", all=True)
READ_ONLY = [MINE, make_acl("world", "anyone", read=True)]
USE = [MINE, make_acl("world", "anyone", read=True, write=True)]


@pytest.fixture
def owner(zk) -> KazooClient:
    zk.add_auth("digest", "me:secret")
    return zk


def test_who_may_not_make_znodes_opens_the_storage(url, storage, owner, root):
    storage.create("q")
    for path in (root, f"{root}/storage", f"{root}/names", f"{root}/queues"):
        owner.set_acls(path, USE)
    with queue_for(f"{url}?queue=q") as queue:
        queue.send("x")
        assert queue.receive(wait=0)[0].body == b"x"


def test_who_may_not_change_the_storage_opens_one_of_an_older_format(url, storage, owner, root):
    storage.create("q")
    content = {**json.loads(owner.get(f"{root}/storage")[0]), "format": 1}
    owner.set(f"{root}/storage", json.dumps(content).encode())
    owner.set_acls(f"{root}/storage", READ_ONLY)
    with queue_for(f"{url}?queue=q") as queue:
        queue.send("x")
        assert queue.receive(wait=0)[0].body == b"x"
    assert json.loads(owner.get(f"{root}/storage")[0]) == content


@pytest.mark.parametrize("acl", [READ_ONLY, [MINE]])
def test_a_queue_that_we_may_not_use_is_told_and_holds_up_no_other(url, storage, owner, root, acl):
    for name in ("q", "good"):
        storage.create(name)
    path = directory(owner, root)
    with storage.open("q") as queue, storage.open("good") as good:
        queue.send("x")
        owner.set_acls(path, acl)
        with pytest.raises(AccessDenied):
            queue.send("y")
        with pytest.raises(AccessDenied):
            queue.receive(wait=0)
        good.send("x")
        assert good.receive(wait=0)[0].body == b"x"
    with storage_for(url) as later:
        later.create("later")
        with pytest.raises(AccessDenied):
            later.delete("q")
        assert later.list() == ["good", "later", "q"]
    owner.set_acls(path, USE)
    assert storage.describe("q").ready == 1


# --- sizes --------------------------------------------------------------------------------------------


def test_a_server_that_takes_less_than_we_think_is_told(url):
    with queue_for(f"{url}?queue=q&create=true&max_packet_bytes=8000000&timeout_ms=2s") as queue:
        queue.send("small")
        with pytest.raises(Unavailable, match=r"jute\.maxbuffer"):
            queue.send(b"x" * 3_000_000)
        assert [message.body for message in queue.receive(wait=0)] == [b"small"]


# --- what the server does not tell --------------------------------------------------------------------


def test_whether_it_syncs_is_unknown_and_the_doctor_says_so(url, capsys):
    assert run(["--queue-url", url, "doctor"]) == 0
    assert "storage: forceSync=unknown: the server does not tell" in capsys.readouterr().out


# --- closing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Cut.BLACKHOLE, Cut.REFUSE])
def test_closing_ends_calls_that_wait_for_an_answer(zookeeper, root, how):
    with Proxy() as proxy:
        cable = Cable(proxy, zookeeper)
        storage = storage_for(f"zookeeper://{cable.connection.hosts}{root}?timeout_ms=50s")
        storage.create("q")
        queue = storage.open("q")
        queue.send("x")
        cable.cut(how)
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(queue.send, "x"), threads.submit(queue.receive, wait=100)]
            SYSTEM_CLOCK.sleep(0.5)
            started = SYSTEM_CLOCK.monotonic()
            storage.close()
            for call in calls:
                assert isinstance(call.exception(timeout=60), Closed)
        assert SYSTEM_CLOCK.monotonic() - started < 40
