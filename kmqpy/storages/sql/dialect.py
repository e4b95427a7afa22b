"""`Dialect`, the protocol of the operations that differ between databases, and code that dialects share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import sqlalchemy

from kmqpy.core.int64 import INT64_MAX
from kmqpy.message import Headers
from kmqpy.queue import Capabilities
from kmqpy.storages.damage import replace_unreadable_headers
from kmqpy.storages.engine import MessageRow, NewRow, TakeRef
from kmqpy.storages.sql.statements import Names, statements
from kmqpy.storages.sql.tables import DialectName
from kmqpy.storages.tls import Tls

Cursor = Any
"""A DB-API cursor, whose rows are tuples."""
Parameters = Mapping[str, Any]

CHUNK = 10_000
"""The most rows whose delays or leases have ended that one pass_time() makes ready or dead; SqlEngine calls
pass_time() again for the rest."""
MAX_BODY_BYTES = 2**28
"""The largest body: it is copied several times on its way, and databases take a gigabyte at most."""


class Fate(Enum):
    """The outcome of a transaction that failed."""

    UNDONE = "undone"  # it did not happen, and may be tried again
    UNKNOWN = "unknown"  # the connection broke; it may have happened
    MISPLACED = (
        "misplaced"  # it did not happen: this session can't write; a new connection may lead elsewhere
    )
    REFUSED = "refused"  # it did not happen, and would not the next time
    DENIED = "denied"  # the user lacks the right, or was not authenticated


class Picked(NamedTuple):
    """The result of a take: rows in order. If there are none, the state of the queue just afterwards.

    now_ms        the time by the storage's clock
    due_ms        when the next delay or lease ends; None: none ends, or the take has rows
    has_ready     True: the queue has ready rows that the take did not find, because other takers had locked
                  them, or because they have just become ready
    waiting       the groups of rows that the take has let wait behind others'
    """

    rows: Sequence[MessageRow]
    now_ms: int
    due_ms: int | None = None
    queue_exists: bool = True
    has_ready: bool = False
    waiting: Sequence[int] = ()

    @property
    def is_due(self) -> bool:
        """True if a delay or lease has ended that pass_time() has not carried out yet."""
        return self.due_ms is not None and self.due_ms <= self.now_ms


class DedupKey(NamedTuple):
    """A dedup key that is locked.

    message    the id of its message, or of the one that it is to have; 0: it has none yet
    in_window  whether its window has not ended
    is_there   whether its message is there, and no dead letter; None: the statement could not tell
    is_new     whether it was stored now, with the id of its message to be
    """

    key: str
    message: int
    in_window: bool
    is_there: bool | None
    is_new: bool


class Dialect(Protocol):
    """The operations that differ between databases, one class for each kind of database.

    driver            the packages of drivers whose connections are used, for errors
    is_one_statement  whether put() and take() are one statement each, which needs no transaction around it
    waits_ms          a taker that waits looks again by itself after this many ms at most
    """

    name: DialectName
    driver: str
    capabilities: Capabilities
    is_one_statement: bool
    waits_ms: int

    @property
    def sql(self) -> Mapping[str, str]:
        """The statements by name."""
        ...

    def engine(self) -> sqlalchemy.Engine:
        """A pool of connections; does not connect yet."""
        ...

    def cursor(self, connection: Any) -> Cursor:
        """A cursor on a connection of the driver; raises TypeError for any other object."""
        ...

    async def async_cursor(self, connection: Any) -> Any:
        """The same on a connection of an asynchronous driver, whose cursor has the methods as coroutines."""
        ...

    def commits_alone(self, connection: Any) -> bool:
        """Return True if the next statement on a connection of a driver commits by itself."""
        ...

    def fileno(self, connection: Any) -> int | None:
        """The socket of a connection; None: the database has no server."""
        ...

    def check(self, connection: Any, seconds: float) -> None:
        """Ask the server for a sign of life; raises an error of the driver if none comes within `seconds`."""
        ...

    def lossy_setting(self, cursor: Cursor) -> str:
        """See Capabilities.lossy_setting.

        Raises ConfigError for a server that loses confirmed writes even without a crash.
        """
        ...

    def unchecked_setting(self, cursor: Cursor) -> str: ...

    def keeps(self, cursor: Cursor) -> bool:
        """Return True if the next transaction on the connection is to use this cursor, not a new one."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Begin a transaction for several statements; without it, each statement commits by itself."""
        ...

    def fate(self, error: BaseException) -> Fate | None:
        """The outcome that an error of the driver implies; None for an error from elsewhere."""
        ...

    def is_damage(self, error: BaseException | None) -> bool:
        """Return True for an error of the driver that says that data is damaged."""
        ...

    def defaults(self) -> dict[str, Any]:
        """Parameters of every statement."""
        ...

    def refs(self, takes: Sequence[TakeRef]) -> dict[str, Any]:
        """Parameters with the ids and numbers of takes."""
        ...

    def ids(self, ids: Sequence[int | str]) -> Any:
        """The value of the parameter :ids of `redrive_ids`."""
        ...

    def put(
        self,
        cursor: Cursor,
        parameters: Parameters,
        rows: Sequence[NewRow],
        ids: Sequence[int] | None = None,
    ) -> list[int]:
        """Insert rows, and return their ids; no ids if the queue does not exist.

        ids  what claim_keys() has returned for the rows
        """
        ...

    def claim_keys(self, cursor: Cursor, parameters: Parameters, keys: Sequence[str]) -> list[DedupKey]:
        """Store dedup keys that are not there, and lock all until the transaction ends.

        Their order is that of the messages, which may get ids here: those of new keys.
        """
        ...

    def take(self, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool) -> Picked:
        """Take rows; `for_good`: delete them.

        Unless `late`, it takes no rows while a delay or lease has ended that pass_time() has not carried out.
        """
        ...

    def remove_twins(self, cursor: Cursor, parameters: Parameters, digests: Sequence[bytes]) -> None:
        """Delete ready rows with these digests."""
        ...

    def pass_time(self, cursor: Cursor, parameters: Parameters) -> int:
        """Make rows ready or dead whose delays or leases have ended, CHUNK at most; returns how many."""
        ...

    def change(self, cursor: Cursor, name: str, parameters: Parameters) -> int:
        """Execute the statement `name`, which changes rows; returns how many it changed."""
        ...


