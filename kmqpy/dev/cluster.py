"""Starts a real Kafka (KRaft) and ZooKeeper on this machine, for demos, tests and development."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kmqpy.dev import kafka, remade_files, zookeeper
from kmqpy.dev.class_archive import ClassArchive, archive_for
from kmqpy.dev.jars import cache_folder, jar_set, remove_damaged
from kmqpy.dev.java import find_java
from kmqpy.dev.ports import free_ports, is_free
from kmqpy.dev.server import Server, ServerKind, Servers, check_platform, stop_all
from kmqpy.errors import ClusterError, ConfigError

_log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""The most attempts of start(): it tries again after a port was taken, or a damaged file was replaced."""
JVM_OPTIONS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",  # with this and the next option a start takes about half as long
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
    # Hundreds of lines per start that would hide the ones that matter.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config.AbstractConfig=warn",
)


BrokerSettings = Mapping[str, str] | Callable[[int, Sequence[int]], Mapping[str, str]]
"""Settings for all brokers, or a function of a broker's number and its ports, for clients and controllers."""


class Cluster(Servers):
    """Runs Kafka brokers and ZooKeeper servers as child processes, on loopback only.

    At the end of the `with` block they are stopped, and their data is removed. If the process that started
    them is killed, a watchdog does the same.

    Args:
        brokers: How many Kafka brokers, usually 1 or 3; 0: only ZooKeeper.
        zookeepers: How many ZooKeeper servers, usually 1 or 3.
        keep: A folder in which data and logs stay; the next start with it uses them again, and the same ports
            if they are free.
        broker_settings: Added to the configuration files of brokers; override those of this package.
        zookeeper_settings: The same for ZooKeeper servers.
        jvm_options: Added to all command lines.
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        zookeepers: int = 1,
        keep: Path | None = None,
        broker_settings: BrokerSettings | None = None,
        zookeeper_settings: Mapping[str, str] | None = None,
        jvm_options: Sequence[str] = (),
    ) -> None:
        if brokers < 0 or zookeepers < 1:
            raise ConfigError(f"brokers={brokers}, zookeepers={zookeepers}: at least 0 and 1")
        super().__init__(keep)
        self._counts = {"kafka": brokers, "zookeeper": zookeepers}
        self._settings: dict[str, BrokerSettings] = {
            "kafka": broker_settings or {},
            "zookeeper": zookeeper_settings or {},
        }
        self._jvm_options = (*JVM_OPTIONS, *jvm_options)
        self._ports: dict[str, list[list[int]]] = {}
        self._brokers: list[Server] = []
        self._zookeepers: list[Server] = []
        self._archives: dict[str, ClassArchive | None] = {}
        self._recorders: dict[ClassArchive, Server] = {}  # class archive -> the server that will write it

    @property
    def bootstrap(self) -> str:
        """The addresses of the brokers, `127.0.0.1:port[,…]`; known after start()."""
        return ",".join(f"127.0.0.1:{ports[0]}" for ports in self._ports["kafka"])

    @property
    def zookeeper(self) -> str:
        """The addresses of the ZooKeeper servers, `127.0.0.1:port[,…]`; known after start()."""
        return ",".join(f"127.0.0.1:{ports[0]}" for ports in self._ports["zookeeper"])

    def broker(self, node_id: int = 1) -> Server:
        """Return a broker by its node id.

        Args:
            node_id: The first is 1.
        """
        return self._brokers[node_id - 1]

    def zookeeper_server(self, my_id: int = 1) -> Server:
        """Return a ZooKeeper server by its id.

        Args:
            my_id: The first is 1.
        """
        return self._zookeepers[my_id - 1]

    def start(self) -> Self:
        """Fetch missing jars, start all servers, and return when all of them answer.

        Raises ClusterError on Windows, if a server does not start (the error shows the end of its log), or if
        a jar can't be fetched. Raises MissingExtra if Java or a jar is missing and the extra `kmqpy[dev]` is
        not installed. Raises ConfigError if the folder `keep` holds another number of servers. After an error
        no server is left running.
        """
        if self._watchdog is not None:
            return self
        check_platform()
        jars = {kind: jar_set(kind) for kind, count in self._counts.items() if count}
        class_paths = {kind: os.pathsep.join(map(str, paths)) for kind, paths in jars.items()}
        java_file = find_java()
        java = (str(java_file), *self._jvm_options)
        archives = cache_folder() / "classes"
        self._archives = {kind: archive_for(kind, java_file, paths, archives) for kind, paths in jars.items()}
        folder = self._make_folder()
        try:
            for attempts_left in reversed(range(START_ATTEMPTS)):
                cluster_id = self._choose_ports(folder)
                self._make_servers(folder, java, class_paths)
                try:
                    self._start_servers(cluster_id, java, class_paths)
                    break
                except ClusterError:
                    if not attempts_left or not (self._a_port_was_taken() or self._mend_cache()):
                        raise
                    self._kill_servers()
        except BaseException:
            self._recorders.clear()  # a server that did not start has not loaded all its classes
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all servers, and remove their data unless it is kept. May be called twice."""
        # Other servers are killed: nobody needs their data.
        ended = stop_all(self._servers if self._keep else self._recorders.values())
        for archive, server in self._recorders.items():
            if server in ended and _recording(server.log).exists() and archive.file is None:
                archive.keep(_recording(server.log))
        self._recorders.clear()
        self._kill_servers()
        self._clear_up()

    @property
    def _servers(self) -> list[Server]:
        return self._brokers + self._zookeepers

    def _kill_servers(self) -> None:
        for server in self._servers:
            server.kill()

    def _a_port_was_taken(self) -> bool:
        return any("Address already in use" in server.log_since_start() for server in self._servers)

    def _mend_cache(self) -> bool:
        """Remove damaged archives and fetch damaged jars again; return False if no file was damaged."""
        files = [archive.file for archive in self._archives.values() if archive]
        damaged = [file for file in files if file and remade_files.remove_if_damaged(file)]
        for kind in self._archives:
            if jars := remove_damaged(kind):
                damaged += jars
                jar_set(kind)
        for file in damaged:
            _log.warning("a damaged file in the cache is replaced", extra={"file": str(file)})
        return bool(damaged)

    def _choose_ports(self, folder: Path) -> str:
        """Choose the ports, those of the last start in `folder` if they are free; return the cluster id."""
        file = folder / "cluster.json"
        fresh: dict[str, Any] = {"id": kafka.new_uuid(), "ports": {}}
        state = json.loads(file.read_text()) if file.exists() else fresh
        self._ports = state["ports"]
        for kind in (kafka.KIND, zookeeper.KIND):
            count, known = self._counts[kind.name], self._ports.get(kind.name)
            if known and len(known) != count:
                raise ConfigError(f"{folder} holds {len(known)} {kind.name} servers, not {count}")
            if not known or not all(is_free(port) for ports in known for port in ports):
                found = free_ports(count * kind.ports_each)
                self._ports[kind.name] = [found[i::count] for i in range(count)]
        file.write_text(json.dumps(state))
        return str(state["id"])

    def _make_servers(self, folder: Path, java: Sequence[str], class_paths: Mapping[str, str]) -> None:
        group = self._watched_group()

        def make(kind: ServerKind, name: str, number: int) -> Server:
            ports, settings = self._ports[kind.name], self._settings[kind.name]
            own = settings(number, ports[number - 1]) if callable(settings) else settings
            config = kind.write_config(folder / name, number, ports, own)
            log, archive = folder / f"{name}.log", self._archives[kind.name]
            # A server with peers records no archive: it can't stop in an orderly way once its peers are gone.
            recording = _recording(log) if self._counts[kind.name] == 1 else None
            options = archive.java_options(recording) if archive else ()
            server = Server(
                name,
                [*java, *options, kind.main_class, str(config)],
                environment={**os.environ, "CLASSPATH": class_paths[kind.name]},
                log=log,
                answers=lambda log: kind.answers(log, config, ports[number - 1][0]),
                group=group,
            )
            if archive and recording and archive.file is None:
                self._recorders[archive] = server
            return server

        count = self._counts
        self._recorders.clear()
        self._brokers = [make(kafka.KIND, f"broker-{i}", i) for i in range(1, count["kafka"] + 1)]
        self._zookeepers = [
            make(zookeeper.KIND, f"zookeeper-{i}", i) for i in range(1, count["zookeeper"] + 1)
        ]

    def _start_servers(self, cluster_id: str, java: Sequence[str], class_paths: Mapping[str, str]) -> None:
        for server in self._zookeepers:
            server.start(wait=0)
        assert self.folder is not None
        configs = [self.folder / broker.name / kafka.CONFIG for broker in self._brokers]
        if configs:
            archive = self._archives["kafka"]
            options = archive.java_options(None) if archive else ()
            kafka.format_storage(configs, cluster_id, [*java, *options], class_paths["kafka"])
        for server in self._brokers:
            server.start(wait=0)
        for server in self._servers:
            server.wait_until_it_answers()


def _recording(log: Path) -> Path:
    """Return the file to which the server with this log records its class archive."""
    return log.with_suffix(".jsa")
