"""Tells Cluster how to configure a Kafka broker, how to format its data folder, and when it is up."""

import base64
import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmqpy.dev import remade_files
from kmqpy.dev.jars import cache_folder
from kmqpy.dev.server import ServerKind
from kmqpy.errors import ClusterError

CONFIG = "server.properties"
_CHECKPOINTS = {
    "bootstrap": "bootstrap.checkpoint",  # before Kafka 4.4
    "metadata": "__cluster_metadata-0/00000000000000000000-0000000000.checkpoint",
}
"""The files of a data folder in which Kafka's format tool writes the features of this Kafka version."""


def _write_config(
    folder: Path, number: int, ports: Sequence[Sequence[int]], settings: Mapping[str, str]
) -> Path:
    """Write the configuration of one broker, which is also a controller."""
    client, controller = ports[number - 1]
    voters = (f"{i}@127.0.0.1:{own[1]}" for i, own in enumerate(ports, 1))
    copies, in_sync = min(3, len(ports)), min(2, len(ports))
    config = {
        "process.roles": "broker,controller",
        "node.id": number,
        "controller.quorum.voters": ",".join(voters),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": folder / "data",
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
        # Few partitions: each costs files and time at its first use.
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.num.partitions": 4,
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        # Else each topic that is made or deleted waits for 25 ms, in case others follow.
        "controller.quorum.append.linger.ms": 0,
        # Every 5 s, not every 10 min, Kafka removes groups whose topics were deleted. `kmq doctor` asks for
        # the offsets of every group, and would be slow if many such groups were left.
        "offsets.retention.check.interval.ms": 5_000,
        # A killed broker may come back only when its earlier session is over; the default is 9 s.
        "broker.session.timeout.ms": 3_000,
        "broker.heartbeat.interval.ms": 500,
        "log.cleaner.dedupe.buffer.size": 16 << 20,  # the default is a quarter of the heap
        "metadata.max.idle.interval.ms": 0,  # else an idle broker writes two records a second
        **settings,
    }
    folder.mkdir(exist_ok=True)
    file = folder / CONFIG
    file.write_text("".join(f"{key}={value}\n" for key, value in config.items()))
    return file


def format_storage(configs: Sequence[Path], cluster_id: str, java: Sequence[str], class_path: str) -> None:
    """Format those data folders of brokers that are not formatted yet.

    Formatted folders differ in their ids only. So the cache keeps the checkpoint file that Kafka's format
    tool wrote, and a copy of it with a new file of ids formats all other folders without a start of Java.
    """
    folder = cache_folder() / "formatted"
    digest = hashlib.sha256(class_path.encode()).hexdigest()[:16]
    names = {kind: f"kafka-{digest}-{kind}.checkpoint" for kind in _CHECKPOINTS}
    for node_id, config in enumerate(configs, 1):
        data = config.parent / "data"
        if (data / "meta.properties").exists():
            continue
        kept = {kind: file for kind, name in names.items() if (file := remade_files.find(folder, name))}
        damaged = [remade_files.remove_if_damaged(file) for file in kept.values()]
        if not kept or any(damaged):
            _run_format_tool(config, cluster_id, java, class_path)
            for kind, place in _CHECKPOINTS.items():
                if (data / place).exists():
                    remade_files.keep(data / place, folder, names[kind])
            continue
        for kind, file in kept.items():
            (data / _CHECKPOINTS[kind]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, data / _CHECKPOINTS[kind])
        (data / "meta.properties").write_text(
            f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={new_uuid()}\n"
        )


def _run_format_tool(config: Path, cluster_id: str, java: Sequence[str], class_path: str) -> None:
    command = [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
    run = subprocess.run(
        [*command, "-t", cluster_id, "-c", str(config)],
        check=False,
        env={**os.environ, "CLASSPATH": class_path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise ClusterError(f"Kafka could not format {config.parent / 'data'}: {run.stdout}{run.stderr}")


def new_uuid() -> str:
    """Return a random id in Kafka's own form."""
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return text if text[0] != "-" else new_uuid()  # a tool would take it for an option


def _answers(log: str, config: Path, port: int) -> bool:  # noqa: ARG001
    return "Kafka Server started" in log  # in the broker's own log: no other process on the port wrote this


KIND = ServerKind("kafka", "kafka.Kafka", 2, _write_config, _answers)  # ports: clients, controller