class ServerDialect:
    """What the dialects of databases with a server share: where it is, and how connections to it are made."""

    name: DialectName
    drivername: str

    def __init__(
        self,
        url: sqlalchemy.URL,
        names: Names,
        tls: Tls | None = None,
        application_name: str | None = None,
        **pool: Any,
    ) -> None:
        self._tls = tls
        self._application_name = application_name
        self._url = url.set(drivername=self.drivername)
        self._pool = pool
        self._tables = [*names.qualified.values()]
        self.sql: Mapping[str, str] = statements(self.name, names)


def picked(cursor: Cursor, sql: Mapping[str, str], parameters: Parameters, *, for_good: bool) -> Picked:
    """Take rows by one statement. If it finds none, read the state of the queue by another."""
    cursor.execute(sql["take_for_good" if for_good else "take"], parameters)
    rows = message_rows(cursor.fetchall())
    if rows:
        return Picked(rows, rows[0].until_ms - parameters["lease_ms"])
    return situation(cursor, sql, parameters)


def take_collapsed(
    dialect: Dialect, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool
) -> Picked:
    """Take rows of a queue that collapses: of ready rows that share a digest the first; delete the others.

    One taker at a time: two could each pick one of such rows. A row that a transaction of the application has
    locked is left for later takes.
    """
    sql, limit = dialect.sql, parameters["limit"]
    cursor.execute(sql["take_turn"], parameters)
    now = situation(cursor, sql, parameters)
    if not late and now.is_due:
        return now
    rows: list[MessageRow] = []
    while len(rows) < limit:
        cursor.execute(sql["pick"], {**parameters, "limit": limit - len(rows), "late": 1})
        found = sorted(cursor.fetchall(), key=_ORDER)
        if not found:
            break
        first = {digest: row_id for row_id, *_, digest in reversed(found) if digest is not None}
        chosen = [message_row(one[:-1]) for one in found if one[-1] is None or first[one[-1]] == one[0]]
        ids = dialect.ids([row.id for row in chosen])
        dialect.change(
            cursor, "take_picked_for_good" if for_good else "take_picked", {**parameters, "ids": ids}
        )
        if first:
            dialect.remove_twins(cursor, parameters, [*first])
        rows += chosen
    return Picked(just_taken(rows, now, parameters), now.now_ms) if rows else now


