"""Creates, migrates and checks the tables of queues in a SQL database."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy

from kmqpy.errors import ConfigError
from kmqpy.storages.receipts import parse_number
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.dialect import Cursor
from kmqpy.storages.sql.statements import Names, migrations, schema
from kmqpy.storages.sql.tables import SCHEMA_VERSION

Migrations = Mapping[int, Sequence[str]]
"""The statements that migrate tables to the next version, by version."""


class Schema:
    """Creates, migrates and checks the tables of one storage.

    version, steps  the version and the migrations of this kmqpy; tests give others
    """

    def __init__(
        self,
        connections: Connections,
        names: Names,
        *,
        version: int = SCHEMA_VERSION,
        steps: Migrations | None = None,
    ) -> None:
        self._connections = connections
        self._dialect = connections.dialect
        self._names = names
        self._version = version
        self._migrations = migrations(self._dialect.name, names) if steps is None else steps

    def prepare(self) -> str:
        """Create or migrate the tables if need be; returns the storage's id.

        Any number of processes may call prepare() at once: one works, the others wait. Raises ConfigError for
        tables of a newer kmqpy or of another program, which it leaves as they are.
        """
        found = self._connections.run(self._storage_id) if self._is_prepared() else None
        return found or self._connections.run(self._prepare_locked, several=True)

    def _is_prepared(self) -> bool:
        """True if the tables have this version. False if that can only be told under the lock."""
        try:
            return self._found_version() == self._version
        except ConfigError:  # perhaps another process is just creating the tables, and has made some
            return False

    def _prepare_locked(self, cursor: Cursor) -> str:
        lock = f"{self._names.qualified['meta']} of kmqpy"
        sql = self._dialect.sql
        if "lock_schema" in sql:
            number = zlib.crc32(lock.encode())
            by = number if self._dialect.name == "postgresql" else lock[:64]
            cursor.execute(sql["lock_schema"], {"lock": by})
            cursor.fetchall()
        try:
            return self._create_or_migrate(cursor)
        finally:
            if "unlock_schema" in sql:
                cursor.execute(sql["unlock_schema"], {"lock": lock[:64]})

    def _create_or_migrate(self, cursor: Cursor) -> str:
        sql = self._dialect.sql
        version = self._found_version()
        if version is None:
            for text in schema(self._dialect.name, self._names):
                cursor.execute(text)
            self._write_meta(cursor, "schema_version", str(self._version))
        else:
            for older in range(version, self._version):
                for text in self._migrations[older]:
                    cursor.execute(text)
                cursor.execute(sql["set_schema_version"], {"version": str(older + 1)})
        found = self._storage_id(cursor)
        if found is None:
            found = uuid.uuid4().hex
            self._write_meta(cursor, "storage_id", found)
        return found

    def _write_meta(self, cursor: Cursor, name: str, value: str) -> None:
        cursor.execute(self._dialect.sql["describe_storage"], {"name": name, "value": value})

    def _storage_id(self, cursor: Cursor) -> str | None:
        cursor.execute(self._dialect.sql["storage_id"])
        row = cursor.fetchone()
        if row is None:
            return None
        if not isinstance(row[0], str):
            raise _foreign_table(self._names.tables["meta"])
        return row[0]

    def _found_version(self) -> int | None:
        """The version of the tables; None if there are none yet. Raises ConfigError, Unavailable."""
        tables = self._names.tables
        there, others = self._connections.inspect(self._found_tables)
        if "meta" not in there:
            if others:
                raise _foreign_table(others[0])
            return None
        if sorted(there["meta"]) != ["name", "value"]:
            raise _foreign_table(tables["meta"])
        version = self._connections.run(self._version_text)
        number = parse_number(version)
        if not number:
            raise _foreign_table(tables["meta"])
        if number > self._version:
            raise ConfigError(
                f"table {tables['meta']!r}: its schema version {version} is of a newer kmqpy; this one knows "
                f"{self._version}: upgrade kmqpy"
            )
        return number

    def _found_tables(self, found: sqlalchemy.Inspector) -> tuple[dict[str, list[str]], list[str]]:
        """The columns of the tables that are there, and the names of those that are not kmqpy's."""
        tables, schema_name = self._names.tables, self._names.schema or None
        there = {
            what: [column["name"] for column in found.get_columns(name, schema=schema_name)]
            for what, name in tables.items()
            if what != "numbers" and found.has_table(name, schema=schema_name)
        }
        return there, [tables[what] for what in there if not self._is_ours(found, tables[what])]

    def _version_text(self, cursor: Cursor) -> str | None:
        cursor.execute(self._dialect.sql["schema_version"])
        row = cursor.fetchone()
        return None if row is None else row[0]

    def _is_ours(self, found: sqlalchemy.Inspector, table: str) -> bool:
        """True for a table that an interrupted creation by kmqpy has left; only MariaDB and MySQL do."""
        if self._dialect.name not in ("mariadb", "mysql"):
            return False
        comment: dict[str, Any] = dict(found.get_table_comment(table))
        return comment.get("text") == "kmqpy"


def _foreign_table(table: str) -> ConfigError:
    return ConfigError(
        f"table {table!r}: it is not one of kmqpy; give kmqpy another name by prefix=…, or another schema"
    )
