"""Databases at Unix sockets, and at several addresses of which one takes writes."""

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from kmqpy.dev import Databases
from kmqpy.dev.ports import free_ports
from kmqpy.dev.programs import hand_over
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.queue import queue_for, storage_for


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="kmqpy-") as made:
        Path(made).chmod(0o755)
        hand_over(Path(made))
        yield Path(made)


@pytest.mark.parametrize(
    "kind",
    [
        "postgresql",
        "mariadb",
        "redis",
        *(pytest.param(one, marks=pytest.mark.breadth) for one in ("mysql", "valkey")),
    ],
)
def test_a_queue_at_a_unix_socket(folder: Path, kind: str) -> None:
    socket = folder / "s"
    with_init_file = {"socket": str(socket), "init-file": str(folder / "first.sql")}
    settings = {
        "postgresql": {"unix_socket_directories": str(folder)},
        "mariadb": with_init_file,
        "mysql": with_init_file,
    }.get(kind, {"unixsocket": str(socket), "unixsocketperm": "777"})
    (folder / "first.sql").write_text("CREATE USER kmq@localhost;\nGRANT ALL ON *.* TO kmq@localhost;\n")
    with Databases(kind, settings={kind: settings}) as started:
        port = started.urls[kind].rpartition(":")[2].partition("/")[0]
        url = {
            "postgresql": f"postgresql://postgres@/postgres?unix_socket={folder}/.s.PGSQL.{port}",
            **{one: f"{one}://kmq@/kmq?unix_socket={socket}" for one in ("mariadb", "mysql")},
        }.get(kind, f"{kind}:///0?unix_socket={socket}")
        with queue_for(f"{url}&queue=q&create=true") as queue:
            queue.send("x")
            (message,) = queue.receive(wait=2)
            message.ack()


def test_of_several_addresses_the_one_that_takes_writes_is_used(database_url: Callable[[str], str]) -> None:
    (nobody,) = free_ports(1)
    with Databases("postgresql", settings={"postgresql": {"default_transaction_read_only": "on"}}) as standby:
        read_only = standby.urls["postgresql"].partition("@")[2].partition("/")[0]
        user, _, place = database_url("postgresql").partition("@")
        url = f"{user}@127.0.0.1:{nobody},{read_only},{place}?prefix=several_"
        with queue_for(f"{url}&queue=q&create=true") as queue:
            queue.send("x")
            assert queue.size() == 1
        with psycopg.connect(database_url("postgresql")) as there:
            assert there.execute("SELECT to_regclass('several_messages')").fetchone() != (None,)


def test_a_standby_hands_out_nothing_and_once_promoted_beside_its_primary_everything_again(
    folder: Path,
) -> None:
    """What docs/storage-operations.md says of both."""
    with Databases("postgresql", keep=folder / "primary") as primary:
        queue_for(f"{primary.urls['postgresql']}?queue=q&create=true").close()
    subprocess.run(["cp", "-a", folder / "primary", folder / "standby"], check=True)
    (folder / "standby" / "postgresql" / "data" / "standby.signal").touch()
    with (
        Databases("postgresql", keep=folder / "primary") as primary,
        Databases("postgresql", keep=folder / "standby") as standby,
        queue_for(f"{primary.urls['postgresql']}?queue=q") as queue,
        queue_for(f"{standby.urls['postgresql']}?queue=q&timeout_ms=300ms") as refused,
    ):
        for call in (lambda: refused.send("x"), refused.receive):
            with pytest.raises(Unavailable, match="read-only transaction"):
                call()
        address = standby.urls["postgresql"].partition("@")[2].partition("/")[0]
        with queue_for(f"{primary.urls['postgresql'].replace('@', f'@{address},')}?queue=q") as found:
            found.send("x")
        assert queue.receive()[0].body == b"x"
        with psycopg.connect(standby.urls["postgresql"], autocommit=True) as there:
            there.execute("SELECT pg_promote()")
        refused.send("y")
        (theirs,) = refused.receive(wait=5)
        assert (theirs.body, queue.in_flight()) == (b"y", 1)
        queue.ack(theirs.receipt)
        assert queue.in_flight() == 0, "the receipt of `y` was one of `x`"


@pytest.mark.parametrize("url", ["redis://h/0", "rediss:///0", "postgresql://h/db"])
def test_a_socket_goes_with_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="unix_socket"):
        storage_for(f"{url}?unix_socket=/run/s")
