"""Tells Databases how to find, create and start a PostgreSQL server, and when it is up."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmqpy.dev.database_kind import DatabaseKind, arguments, copy_of_first, run
from kmqpy.dev.programs import on_path, this_platform, unpacked

INSTALL_ADVICE = "install PostgreSQL so that `postgres` and `initdb` are on the PATH"


def _find() -> list[Path]:
    if found := on_path("postgres", "initdb"):
        return found
    folder = unpacked(f"postgresql-{this_platform()}", lambda name: name.endswith(".txz"), INSTALL_ADVICE)
    return [folder / "bin" / "postgres", folder / "bin" / "initdb"]


def _create(programs: Sequence[Path], folder: Path, group: int) -> None:
    server, initdb = programs
    options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
    # copy_of_first() syncs what it keeps.
    command = [str(initdb), "--pgdata=data", "--no-sync", *options]
    copy_of_first("postgresql", server, options, folder, lambda: run(command, folder, group))


def _command(programs: Sequence[Path], folder: Path, port: int, settings: Mapping[str, str]) -> list[str]:
    postgres, _ = programs
    config = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": "",
        "dynamic_shared_memory_type": "mmap",  # files among the data: a killed server leaves none elsewhere
        "max_connections": "200",
        **settings,
    }
    return [str(postgres), "-D", str(folder / "data"), *arguments(config)]


KIND = DatabaseKind(
    "postgresql",
    "postgresql://postgres@127.0.0.1:{port}/postgres",
    _find,
    _create,
    _command,
    "database system is ready to accept",  # connections; a standby says "read-only connections"
    signal.SIGINT,  # on SIGTERM PostgreSQL waits for its clients to leave
)
