"""Runs queues on SQLite, with Python's module sqlite3.

SQLite has one writer at a time, so each transaction of the storage's own takes the write lock when it begins
(BEGIN IMMEDIATE).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy

from kmqpy.core.clock import Clock
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.queue import Capabilities
from kmqpy.storages.engine import NewRow, TakeRef
from kmqpy.storages.sql.dialect import (
    CHUNK,
    MAX_BODY_BYTES,
    Cursor,
    DedupKey,
    Fate,
    Parameters,
    Picked,
    group_id,
    headers_bytes,
    is_behind,
    picked,
)
from kmqpy.storages.sql.statements import Names, statements
from kmqpy.storages.sql.tables import DialectName

_MIN_VERSION = (3, 37)  # has STRICT
_SESSION = (
    "PRAGMA journal_mode = WAL",  # readers and the writer do not wait for each other
    "PRAGMA synchronous = FULL",  # a commit survives a crash of the machine
    "PRAGMA fullfsync = ON",  # on macOS, whose fsync() leaves data in the disk's cache
)
_IN_MEMORY = ("tmpfs", "ramfs")
_NUMBERED_STATEMENTS = frozenset(
    {"pass_time", "give_back", "extend", "release_all", "redrive", "redrive_ids"}
)
"""Statements that may give messages new places. A place is a number: of the ready messages of one priority,
the one with the smallest place is taken first. change() draws new places from the table `numbers`."""
_DAMAGE_NAMES = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class Sqlite:
    """Implements Dialect, which describes the attributes.

    `clock` is the storage's clock, because there is no server with one.
    """

    name: DialectName = "sqlite"
    driver = "sqlite3 (with asyncio aiosqlite)"
    capabilities = Capabilities(
        collapse=True,
        groups=True,
        fair=True,
        dedup=True,
        retry_delays=True,
        transactions=True,
        blocking_take=True,
        max_body_bytes=MAX_BODY_BYTES,
    )
    is_one_statement = False
    waits_ms = 2_000
    _file: tuple[int, int] | None = None
    """The identity of the file when it was first opened."""

    def __init__(self, url: sqlalchemy.URL, names: Names, clock: Clock, **pool: Any) -> None:
        if sqlite3.sqlite_version_info < _MIN_VERSION:
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version} is older than {'.'.join(map(str, _MIN_VERSION))}: "
                "use a Python with a newer one"
            )
        self._url = url.set(drivername="sqlite+pysqlite")
        self._path = Path(url.database or "").absolute()
        self._numbers = names.tables["numbers"]
        self._clock = clock
        self._pool = pool
        self.sql: Mapping[str, str] = statements(self.name, names)

    def engine(self) -> sqlalchemy.Engine:
        made = sqlalchemy.create_engine(
            self._url,
            connect_args={"check_same_thread": False, "timeout": 5},
            poolclass=sqlalchemy.QueuePool,
            **self._pool,
        )
        sqlalchemy.event.listen(made, "connect", self._prepare)
        return made

    def cursor(self, connection: Any) -> Cursor:
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError
        made: Any = connection.cursor()
        made.row_factory = None  # an application may want other rows of its connection
        return made

    async def async_cursor(self, connection: Any) -> Any:
        made = await connection.cursor()
        made.row_factory = None
        return made

    def commits_alone(self, connection: Any) -> bool:
        """See Dialect. Python 3.12 has another attribute for it."""
        is_alone = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
        return is_alone and not connection.in_transaction

    def fileno(self, connection: Any) -> int | None:
        """See Dialect."""

    def check(self, connection: Any, seconds: float) -> None:
        """See Dialect; a file is always there."""

    def lossy_setting(self, cursor: Cursor) -> str:
        """See Dialect. Connections are made so that commits are synced; that may fail, or be undone."""
        ((mode,),) = cursor.execute("PRAGMA journal_mode").fetchall()
        ((level,),) = cursor.execute("PRAGMA synchronous").fetchall()
        if mode != "wal" and level < 3:  # nobody syncs the folder from which a commit deletes the journal
            return f"journal_mode={mode}"
        if level < 2:
            return f"synchronous={level}"
        system = _file_system(self._path)
        return f"filesystem={system}" if system in _IN_MEMORY else ""

    def unchecked_setting(self, cursor: Cursor) -> str:  # noqa: ARG002
        """See Dialect; no setting makes SQLite check what it reads."""
        return ""

    def keeps(self, cursor: Cursor) -> bool:  # noqa: ARG002
        return False

    def begin(self, cursor: Cursor) -> None:
        """See Dialect. Raises Unavailable if the file was deleted or replaced: writes would be lost."""
        if _identity(self._path) != self._file:
            raise Unavailable(
                f"{self._path} was deleted or replaced while it was open; close the storage and open it again"
            )
        cursor.execute("BEGIN IMMEDIATE")

    def fate(self, error: BaseException) -> Fate | None:
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return Fate.UNDONE if code in _BUSY_CODES else Fate.REFUSED

    def is_damage(self, error: BaseException | None) -> bool:
        return getattr(error, "sqlite_errorname", "").startswith(_DAMAGE_NAMES)

    def defaults(self) -> dict[str, Any]:
        return {"now_ms": self._clock.wall_ms()}

    def refs(self, takes: Sequence[TakeRef]) -> dict[str, Any]:
        return {"refs": json.dumps(takes)}

    def ids(self, ids: Sequence[int | str]) -> Any:
        return json.dumps([*ids])

    def put(
        self,
        cursor: Cursor,
        parameters: Parameters,
        rows: Sequence[NewRow],
        ids: Sequence[int] | None = None,
    ) -> list[int]:
        if ids is None:
            first = self._draw(cursor, len(rows))
            ids = range(first, first + len(rows))
        common = {name: parameters[name] for name in ("queue", "now_ms")}
        given = [
            {
                **common,
                "id": row_id,
                "delay_ms": row.delay_ms,
                "priority": row.priority,
                "key": row.key,
                "headers": headers_bytes(row.headers),
                "body": row.body,
                "digest": row.digest,
            }
            for row_id, row in zip(ids, rows, strict=True)
        ]
        name = "put"
        if any(row.group for row in rows):
            name = "put_grouped"
            behind = is_behind(parameters, rows) or [0] * len(rows)
            for one, row, waits in zip(given, rows, behind, strict=True):
                one |= {"group_id": group_id(parameters, row), "group": row.group, "behind": waits}
        cursor.executemany(self.sql[name], given)
        return [*ids] if cursor.rowcount else []

    def claim_keys(self, cursor: Cursor, parameters: Parameters, keys: Sequence[str]) -> list[DedupKey]:
        given = {**parameters, "keys": json.dumps(keys), "first": self._draw(cursor, len(keys))}
        return [DedupKey(*row) for row in cursor.execute(self.sql["claim_keys"], given).fetchall()]

    def take(self, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool) -> Picked:  # noqa: ARG002
        """See Dialect. The statement reads `late` from the parameters."""
        return picked(cursor, self.sql, parameters, for_good=for_good)

    def remove_twins(self, cursor: Cursor, parameters: Parameters, digests: Sequence[bytes]) -> None:
        cursor.executemany(self.sql["remove_twins"], [{**parameters, "digest": one} for one in digests])

    def pass_time(self, cursor: Cursor, parameters: Parameters) -> int:
        return self.change(cursor, "pass_time", {**parameters, "limit": CHUNK})

    def change(self, cursor: Cursor, name: str, parameters: Parameters) -> int:
        if name not in _NUMBERED_STATEMENTS:
            return int(cursor.execute(self.sql[name], parameters).rowcount)
        numbered = {**parameters, "number": self._draw(cursor, 0)}
        changed: int = cursor.execute(self.sql[name], numbered).rowcount
        # give_back and extend use a number for each take, also for those that they do not change.
        self._draw(cursor, max(changed, parameters.get("asked", 0)))
        return changed

    def _draw(self, cursor: Cursor, count: int) -> int:
        """Take the next `count` numbers from the table of numbers; returns the first of them."""
        found = cursor.execute(self.sql["draw"], {"count": count}).fetchall()
        if len(found) != 1 or not isinstance(found[0][0], int):
            raise ConfigError(
                f"table {self._numbers!r}: it must have one row, with a number above all ids and places of "
                f"the messages; it has {found}"
            )
        first: int = found[0][0]
        return first

    def _prepare(self, connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for setting in _SESSION:
            connection.execute(setting)
        self._file = self._file or _identity(self._path)


def _file_system(path: Path) -> str:
    """The kind of file system of a file, where Linux tells it; else ""."""
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    found = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return found[0] if found else ""


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at a path, which a later file there would not have; None: no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