def just_taken(rows: Sequence[MessageRow], now: Picked, parameters: Parameters) -> list[MessageRow]:
    """Rows as they are after the take, which were read before it."""
    until_ms = now.now_ms + parameters["lease_ms"]
    return [row._replace(take=row.take + 1, since_ms=now.now_ms, until_ms=until_ms) for row in rows]


def situation(cursor: Cursor, sql: Mapping[str, str], parameters: Parameters) -> Picked:
    """The state of a queue, as the result of a take that found no rows."""
    cursor.execute(sql["situation"], parameters)
    now_ms, due_ms, exists, has_ready = cursor.fetchone()
    return Picked([], now_ms, due_ms, bool(exists), bool(has_ready))


def message_row(columns: Sequence[Any]) -> MessageRow:
    """The row of the columns `statements.COLUMNS`."""
    (
        row_id,
        take,
        body,
        key,
        headers,
        minus_priority,
        requeues,
        enqueued_ms,
        first_enqueued_ms,
        since_ms,
        until_ms,
        reason,
        place,
        group,
    ) = columns
    if not isinstance(body, bytes):
        body = str(body).encode()  # a length, of dead_rows_without_bodies
    return MessageRow(
        row_id,
        take,
        body,
        key,
        () if headers is None else headers_of(headers),
        max(0, -minus_priority),  # or a rank, of group_statements.py
        requeues,
        enqueued_ms,
        first_enqueued_ms,
        since_ms,
        until_ms,
        reason,
        0,
        place,
        group,
    )


_ORDER = itemgetter(5, 12)  # minus_priority, place


def message_rows(found: Sequence[Sequence[Any]]) -> list[MessageRow]:
    """The rows in the order in which they are taken; RETURNING promises none."""
    return [message_row(one) for one in sorted(found, key=_ORDER)]


def is_behind(parameters: Parameters, rows: Sequence[NewRow]) -> list[int] | None:
    """By row, 1 if it waits behind another one of its group that is put with it; None: none does."""
    if not parameters["in_groups"]:
        return None
    seen: set[str] = set()
    found = []
    for row in rows:
        found.append(int(row.group in seen and not row.delay_ms))
        if row.group is not None and not row.delay_ms:
            seen.add(row.group)
    return found


def group_id(parameters: Parameters, row: NewRow) -> int | None:
    """The number of a row's group, in a queue in which groups matter."""
    if row.group is None or not parameters["in_groups"]:
        return None
    # By the queue's name: its number is another one after a restore.
    digest = blake2b(f"{parameters['name']}\0{row.group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % INT64_MAX


def headers_bytes(headers: Headers) -> bytes | None:
    """Headers as they are stored: JSON, the values as Latin-1 text. None: there are none."""
    if not headers:
        return None
    pairs = [[name, None if value is None else value.decode("latin-1")] for name, value in headers]
    return json.dumps(pairs, separators=(",", ":")).encode()


def headers_of(data: bytes) -> Headers:
    """The reverse of headers_bytes(). Headers of another program that it can't read become empty."""
    try:
        return tuple(
            (_text(name), None if value is None else value.encode("latin-1"))
            for name, value in json.loads(data)
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return replace_unreadable_headers(error)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name of type {type(name).__name__}")
    return name
