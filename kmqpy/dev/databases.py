"""Real database servers on this machine, for tests and a developer's desk."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from kmqpy.dev import mariadb, postgresql, redis, watchdog
from kmqpy.dev.database_kind import DatabaseKind
from kmqpy.dev.ports import free_ports, is_free
from kmqpy.dev.programs import hand_over, process_owner
from kmqpy.dev.server import Server, check_platform
from kmqpy.errors import ClusterError, ConfigError

KINDS = {kind.name: kind for kind in (postgresql.KIND, redis.REDIS, redis.VALKEY, mariadb.KIND)}
PORT_ATTEMPTS = 3


class Databases:
    """Database servers as child processes, on loopback only: `Databases("postgresql", "redis")`.

    The names are those of KINDS. Servers and data live as long as the context, as those of Cluster do;
    with `keep`, data, logs and (if they are free) ports are those of the last start with that folder.

    Data that a server acknowledged survives its kill: PostgreSQL and MariaDB sync each commit, Redis and
    Valkey write an append-only file, which is synced each second. `settings` are added to a server's command
    line, by its name, and win: `{"redis": {"appendfsync": "always"}}`.
    """

    def __init__(
        self,
        *names: str,
        keep: Path | None = None,
        settings: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        for name in (*names, *(settings or {})):
            if name not in KINDS:
                raise ConfigError(f"no such database: {name!r}; there are {', '.join(KINDS)}")
        self.folder: Path | None = None
        self._kinds = [KINDS[name] for name in dict.fromkeys(names)]
        self._keep = keep
        self._settings = settings or {}
        self._ports: dict[str, int] = {}
        self._servers: dict[str, Server] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def urls(self) -> dict[str, str]:
        """The URLs for clients, by name of the database; known once the databases were started."""
        return {name: KINDS[name].url.format(port=self._ports[name]) for name in self._ports}

    def server(self, name: str) -> Server:
        """Return the server of this name."""
        return self._servers[name]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Fetch what is missing, start all servers and return when they answer.

        Raises ClusterError if a server does not start (with the end of its log) or its program can't be
        had, MissingExtra without the extra `kmqpy[dev]`. Nothing is left running then.
        """
        if self._watchdog is not None or not self._kinds:
            return self
        check_platform()
        programs = [kind.find() for kind in self._kinds]
        self.folder = Path(self._keep or tempfile.mkdtemp(prefix="kmqpy-")).resolve()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if process_owner():
                self.folder.chmod(0o711)
            self._watchdog = watchdog.start("" if self._keep else str(self.folder))
            ports = self.folder / "databases.json"
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
        for server in self._servers.values():  # all of them first: they don't wait for each other then
            server.terminate()
        for server in self._servers.values():
            server.stop()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None
        if self.folder and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_one(self, kind: DatabaseKind, programs: Sequence[Path]) -> None:
        assert self.folder is not None
        assert self._watchdog is not None
        folder, group = self.folder / kind.name, self._watchdog.pid
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
                environment={**os.environ, "LC_ALL": "C"},  # logs are searched for texts
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
