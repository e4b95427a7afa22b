"""Runs transactions on a pool of connections, and repeats failed ones where that is harmless."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import sqlalchemy
import sqlalchemy.exc

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.sockets import is_readable
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.storages.sql.applications import cursor_on
from kmqpy.storages.sql.dialect import Cursor, Dialect, Fate, Parameters

T = TypeVar("T")
_BACKOFF = Backoff(0.02, 2, 1)
_NOT_DONE = (Fate.UNDONE, Fate.MISPLACED)
_CHECK_AFTER_IDLE_S = 1.0
"""A connection idle for more seconds than this, or with something to read, is checked before it is used."""
_CHECK_S = 1.5
"""A check without an answer for so many seconds has failed: firewalls forget idle connections silently."""


class Connections:
    """Runs transactions. Safe to use from any thread.

    timeout_s  run() repeats a failed transaction for at most this many seconds (waiting for a connection
               counts), then it raises Unavailable
    """

    def __init__(self, dialect: Dialect, timeout_s: float) -> None:
        self.dialect = dialect
        self.pool = dialect.engine()
        self._disposals = 0
        self._is_closed = False
        self.moves = 0
        """How often run() met a server that can't write: who has a connection of their own connects anew."""
        self._timeout_s = timeout_s
        self._check_s = min(_CHECK_S, timeout_s)
        sqlalchemy.event.listen(self.pool, "checkout", self._check_idle)
        sqlalchemy.event.listen(self.pool, "checkin", self._note_use)
        # SQLite has one writer at a time: threads wait for this lock instead of trying again and again.
        self._writing: AbstractContextManager[Any] = (
            threading.Lock() if dialect.name == "sqlite" else nullcontext()
        )

    def run(
        self,
        work: Callable[[Cursor], T],
        *,
        several: bool = False,
        repeatable: bool = True,
        then: Callable[[Cursor, T], object] | None = None,
    ) -> T:
        """Run `work(cursor)`, commit, and return the result of `work`.

        several     True: `work` executes several statements, which need a transaction around them
        repeatable  False: run() does not repeat an attempt of unknown outcome, because that could do harm
        then        called after the commit with the same connection, and the result; if it fails, the outcome
                    of the attempt is unknown

        Raises Unavailable after `timeout_s`. Raises Unavailable or AccessDenied at once if the database
        refuses, and after an attempt of unknown outcome that is not `repeatable`.
        """
        return self._repeated(lambda: self._attempt(work, then, several=several), repeatable=repeatable)

    def try_now(self, work: Callable[[Cursor], object]) -> None:
        """Run `work(cursor)` in a transaction, once, if a connection lies idle; the database may fail."""
        pool = self.pool.pool
        if isinstance(pool, sqlalchemy.QueuePool) and pool.checkedin():
            with suppress(_TransactionFailed):
                self._attempt(work, None, several=True)

    def _repeated(self, attempt: Callable[[], T], *, repeatable: bool) -> T:
        deadline = SYSTEM_CLOCK.monotonic() + self._timeout_s
        attempts = 0
        while True:
            attempts += 1
            try:
                return attempt()
            except _TransactionFailed as failed:
                again = failed.fate in _NOT_DONE or (failed.fate is Fate.UNKNOWN and repeatable)
                self.moves += failed.fate is Fate.MISPLACED
                left_s = deadline - SYSTEM_CLOCK.monotonic()
                if not again or left_s <= 0:
                    raise failed.shown(self.dialect, self.pool.url) from failed.cause
            SYSTEM_CLOCK.sleep(min(left_s, _BACKOFF.delay(attempts)))

    def within(self, connection: Any, work: Callable[[Cursor], T]) -> T:
        """Return the result of `work(cursor)`, which runs in the application's own transaction.

        Without one, as Django's connections are outside `atomic`, it runs in a transaction of its own.
        """
        with self._translated(connection):
            cursor, commits_alone = cursor_on(self.dialect, connection)
            with closing(cursor):
                try:
                    return self._transaction(cursor, work) if commits_alone else work(cursor)
                except UnicodeEncodeError as error:
                    raise ConfigError(
                        f"transaction: the connection's character set, {error.encoding}, can't hold this "
                        "header, group or reason; connect with UTF-8"
                    ) from None

    def reader(self) -> Cursor:
        """Acts as a cursor; reads what is committed, by another connection than that of a transaction."""
        return _Reader(self)

    def inspect(self, work: Callable[[sqlalchemy.Inspector], T]) -> T:
        """Return the result of `work(inspector)`, which reads how tables are made; repeated as by run()."""
        return self._repeated(lambda: self._inspected(work), repeatable=True)

    def _inspected(self, work: Callable[[sqlalchemy.Inspector], T]) -> T:
        connected = False
        try:
            with self.pool.connect() as connection:
                connected = True
                return work(sqlalchemy.inspect(connection))
        except Exception as error:
            failed = self._as_failure(error, connected=connected)
            if failed is None:
                raise
            if failed.is_broken:
                self._drop()
            raise failed from None

    def own(self) -> Any:
        """A connection that the pool does not count any more, for one thread that keeps it; it closes it."""
        proxy = self.pool.raw_connection()
        proxy.detach()
        return proxy

    @contextmanager
    def _translated(self, connection: Any) -> Iterator[None]:
        """Raise errors in the transaction of the application, perhaps one of another database, as ours."""
        try:
            yield
        except Exception as error:
            failed = self._as_failure(error, connected=True)
            if failed is None:
                raise
            if hasattr(connection, "errors_occurred"):  # else Django would keep a connection that is broken
                connection.errors_occurred = True
            shown = failed.shown(self.dialect, self.pool.url)
            raise type(shown)(f"transaction: {shown}") from failed.cause

    def close(self) -> None:
        """Close the idle connections at once; those in use, or made later, when they come back."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        """Close all connections as close() does; new ones stay."""
        self._disposals += 1  # closes what comes back meanwhile
        self.pool.dispose()
        self._disposals += 1  # and what is taken meanwhile

    def _attempt(
        self, work: Callable[[Cursor], T], then: Callable[[Cursor, T], object] | None, *, several: bool
    ) -> T:
        try:
            proxy = self.pool.raw_connection()
        except Exception as error:
            raise self._as_failure(error, connected=False) or error from None
        cursor: Cursor | None = None
        try:
            cursor = proxy.info.pop("cursor", None) or self.dialect.cursor(proxy.driver_connection)
            result = self._transaction(cursor, work) if several else work(cursor)
            if then is not None:
                then(cursor, result)
            if self.dialect.keeps(cursor):
                proxy.info["cursor"] = cursor
            else:
                cursor.close()
        except BaseException as error:
            failed = self._as_failure(error, connected=True)
            # Of errors from elsewhere, only interruptions (Ctrl-C) may leave a connection in mid-statement,
            # unless the dialect has closed it.
            closed = getattr(proxy.driver_connection, "closed", False)
            broken = closed or not isinstance(error, Exception) if failed is None else failed.is_broken
            if not broken and cursor is not None and self.dialect.keeps(cursor):
                proxy.info["cursor"] = cursor
            self._give_back_after_error(proxy, broken=broken)
            if failed is None or failed is error:
                raise
            raise failed from None
        proxy.close()
        return result

    def _transaction(self, cursor: Cursor, work: Callable[[Cursor], T]) -> T:
        with self._writing:
            self.dialect.begin(cursor)
            try:
                result = work(cursor)
                cursor.execute("COMMIT")
            except BaseException:
                with suppress(Exception):  # fails on a broken connection; the first error counts
                    cursor.execute("ROLLBACK")
                raise
        return result

    def is_alive(self, proxy: Any) -> bool:
        """True if the server answers on this connection, which may have been idle for long."""
        try:
            self.dialect.check(proxy.dbapi_connection, self._check_s)
        except Exception:
            return False
        return True

    def _check_idle(self, connection: Any, record: Any, proxy: Any) -> None:
        """Before a connection is used: if it is dead, the pool replaces it, and all others as old as it."""
        record.info["disposals"] = self._disposals
        used = record.info.get("used")
        if used is None:  # it is new
            return
        fileno = self.dialect.fileno(connection)
        if fileno is None:
            return
        suspect = SYSTEM_CLOCK.monotonic() - used > _CHECK_AFTER_IDLE_S or is_readable(fileno, 0)
        if suspect and not self.is_alive(proxy):
            raise sqlalchemy.exc.InvalidatePoolError

    def _note_use(self, connection: Any, record: Any) -> None:
        """Note when a connection was last used; close it if its pool was replaced meanwhile, or is closed."""
        record.info["used"] = SYSTEM_CLOCK.monotonic()
        is_late = self._is_closed or record.info.get("disposals") != self._disposals
        if connection is not None and is_late:
            record.invalidate()

    def _as_failure(self, error: BaseException, *, connected: bool) -> _TransactionFailed | None:
        """The exception to raise for an error of the driver or the pool; None for an error from elsewhere."""
        if isinstance(error, _TransactionFailed):
            return error
        if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None:
            error = error.orig
        if isinstance(error, sqlalchemy.exc.TimeoutError):
            return _TransactionFailed(Fate.REFUSED, error)
        fate = self.dialect.fate(error)
        if fate is None:
            return None
        return _TransactionFailed(Fate.UNDONE if fate is Fate.UNKNOWN and not connected else fate, error)

    def _give_back_after_error(self, proxy: Any, *, broken: bool) -> None:
        """Give a connection back after an error. If it broke, close the others, which broke with it."""
        with suppress(Exception):
            if broken:
                proxy.invalidate()
                self._drop()
            proxy.close()


class _Reader:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._rows: Sequence[Any] = ()

    def execute(self, statement: str, parameters: Parameters) -> None:
        def read(cursor: Cursor) -> Sequence[Any]:
            cursor.execute(statement, parameters)
            found: Sequence[Any] = cursor.fetchall()
            return found

        self._rows = self._connections.run(read)

    def fetchall(self) -> Sequence[Any]:
        return self._rows

    def fetchone(self) -> Any:
        return self._rows[0]


class _TransactionFailed(Exception):
    """An error of the driver or the pool, with the outcome of the transaction that it implies."""

    def __init__(self, fate: Fate, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.fate = fate
        self.cause = cause
        self.is_broken = fate in (Fate.UNKNOWN, Fate.MISPLACED)

    def shown(self, dialect: Dialect, url: sqlalchemy.URL) -> Unavailable:
        """The error to raise to the caller."""
        name = _name(url)
        if isinstance(self.cause, sqlalchemy.exc.TimeoutError):
            return Unavailable(f"{name}: all connections of this process are in use; raise pool_size")
        text = " ".join(str(self.cause).split())
        if self.fate is Fate.DENIED:
            return AccessDenied(f"{name} denies it: {text}")
        if self.fate is Fate.MISPLACED:
            return Unavailable(
                f"{name} refuses: {text}; check that the address leads to the server that takes writes"
            )
        if self.fate is Fate.REFUSED:
            advice = ""
            if dialect.name == "sqlite" and dialect.is_damage(self.cause):
                advice = "; restore it from a backup, or rescue what sqlite3's `.recover` finds"
            elif "unable to open database file" in text:
                advice = "; check that its folder is there, and may be written"
            return Unavailable(f"{name} refuses: {text}{advice}")
        advice = "; check the address, and that the database runs" if url.host else ""
        return Unavailable(f"{name} does not answer: {text}{advice}")


def _name(url: sqlalchemy.URL) -> str:
    """The database as errors name it: its address, or SQLite's file."""
    if "host" in url.query:  # several hosts
        return f"the database at {url.query['host']}"
    if url.host is None:
        return f"the database {url.database!r}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"the database at {host}:{url.port}" if url.port else f"the database at {host}"
