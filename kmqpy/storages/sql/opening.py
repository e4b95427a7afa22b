"""Opens the storages of urls `postgresql:`, `mariadb:`, `mysql:` and `sqlite:`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.settings import check_addresses, convert
from kmqpy.errors import ConfigError, MissingExtra, QueueNotFound
from kmqpy.queue import QueueUrl
from kmqpy.storages.sql.statements import Names
from kmqpy.storages.stored_storage import URL_SETTINGS, StoredStorage
from kmqpy.storages.tls import TLS_SETTINGS, tls_of
from kmqpy.telemetry.base import Telemetry

try:
    import sqlalchemy

    from kmqpy.storages.sql.dialect import Dialect
    from kmqpy.storages.sql.engine import SqlEngine
    from kmqpy.storages.sql.sqlite import Sqlite
except ImportError as error:  # pragma: no cover
    if (error.name or "").startswith("kmqpy"):
        raise
    raise MissingExtra("sql", "queues in a SQL database") from None

_SERVER_SETTINGS = (*TLS_SETTINGS, "application_name", "unix_socket")
SETTINGS = ("prefix", "schema", "pool_size", "timeout_ms", *_SERVER_SETTINGS)
"""Settings of the storage in a url. `prefix` and `schema` name its tables, `pool_size` is the number of its
connections, and a failed transaction is repeated for at most `timeout_ms`. The others are of connections to a
server: how they use TLS, and `application_name`, what the server calls them."""
_MIN_POOL_SIZE = 2  # one connection reads the tables' columns while another one has their lock
_MAX_POOL_SIZE = 100


def open_storage(
    url: QueueUrl,
    telemetry: Telemetry | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    engine: sqlalchemy.Engine | None = None,
) -> StoredStorage:
    """Open the storage of `postgresql://user:password@host:5432/database` and the like, or `sqlite:///file`.

    It connects, and creates or migrates the tables if need be.

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.
        clock: Gives the time for leases in SQLite, which has no server.
        engine: As for storage_for().

    Raises:
        ConfigError: An argument or setting is invalid.
        Unavailable: The storage does not answer.
        AccessDenied: The server refuses the login, or the operation.
        MissingExtra: A package is missing; the text says how to install it.
        QueueNotFound: The url names a queue without `create=true`, and SQLite's file is missing.
    """
    url.refuse_unknown((*SETTINGS, *URL_SETTINGS))
    timeout_s = _timeout_ms(url) / 1000
    if url.queue and not convert("create", url.settings.get("create", False), bool):
        refuse_missing_file(url)
    names = Names.of(url.scheme, url.settings)
    return StoredStorage(
        SqlEngine(dialect_of(url, clock, engine), names, timeout_s=timeout_s), telemetry=telemetry
    )


def refuse_missing_file(url: QueueUrl) -> None:
    """Raise QueueNotFound if SQLite would make a new, empty file, and ConfigError for a bad url of SQLite."""
    if url.scheme != "sqlite":
        return
    dialect_of(url)  # raises for a bad url
    file = url.path[1:]
    try:
        Path(file).stat()
    except FileNotFoundError:
        raise QueueNotFound(
            f"queue url: there is no file {file!r}; check the path, or create it together with a queue: "
            "kmq queue create, or create=true in the url"
        ) from None
    except (OSError, ValueError):
        pass  # SQLite will say what is wrong


def dialect_of(
    url: QueueUrl, clock: Clock = SYSTEM_CLOCK, engine: sqlalchemy.Engine | None = None
) -> Dialect:
    """The dialect of a url, with a pool of the size in the url. Raises ConfigError, MissingExtra."""
    size = convert("pool_size", url.settings.get("pool_size", "10"), int)
    if not _MIN_POOL_SIZE <= size <= _MAX_POOL_SIZE:
        raise ConfigError(f"pool_size: {size} is not from {_MIN_POOL_SIZE} to {_MAX_POOL_SIZE}")
    pool: dict[str, Any] = {
        "pool_size": size,
        "max_overflow": 0,
        "pool_timeout": _timeout_ms(url) / 1000,
        "pool_use_lifo": True,
        "pool_reset_on_return": None,  # Connections has rolled back what was not committed
    }
    names = Names.of(url.scheme, url.settings)
    given = [name for name in _SERVER_SETTINGS if name in url.settings]
    if given and (engine is not None or url.scheme == "sqlite"):
        reason = "SQLite has no server" if engine is None else "the engine says how to connect"
        raise ConfigError(f"{given[0]}: {reason}; leave it out")
    if engine is None:
        return _dialect(url, _database(url), names, clock, pool)
    return _dialect(
        url, _database_of(engine, url), names, clock, {**pool, "creator": partial(_connect, engine)}
    )


def _timeout_ms(url: QueueUrl) -> int:
    timeout_ms: int = convert("timeout_ms", url.settings.get("timeout_ms", "10s"), int)
    if timeout_ms < 1:
        raise ConfigError(f"timeout_ms: {timeout_ms} must be at least 1")
    return timeout_ms


def _database_of(engine: object, url: QueueUrl) -> sqlalchemy.URL:
    """The database of an engine of the application; raises ConfigError if kmqpy can't use the engine."""
    if not isinstance(engine, sqlalchemy.Engine):
        raise ConfigError(f"engine: an object of type {type(engine).__name__} is not an engine of SQLAlchemy")
    if url.address or url.user is not None or url.path.strip("/"):
        raise ConfigError(f"engine: it says where the database is; write the url as {url.scheme}:")
    names, driver = _ENGINES[url.scheme]
    if engine.dialect.name not in names or engine.dialect.driver != driver:
        found = f"{engine.dialect.name}+{engine.dialect.driver}"
        raise ConfigError(f"engine: it is one for {found}; {url.scheme}: needs one for {names[0]}+{driver}")
    if url.scheme == "sqlite" and engine.url.database in (None, "", ":memory:"):
        raise ConfigError("engine: each connection would have a database of its own; use memory:")
    return engine.url


