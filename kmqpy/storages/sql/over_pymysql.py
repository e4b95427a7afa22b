"""What the dialects of MariaDB and MySQL share, by PyMySQL.

An UPDATE returns no rows, so a take is several statements.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pymysql
import sqlalchemy
from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
from pymysql.cursors import Cursor as PlainCursor

# Not pymysql.err: with install_as_MySQLdb() Django replaces this attribute by a copy with other classes.
from pymysql.err import Error, InterfaceError

from kmqpy.core.pieces import pieces
from kmqpy.core.sockets import keep_alive
from kmqpy.errors import ConfigError, MessageError
from kmqpy.queue import Capabilities
from kmqpy.storages.engine import NewRow, TakeRef
from kmqpy.storages.sql.dialect import (
    CHUNK,
    Cursor,
    DedupKey,
    Fate,
    Parameters,
    Picked,
    ServerDialect,
    group_id,
    headers_bytes,
    is_behind,
    just_taken,
    message_rows,
    situation,
)
from kmqpy.storages.tls import is_refusal

_ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
_DURABILITY = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name REGEXP 'innodb_(flush|double)|log_bin$|sync_binlog|wsrep_on'",
    "SHOW GLOBAL STATUS LIKE 'innodb_redo_log_enabled'",  # of MySQL: ALTER INSTANCE DISABLE INNODB REDO_LOG
)
_FLUSH = "innodb_flush_log_at_trx_commit"
_LOSSY_VALUES = {
    _FLUSH: {"0", "2"},  # 3 is as good as 1; MariaDB has it
    "innodb_flush_method": {"NOSYNC"},
    "innodb_doublewrite": {"OFF", "0", "DETECT_ONLY"},  # a page that was half written can't be mended
    "innodb_redo_log_enabled": {"OFF"},
}
_SESSION = "SET SESSION sql_mode = %s, innodb_lock_wait_timeout = 5"
# The numbers of errors, of the server and of the client, by the Fate that they imply.
_DENIED_CODES = {1044, 1045, 1142, 1143, 1227, 1370, 1698, 3159}
_CONNECT_CODES = {2003, 2013, 2026}  # among them TLS that one end refuses
_UNDONE_CODES = {1020, 1040, 1203, 1205, 1213, 2002, 2003, 2005, 3101}  # 3101: Group Replication
_MISPLACED_CODES = {1047, 1290, 1792, 1836}  # read-only; 1047: a node that has left its Galera cluster
_BROKEN_CODES = {0, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1317, 1927, 2006, 2013, 2014, 4031}
_DAMAGE_CODES = {1034, 1194, 1712, 1812, 1877, 1932}
"""Of damaged pages, tables and indexes, and of tables whose files are gone (1812, 1932)."""
_MAX_INSERT_BYTES, _MAX_INSERT_ROWS = 3 * 2**20, 1_000
"""The most bytes and rows of one INSERT; put() sends the rest by others. A larger row has its own INSERT."""
_ROW_BYTES, _MARGIN_BYTES = 640, 2**16
"""What a row's statement has beside its values, and what a packet is to have beside the rows."""
MAX_MESSAGE_BYTES = 7 * 2**20
"""The largest message, in packets of 16 MiB (max_allowed_packet): a body is sent as hexadecimal digits."""
_DIGESTS_PER_QUERY = 500
"""MariaDB makes a subquery of a longer list (in_predicate_conversion_threshold), which reads all rows."""
_NO_TAKES = ((0, 0),)
"""Stands for an empty list, which SQL lacks: no row has the id 0."""
_ANSWER_TIMEOUT_S = 60.0
"""A connection without an answer for this many seconds (or pool_timeout, if that is longer) counts as broken.

Purges of large queues take long.
"""


