"""Sends commands to a Redis or Valkey server, repeats them after failures, and raises errors of kmqpy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.sockets import keepalive_options
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.storages.tls import Tls, is_refusal

_BACKOFF = Backoff(first=0.02, maximum=1.0)
_TEMPORARY_ERRORS = (BusyLoadingError, ReadOnlyError, ClusterDownError, TryAgainError)
"""With these errors a server says that it did not execute the command: it is still loading its data, it is a
replica (another server has taken over), or its cluster is down or is moving keys. call() tries again."""
_CHECK_AFTER_IDLE_S = 1.0
"""A connection idle for more seconds than this is checked before it is used."""
_CHECK_S = 1.5
"""A check without an answer for so many seconds has failed."""
_DENIED_ERRORS = (AuthenticationError, AuthorizationError, NoPermissionError)
_PLACEHOLDER = "kmqpy_library"
"""The name of the library in functions.lua, which _library() replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The address of a server, and how to connect to it.

    timeout_s  call() repeats a failed command for at most this many seconds, then it raises Unavailable
    pool_size  the most connections for commands; call() waits for a free one for up to `timeout_s`. Threads
               that wait for messages share one more
    tls        None: without
    is_socket  `host` is the path of a Unix socket
    as_given   a class of connections of redis-py and its arguments, instead of all others but those for time
    """

    host: str
    port: int = 6379
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    pool_size: int = 10
    tls: Tls | None = None
    application_name: str | None = None
    is_socket: bool = False
    as_given: tuple[type[Any], dict[str, Any]] | None = field(default=None, repr=False)


class Server:
    """A client of one server. Safe to use from any thread; connects at the first command."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._pool = BlockingConnectionPool(
            max_connections=settings.pool_size,
            timeout=settings.timeout_s,
            connection_class=self._kind(),
            **self._arguments(),
        )
        self._used: WeakKeyDictionary[AbstractConnection, float] = WeakKeyDictionary()
        self._broke_at = 0.0

    @property
    def name(self) -> str:
        """The address, for errors."""
        settings = self._settings
        return (
            f"Redis at {settings.host}" if settings.is_socket else f"Redis at {settings.host}:{settings.port}"
        )

    def connection(self) -> AbstractConnection:
        """A new connection of the caller's own, connected."""
        connection: AbstractConnection = self._kind()(**self._arguments())
        connection.connect()
        return connection

    def function(self, name: str, keys: tuple[str, ...], *arguments: Any, repeatable: bool = True) -> Any:
        """Call a function of functions.lua by its name there; load the library if the server lacks it.

        Raises the errors of call(). A ResponseError whose text begins with KMQ is for the caller to handle.
        """
        library, code = _library()
        command = ("FCALL", f"{library}_{name}", len(keys), *keys, *arguments)
        while True:
            try:
                return self.call(*command, repeatable=repeatable)
            except ResponseError as error:
                text = str(error)
                if text.startswith("KMQAGAIN"):  # more delays and leases have ended than one step carries out
                    continue
                if "Function not found" in text:  # the server is new, was emptied, or took over
                    self._load(code)
                    continue
                raise

    def call(self, *command: Any, repeatable: bool = True) -> Any:
        """Send a command; returns the answer.

        It sends the command again after a failure, for up to `timeout_s`; a command that is not `repeatable`
        only if the server has certainly not carried it out.

        Raises Unavailable; AccessDenied; ConfigError for keys that are not of kmqpy, or a node of a cluster;
        ResponseError for an error of functions.lua or a command that the server does not know.
        """
        until = SYSTEM_CLOCK.monotonic() + self._settings.timeout_s
        for attempts in count(1):
            try:
                return self._call(command)
            except _CallFailed as failed:
                left = until - SYSTEM_CLOCK.monotonic()
                if not (repeatable or failed.not_done) or left <= 0:
                    unsure = "" if failed.not_done else "; whether the server did it is not known"
                    text = str(failed.cause).removesuffix(".")
                    advice = _advice(failed.cause)
                    raise Unavailable(f"{self.name}: {text}{unsure}{advice}") from failed.cause
            SYSTEM_CLOCK.sleep(min(left, _BACKOFF.delay(attempts)))
        raise AssertionError("count() does not end")

    def close(self) -> None:
        self._pool.disconnect()

    def _load(self, code: str) -> None:
        try:
            self.call("FUNCTION", "LOAD", code)
        except ResponseError as error:
            if "already exists" not in str(error):
                raise ConfigError(f"{self.name}: it can't load the functions of kmqpy: {error}") from None

    def _call(self, command: tuple[Any, ...]) -> Any:
        try:
            connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise self._translated(error, not_done=True) from None
        try:
            self._check_idle(connection)
        except BaseException as error:
            connection.disconnect()
            self._pool.release(connection)
            if isinstance(error, RedisError | OSError):
                raise self._translated(error, not_done=True) from None
            raise
        try:
            connection.send_command(*command)
            return connection.read_response()
        except (RedisError, OSError) as error:
            if not isinstance(error, ResponseError) or isinstance(error, (*_TEMPORARY_ERRORS, MovedError)):
                connection.disconnect()  # the next connection may lead to the server that took over
                self._broke_at = SYSTEM_CLOCK.monotonic()
            raise self._translated(error, not_done=False) from None
        except BaseException:  # Ctrl-C: the answer must not be taken for that of another command
            connection.disconnect()
            raise
        finally:
            self._used[connection] = SYSTEM_CLOCK.monotonic()
            self._pool.release(connection)

    def _check_idle(self, connection: AbstractConnection) -> None:
        """Replace a connection if it is dead, or was idle when another one broke.

        Load balancers and firewalls forget idle connections silently.
        """
        used = self._used.get(connection)
        if used is None:  # it is new
            return
        if used > self._broke_at:
            if SYSTEM_CLOCK.monotonic() - used <= _CHECK_AFTER_IDLE_S:
                return
            try:
                connection.send_command("PING")
                connection.read_response(timeout=min(_CHECK_S, self._settings.timeout_s))
            except (RedisError, OSError):
                self._broke_at = SYSTEM_CLOCK.monotonic()
            else:
                return
        connection.disconnect()
        connection.connect()

    def _translated(self, error: Exception, *, not_done: bool) -> Exception:
        """The exception to raise for an error of redis-py."""
        text = str(error)
        if isinstance(error, _DENIED_ERRORS) or is_refusal(error):
            return AccessDenied(f"{self.name}: {text}")
        if isinstance(error, _TEMPORARY_ERRORS) or text.startswith("BUSY "):
            return _CallFailed(error, not_done=True)
        if isinstance(error, OutOfMemoryError):
            return Unavailable(f"{self.name}: its memory is full (maxmemory), nothing was done: {text}")
        if isinstance(error, MovedError):
            return ConfigError(
                f"{self.name}: it is a node of a Redis Cluster, and another node has the queue; kmqpy "
                "connects to one server only"
            )
        if text.startswith("WRONGTYPE"):
            return ConfigError(
                f"{self.name}: a key with a name of kmqpy's is not kmqpy's; choose another prefix, "
                f"or another database: {text}"
            )
        if text.startswith(("MISCONF", "NOREPLICAS")):
            return Unavailable(f"{self.name}: nothing was done: {text}")
        return error if isinstance(error, ResponseError) else _CallFailed(error, not_done=not_done)

    def _kind(self) -> type[Any]:
        if self._settings.as_given is not None:
            return self._settings.as_given[0]
        if self._settings.is_socket:
            return UnixDomainSocketConnection
        return Connection if self._settings.tls is None else SSLConnection

    def _arguments(self) -> dict[str, Any]:
        settings = self._settings
        found: dict[str, Any] = {
            "socket_timeout": settings.timeout_s,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),  # call() repeats
        }
        if not issubclass(self._kind(), UnixDomainSocketConnection):
            found["socket_connect_timeout"] = min(5.0, settings.timeout_s)
            found["socket_keepalive"] = True
            found["socket_keepalive_options"] = keepalive_options()
        if settings.as_given is not None:
            return {**found, **settings.as_given[1]}
        address = (
            {"path": settings.host} if settings.is_socket else {"host": settings.host, "port": settings.port}
        )
        return {
            **found,
            **address,
            "db": settings.db,
            "username": settings.user or None,
            "password": settings.password,
            "client_name": settings.application_name,
            **({} if settings.tls is None else _tls_arguments(settings.tls)),
        }


def _tls_arguments(tls: Tls) -> dict[str, Any]:
    tls.context()  # raises for bad files: redis-py would do so at each attempt to connect
    return {
        "ssl_ca_certs": tls.ca_certs,
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile or tls.certfile,
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.verify,
    }


class _CallFailed(Exception):
    """A command failed. `not_done`: it is certain that the server has not carried it out."""

    def __init__(self, cause: Exception, *, not_done: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.not_done = not_done


@cache
def _library() -> tuple[str, str]:
    """The name of the library, which contains a digest of its code, and the code."""
    code = (files(__package__) / "functions.lua").read_text(encoding="utf-8")
    name = f"kmqpy_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    return name, code.replace(_PLACEHOLDER, name)


def _advice(error: BaseException) -> str:
    if isinstance(error, ResponseError | BusyLoadingError):  # the server answers, so its address is right
        return ""
    if "No connection available" in str(error):  # what redis-py says when the pool is empty
        return "; all connections of this process are in use: raise pool_size"
    return "; check the address, and that the server runs"
