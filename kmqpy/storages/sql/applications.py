"""Connections of applications, for messages within their own transactions: whose they are, and their cursors.

SQLAlchemy's asyncio runs its drivers in greenlets: within `run_sync` a call of ours may wait for a coroutine.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.orm

from kmqpy.errors import ConfigError
from kmqpy.storages.sql.dialect import Cursor, Dialect, Parameters

_ENGINES = (sqlalchemy.Engine, sqlalchemy.orm.sessionmaker)
_RUN_SYNC = "await connection.run_sync(lambda sync: queue.send(…, transaction=sync))"


def cursor_on(dialect: Dialect, given: Any) -> tuple[Cursor, bool]:
    """A cursor on a connection of the application, and whether its next statement commits by itself.

    The connection is one of SQLAlchemy or a session, one of Django, or one of the driver. Raises ConfigError,
    and errors of the driver or of Django.
    """
    try:
        return _cursor_on(dialect, given)
    except sqlalchemy.exc.MissingGreenlet:
        raise _refusal(given, f"is one of asyncio; call us in its greenlet: {_RUN_SYNC}") from None
    except sqlalchemy.exc.InvalidRequestError as error:  # closed, or failed and not rolled back
        raise ConfigError(f"transaction: {error.args[0]}") from None
    except (AttributeError, TypeError):
        raise _refusal(
            given,
            f"is not a connection to {dialect.name} that we can use; pass one of {dialect.driver}, or one of "
            f"SQLAlchemy, a session of it, or django.db.connection, which use {dialect.driver}",
        ) from None


def _cursor_on(dialect: Dialect, given: Any) -> tuple[Cursor, bool]:
    if type(given).__module__.startswith("sqlalchemy.ext.asyncio"):
        raise _refusal(given, f"is one of asyncio; pass what its run_sync gives: {_RUN_SYNC}")
    if isinstance(given, _ENGINES):
        raise _refusal(given, "makes connections; pass one of them: with engine.begin() as connection: …")
    if isinstance(given, sqlalchemy.orm.scoped_session | sqlalchemy.orm.Session):
        given = given.connection()
    if isinstance(given, sqlalchemy.Connection):
        if not given.in_transaction():
            given.begin()  # as SQLAlchemy does: without it, commit() would do nothing
        given = given.connection
    if isinstance(given, sqlalchemy.PoolProxiedConnection):
        given = given.dbapi_connection
    if isinstance(given, sqlalchemy.AdaptedConnection):
        return _AsyncCursor(dialect, given), dialect.commits_alone(given.driver_connection)
    if hasattr(given, "validate_no_broken_transaction"):  # Django's, or of a package that wraps it
        given.validate_no_broken_transaction()
        given.cursor().close()  # it connects, and checks the connection's health
        given = given.connection
    return dialect.cursor(given), dialect.commits_alone(given)


def _refusal(given: Any, why: str) -> ConfigError:
    return ConfigError(f"transaction: an object of type {type(given).__name__} {why}")


class _AsyncCursor:
    """A cursor of an asynchronous driver, for calls within a greenlet of SQLAlchemy's asyncio."""

    def __init__(self, dialect: Dialect, connection: sqlalchemy.AdaptedConnection) -> None:
        self._connection = connection
        self._cursor: Any = connection.run_async(dialect.async_cursor)

    def execute(self, statement: str, parameters: Parameters | None = None) -> Any:
        """See DB-API: returns what the driver's synchronous sibling does."""
        result = self._await("execute", statement, parameters)
        return result if isinstance(result, int) else self

    def executemany(self, statement: str, rows: Any) -> None:
        self._await("executemany", statement, rows)

    def fetchone(self) -> Any:
        return self._await("fetchone")

    def fetchall(self) -> Any:
        return self._await("fetchall")

    def mogrify(self, statement: str, parameters: Parameters) -> str:
        found: str = self._cursor.mogrify(statement, parameters)
        return found

    @property
    def rowcount(self) -> int:
        found: int = self._cursor.rowcount
        return found

    @property
    def lastrowid(self) -> int:
        found: int = self._cursor.lastrowid
        return found

    def close(self) -> None:
        self._await("close")

    def _await(self, method: str, *arguments: Any) -> Any:
        return self._connection.run_async(lambda _: getattr(self._cursor, method)(*arguments))
