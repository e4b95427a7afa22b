"""Tells Databases how to find, create and start a MySQL server, and when it is up."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kmqpy.dev.database_kind import DatabaseKind, arguments, copy_of_first, run
from kmqpy.dev.debian import from_debian, loaded
from kmqpy.dev.mariadb import FIRST_SQL
from kmqpy.dev.programs import on_path

INSTALL_ADVICE = "install MySQL so that `mysqld` is on the PATH"
_PACKAGE = "mysql-server-core"
_PROGRAM = "usr/sbin/mysqld"
# The creation and each start have the same options, as with MariaDB.
_OPTIONS = {
    "secure-file-priv": "NULL",
    "innodb-redo-log-capacity": "16M",
    "mysqlx": "OFF",
    "skip-log-bin": None,
    "performance-schema": "OFF",
}
# While an empty database is made, nothing of value can be lost; copy_of_first() syncs what it keeps.
_UNSAFE = {
    "innodb-flush-method": "nosync",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-doublewrite": "OFF",
}


def _find() -> list[Path]:
    found = on_path("mysqld")
    if found and "mariadb" not in found[0].resolve().name:  # MariaDB's packages have this name, too
        return found
    return [from_debian(_PACKAGE, _is_wanted, INSTALL_ADVICE) / _PROGRAM]


def _is_wanted(member: str) -> bool:
    is_library = member.startswith("usr/lib/") and member.count("/") == 3 and ".so" in member
    return is_library or member == _PROGRAM or member.startswith(("usr/share/mysql", "usr/lib/mysql/plugin/"))


def _create(programs: Sequence[Path], folder: Path, group: int) -> None:
    server, *_ = programs

    def make() -> None:
        first = folder / "first.sql"
        first.write_text(FIRST_SQL.replace("flush privileges;\n", ""))
        first.chmod(0o644)
        options = {"datadir": folder / "data", "init-file": first, **_OPTIONS, **_UNSAFE}
        run([*_server(server), *arguments(options), "--initialize-insecure"], folder, group)

    copy_of_first("mysql", server, (_OPTIONS, FIRST_SQL), folder, make)


def _command(programs: Sequence[Path], folder: Path, port: int, settings: Mapping[str, str]) -> list[str]:
    server, *_ = programs
    config = {
        "datadir": folder / "data",
        "bind-address": "127.0.0.1",
        "port": port,
        "socket": "mysql.sock",  # in the data folder; an absolute path may be too long for a socket
        "pid-file": "mysql.pid",
        **_OPTIONS,
        **{name: value or None for name, value in settings.items()},
    }
    return [*_server(server), *arguments(config)]


def _server(server: Path) -> list[str]:
    """The command without its options. `--no-defaults` must be the first of these."""
    base = server.resolve().parent.parent
    fetched = base.parent / _PROGRAM == server and base.parent.name.startswith("debian-")
    command = loaded(base.parent, _PROGRAM) if fetched else [str(server)]
    return [*command, "--no-defaults", f"--basedir={base}", "--skip-name-resolve"]


URL = "mysql://kmq@127.0.0.1:{port}/kmq"
KIND = DatabaseKind("mysql", URL, _find, _create, _command, "ready for connections")
