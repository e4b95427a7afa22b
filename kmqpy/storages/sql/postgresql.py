"""The dialect of PostgreSQL, by psycopg: a put or take is one statement, so one round trip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

import psycopg
import sqlalchemy
from psycopg.rows import tuple_row

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.sockets import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, is_readable
from kmqpy.errors import MessageError
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
    ServerDialect,
    group_id,
    headers_bytes,
    is_behind,
    picked,
)
from kmqpy.storages.sql.pipeline import Pipeline
from kmqpy.storages.sql.statements import Names
from kmqpy.storages.sql.tables import DialectName
from kmqpy.storages.tls import is_refusal

SESSION = (
    "SET default_transaction_isolation = 'read committed'",  # each statement sees what others have committed
    "SET enable_seqscan = off",  # a queue's statistics are always old, and plans are kept
    "SET enable_bitmapscan = off",
    "SET plan_cache_mode = force_generic_plan",
    "SET jit = off",
)
MAX_STATEMENT_BYTES = 2**30 - 2**20
"""The server closes the connection when it gets a statement of 1 GiB; the rest is for what else is in it."""
_ROW_BYTES = 64
# SQLSTATEs of errors, or how these begin, by the Fate that they imply.
_UNDONE_STATES = ("40", "53", "55P03", "57P03")
_MISPLACED_STATES = ("25006",)  # read-only: a standby, or a session made while the server was one
_DENIED_STATES = ("28", "42501")
_DAMAGE_STATES = ("XX001", "XX002", "58030", "58P01")  # 58: a file that can't be read, or is gone
_BROKEN_STATES = ("08", "25P03", "25P04", "57P01", "57P02", "57P04", "57P05")


class _CursorPerStatement:
    """Acts as one cursor; it has a cursor of psycopg for each statement, and gives the last one's result.

    A cursor of psycopg that is given another statement forgets how it converts parameters and columns.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._current = self._new()
        self._cursors: dict[str, Cursor] = {}
        self._pipeline = Pipeline(connection)

    def execute(self, statement: str, parameters: Parameters | None = None) -> None:
        self.free_result()
        self._current = self._for(statement)
        self._current.execute(statement, parameters)

    def transact(self, *transactions: Sequence[tuple[str, Parameters]]) -> Any:
        """Execute transactions; returns the rows of each statement.

        They are sent at once: others who wait for a lock that one takes do not wait for this client.
        """
        self.free_result()
        if psycopg.Pipeline.is_supported():
            return self._pipeline.run(*transactions)
        found: list[Any] = []
        for transaction in transactions:
            with self._connection.transaction():
                for statement, given in transaction:
                    self.execute(statement, given)
                    found.append(self.fetchall())
        return found

    def fetchone(self) -> Any:
        return self._current.fetchone()

    def fetchall(self) -> Any:
        return self._current.fetchall()

    @property
    def rowcount(self) -> int:
        found: int = self._current.rowcount
        return found

    def free_result(self) -> None:
        """Free the last result, which may be large; its cursor would keep it."""
        if self._current.pgresult is not None:
            self._current.pgresult.clear()

    def close(self) -> None:
        for cursor in (self._current, *self._cursors.values()):
            cursor.close()

    def _for(self, statement: str) -> Cursor:
        cursor = self._cursors.get(statement)
        if cursor is None:
            cursor = self._cursors[statement] = self._new() if self._cursors else self._current
        return cursor

    def _new(self) -> Cursor:
        # Not connection.cursor(): the application may have set a factory of cursors that can do less.
        made: Any = psycopg.Cursor(self._connection, row_factory=tuple_row)
        made.format = psycopg.pq.Format.BINARY
        return made


_UNLOGGED = (
    "SELECT min(relname) FROM pg_class JOIN unnest(%(tables)s::text[]) AS name ON oid = to_regclass(name) "
    "WHERE relpersistence = 'u'"
)


