"""docs/storage-operations.md on real servers: what a restore from a backup needs; its queries and rights."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy
from redis import Redis

from kmqpy.errors import QueueNotFound, ReceiptError
from kmqpy.queue import storage_for
from kmqpy.storages.sql.statements import Names, script
from kmqpy.zookeeper.session import connect

PAGE = (Path(__file__).parents[2] / "docs" / "storage-operations.md").read_text()
DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mysql+pymysql",
}


def block(comment: str) -> str:
    """The code of the page below this comment."""
    (code,) = re.findall(rf"<!-- {comment} -->\n(?:<!-- [^>]*-->\n)?```\w+\n(.*?)```", PAGE, re.DOTALL)
    return code


class Sql:
    """Tables of a name of their own in a database."""

    def __init__(self, dialect: str, url: str) -> None:
        self.dialect = dialect
        prefix = f"t{uuid4().hex[:12]}_"
        self.names = Names(prefix=prefix)
        self.url = f"{url}?prefix={prefix}"
        self.engine = sqlalchemy.create_engine(
            DRIVERS[dialect] + url.removeprefix(dialect), poolclass=sqlalchemy.NullPool
        )

    def run(self, text: str) -> list[list[Any]]:
        """The rows that each statement gives, with the tables of the page called as these are."""
        shown = []
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in re.sub(r"--.*", "", text.replace("kmq_", self.names.prefix)).split(";"):
                if statement.strip():
                    result = connection.exec_driver_sql(statement)
                    shown.append([tuple(row) for row in result] if result.returns_rows else [])
        return shown

    def backup(self) -> Any:
        tables = ["meta", "queues", "messages", "dedup", *(["numbers"] if self.dialect == "sqlite" else [])]
        with self.engine.connect() as connection:
            return {
                self.names.tables[what]: connection.execute(
                    sqlalchemy.text(f"SELECT * FROM {self.names.tables[what]}")
                )
                .mappings()
                .all()
                for what in tables
            }, self._next(connection)

    def _next(self, connection: sqlalchemy.Connection) -> int:
        names = self.names.tables
        source = {
            "postgresql": f"last_value + is_called::int FROM {names['numbers']}",
            "mariadb": f"next_not_cached_value FROM {names['numbers']}",
            "mysql": f"coalesce(max(id), 0) + 1 FROM {names['messages']}",
            "sqlite": "0",
        }
        return connection.exec_driver_sql(f"SELECT {source[self.dialect]}").scalar_one()

    def restore(self, backup: Any) -> None:
        tables, following = backup
        with self.engine.begin() as connection:
            for table, rows in tables.items():
                connection.exec_driver_sql(f"DELETE FROM {table}")
                for row in rows:
                    values = ", ".join(f":{name}" for name in row)
                    connection.execute(
                        sqlalchemy.text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})"),
                        dict(row),
                    )
            if self.dialect == "mysql":
                connection.exec_driver_sql(
                    f"ALTER TABLE {self.names.tables['messages']} AUTO_INCREMENT = {following}"
                )
            elif self.dialect != "sqlite":
                connection.exec_driver_sql(
                    f"ALTER SEQUENCE {self.names.tables['numbers']} RESTART WITH {following}"
                )

    def renew(self) -> None:
        self.run(block(f"restored: {'mariadb' if self.dialect == 'mysql' else self.dialect}"))

    def close(self) -> None:
        kind = dict.fromkeys(self.names.tables, "TABLE")
        kind["numbers"] = "SEQUENCE" if self.dialect in ("postgresql", "mariadb") else "TABLE"
        with self.engine.begin() as connection:
            for what, table in self.names.tables.items():
                connection.exec_driver_sql(f"DROP {kind[what]} IF EXISTS {table}")


class RedisKeys:
    """Keys with a prefix of their own."""

    def __init__(self, url: str) -> None:
        self._server, self._address, self._prefix = Redis.from_url(url), url, f"t{uuid4().hex[:12]}"
        self.url = f"{url}?prefix={self._prefix}"

    def backup(self) -> dict[bytes, bytes]:
        return {key: self._server.dump(key) for key in self._keys()}

    def restore(self, backup: dict[bytes, bytes]) -> None:
        self._server.delete(*self._keys())
        for key, value in backup.items():
            self._server.restore(key, 0, value)

    def renew(self) -> None:
        code = block("restored: redis").replace("kmq:", f"{self._prefix}:")
        exec(code.replace("redis://localhost:6379/0", self._address), {})

    def close(self) -> None:
        self._server.delete(*self._keys())
        self._server.close()

    def _keys(self) -> list[bytes]:
        return [*self._server.scan_iter(match=f"{self._prefix}:*")]


def sql(dialect: str, database_url: Callable[[str], str], folder: Path) -> Sql:
    return Sql(dialect, f"sqlite:///{folder}/queues.db" if dialect == "sqlite" else database_url(dialect))


ALWAYS = ["sqlite", "postgresql"]
BREADTH = [pytest.param(name, marks=pytest.mark.breadth) for name in ("mariadb", "mysql")]


@pytest.fixture(params=[*ALWAYS, *BREADTH, "redis", pytest.param("valkey", marks=pytest.mark.breadth)])
def place(request: pytest.FixtureRequest, database_url, tmp_path: Path) -> Iterator[Sql | RedisKeys]:
    name = request.param
    made = sql(name, database_url, tmp_path) if name in DRIVERS else RedisKeys(database_url(name))
    yield made
    made.close()


@pytest.fixture(params=[*ALWAYS, *BREADTH])
def database(request: pytest.FixtureRequest, database_url, tmp_path: Path) -> Iterator[Sql]:
    made = sql(request.param, database_url, tmp_path)
    yield made
    made.close()


def test_without_more_an_old_receipt_acknowledges_a_message_of_others(place: Sql | RedisKeys) -> None:
    """The control of the next test: if this fails, kmqpy has learned to tell, and the page can be shorter."""
    with storage_for(place.url) as storage:
        storage.create("q")
        backup = place.backup()
        queue = storage.open("q")
        queue.send("old")
        (old,) = queue.receive(lease=600)
        place.restore(backup)
        queue.send("new")
        (new,) = queue.receive(lease=600)
        assert new.body == b"new"
        queue.ack(old)
        assert queue.in_flight() == 0, "the ack of `old` was one of `new`"


def test_with_a_new_generation_old_receipts_are_refused_and_nothing_is_lost(place: Sql | RedisKeys) -> None:
    with storage_for(place.url) as before, storage_for(place.url) as after:
        before.create("q", max_redeliveries=7)
        before.create("other")
        queue = before.open("q")
        queue.send_many(["dead", "in flight", "waits", "waits, too"])
        dead, _ = queue.receive(max_messages=2, lease=600)
        queue.dead_letter(dead, reason="bad")
        backup = place.backup()
        queue.send("old")
        *_, old = queue.receive(max_messages=3, lease=600)
        assert old.body == b"old"
        place.restore(backup)
        place.renew()

        with pytest.raises(QueueNotFound):
            queue.ack(old)
        with pytest.raises(QueueNotFound):
            queue.receive()
        again = after.open("q")
        again.send("new")
        taken = again.receive(max_messages=9, lease=600)
        assert [message.body for message in taken] == [b"waits", b"waits, too", b"new"]
        with pytest.raises(ReceiptError):
            again.ack(old)
        assert (again.in_flight(), again.size()) == (4, 0)
        for message in taken:
            again.ack(message)
        assert again.release_all() == 1
        assert [message.body for message in again.receive()] == [b"in flight"]
        assert again.dead_letters.redrive() == 1
        assert [message.body for message in again.receive()] == [b"dead"]
        assert after.describe("q").settings["max_redeliveries"] == 7
        assert sorted(after.list()) == ["other", "q"]


def test_groups_and_dedup_ids_are_restored(place: Sql | RedisKeys) -> None:
    with storage_for(place.url) as storage:
        storage.create("q", order="group")
        queue = storage.open("q")
        queue.send("1", group="a")
        first = queue.send("2", group="b", dedup_id="d")
        backup = place.backup()
        place.restore(backup)
        place.renew()
    with storage_for(place.url) as storage:
        queue = storage.open("q")
        queue.send("3", group="a")
        assert queue.send("4", group="b", dedup_id="d") == first
        assert [one.body for one in queue.receive(9, lease=600, one_per_group=True)] == [b"1", b"2"]


def test_queues_in_zookeeper_refuse_old_receipts_once_their_storage_has_another_id(
    zookeeper, queue_name: str
) -> None:
    """What docs/operations.md says of a restored ZooKeeper."""
    url = f"zookeeper://{zookeeper.hosts}/{queue_name}"
    with storage_for(url) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many(["a", "b"])
        (old,) = queue.receive(1, lease=600)
    with connect(zookeeper) as zk:
        zk.delete(f"/{queue_name}/storage")
    with storage_for(url) as storage:
        queue = storage.open("q")
        with pytest.raises(ReceiptError, match="another storage"):
            queue.ack(old)
        assert (queue.in_flight(), queue.size()) == (1, 1)
        (b,) = queue.receive()
        queue.ack(b)
        storage.delete("q")


def test_the_queries_to_watch_by(database: Sql) -> None:
    with storage_for(database.url) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send_many(["a", "b"])
        queue.receive(1, lease=600)
        storage.create("h", order="group", on_dead_letter="hold")
        held = storage.open("h")
        held.send_many(["a", "b"], group="g")
        held.dead_letter(held.receive(1), confirmed=True)
        assert held.receive(wait=0) == []
    (states,) = database.run(block("sql: all"))
    assert sorted((*row[:3], row[4]) for row in states) == [
        ("h", "behind", 1, 1),
        ("h", "dead", 1, 1),
        ("q", "in flight", 1, 0),
        ("q", "ready", 1, 0),
    ]
    assert all(row[3] > 10**12 for row in states)
    if database.dialect == "postgresql":
        vacuum, _, _, _, size = database.run(block("sql: postgresql"))
        assert len(vacuum) == 1
        assert "kB" in size[0][0]


def test_the_rights_of_the_page_are_enough(database_url, tmp_path: Path) -> None:
    database = sql("postgresql", database_url, tmp_path)
    role = f"worker_{uuid4().hex[:12]}"
    try:
        database.run(script("postgresql", Names()) + f"CREATE ROLE {role} LOGIN;")
        database.run(re.sub(r"\bworker\b", role, block("sql: rights")))
        url = re.sub(r"//.*?@", f"//{role}@", database.url)
        with storage_for(url) as storage:
            storage.create("q")
            queue = storage.open("q")
            queue.send("a", delay=0.01)
            (message,) = queue.receive(wait=30)
            queue.nack(message)
            (message,) = queue.receive(wait=30)
            queue.ack(message)
            assert queue.size() == 0
            storage.delete("q")
    finally:
        database.close()
        database.run(f"REVOKE ALL ON SCHEMA public FROM {role}; DROP ROLE {role}")
