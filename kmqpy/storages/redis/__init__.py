"""Queues on Redis (7 or newer) and Valkey: open_storage() opens `redis://user:password@host:6379/0`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kmqpy.core.settings import convert
from kmqpy.errors import ConfigError, MissingExtra
from kmqpy.queue import QueueUrl
from kmqpy.storages.stored_storage import URL_SETTINGS, StoredStorage
from kmqpy.storages.tls import TLS_SETTINGS, tls_of
from kmqpy.telemetry.base import Telemetry

if TYPE_CHECKING:
    from kmqpy.storages.redis.server import ServerSettings

_STORAGE_SETTINGS = ("prefix", "pool_size", "timeout_ms", "application_name", "unix_socket")


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None, *, engine: Any = None) -> StoredStorage:
    """Open the storage of a url with these settings; `rediss:` and `valkeys:` use TLS.

    - `prefix`: the text with which all keys begin; default `kmq`
    - `pool_size`: the most connections for commands; one more wakes threads that wait; default 10
    - `timeout`: a failed command is repeated for up to this time, then Unavailable; default 10s
    - `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_verify`: with TLS; see Tls
    - `application_name`: what the server calls the connections
    - `unix_socket`: the path of the server's socket, in place of an address: `redis:///0?unix_socket=…`

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.
        engine: A client or a pool of redis-py, of the application: the storage opens connections of its own
            to the same server, with the same user, database and TLS.

    Raises:
        ConfigError: An argument or setting is invalid.
        MissingExtra: A package is missing; the text says how to install it.
        Unavailable: The storage does not answer.
        AccessDenied: The server refuses the login, or the operation.
    """
    secure = url.scheme in ("rediss", "valkeys")
    url.refuse_unknown([*_STORAGE_SETTINGS, *(TLS_SETTINGS if secure else ()), *URL_SETTINGS])
    prefix = url.settings.get("prefix", "kmq")
    if not prefix or not prefix.isprintable() or set(prefix) & set("{} "):
        raise ConfigError(
            f"prefix: invalid prefix {prefix!r}: use printable characters other than spaces and {{}}"
        )
    try:
        from kmqpy.storages.redis.engine import RedisEngine
        from kmqpy.storages.redis.server import Server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise MissingExtra("redis", f"a queue on {url.scheme}:") from None
    server = Server(_server_settings(url, secure=secure, engine=engine))
    try:
        return StoredStorage(RedisEngine(server, prefix=prefix), telemetry=telemetry)
    except BaseException:
        server.close()
        raise


def _server_settings(url: QueueUrl, *, secure: bool, engine: Any = None) -> ServerSettings:
    from kmqpy.storages.redis.server import ServerSettings

    more = _limits(url)
    if engine is not None:
        return _as_the_application(url, engine, more)
    example = f"write it like {url.scheme}://user:password@host:6379/0?queue=name"
    host, colon, port = url.address.rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address without a port
        host, port = url.address, "6379"
    host = host.removeprefix("[").removesuffix("]")
    db = url.path.removeprefix("/") or "0"
    socket = url.settings.get("unix_socket")
    if socket is not None:
        if url.address or secure:
            raise ConfigError(
                "unix_socket: goes with neither an address nor TLS; write the url like redis:///0"
            )
        host = socket
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or ("," in host and socket is None):
        raise ConfigError(f"queue url: {url.address!r} is not the address of a server; {example}")
    if not (db.isascii() and db.isdecimal()):
        raise ConfigError(f"queue url: {url.path!r} is not the number of a database; {example}")
    name = url.settings.get("application_name")
    if name is not None and not (name.isascii() and name.isprintable() and name and " " not in name):
        raise ConfigError(f"application_name: {name!r}: Redis takes printable ASCII without spaces")
    return ServerSettings(
        host=host,
        port=int(port),
        db=int(db),
        user=url.user,
        password=url.password,
        tls=tls_of(url, wanted=True) if secure else None,
        application_name=name,
        is_socket=socket is not None,
        **more,
    )


def _as_the_application(url: QueueUrl, engine: Any, limits: dict[str, Any]) -> ServerSettings:
    """The settings of a client or pool of the application; raises ConfigError if kmqpy can't use it."""
    from redis.connection import ConnectionPool

    from kmqpy.storages.redis.server import ServerSettings

    pool = getattr(engine, "connection_pool", engine)
    if not isinstance(pool, ConnectionPool):
        raise ConfigError(
            f"engine: an object of type {type(engine).__name__} is neither a redis.Redis nor a ConnectionPool"
        )
    if url.address or url.user is not None or url.path.strip("/"):
        raise ConfigError(f"engine: it says where the server is; write the url as {url.scheme}:")
    given: dict[str, Any] = pool.connection_kwargs
    names = [name for name in given if name in _WAY_TO_A_SERVER or name.startswith("ssl_")]
    host, port = given.get("path") or given.get("host", "localhost"), given.get("port", 6379)
    return ServerSettings(
        host=host,
        port=int(port),
        as_given=(pool.connection_class, {name: given[name] for name in names}),
        **limits,
    )


_WAY_TO_A_SERVER = (
    "host",
    "port",
    "path",
    "db",
    "username",
    "password",
    "credential_provider",
    "client_name",
)
"""The arguments of redis-py's connections that say which server it is, and who connects; and ssl_…"""


def _limits(url: QueueUrl) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if "pool_size" in url.settings:
        more["pool_size"] = convert("pool_size", url.settings["pool_size"], int)
        if more["pool_size"] < 1:
            raise ConfigError(f"pool_size: {more['pool_size']!r} must be at least 1")
    if "timeout_ms" in url.settings:
        more["timeout_s"] = convert("timeout_ms", url.settings["timeout_ms"], int) / 1000
        if more["timeout_s"] <= 0:
            raise ConfigError("timeout_ms: it must be above 0")
    return more