class PostgreSql(ServerDialect):
    """Implements Dialect for PostgreSQL."""

    name: DialectName = "postgresql"
    drivername = "postgresql+psycopg"
    driver = "psycopg 3"
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
    is_one_statement = True
    waits_ms = 2_000

    def __init__(self, url: sqlalchemy.URL, names: Names, *settings: Any, **pool: Any) -> None:
        super().__init__(url, names, *settings, **pool)
        self.channel = f"{names.schema}.{names.prefix}ready" if names.schema else f"{names.prefix}ready"

    def engine(self) -> sqlalchemy.Engine:
        timeout_s = self._pool["pool_timeout"]
        made = sqlalchemy.create_engine(
            self._url,
            connect_args={
                "connect_timeout": max(2, min(5, int(timeout_s))),  # at least 2 s, as libpq wants it
                # Else the kernel waits for 15 minutes for a machine or network that is gone without a word.
                "tcp_user_timeout": min(int(timeout_s * 1000), 2**31 - 1),  # libpq refuses larger ones
                "keepalives_idle": KEEPALIVE_IDLE_S,
                "keepalives_interval": KEEPALIVE_INTERVAL_S,
                "keepalives_count": KEEPALIVE_COUNT,
                **self._settings(),
            },
            **self._pool,
        )
        sqlalchemy.event.listen(made, "connect", _prepare)
        return made

    def lossy_setting(self, cursor: Cursor) -> str:
        """See Dialect. Servers that only speak PostgreSQL's language may not have all these settings."""
        for name in ("synchronous_commit", "fsync", "full_page_writes"):
            cursor.execute("SELECT current_setting(%(name)s, true)", {"name": name})
            (value,) = cursor.fetchone()
            if value in (None, "off"):
                return f"{name}={value or 'unknown'}"
        # Somebody made them faster: a crash empties them.
        cursor.execute(_UNLOGGED, {"tables": self._tables})
        (unlogged,) = cursor.fetchone()
        return f"{unlogged}=UNLOGGED" if unlogged else ""

    def unchecked_setting(self, cursor: Cursor) -> str:
        for name, bad in (
            ("data_checksums", "off"),
            ("ignore_checksum_failure", "on"),
            ("zero_damaged_pages", "on"),
        ):
            cursor.execute("SELECT current_setting(%(name)s, true)", {"name": name})
            if cursor.fetchone() == (bad,):
                return f"{name}={bad}"
        return ""

    def _settings(self) -> dict[str, str]:
        """Settings of libpq for TLS and the name."""
        found = {} if self._application_name is None else {"application_name": self._application_name}
        if self._tls is None:
            return found  # libpq's default: TLS if the server has it
        found["sslmode"] = "verify-full" if self._tls.verify else "require"
        if self._tls.verify:
            found["sslrootcert"] = self._tls.ca_certs or "system"
        if self._tls.certfile is not None:
            found |= {"sslcert": self._tls.certfile, "sslkey": self._tls.keyfile or self._tls.certfile}
        return found

    def cursor(self, connection: Any) -> Cursor:
        if not isinstance(connection, psycopg.Connection):
            raise TypeError
        return _CursorPerStatement(connection)

    async def async_cursor(self, connection: Any) -> Any:
        if not isinstance(connection, psycopg.AsyncConnection):
            raise TypeError
        return psycopg.AsyncCursor(connection, row_factory=tuple_row)

    def commits_alone(self, connection: Any) -> bool:
        """See Dialect."""
        idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return bool(connection.autocommit and idle)

    def fileno(self, connection: Any) -> int | None:
        found: int = connection.fileno()
        return found

    def check(self, connection: Any, seconds: float) -> None:
        """See Dialect. By libpq's own functions: execute() of psycopg has no time-out."""
        server, until = connection.pgconn, SYSTEM_CLOCK.monotonic() + seconds
        server.send_query(b"SELECT 1")
        while True:
            while server.is_busy():
                if not is_readable(server.socket, max(0, until - SYSTEM_CLOCK.monotonic())):
                    raise psycopg.OperationalError("the connection was idle, and the server is silent now")
                server.consume_input()
            result = server.get_result()
            if result is None:
                return
            if result.status != psycopg.pq.ExecStatus.TUPLES_OK:
                raise psycopg.OperationalError(result.get_error_message())

    def keeps(self, cursor: Cursor) -> bool:
        """See Dialect. A cursor is kept because it knows how types are converted; its result is freed."""
        cursor.free_result()
        return True

    def begin(self, cursor: Cursor) -> None:
        cursor.execute("BEGIN")

    def fate(self, error: BaseException) -> Fate | None:
        if not isinstance(error, psycopg.Error):
            return None
        state = error.sqlstate
        if state is None:
            text = str(error)
            if "authentication failed" in text or "no password supplied" in text or is_refusal(error):
                return Fate.DENIED
            if "does not exist" in text or "no pg_hba.conf entry" in text:
                return Fate.REFUSED  # libpq has no SQLSTATE for what it met while it connected
            return Fate.UNKNOWN if isinstance(error, psycopg.OperationalError) else Fate.REFUSED
        if state.startswith(_DENIED_STATES):
            return Fate.DENIED
        if state.startswith(_UNDONE_STATES):
            return Fate.UNDONE
        if state.startswith(_MISPLACED_STATES):
            return Fate.MISPLACED
        return Fate.UNKNOWN if state.startswith(_BROKEN_STATES) else Fate.REFUSED

    def is_damage(self, error: BaseException | None) -> bool:
        return isinstance(error, psycopg.Error) and error.sqlstate in _DAMAGE_STATES

    def defaults(self) -> dict[str, Any]:
        return {"channel": self.channel}

    def refs(self, takes: Sequence[TakeRef]) -> dict[str, Any]:
        ids, numbers = zip(*takes, strict=True) if takes else ((), ())
        return {"ids": _array(ids), "takes": _array(numbers)}

    def ids(self, ids: Sequence[int | str]) -> Any:
        return _array(ids)

    def put(
        self,
        cursor: Cursor,
        parameters: Parameters,
        rows: Sequence[NewRow],
        ids: Sequence[int] | None = None,
    ) -> list[int]:
        bodies, keys, headers, delays, priorities, digests = _columns(rows)
        groups = [row.group for row in rows] if any(row.group for row in rows) else None
        numbers = groups and parameters["in_groups"]
        name = "put" if ids is None else "put_numbered"
        name = "put_new" if "new_keys" in parameters else name
        with suppress(psycopg.errors.UniqueViolation) if name == "put_new" else nullcontext():
            cursor.execute(
                self.sql[name],
                {
                    **parameters,
                    "ids": ids and _array(ids),
                    "bodies": bodies,
                    "keys": keys,
                    "headers": headers,
                    "delays": delays,
                    "priorities": priorities,
                    "digests": digests,
                    "group_ids": [group_id(parameters, row) for row in rows] if numbers else None,
                    "groups": groups,
                    "behind": is_behind(parameters, rows) if numbers else None,
                },
            )
            return [one for (one,) in cursor.fetchall()]
        return []

    def claim_keys(self, cursor: Cursor, parameters: Parameters, keys: Sequence[str]) -> list[DedupKey]:
        cursor.execute(self.sql["claim_keys"], {**parameters, "keys": _array(keys)})
        return [DedupKey(*row) for row in cursor.fetchall()]

    def take(self, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool) -> Picked:  # noqa: ARG002
        """See Dialect. The statement reads `late` from the parameters."""
        return picked(cursor, self.sql, parameters, for_good=for_good)

    def remove_twins(self, cursor: Cursor, parameters: Parameters, digests: Sequence[bytes]) -> None:
        self.change(cursor, "remove_twins", {**parameters, "digests": [*digests]})

    def pass_time(self, cursor: Cursor, parameters: Parameters) -> int:
        return self.change(cursor, "pass_time", {**parameters, "limit": CHUNK})

    def change(self, cursor: Cursor, name: str, parameters: Parameters) -> int:
        cursor.execute(self.sql[name], parameters)
        changed: int = cursor.rowcount
        return changed


