"""Starts real database servers on this machine, for tests and development."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from kmqpy.dev import mariadb, mysql, postgresql, redis
from kmqpy.dev.database_kind import DatabaseKind
from kmqpy.dev.ports import free_ports, is_free
from kmqpy.dev.programs import hand_over, process_owner
from kmqpy.dev.server import Server, Servers, check_platform, stop_all
from kmqpy.errors import ClusterError, ConfigError

KINDS = {kind.name: kind for kind in (postgresql.KIND, redis.REDIS, redis.VALKEY, mariadb.KIND, mysql.KIND)}
PORT_ATTEMPTS = 3
"""The most ports that start() tries for a server while other processes take them; then it fails."""


class Databases(Servers):
    """Runs database servers as child processes, on loopback only: `Databases("postgresql", "redis")`.

    At the end of the `with` block the servers are stopped, and their data is
    removed. If the process that started them is killed, a watchdog does the same.

    Data that a server acknowledged survives a kill of this server: PostgreSQL, MariaDB and MySQL sync each
    commit, Redis and Valkey write an append-only file, which they sync each second.

    Args:
        names: Keys of KINDS.
        keep: As for Cluster.
        settings: Options for the command lines of servers, by the names of the servers; they override the
            defaults: `{"redis": {"appendfsync": "always"}}`.
    """

    def __init__(
        self, *names: str, keep: Path | None = None, settings: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        for name in (*names, *(settings or {})):
            if name not in KINDS:
                raise ConfigError(f"no such database: {name!r}; there are {', '.join(KINDS)}")
        super().__init__(keep)
        self._kinds = [KINDS[name] for name in dict.fromkeys(names)]
        self._settings = settings or {}
        self._ports: dict[str, int] = {}
        self._servers: dict[str, Server] = {}

    @property
    def urls(self) -> dict[str, str]:
        """The URLs for clients, by the name of the server; known after start()."""
        return {name: KINDS[name].url.format(port=self._ports[name]) for name in self._ports}

    def server(self, name: str) -> Server:
        """Return the server of this name.

        Args:
            name: A key of KINDS.
        """
        return self._servers[name]

    def start(self) -> Self:
        """Fetch missing programs, start all servers, and return when all of them answer.

        Raises ClusterError on Windows, if a server does not start (the error shows the end of its log), or if
        its programs can't be found, fetched or run. Raises MissingExtra if a program is missing and the extra
        `kmqpy[dev]` is not installed. After an error no server is left running.
        """
        if self._watchdog is not None or not self._kinds:
            return self
        check_platform()
        programs = [kind.find() for kind in self._kinds]
        folder = self._make_folder()
        try:
            if process_owner():
                folder.chmod(0o711)  # the user of the servers must be able to enter it
            self._watched_group()
            ports = folder / "databases.json"
            known = json.loads(ports.read_text()) if ports.exists() else {}
            self._ports = {kind.name: known.get(kind.name, 0) for kind in self._kinds}
            with ThreadPoolExecutor(len(programs)) as pool:
                list(pool.map(self._start_one, self._kinds, programs))
            ports.write_text(json.dumps(known | self._ports))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all servers, and remove their data unless it is kept. May be called twice."""
        stop_all(self._servers.values())
        self._clear_up()

    def _start_one(self, kind: DatabaseKind, programs: Sequence[Path]) -> None:
        assert self.folder is not None
        folder, group = self.folder / kind.name, self._watched_group()
        created = folder / "created"
        if not created.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            hand_over(folder)
            kind.create(programs, folder, group)
            created.touch()
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            port = self._ports[kind.name]
            if not port or not is_free(port):
                port = self._ports[kind.name] = free_ports(1)[0]
            server = self._servers[kind.name] = Server(
                kind.name,
                kind.command(programs, folder, port, self._settings.get(kind.name, {})),
                environment={**os.environ, "LC_ALL": "C"},  # Databases searches the logs for texts in English
                log=self.folder / f"{kind.name}.log",
                answers=lambda log: kind.ready in log,
                group=group,
                owner=process_owner(),
                stop_signal=kind.stop_signal,
            )
            try:
                server.start()
                break
            except ClusterError:
                if not attempts_left or "Address already in use" not in server.log_since_start():
                    raise
