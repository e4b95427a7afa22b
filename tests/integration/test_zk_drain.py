"""`kmq zookeeper drain`; KMQ_ZK_CHILDREN=200000 for an overfull queue."""

import json
import os
import shlex
from urllib.parse import quote

import pytest
from kazoo.exceptions import ConnectionLoss
from zk_support import ZOOKEEPERS

from kmqpy.cli.app import run
from kmqpy.dev import Cluster
from kmqpy.errors import Unfinished
from kmqpy.queue import queue_for
from kmqpy.zookeeper import drain
from kmqpy.zookeeper.queue import ZkQueue, ZkQueueSettings
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

CHILDREN = int(os.environ.get("KMQ_ZK_CHILDREN", "3000"))
BUFFER_BYTES = 1_048_575 if CHILDREN > 100_000 else 16_384


@pytest.fixture
def zk(zookeeper):
    with connect(zookeeper, 4_000) as client:
        yield client


@pytest.fixture
def path(queue_name, zk):
    zk.ensure_path(f"/drain-{queue_name}")
    return f"/drain-{queue_name}"


@pytest.fixture
def kmq(zookeeper, capsys):
    def call(*args, at=zookeeper.hosts):
        code = run(["zookeeper", "drain", *args, "--zookeeper", at, "-o", "json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return call


@pytest.mark.breadth
@pytest.mark.timeout(600)
def test_a_queue_with_more_children_than_jute_maxbuffer_is_emptied(kmq):
    options = [f"-Djute.maxbuffer={BUFFER_BYTES}"]
    with (
        Cluster(brokers=0, zookeepers=ZOOKEEPERS, jvm_options=options) as own,
        connect(ZooKeeperConnection(hosts=own.zookeeper), 30_000) as zk,
    ):
        zk.create("/queue")
        for start in range(0, CHILDREN, 2_000):
            count = min(2_000, CHILDREN - start)
            for made in [zk.create_async("/queue/queue-", sequence=True) for _ in range(count)]:
                made.get()
        assert CHILDREN * len("queue-0000000001") > BUFFER_BYTES
        code, printed, err = kmq("/queue", "--yes", at=own.zookeeper)
        assert (code, printed["removed"]) == (0, CHILDREN), err
        assert zk.get_children("/queue") == []


def test_a_list_that_does_not_get_through_is_explained(zk, path, monkeypatch):
    """Something between ends the connection whenever the children are listed."""
    zk.create(f"{path}/queue-", sequence=True)

    def cut(_path):
        result = zk.handler.async_result()
        result.set_exception(ConnectionLoss())
        return result

    monkeypatch.setattr(zk, "get_children_async", cut)
    with pytest.raises(Unfinished, match=r"1 children are listed.*SERVER_JVMFLAGS=-Djute.maxbuffer=1000000"):
        drain.plan(zk, path)


NO_PATHS = ["relative", "/a/", "//", "/a/../b", "/.", "/.."]
NO_QUEUES = ["/", "/zookeeper", "/zookeeper/quota", "/kmq", "/zms", *NO_PATHS]


@pytest.mark.parametrize("refused", NO_QUEUES)
def test_what_is_no_queue_is_refused(kmq, refused):
    code, printed, err = kmq(refused, "--yes", "--any-name")
    assert (code, printed) == (2, None)
    assert "PATH" in err


def test_the_registry_of_kmqpy_is_refused_wherever_it_is(kmq, path, zk):
    zk.create(f"{path}/queue-1")
    code, _, err = kmq(path, "--yes", "--any-name", "--root", path)
    assert code == 2
    assert "registry" in err
    assert zk.exists(f"{path}/queue-1")


@pytest.mark.parametrize("below", ["", "/names", "/queues"])
def test_a_storage_of_kmqpy_is_refused_wherever_it_is(kmq, path, zookeeper, below, capsys):
    root = f"{path}/a b%20"
    with queue_for(f"zookeeper://{zookeeper.hosts}{quote(root)}?queue=jobs&create=true") as queue:
        for drained, at in ((f"{root}{below}", ""), (below or "/names", root)):
            queue.send(b"m0")
            code, _, err = kmq(drained, "--yes", "--any-name", at=f"{zookeeper.hosts}{at}")
            assert code == 2
            assert len(queue.peek()) == 1
            name, *advised = shlex.split(err[err.index("kmq purge NAME") :].replace("NAME", "jobs"))
            assert (name, run([*advised, "--yes"])) == ("kmq", 0)
            assert "1 message deleted" in capsys.readouterr().out
            assert queue.peek() == []


def test_a_missing_path_is_told(kmq):
    code, _, err = kmq("/nothing-here", "--yes")
    assert code == 2
    assert "there is no znode '/nothing-here'" in err


def test_foreign_children_are_refused_unless_told(kmq, path, zk):
    for name in ("a", "b"):
        zk.create(f"{path}/{name}")
    code, _, err = kmq(path, "--yes")
    assert code == 2
    assert "is not a queue" in err
    zk.create(f"{path}/queue-", sequence=True)
    zk.create(f"{path}/b/child")
    code, _, err = kmq(path, "--yes")
    assert code == 2
    assert "--any-name" in err
    code, printed, _ = kmq(path, "--yes", "--any-name")
    assert (code, printed["removed"]) == (0, 2)
    assert zk.get_children(path) == ["b"], "what has children stays"


def test_without_yes_nothing_is_removed(kmq, path, zk, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    zk.create(f"{path}/queue-", sequence=True)
    code, _, err = kmq(path)
    assert code == 2
    assert f"to be deleted: 1 znode in {path}" in err
    assert len(zk.get_children(path)) == 1


def test_locked_items_stay(kmq, path, zk):
    for name in ("items", "locks"):
        zk.create(f"{path}/{name}")
    names = [zk.create(f"{path}/items/queue-", sequence=True).rpartition("/")[2] for _ in range(3)]
    zk.create(f"{path}/locks/{names[1]}", ephemeral=True)
    code, printed, err = kmq(f"{path}/items", "--lock-path", f"{path}/locks", "--yes")
    assert (code, printed) == (0, {"path": f"{path}/items", "removed": 2, "locked": 1}), err
    assert zk.get_children(f"{path}/items") == [names[1]]


def test_a_queue_of_the_unit_of_work_keeps_what_is_taken(kmq, path, zookeeper, zk):
    with ZkQueue(zookeeper, ZkQueueSettings(root=path, session_timeout_ms=4_000)) as queue:
        queue.init("q")
        with queue.transaction() as tx:
            for _ in range(4):
                tx.put("q", b"x")
            tx.commit()
        with queue.transaction() as tx:
            tx.try_take("q")
            code, printed, _ = kmq(f"{path}/q", "--yes")
            assert (code, printed["removed"], printed["locked"]) == (0, 3, 1)
            tx.commit()
        assert queue.size("q") == 0
        assert sorted(zk.get_children(f"{path}/q")) == ["dlq", "items", "locks", "meta"]
