"""The embedded cluster: real servers, and that nothing of them is ever left."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient

from kmqpy.core.clock import wait_until
from kmqpy.dev import Cluster, jars, java
from kmqpy.dev import cluster as cluster_module
from kmqpy.dev.server import Server
from kmqpy.errors import ClusterError, ConfigError, MissingExtra
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection


def create_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, num_partitions=1)])[name].result(60)


def send(bootstrap: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 20_000})
    errors: list[object] = []
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    producer.flush(60)
    assert errors == [None]


def read(bootstrap: str, topic: str) -> bytes | None:
    settings = {"bootstrap.servers": bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None
        return message.value()
    finally:
        consumer.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.breadth
def test_it_starts_answers_survives_a_kill_and_leaves_nothing() -> None:
    with Cluster() as cluster:
        broker, zookeeper, folder = cluster.broker(1), cluster.zookeeper_server(1), cluster.folder
        assert folder is not None
        create_topic(cluster.bootstrap, "t")
        send(cluster.bootstrap, "t", b"before")

        broker.kill()
        assert broker.pid is None
        broker.start()
        assert read(cluster.bootstrap, "t") == b"before"

        client = KazooClient(cluster.zookeeper, timeout=1)
        client.start()
        client.create("/node", b"value")
        assert client.client_id is not None
        zookeeper.pause()
        zookeeper.resume()
        zookeeper.kill()
        zookeeper.start()
        assert client.retry(client.get, "/node")[0] == b"value"
        client.stop()
        client.close()

        pids = [server.pid for server in (broker, zookeeper)]
        broker.pause()  # a stop must not wait for it
    assert not any(is_alive(pid) for pid in pids if pid)
    assert not folder.exists()


@pytest.mark.parametrize(
    "halted", [False, pytest.param(True, marks=pytest.mark.breadth)]
)  # Linux itself ends halted ones that lost their owner
def test_everything_is_gone_soon_after_its_owner_was_killed(halted: bool) -> None:
    program = """if True:
        import json, sys, threading
        from kmqpy.dev import Cluster
        cluster = Cluster(brokers=0, zookeepers=2)  # two JVMs that start faster than a broker
        starter = threading.Thread(target=cluster.start)  # the servers outlive this thread
        starter.start(); starter.join()
        pids = [cluster.zookeeper_server(1).pid, cluster.zookeeper_server(2).pid]
        if len(sys.argv) > 1:
            cluster.zookeeper_server(1).pause()
        print(json.dumps([str(cluster.folder), *pids]), flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", program, *(["halt"] if halted else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        folder, *pids = json.loads(owner.stdout.readline())
        time.sleep(0.5)
        assert all(is_alive(pid) for pid in pids)
        os.kill(owner.pid, signal.SIGKILL)
    try:
        assert wait_until(lambda: not any(is_alive(pid) for pid in pids), 60)
        assert wait_until(lambda: not Path(folder).exists(), 60)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.breadth
def test_keep_keeps_data_and_ports(tmp_path: Path) -> None:
    with Cluster(keep=tmp_path) as first:
        addresses = first.bootstrap, first.zookeeper
        create_topic(first.bootstrap, "t")
        send(first.bootstrap, "t", b"kept")
    with Cluster(keep=tmp_path) as second:
        assert (second.bootstrap, second.zookeeper) == addresses
        assert read(second.bootstrap, "t") == b"kept"
    with pytest.raises(ConfigError, match="holds 1 kafka servers, not 3"):
        Cluster(keep=tmp_path, brokers=3).start()


def loaded(server: Server) -> str:
    return Path(f"/proc/{server.pid}/maps").read_text()


@pytest.mark.skipif(
    not (java.find_java().resolve().parents[1] / "lib" / "server" / "classes.jsa").exists(),
    reason="this Java has no archive of its own classes",
)
@pytest.mark.breadth
def test_a_server_has_the_classes_that_one_before_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jars").symlink_to(jars.cache_folder() / "jars")
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path))
    with Cluster(brokers=0) as first:
        assert str(tmp_path) not in loaded(first.zookeeper_server())
    (archive,) = (tmp_path / "classes").iterdir()
    with Cluster(brokers=0) as second:
        assert str(archive) in loaded(second.zookeeper_server())


def test_a_port_that_is_snatched_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cluster_module.free_ports
    with socket.create_server(("127.0.0.1", 0)) as thief:
        stolen = thief.getsockname()[1]
        answers = iter([[stolen, *real(2)]])  # the server's, the first time
        monkeypatch.setattr(cluster_module, "free_ports", lambda n: (n and next(answers, None)) or real(n))
        with Cluster(brokers=0) as cluster, connect(ZooKeeperConnection(hosts=cluster.zookeeper)):
            assert str(stolen) not in cluster.zookeeper


def test_a_failed_start_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    failing = Cluster(broker_settings={"num.io.threads": "none"})
    with pytest.raises(ClusterError, match=r"num\.io\.threads"):
        failing.start()
    assert failing.folder is not None
    assert not failing.folder.exists()
    with pytest.raises(ClusterError, match=r"zookeeper-1 ended with exit code \d+(.|\n)*soon"):
        Cluster(zookeeper_settings={"tickTime": "soon"}, keep=tmp_path).start()


LOCK = {"set": {"jars": {"g:a:1": hashlib.sha256(b"jar").hexdigest()}}}


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KMQ_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "jars.json"
    path.write_text(json.dumps(LOCK))
    return path


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def fetch(_name: str, coordinates: list[str], scratch: Path, _extra: str) -> list[tuple[str, Path]]:
        (scratch / "fetched").write_bytes(content)
        return [(coordinate, scratch / "fetched") for coordinate in coordinates]

    monkeypatch.setattr(jars, "_fetch", fetch)


def test_a_jar_with_another_sha256_is_refused(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"tampered")
    with pytest.raises(ClusterError, match=r"g:a:1: the fetched jar has SHA-256 .* is pinned"):
        jars.jar_set("set", lock)
    assert not list(jars.cache_folder().rglob("*.jar"))


def test_a_full_cache_needs_neither_network_nor_jgo(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(MissingExtra, match=r'pip install "kmqpy\[dev\]"'):
        jars.jar_set("set", lock)
    with monkeypatch.context() as online:
        serve(online, b"jar")
        (fetched,) = jars.jar_set("set", lock)
    assert jars.jar_set("set", lock) == [fetched]
    assert fetched.read_bytes() == b"jar"


def test_a_damaged_jar_is_removed_and_fetched_again(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"jar")
    (fetched,) = jars.jar_set("set", lock)
    assert jars.remove_damaged("set", lock) == []
    fetched.write_bytes(b"ja")
    assert jars.remove_damaged("set", lock) == [fetched]
    assert jars.jar_set("set", lock) == [fetched]
    assert fetched.read_bytes() == b"jar"