_ENGINES = {
    "postgresql": (("postgresql",), "psycopg"),
    **dict.fromkeys(("mariadb", "mysql"), (("mariadb", "mysql"), "pymysql")),
    "sqlite": (("sqlite",), "pysqlite"),
}
"""The names of SQLAlchemy's dialects, and the driver, that an engine for a scheme must have."""


def _connect(engine: sqlalchemy.Engine) -> Any:
    """Open a connection as the engine of the application does.

    It comes from a new pool like the engine's. The engine's own pool may give the connection that the
    application is using (StaticPool, SingletonThreadPool), or have none left.
    """
    proxy = engine.pool.recreate().connect()
    connection: Any = proxy.driver_connection
    proxy.detach()
    connection.rollback()
    return connection


def _database(url: QueueUrl) -> sqlalchemy.URL:
    """The database that a url names; raises ConfigError."""
    if url.scheme == "sqlite":
        if url.address or url.user is not None or url.path == "/" or not url.path.startswith("/"):
            raise ConfigError("queue url: write it like sqlite:///relative.db or sqlite:////absolute.db")
        if url.path[1:] == ":memory:":
            raise ConfigError("queue url: each connection would have a database of its own; use memory:")
        return sqlalchemy.URL.create("sqlite", database=url.path[1:])
    if not url.path.strip("/"):
        raise ConfigError(f"queue url: it names no database; write it like {url.scheme}://host/database")
    return sqlalchemy.URL.create(
        url.scheme,
        username=url.user,
        password=url.password,
        database=url.path.removeprefix("/"),
        **_place(url),
    )


def _place(url: QueueUrl) -> dict[str, Any]:
    """Where the server is, as arguments of sqlalchemy.URL; its query is given to the driver."""
    socket = url.settings.get("unix_socket")
    if socket is not None:
        if url.address:
            raise ConfigError(
                f"unix_socket: the url has an address, too; write it like {url.scheme}:///database"
            )
        if url.scheme != "postgresql":
            return {"query": {"unix_socket": socket}}
        folder, is_file, port = socket.partition("/.s.PGSQL.")  # libpq wants the folder and the port
        return {"host": folder, "port": int(port) if is_file and port.isdecimal() else None}
    check_addresses(url.address, "queue url", "host:5432")
    hosts, ports = zip(*map(_host_and_port, url.address.split(",")), strict=True)
    if len(hosts) == 1:
        return {"host": hosts[0], "port": ports[0]}
    if url.scheme != "postgresql":
        raise ConfigError(f"queue url: {url.scheme}: takes one address")
    numbers = ",".join(str(port or 5432) for port in ports)
    several = {"host": ",".join(hosts), "port": numbers, "target_session_attrs": "read-write"}
    return {"query": several}


def _dialect(
    url: QueueUrl, where: sqlalchemy.URL, names: Names, clock: Clock, pool: dict[str, Any]
) -> Dialect:
    if url.scheme == "sqlite":
        return Sqlite(where, names, clock, **pool)
    application = url.settings.get("application_name")
    try:
        if url.scheme == "postgresql":
            from kmqpy.storages.sql.postgresql import PostgreSql

            return PostgreSql(where, names, tls_of(url), application, **pool)
        if url.scheme == "mysql":
            from kmqpy.storages.sql.mysql import MySql

            return MySql(where, names, tls_of(url), application, **pool)
        from kmqpy.storages.sql.mariadb import MariaDb

        return MariaDb(where, names, tls_of(url), application, **pool)
    except ImportError as error:  # pragma: no cover
        if (error.name or "").startswith("kmqpy"):
            raise
        raise MissingExtra("sql", f"queues in {url.scheme}") from None


def _host_and_port(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, ""
    return host.strip("[]") or "127.0.0.1", int(port) if port else None
