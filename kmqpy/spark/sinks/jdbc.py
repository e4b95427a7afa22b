# ruff: noqa: S608 # names are quoted, values are not in the statements
"""Writes rows to PostgreSQL and SQLite: executors fill a stage table, from which the driver copies new rows.

The driver copies in one transaction, and leaves out messages of which the table has rows already. So a
micro-batch that is repeated changes nothing, nor does a redelivered message.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, AtomicType, DataType, StructType, TimestampType

from kmqpy.errors import ConfigError, MissingExtra, Unavailable
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.portable import portable
from kmqpy.spark.sinks.limits import Limit, no_nul
from kmqpy.spark.sinks.origin import COPY, MESSAGE_COLUMNS, ORIGIN
from kmqpy.spark.sinks.target import Target

POSTGRESQL, SQLITE = "jdbc:postgresql:", "jdbc:sqlite:"
PASSWORD = "KMQ_SINK_PASSWORD"  # noqa: S105
"""The environment variable with the password, which other users could see on a command line."""

_DRIVERS = {POSTGRESQL: "org.postgresql.Driver", SQLITE: "org.sqlite.JDBC"}
_JARS = {POSTGRESQL: "spark-postgresql", SQLITE: "spark-sqlite"}
_MAX_POSTGRESQL_BYTES = 63 - len("_kmq_s")
"""PostgreSQL uses the first 63 bytes of a name: the tables beside a table must differ in these."""
_CONNECT_TIMEOUT_S = 30
"""How long the driver waits for a connection to PostgreSQL, or for another writer of the SQLite database."""


@dataclass(frozen=True)
class JdbcTarget(Target):
    """Writes to a table of a database; `path` is the JDBC URL, the option `table` names the table."""

    def __post_init__(self) -> None:
        if not self.sink.path.startswith(tuple(_DRIVERS)):
            known = " or ".join(f"{one}…" for one in _DRIVERS)
            raise ConfigError(f"out: unsupported URL of a database {self.sink.path!r}: use {known}")
        if not self.sink.options.get("table"):
            raise ConfigError("out: which table? Name it: --option table=NAME")
        if self._kind == POSTGRESQL and len(self._names[-1].encode()) > _MAX_POSTGRESQL_BYTES:
            raise ConfigError(
                f"out: table {self._names[-1]!r}: PostgreSQL cuts names, and would take NAME_kmq_stage and "
                f"NAME_kmq_queue for one table; choose a name of at most {_MAX_POSTGRESQL_BYTES} bytes"
            )
        if self.sink.partition_by:
            raise ConfigError("partition by: a table of a database has no folders")

    def check(self, spark: SparkSession, schema: StructType) -> None:
        # Creates the table with the columns of a stage table without rows.
        for field in schema:
            if not _storable(field.dataType, arrays=self._kind == POSTGRESQL):
                raise ConfigError(
                    f"schema: column {field.name!r}: a table of {self._kind}… can't hold "
                    f"{field.dataType.simpleString()}; write its JSON text with --function"
                )
        try:
            self._stage(spark.createDataFrame([], schema))
            self._insert_new(schema.names)
        except (PySparkException, Py4JError) as error:
            raise ConfigError(f"out: table {self.sink.options['table']!r}: {error_line(error)}") from None

    def write(self, batch: DataFrame, number: int, run: str) -> None:  # noqa: ARG002
        rows = batch.drop(COPY)
        self._stage(rows)
        self._insert_new(rows.columns)

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        properties, times = self._properties(), _times(schema) if self._kind == SQLITE else []
        if times:
            properties["customSchema"] = ", ".join(f"{_backticked(name)} string" for name in times)
        found = spark.read.jdbc(self.sink.path, self._table(""), properties=properties)
        utc = {name: F.concat(F.col(_backticked(name)), F.lit("Z")).cast("timestamp") for name in times}
        return found.withColumns(utc).select(*schema.names)

    @property
    def jar_sets(self) -> tuple[str, ...]:
        return () if "driver" in self.sink.options else (_JARS[self._kind],)

    @property
    def _kind(self) -> str:
        return next(kind for kind in _DRIVERS if self.sink.path.startswith(kind))

    @property
    def _names(self) -> list[str]:
        return self.sink.options["table"].split(".")

    def _table(self, suffix: str) -> str:
        *schemas, table = self._names
        return ".".join(map(_quoted, [*schemas, f"{table}{suffix}"]))

    def _properties(self) -> dict[str, str]:
        given = {key: value for key, value in self.sink.options.items() if key != "table"}
        if password := self._password():
            given["password"] = password
        # Without the driver's name, Spark asks DriverManager, which does not see jars that were added.
        return {"driver": _DRIVERS[self._kind], "date_class": "TEXT", **given}

    def _password(self) -> str | None:
        return self.sink.options.get("password") or os.environ.get(PASSWORD)

    def _stage(self, rows: DataFrame) -> None:
        if self._kind == SQLITE:
            rows = rows.coalesce(1)  # SQLite has one writer at a time
            with self._connected() as connection:  # Spark can't tell that a table of SQLite is missing
                connection.execute(f"create table if not exists {self._table('_kmq_stage')} (id int)")
        with portable(rows.sparkSession):
            if self._kind == SQLITE:
                # Its driver would write times of this machine's zone, without a zone, and cut to ms.
                texts = {name: F.col(_backticked(name)).cast("string") for name in _times(rows.schema)}
                rows = rows.withColumns(texts)
            rows.write.jdbc(self.sink.path, self._table("_kmq_stage"), "overwrite", self._properties())

    def _insert_new(self, columns: Sequence[str]) -> None:
        """Copy from the stage table the rows of messages of which the table has no rows."""
        table, stage = self._table(""), self._table("_kmq_stage")
        index = _quoted(f"{self._names[-1]}_kmq_origin")
        names, key = ", ".join(map(_quoted, columns)), ", ".join(map(_quoted, ORIGIN))
        same = " and ".join(f"known.{_quoted(name)} = stage.{_quoted(name)}" for name in MESSAGE_COLUMNS)
        with self._connected() as connection:
            connection.execute("begin")
            connection.execute(f"create table if not exists {table} as select * from {stage} where 1 = 0")
            connection.execute(f"create unique index if not exists {index} on {table} ({key})")
            is_known = f"exists (select 1 from {table} known where {same})"
            new = f"select {names} from {stage} stage where not {is_known}"
            connection.execute(f"insert into {table} ({names}) {new}")
            connection.execute("commit")

    def limits(self, schema: StructType) -> tuple[Limit, ...]:
        return no_nul(schema) if self._kind == POSTGRESQL else ()

    def _noted_queue(self, queue: str, ending: str) -> str:
        table = self._table("_kmq_queue")
        with self._connected() as connection:
            connection.execute("begin")
            connection.execute(f"create table if not exists {table} (queue varchar(400))")
            rows = [str(row).split(" ") for (row,) in connection.execute(f"select queue from {table}")]
            # That of a lane has one word more, its ending.
            noted = [" ".join(row[:2]) for row in rows if row[2:] == ending.split()]
            if not noted:
                text = f"{queue} {ending}".rstrip().replace("'", "''")
                connection.execute(f"insert into {table} (queue) values ('{text}')")
            connection.execute("commit")
        return next((one for one in noted if one != queue), queue)

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A connection that begins no transaction by itself; raises Unavailable, MissingExtra."""
        connection: Any = None
        errors: tuple[type[Exception], ...] = (sqlite3.Error,)
        try:
            if self._kind == SQLITE:
                path = self.sink.path.removeprefix(SQLITE).partition("?")[0]
                connection = sqlite3.connect(path, timeout=_CONNECT_TIMEOUT_S, isolation_level=None)
            else:
                try:
                    psycopg = import_module("psycopg")
                except ImportError:
                    raise MissingExtra("sql", "Writing to PostgreSQL") from None
                errors = (psycopg.Error,)
                connection = psycopg.connect(
                    self.sink.path.removeprefix("jdbc:"),
                    user=self.sink.options.get("user"),
                    password=self._password(),
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    autocommit=True,
                )
            yield connection
        except errors as error:
            table = self.sink.options["table"]
            raise Unavailable(f"out: {self._kind}… table {table!r}: {error_line(error)}") from error
        finally:
            if connection is not None:
                connection.close()


def _storable(kind: DataType, *, arrays: bool) -> bool:
    if isinstance(kind, ArrayType):
        return arrays and isinstance(kind.elementType, AtomicType)
    return isinstance(kind, AtomicType)


def _times(schema: StructType) -> list[str]:
    return [field.name for field in schema if isinstance(field.dataType, TimestampType)]


def _backticked(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