def _columns(rows: Sequence[NewRow]) -> tuple[list[bytes] | list[bytes | None] | str | None, ...]:
    """The fields of rows as arrays, one per column; None for a column of defaults: unnest() gives NULL.

    Raises MessageError for more bytes than the server takes at once.
    """
    bodies, keys, headers, delays, priorities, digests, *_ = zip(*rows, strict=True)
    stored_headers = [headers_bytes(one) for one in headers] if any(headers) else None
    variable = (bodies, filter(None, keys), filter(None, stored_headers or ()))
    total = len(rows) * _ROW_BYTES + sum(map(len, chain.from_iterable(variable)))
    if total > MAX_STATEMENT_BYTES:
        raise MessageError(
            f"messages: {total} bytes at once are more than PostgreSQL takes, {MAX_STATEMENT_BYTES}; "
            "send fewer of them"
        )
    return (
        list(bodies),
        list(keys) if any(key is not None for key in keys) else None,
        stored_headers,
        _array(delays) if any(delays) else None,
        _array(priorities) if any(priorities) else None,
        list(digests) if any(digests) else None,
    )


def _array(numbers: Iterable[int | str]) -> str:
    """An array as text, which is made faster than the binary form, and has one type for all numbers."""
    return f"{{{','.join(map(str, numbers))}}}"


def _prepare(connection: Any, _: Any) -> None:
    connection.autocommit = True
    connection.prepare_threshold = 1
    with connection.cursor() as cursor:
        for setting in SESSION:
            cursor.execute(setting)
