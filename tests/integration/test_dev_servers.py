"""Database servers of kmqpy.dev: they serve, survive kills with their data, and leave nothing."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import redis

from kmqpy.core.clock import wait_until
from kmqpy.dev import Databases, watchdog
from kmqpy.dev.databases import KINDS
from kmqpy.errors import ClusterError, ConfigError


class Client:
    """A connection to one of them, with a value to keep."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.redis = self.sql = None
        if parts.scheme == "redis":
            self.redis = redis.Redis.from_url(url)
        elif parts.scheme == "postgresql":
            self.sql = psycopg.connect(url, autocommit=True)
        else:
            address = {"host": parts.hostname, "port": parts.port, "user": parts.username}
            self.sql = pymysql.connect(**address, database=parts.path[1:], autocommit=True)

    def ask(self) -> bool:
        return self.redis.ping() if self.redis else self._execute("select 1") == (1,)

    def keep(self, name: str, value: int) -> None:
        if self.redis:
            self.redis.set(name, value)
        else:
            self._execute(f"create table {name} as select {value} as number")

    def kept(self, name: str) -> int:
        return int(self.redis.get(name)) if self.redis else self._execute(f"select number from {name}")[0]

    def _execute(self, statement: str) -> tuple | None:
        with self.sql.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone() if statement.startswith("select") else None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the server may have been killed
            (self.redis or self.sql).close()


@contextlib.contextmanager
def connected(url: str) -> Iterator[Client]:
    with contextlib.closing(Client(url)) as client:
        yield client


BREADTH = [pytest.param(name, marks=pytest.mark.breadth) for name in ("mysql", "valkey")]


@pytest.mark.parametrize("name", ["postgresql", "mariadb", "redis", *BREADTH])
def test_a_shared_server_answers(database_url: Callable[[str], str], name: str) -> None:
    with connected(database_url(name)) as client:
        assert client.ask()


@contextlib.contextmanager
def gone_afterwards(*names: str) -> Iterator[Databases]:
    with Databases(*names, settings={"redis": {"appendfsync": "always"}}) as databases:
        folder = databases.folder
        pids = {databases.server(name).pid for name in names}
        pids |= {pid for pid, parent, _ in watchdog.processes() if parent in pids}
        yield databases
    assert folder is not None
    assert not folder.exists()
    assert not watchdog.running(pids)


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    with gone_afterwards(*(KINDS.keys() - {"mysql"})) as databases:
        yield databases


@pytest.fixture(scope="module")
def mysql() -> Iterator[Databases]:
    with gone_afterwards("mysql") as databases:
        yield databases


@pytest.mark.parametrize("name", ["postgresql", "mariadb", "redis", *BREADTH])
def test_a_server_can_be_paused_and_killed_and_has_its_data_again(
    request: pytest.FixtureRequest, name: str
) -> None:
    databases: Databases = request.getfixturevalue("mysql" if name == "mysql" else "databases")
    server, url = databases.server(name), databases.urls[name]
    with ThreadPoolExecutor() as pool, connected(url) as client:
        client.keep("kept", 42)
        server.pause()
        answer = pool.submit(client.ask)
        time.sleep(0.2)
        assert not answer.done()
        server.resume()
        assert answer.result(60)
        server.pause()
        server.kill()
        assert server.pid is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", urlsplit(url).port))
        server.start()
        with connected(url) as again:
            assert again.kept("kept") == 42
        server.stop()
        server.start()
        with connected(url) as again:
            assert again.kept("kept") == 42


def test_servers_of_mariadb_delete_no_temporary_tables_of_each_other(databases: Databases) -> None:
    """One that starts deletes all that are in its folder of them, also while another is being created."""
    with connected(databases.urls["mariadb"]) as client:
        assert client._execute("select @@tmpdir") == (str(databases.folder / "mariadb" / "tmp"),)


def test_acknowledged_data_is_synced(databases: Databases) -> None:
    with connected(databases.urls["postgresql"]) as client:
        assert client._execute("select current_setting('fsync'), current_setting('synchronous_commit')") == (
            "on",
            "on",
        )
    with connected(databases.urls["mariadb"]) as client:
        assert client._execute("select @@innodb_flush_log_at_trx_commit, @@innodb_doublewrite") in (
            (1, 1),
            (1, "ON"),
        )
    for name, appendfsync in (("redis", "always"), ("valkey", "everysec")):
        with connected(databases.urls[name]) as client:
            found = client.redis.config_get("append*")
            assert (found["appendonly"], found["appendfsync"]) == ("yes", appendfsync)


def test_all_are_gone_soon_after_their_owner_was_killed() -> None:
    program = """if True:
        import json, sys
        from kmqpy.dev import Databases
        databases = Databases("postgresql", "redis").start()
        pids = [databases.server(name).pid for name in databases.urls]
        print(json.dumps([str(databases.folder), *pids]), flush=True)
        sys.stdin.readline()
        databases.server("postgresql").pause()  # halted processes must go as well
        print(flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", program]
    # With this PATH it is usually not the PostgreSQL of the other tests but the fetched one.
    environment = {**os.environ, "PATH": os.defpath}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        folder, *servers = json.loads(owner.stdout.readline())
        pids = {*servers, *(pid for pid, parent, _ in watchdog.processes() if parent in servers)}
        assert len(pids) > 4  # PostgreSQL has children
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        owner.stdout.readline()
        os.kill(owner.pid, signal.SIGKILL)
    assert wait_until(lambda: not watchdog.running(pids), 60)
    assert wait_until(lambda: not Path(folder).exists(), 60)


def test_kept_data_is_found_at_the_next_start_on_the_same_port() -> None:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are closed to the user nobody
        Path(parent).chmod(0o755)
        keep = Path(parent) / "kept"
        with Databases("redis", keep=keep) as first, connected(first.urls["redis"]) as client:
            client.keep("kept", 1)
        with Databases("redis", keep=keep) as second, connected(second.urls["redis"]) as client:
            assert second.urls == first.urls
            assert client.kept("kept") == 1


def test_a_failed_start_shows_the_log_and_leaves_nothing() -> None:
    failing = Databases("redis", settings={"redis": {"appendfsync": "sometimes"}})
    with pytest.raises(ClusterError, match=r"redis ended with exit code 1(.|\n)*appendfsync"):
        failing.start()
    assert failing.folder is not None
    assert not failing.folder.exists()
    with pytest.raises(ConfigError, match="no such database: 'oracle'; there are postgresql, redis"):
        Databases("oracle")


def test_a_port_that_is_snatched_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from kmqpy.dev import databases as module

    real = module.free_ports
    with socket.create_server(("127.0.0.1", 0)) as thief:
        answers = iter([[thief.getsockname()[1]]])
        monkeypatch.setattr(module, "free_ports", lambda n: next(answers, None) or real(n))
        with Databases("valkey") as databases, connected(databases.urls["valkey"]) as client:
            assert client.ask()
