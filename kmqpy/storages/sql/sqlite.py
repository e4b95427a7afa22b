"""SQLite by Python's own module: one writer at a time, in transactions that begin as writers."""

from __future__ import annotations

import json
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
    Fate,
    Parameters,
    Picked,
    headers_bytes,
    picked,
)
from kmqpy.storages.sql.statements import DialectName, Names, statements

_OLDEST = (3, 37)  # has STRICT
_SESSION = (
    "PRAGMA journal_mode = WAL",  # readers and the writer do not wait for each other
    "PRAGMA synchronous = FULL",  # what was committed outlives the machine
)
_PLACING = frozenset({"pass_time", "give_back", "release_all", "redrive", "redrive_ids"})
"""These may give places."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class Sqlite:
    """See Dialect. `clock` is that of the storage: there is no server to have one."""

    name: DialectName = "sqlite"
    capabilities = Capabilities(transactions=True, blocking_take=True, max_body_bytes=MAX_BODY_BYTES)
    is_one_statement = False
    waits_ms = 2_000
    _file: tuple[int, int] | None = None

    def __init__(self, url: sqlalchemy.URL, names: Names, clock: Clock, **pool: Any) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version} is older than {'.'.join(map(str, _OLDEST))}: "
                "use a Python with a newer one"
            )
        self._url = url.set(drivername="sqlite+pysqlite")
        self._path = Path(url.database or "").absolute()
        self._numbers = names.tables["numbers"]
        self._clock = clock
        self._pool = pool
        self.sql: Mapping[str, str] = statements(self.name, names)

    def engine(self) -> sqlalchemy.Engine:
        """See Dialect."""
        made = sqlalchemy.create_engine(
            self._url,
            connect_args={"isolation_level": None, "check_same_thread": False, "timeout": 5},
            poolclass=sqlalchemy.QueuePool,
            **self._pool,
        )
        sqlalchemy.event.listen(made, "connect", self._prepare)
        return made

    def cursor(self, connection: Any) -> Cursor:
        """See Dialect."""
        made = connection.cursor()
        made.row_factory = None  # an application may want other rows of its connection
        return made

    def keeps(self, cursor: Cursor) -> bool:  # noqa: ARG002
        """See Dialect."""
        return False

    def begin(self, cursor: Cursor) -> None:
        """See Dialect. Raises Unavailable if the file is another one now: what is written to ours is lost."""
        if _identity(self._path) != self._file:
            raise Unavailable(
                f"{self._path} was deleted or replaced while it was open; close the storage and open it again"
            )
        cursor.execute("BEGIN IMMEDIATE")

    def fate(self, error: BaseException) -> Fate | None:
        """See Dialect."""
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return Fate.UNDONE if code in _BUSY else Fate.REFUSED

    def defaults(self) -> dict[str, Any]:
        """See Dialect."""
        return {"now_ms": self._clock.wall_ms()}

    def refs(self, takes: Sequence[TakeRef]) -> dict[str, Any]:
        """See Dialect."""
        return {"refs": json.dumps(takes)}

    def ids(self, ids: Sequence[int]) -> Any:
        """See Dialect."""
        return json.dumps([*ids])

    def put(self, cursor: Cursor, parameters: Parameters, rows: Sequence[NewRow]) -> list[int]:
        """See Dialect."""
        first = self._draw(cursor, len(rows))
        ids = [*range(first, first + len(rows))]
        cursor.executemany(
            self.sql["put"],
            [
                {
                    **parameters,
                    "id": row_id,
                    "delay_ms": row.delay_ms,
                    "priority": row.priority,
                    "key": row.key,
                    "headers": headers_bytes(row.headers),
                    "body": row.body,
                }
                for row_id, row in zip(ids, rows, strict=True)
            ],
        )
        return ids if cursor.rowcount else []

    def take(self, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool) -> Picked:  # noqa: ARG002
        """See Dialect; `late` is in the parameters, too."""
        return picked(cursor, self.sql, parameters, for_good=for_good)

    def pass_time(self, cursor: Cursor, parameters: Parameters) -> int:
        """See Dialect."""
        return self.change(cursor, "pass_time", {**parameters, "limit": CHUNK})

    def change(self, cursor: Cursor, name: str, parameters: Parameters) -> int:
        """See Dialect."""
        if name not in _PLACING:
            return int(cursor.execute(self.sql[name], parameters).rowcount)
        numbered = {**parameters, "number": self._draw(cursor, 0)}
        changed: int = cursor.execute(self.sql[name], numbered).rowcount
        # give_back() numbers what it does not change, too: as many as were asked for.
        self._draw(cursor, max(changed, parameters.get("asked", 0)))
        return changed

    def _draw(self, cursor: Cursor, count: int) -> int:
        """The first of the next `count` numbers."""
        found = cursor.execute(self.sql["draw"], {"count": count}).fetchall()
        if len(found) != 1 or not isinstance(found[0][0], int):
            raise ConfigError(
                f"table {self._numbers!r}: it must have one row, with a number above all ids and places of "
                f"the messages; it has {found}"
            )
        first: int = found[0][0]
        return first

    def _prepare(self, connection: Any, _: Any) -> None:
        for setting in _SESSION:
            connection.execute(setting)
        self._file = self._file or _identity(self._path)


def _identity(path: Path) -> tuple[int, int] | None:
    """A key of the file at a path, which another file there would not have; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
