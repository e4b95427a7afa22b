"""Tells Databases how to find, create and start a MariaDB server, and when it is up."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kmqpy.dev.database_kind import DatabaseKind, arguments, copy_of_first, run
from kmqpy.dev.programs import hand_over, on_path, this_platform, unpacked

INSTALL_ADVICE = "install MariaDB so that `mariadbd` and `mariadb-install-db` are on the PATH"
WANTED_PATHS = ("/bin/mariadbd", "/bin/my_print_defaults", "/bin/resolveip", "/scripts/", "/share/")
# The server executes this SQL when its database is created.
FIRST_SQL = """flush privileges;
create database kmq;
create user kmq@'127.0.0.1';
grant all on *.* to kmq@'127.0.0.1' with grant option;
"""
# The creation and each start have the same options: a server writes its log anew if the size differs. TLS
# would cost 10 s a start.
OPTIONS = {"innodb-log-file-size": "16M", "ssl": "0"}

# The folder for temporary tables. Each server has its own: a server that starts deletes all temporary tables
# that it finds in this folder.
TEMPORARY = "tmp"


def _find() -> list[Path]:
    if found := on_path("mariadbd", "mariadb-install-db"):
        return found
    folder = unpacked(f"mariadb-{this_platform()}", _is_wanted, INSTALL_ADVICE)
    (server,) = folder.rglob("mariadbd")
    return [server, server.parent.parent / "scripts" / "mariadb-install-db"]


def _is_wanted(member: str) -> bool:
    return not member.endswith("/") and any(part in member for part in WANTED_PATHS)


def _create(programs: Sequence[Path], folder: Path, group: int) -> None:
    server, install = programs
    first = folder / "first.sql"
    first.write_text(FIRST_SQL)
    first.chmod(0o644)
    tmp = folder / TEMPORARY
    tmp.mkdir()
    hand_over(tmp)
    options = {
        "basedir": _base(server),
        "datadir": folder / "data",
        "extra-file": first,
        "auth-root-authentication-method": "normal",
        "skip-test-db": None,
        "skip-name-resolve": None,
        "tmpdir": tmp,
        **OPTIONS,
    }
    command = [str(install), "--no-defaults", *arguments(options)]
    copy_of_first("mariadb", server, (OPTIONS, FIRST_SQL), folder, lambda: run(command, folder, group))


def _command(programs: Sequence[Path], folder: Path, port: int, settings: Mapping[str, str]) -> list[str]:
    server, _ = programs
    config = {
        "skip-name-resolve": None,
        "basedir": _base(server),
        "datadir": folder / "data",
        "bind-address": "127.0.0.1",
        "port": port,
        "socket": "mariadb.sock",  # in the data folder; an absolute path may be too long for a socket
        "pid-file": "mariadb.pid",
        "tmpdir": folder / TEMPORARY,
        **OPTIONS,
        **settings,
    }
    return [str(server), "--no-defaults", *arguments(config)]


def _base(server: Path) -> Path:
    return server.resolve().parent.parent


URL = "mariadb://kmq@127.0.0.1:{port}/kmq"
KIND = DatabaseKind("mariadb", URL, _find, _create, _command, "ready for connections")
