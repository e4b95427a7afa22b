"""Tells Cluster how to configure a ZooKeeper server, and when it is up."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmqpy.dev.server import ServerKind


def _write_config(
    folder: Path, number: int, ports: Sequence[Sequence[int]], settings: Mapping[str, str]
) -> Path:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "myid").write_text(f"{number}\n")
    config = {
        "dataDir": data,
        "clientPort": ports[number - 1][0],
        "clientPortAddress": "127.0.0.1",
        "tickTime": 500,
        "minSessionTimeout": 1_000,
        "maxSessionTimeout": 40_000,
        "initLimit": 20,
        "syncLimit": 10,
        "maxClientCnxns": 0,
        "admin.enableServer": "false",
        "4lw.commands.whitelist": "ruok,srvr,mntr,conf",
        "forceSync": "no",  # no sync: only a crash of the machine loses data, a kill of the server does not
        "preAllocSize": 4096,  # KiB
        **settings,
    }
    if len(ports) > 1:
        peers = enumerate(ports, 1)
        config |= {f"server.{i}": f"127.0.0.1:{own[1]}:{own[2]}" for i, own in peers}
    file = folder / "zoo.cfg"
    file.write_text("".join(f"{key}={value}\n" for key, value in config.items()))
    return file


def _answers(log: str, config: Path, port: int) -> bool:  # noqa: ARG001
    """Return True if this server answers on the port: the configuration that it tells has its data folder."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"conf")
            with connection.makefile("rb") as stream:
                return str(config.parent / "data") in stream.read().decode(errors="replace")
    except OSError:
        return False


KIND = ServerKind(  # ports: clients, quorum, election
    "zookeeper", "org.apache.zookeeper.server.quorum.QuorumPeerMain", 3, _write_config, _answers
)
