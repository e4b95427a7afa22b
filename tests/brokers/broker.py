"""Starts one broker of an older Kafka, beside the cluster's ZooKeeper."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kmqpy.dev import Cluster, kafka, watchdog
from kmqpy.dev.cluster import JVM_OPTIONS
from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from kmqpy.dev.ports import free_ports
from kmqpy.dev.server import Server

LOCK = Path(__file__).with_name("jars.json")
VERSIONS = ("2.8.2", "3.5.2", "3.9.1", "4.0.1")
NEEDS_ZOOKEEPER = ("2.8.2", "3.5.2")
"""Without ZooKeeper, Kafka was a preview in 2.8, and could do less until 3.6."""


@contextlib.contextmanager
def running(version: str) -> Iterator[tuple[str, str]]:
    """Run a broker of this version and a ZooKeeper; give their addresses, `host:port`."""
    with Cluster(brokers=0) as cluster, tempfile.TemporaryDirectory(prefix="kmqpy-") as scratch:
        class_path = os.pathsep.join(map(str, jar_set(f"kafka-{version}", LOCK)))
        java = (str(find_java()), *JVM_OPTIONS)
        group = watchdog.start(scratch)
        folder, ports = Path(scratch, "broker"), free_ports(2)
        if version in NEEDS_ZOOKEEPER:
            config = _zookeeper_config(folder, ports[0], f"{cluster.zookeeper}/kafka-{version}")
        else:
            config = kafka.KIND.write_config(folder, 1, [ports], {})
            kafka.format_storage([config], kafka.new_uuid(), java, class_path)
        server = Server(
            f"kafka-{version}",
            [*java, kafka.KIND.main_class, str(config)],
            environment={**os.environ, "CLASSPATH": class_path},
            log=Path(scratch, "broker.log"),
            answers=lambda log: "Kafka Server started" in log or "[KafkaServer id=1] started" in log,
            group=group.pid,
        )
        try:
            server.start()
            yield f"127.0.0.1:{ports[0]}", cluster.zookeeper
        finally:
            server.kill()
            group.kill()
            group.wait()


def _zookeeper_config(folder: Path, port: int, zookeeper: str) -> Path:
    folder.mkdir()
    config = {
        "broker.id": 1,
        "zookeeper.connect": zookeeper,
        "listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": folder / "data",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        "log.cleaner.dedupe.buffer.size": 16 << 20,
    }
    file = folder / kafka.CONFIG
    file.write_text("".join(f"{key}={value}\n" for key, value in config.items()))
    return file
