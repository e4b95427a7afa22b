"""What `durable` says is what the server's settings say."""

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from sql_support import Place

from kmqpy.cli.app import run
from kmqpy.errors import ConfigError
from kmqpy.queue import storage_for
from kmqpy.storages.sql.mariadb import MariaDb
from kmqpy.storages.sql.postgresql import PostgreSql
from kmqpy.storages.sql.sqlite import Sqlite
from kmqpy.storages.sql.statements import Names


@pytest.fixture
def lossy(place: Place) -> Iterator[str]:
    """The setting that makes the server lossy, until the end of the test; empty for one without such."""
    if place.name == "postgresql":
        ((database,),) = place.execute("SELECT current_database()")
        place.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
        yield "synchronous_commit=off"
        place.execute(f"ALTER DATABASE {database} RESET synchronous_commit")
    elif place.name in ("mariadb", "mysql"):
        place.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        yield "innodb_flush_log_at_trx_commit=2"
        place.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    else:
        yield ""


def test_a_server_that_syncs_is_durable(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with storage_for(place.url) as storage:
        assert (storage.capabilities.durable, storage.capabilities.lossy_setting) == (True, "")
    assert run(["--queue-url", place.url, "doctor"]) == 0
    assert "storage: no setting of the server" in capsys.readouterr().out


def test_one_that_does_not_is_asked_when_it_is_opened(
    place: Place, lossy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with storage_for(place.url) as storage:
        assert (storage.capabilities.durable, storage.capabilities.lossy_setting) == (not lossy, lossy)
    assert run(["--queue-url", place.url, "doctor"]) == 0
    assert (f"storage: {lossy}: a power cut" in capsys.readouterr().out) == bool(lossy)


@pytest.mark.breadth
@pytest.mark.parametrize("place", ["mysql"], indirect=True)
def test_a_commit_that_the_binary_log_may_lack_is_not_durable(place: Place) -> None:
    ((log_bin,),) = place.execute("SELECT @@log_bin")
    place.execute("SET GLOBAL sync_binlog = 100")
    try:
        with storage_for(place.url) as storage:
            assert storage.capabilities.lossy_setting == ("sync_binlog=100" if log_bin else "")
    finally:
        place.execute("SET GLOBAL sync_binlog = 1")


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_a_table_that_a_crash_empties_is_not_durable(place: Place) -> None:
    storage_for(place.url).close()
    place.execute(f"ALTER TABLE {place.prefix}messages SET UNLOGGED")
    with storage_for(place.url) as storage:
        assert storage.capabilities.lossy_setting == f"{place.prefix}messages=UNLOGGED"


@pytest.mark.parametrize("place", ["mariadb"], indirect=True)
def test_a_table_of_another_engine_is_not_durable(place: Place) -> None:
    storage_for(place.url).close()
    place.execute(f"ALTER TABLE {place.prefix}messages ENGINE = Aria")
    with storage_for(place.url) as storage:
        assert storage.capabilities.lossy_setting == f"{place.prefix}messages=ARIA"


def test_a_file_in_memory_or_with_a_journal_that_may_come_back_is_not_durable(tmp_path: Path) -> None:
    file = tmp_path / "queues.db"
    with sqlite3.connect(file) as others:
        assert Sqlite.lossy_setting(Sqlite.__new__(Sqlite), others.cursor()) == "journal_mode=delete"
    others.close()
    memory = Path("/dev/shm")
    if f" {memory} " not in Path("/proc/self/mountinfo").read_text():
        pytest.skip("no file system in memory")
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        storage_for(f"sqlite:///{folder}/queues.db") as storage,
    ):
        assert storage.capabilities.lossy_setting == "filesystem=tmpfs"


MARIADB = MariaDb(sqlalchemy.make_url("mariadb://nowhere"), Names())


class Answers:
    """A cursor on a server with these variables."""

    def __init__(self, **variables: str) -> None:
        self._variables = variables

    def execute(self, _: str) -> None:
        pass

    def fetchall(self) -> list[tuple[str, str]]:
        return list(self._variables.items())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"innodb_flush_log_at_trx_commit": "0"}, "innodb_flush_log_at_trx_commit=0"),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "0"}, "sync_binlog=0"),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "OFF", "sync_binlog": "0"}, ""),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON"}, "sync_binlog=unknown"),
        ({"wsrep_on": "OFF"}, "innodb_flush_log_at_trx_commit=unknown"),
        ({"innodb_flush_log_at_trx_commit": "3"}, ""),
        ({"innodb_doublewrite": "DETECT_ONLY"}, "innodb_doublewrite=DETECT_ONLY"),
        ({"Innodb_redo_log_enabled": "OFF"}, "innodb_redo_log_enabled=OFF"),
    ],
)
def test_which_settings_of_mariadb_and_mysql_count(variables: dict[str, str], said: str) -> None:
    assert MARIADB.lossy_setting(Answers(**variables)) == said


def test_what_postgresql_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = Answers(fsync="")
    monkeypatch.setattr(cursor, "execute", lambda *_: None)
    monkeypatch.setattr(cursor, "fetchone", lambda: (None,), raising=False)
    said = PostgreSql.lossy_setting(PostgreSql.__new__(PostgreSql), cursor)
    assert said == "synchronous_commit=unknown"


def test_a_node_of_a_galera_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Galera cluster.* use a server outside"):
        MARIADB.lossy_setting(Answers(wsrep_on="ON"))
