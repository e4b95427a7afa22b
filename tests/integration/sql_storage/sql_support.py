"""What tests of the storages in SQL share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import sqlalchemy

from kmqpy.queue import Queue, storage_for
from kmqpy.storages.sql.statements import Names

DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mysql+pymysql",
}


def taken(queue: Queue, limit: int = 1) -> list[str]:
    return [one.body.decode() for one in queue.receive(limit, wait=0, lease=60)]


class Place:
    """A database, and a prefix in it that no other test has."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.prefix = f"t{uuid4().hex[:12]}_"
        self.url = f"{url}?prefix={self.prefix}"
        self.names = Names(prefix=self.prefix)
        # Else PyMySQL would load all certificates of the machine at each of these connections.
        self.application = sqlalchemy.create_engine(
            DRIVERS[name] + url.removeprefix(name),
            poolclass=sqlalchemy.NullPool,
            connect_args={"ssl_disabled": True} if "pymysql" in DRIVERS[name] else {},
        )

    @contextmanager
    def queue(self, **settings: Any) -> Iterator[Queue]:
        """The queue `q`, made with these settings."""
        with storage_for(self.url) as storage:
            storage.create("q", **settings)
            yield storage.open("q")

    def execute(self, *statements: str) -> list[Any]:
        """The rows of the last one."""
        with self.application.begin() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
            return list(result) if result.returns_rows else []

    def drop(self) -> None:
        """Drop the tables that are there."""
        kind = dict.fromkeys(self.names.tables, "TABLE")
        kind["numbers"] = "SEQUENCE" if self.name in ("postgresql", "mariadb") else "TABLE"
        self.execute(*(f"DROP {kind[what]} IF EXISTS {table}" for what, table in self.names.tables.items()))