class OverPyMySql(ServerDialect):
    """Implements Dialect but for what differs between MariaDB and MySQL, which subclasses say.

    sql_mode  that of sessions
    """

    driver = "PyMySQL (with asyncio asyncmy)"
    capabilities = Capabilities(
        collapse=True,
        groups=True,
        fair=True,
        dedup=True,
        retry_delays=True,
        transactions=True,
        max_body_bytes=MAX_MESSAGE_BYTES,
    )
    is_one_statement = False
    waits_ms = 200
    sql_mode: str
    _packet_bytes = 2**24

    def engine(self) -> sqlalchemy.Engine:
        connect_s = max(1.0, min(5.0, self._pool["pool_timeout"]))
        made = sqlalchemy.create_engine(
            self._url,
            connect_args={
                "charset": "utf8mb4",
                "connect_timeout": connect_s,
                "read_timeout": connect_s,  # until _prepare()
                **self._settings(),
            },
            **self._pool,
        )
        # Before SQLAlchemy asks the server what it is: that fails on one of the other scheme.
        sqlalchemy.event.listen(made, "connect", self._prepare, insert=True)
        return made

    def cursor(self, connection: Any) -> Cursor:
        if not isinstance(connection, pymysql.Connection):
            raise TypeError
        found: Any = connection.cursor(PlainCursor)
        return found

    async def async_cursor(self, connection: Any) -> Any:
        if not type(connection).__module__.startswith("asyncmy."):
            raise TypeError  # aiomysql can't escape bytes with a PyMySQL as new as ours
        return connection.cursor(importlib.import_module("asyncmy.cursors").Cursor)

    def commits_alone(self, connection: Any) -> bool:
        """See Dialect."""
        return connection.get_autocommit() and not connection.server_status & SERVER_STATUS_IN_TRANS

    def fileno(self, connection: Any) -> int | None:
        found: int = connection._sock.fileno()
        return found

    def check(self, connection: Any, seconds: float) -> None:
        usual_s, connection._read_timeout = connection._read_timeout, seconds
        connection.ping(reconnect=False)  # a connection that fails is not used any more
        connection._read_timeout = usual_s

    def lossy_setting(self, cursor: Cursor) -> str:
        found: dict[str, str] = {}
        for question in (*_DURABILITY, self.sql["other_engines"]):
            cursor.execute(question)
            found |= {name.lower(): str(value).upper() for name, value in cursor.fetchall()}
        if found.get("wsrep_on") == "ON":
            raise ConfigError(
                "queue url: the server is a node of a Galera cluster, where two writers lose each other's "
                "updates; use a server outside of it, or one with replicas"
            )
        for name, values in _LOSSY_VALUES.items():
            if (value := found.get(name)) in values:
                return f"{name}={value}"
        for table in self._tables:  # somebody altered it: a crash leaves it half written, or empty
            if engine := found.get(table.lower()):
                return f"{table}={engine}"
        # A commit that the binary log lacks after a crash is rolled back.
        if found.get("log_bin") == "ON" and (sync := found.get("sync_binlog", "unknown")) != "1":
            return f"sync_binlog={sync}"
        return "" if _FLUSH in found else f"{_FLUSH}=unknown"  # a proxy that answers by itself

    def unchecked_setting(self, cursor: Cursor) -> str:
        """See Dialect. Pages are checked unless the algorithm is `none` or `strict_none`."""
        cursor.execute("SHOW GLOBAL VARIABLES LIKE 'innodb_checksum_algorithm'")
        found = [f"{name}={value}" for name, value in cursor.fetchall() if "none" in str(value).lower()]
        return found[0] if found else ""

    def keeps(self, cursor: Cursor) -> bool:  # noqa: ARG002
        return False

    def begin(self, cursor: Cursor) -> None:
        cursor.execute("START TRANSACTION")

    def fate(self, error: BaseException) -> Fate | None:
        if not isinstance(error, Error):
            # PyMySQL's error for a way to log in that needs a package which is missing, and which it names.
            return Fate.DENIED if isinstance(error, RuntimeError) and "package is" in str(error) else None
        code = error.args[0] if error.args else None
        if code in _DENIED_CODES or (code in _CONNECT_CODES and is_refusal(error)):
            return Fate.DENIED
        if code in _UNDONE_CODES:
            return Fate.UNDONE
        if code in _MISPLACED_CODES:
            return Fate.MISPLACED
        broken = code in _BROKEN_CODES or isinstance(error, InterfaceError)
        return Fate.UNKNOWN if broken else Fate.REFUSED

    def is_damage(self, error: BaseException | None) -> bool:
        return isinstance(error, Error) and bool(error.args) and error.args[0] in _DAMAGE_CODES

    def _settings(self) -> dict[str, Any]:
        """Arguments of PyMySQL for TLS and the name; without TLS it connects without."""
        found: dict[str, Any] = {"ssl_disabled": True} if self._tls is None else {"ssl": self._tls.context()}
        if self._application_name is not None:
            found["program_name"] = self._application_name
        return found

    def defaults(self) -> dict[str, Any]:
        return {}

    def refs(self, takes: Sequence[TakeRef]) -> dict[str, Any]:
        ids = tuple(one.id for one in takes)
        return {
            "ids": ids or (0,),
            "any_ids": tuple(one.id for one in takes if one.is_any) or (0,),
            "takes": tuple(map(tuple, takes)) or _NO_TAKES,
            "order": ",".join(map(str, ids)),
        }

    def ids(self, ids: Sequence[int | str]) -> Any:
        return tuple(ids) or (0,)

    def put(
        self,
        cursor: Cursor,
        parameters: Parameters,
        rows: Sequence[NewRow],
        ids: Sequence[int] | None = None,
    ) -> list[int]:
        """See Dialect. `ids` come in any order, so the places are these numbers in the order of the rows."""
        if not cursor.execute(self.sql["lock_queue"], parameters):
            return []
        _, step = cursor.fetchone()
        put_row = self.sql["put_row" if ids is None else "put_numbered"]
        numbers = zip(ids or (), sorted(ids or ()), strict=True)
        new_ids: list[int] = []
        behind = iter(is_behind(parameters, rows) or [0] * len(rows))
        for some in _portions(rows, self.name, self._packet_bytes):
            values = [
                cursor.mogrify(
                    put_row,
                    {
                        **dict(zip(("id", "place"), next(numbers, ()), strict=False)),
                        "queue": parameters["queue"],
                        "at": at,
                        "delay_ms": row.delay_ms,
                        "priority": row.priority,
                        "key": row.key,
                        "headers": headers_bytes(row.headers),
                        "body": row.body,
                        "digest": row.digest,
                        "group_id": None if row.group is None else group_id(parameters, row),
                        "group": row.group,
                        "behind": next(behind),
                    },
                )
                for at, row in enumerate(some)
            ]
            cursor.execute(self.sql["put"].replace("{rows}", ",".join(values)))
            new_ids += self.new_ids(cursor, len(some), step)
        return new_ids

    def claim_keys(self, cursor: Cursor, parameters: Parameters, keys: Sequence[str]) -> list[DedupKey]:
        """See Dialect. What was inserted no statement tells, and ids come with the rows."""
        given = {**parameters, "keys": self.ids(keys), "listed": json.dumps(keys)}
        self.change(cursor, "claim_keys", given)
        cursor.execute(self.sql["keys"], given)
        return [DedupKey(*row) for row in cursor.fetchall()]

    def take(self, cursor: Cursor, parameters: Parameters, *, for_good: bool, late: bool) -> Picked:
        """See Dialect."""
        now = situation(cursor, self.sql, parameters)
        if not late and now.is_due:
            return now
        if not cursor.execute(self.sql["pick"], parameters):
            return now
        found = message_rows([columns for *columns, _ in cursor.fetchall()])
        ids = tuple(row.id for row in found)
        name = "take_picked_for_good" if for_good else "take_picked"
        cursor.execute(self.sql[name], {**parameters, "ids": ids})
        return Picked(just_taken(found, now, parameters), now.now_ms)

    def remove_twins(self, cursor: Cursor, parameters: Parameters, digests: Sequence[bytes]) -> None:
        for some in pieces(digests, _DIGESTS_PER_QUERY):
            cursor.execute(self.sql["twins"], {**parameters, "digests": tuple(some)})
            for ids in pieces(tuple(one for (one,) in cursor.fetchall()), CHUNK):
                self.change(cursor, "take_picked_for_good", {"ids": ids})

    def pass_time(self, cursor: Cursor, parameters: Parameters) -> int:
        if not cursor.execute(self.sql["due"], {**parameters, "limit": CHUNK}):
            return 0
        ids = tuple(one for (one,) in cursor.fetchall())
        return self.change(cursor, "pass_time", {**parameters, "ids": ids})

    def change(self, cursor: Cursor, name: str, parameters: Parameters) -> int:
        changed: int = cursor.execute(self.sql[name], parameters)
        return changed

    def check_server(self, version: str) -> None:
        """Raise ConfigError if a server of this version is not of this dialect."""
        raise NotImplementedError

    def new_ids(self, cursor: Cursor, count: int, step: int) -> Sequence[int]:
        """The ids of the `count` rows that the cursor has just inserted; `step` is between those of MySQL."""
        raise NotImplementedError

    def _prepare(self, connection: Any, _: Any) -> None:
        self.check_server(connection.get_server_info())
        keep_alive(connection._sock)
        connection.autocommit(True)  # noqa: FBT003 - a method of PyMySQL
        with connection.cursor() as cursor:
            cursor.execute(_ISOLATION)
            cursor.execute(_SESSION, (self.sql_mode,))
            cursor.execute("SELECT @@max_allowed_packet")
            (self._packet_bytes,) = cursor.fetchone()
        answer_s = max(_ANSWER_TIMEOUT_S, self._pool["pool_timeout"])
        connection._read_timeout = connection._write_timeout = answer_s


def _portions(rows: Sequence[NewRow], name: str, packet_bytes: int) -> Iterator[list[NewRow]]:
    """The rows in groups, one for each INSERT; raises MessageError for a row that is too large."""
    packet_bytes -= _MARGIN_BYTES
    most = min(MAX_MESSAGE_BYTES, (packet_bytes - _ROW_BYTES) // 2)
    portion: list[NewRow] = []
    size = 0
    for row in rows:
        more = len(row.body) + len(row.key or b"") + len(headers_bytes(row.headers) or b"")
        if more > most:
            advice = "" if most == MAX_MESSAGE_BYTES else "; its max_allowed_packet may be raised"
            raise MessageError(
                f"message: {more} bytes with key and headers are more than {name} takes, {most}{advice}"
            )
        more = 2 * more + _ROW_BYTES + 4 * len(row.group or "")
        if len(portion) >= _MAX_INSERT_ROWS or size + more > min(_MAX_INSERT_BYTES, packet_bytes):
            if portion:
                yield portion
            portion, size = [], 0
        portion.append(row)
        size += more
    yield portion
