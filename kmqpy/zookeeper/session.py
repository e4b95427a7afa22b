"""Makes ZooKeeper clients (of kazoo) that reconnect quickly, and turns kazoo's errors into those of kmqpy."""

from __future__ import annotations

import atexit
import logging
import math
import select
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionClosedRequireSaslError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import SASL, Auth, CloseInstance
from kazoo.security import ACL, CREATOR_ALL_ACL, Id, Permissions

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.first_contact import Service, note_answer, patience_s
from kmqpy.core.forks import ForkGuard
from kmqpy.core.green import green_library, tell_once
from kmqpy.errors import AccessDenied, ConfigError, MissingExtra, Unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity, check_zookeeper

log = logging.getLogger(__name__)

LOST_ANSWER = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, KazooTimeoutError)
"""After one of these errors, a request may have been executed or not."""
_POLL_S = 0.05
"""connect() checks at intervals of this many seconds whether the client is connected, or was refused."""
_AT_EXIT_S = 1.0
"""At the end of a process that has not stopped its client, ZooKeeper has this many seconds for an answer."""
_SESSION_PER_READ_TIMEOUT = 3 / 2
"""kazoo does not tell the granted session time-out, only its read time-out, which is two thirds of that."""
_PERMISSIONS = {
    "c": Permissions.CREATE,
    "d": Permissions.DELETE,
    "r": Permissions.READ,
    "w": Permissions.WRITE,
    "a": Permissions.ADMIN,
}
_DENIAL_TEXTS = {
    AuthFailedError: "the server does not accept the username or password; check those of zookeeper_security",
    SessionClosedRequireSaslError: "the server accepts only clients that log in; "
    "give zookeeper_security a username and password",
    InvalidACLError: "the server has not authenticated this client, so it can't reserve znodes for a user; "
    "check zookeeper_security, and which ways of authentication the server has",
    NoAuthError: "this user may not do that; check username and password of zookeeper_security, "
    "and the ACLs of the znodes",
}
"""The texts for the user, by error. These are the errors that another attempt would meet again."""


class Greeting(Protocol):
    """A function that sends requests over each new connection, before any others."""

    def __call__(self, zk: KazooClient, server: Any, timeout_s: float) -> None:
        """Called with each new connection to `server`; an exception ends this connection."""
        ...


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo ships no types
    """kazoo's handler of sockets and threads, with three changes.

    It gives one address up early enough to try the others within the session time-out; kazoo waits a whole
    session time-out. It does TLS itself: kazoo trusts the system's authorities, too, and leaves the
    socket open when TLS fails. It waits for sockets by poll(): kazoo makes a new epoll object for each wait,
    five for a request.
    """

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._guard = ForkGuard("this ZooKeeper client")

    def stop(self) -> None:  # kazoo calls it at the end of the process, too
        if not self._guard.inherited:
            super().stop()

    def select(self, readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
        if not hasattr(select, "poll"):  # on Windows
            return super().select(readers, writers, others, timeout)
        waiting, watched = select.poll(), {}
        for event, sockets in ((select.POLLIN, readers), (select.POLLOUT, writers)):
            for one in sockets:
                waiting.register(one, event)
                watched[one.fileno()] = one
        # Rounded up: a wait of less than a millisecond would be none at all. poll() also finds sockets with
        # an error or an end; the read or write that follows raises it.
        found = waiting.poll(None if timeout is None else math.ceil(max(0.0, timeout) * 1000))
        ready = [watched[descriptor] for descriptor, _ in found]
        return [one for one in readers if one in ready], [one for one in writers if one in ready], []

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        plain = {**kwargs, "timeout": self._connect_timeout_s, "use_ssl": False}
        made = super().create_connection(*args, **plain)
        if self._tls is None:
            return made
        try:
            return self._tls.wrap_socket(made, server_hostname=kwargs["hostname"])
        finally:
            made.close()  # wrap_socket() has taken its descriptor over, unless it failed


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt to connect failed. Not the exception itself, which would keep many objects alive.

    denied   the text for the user if another attempt is useless, else None
    at_once  whether one such failure is enough for check_access(), whatever other servers say
    """

    text: str
    denied: str | None
    at_once: bool


class _Client(KazooClient):  # type: ignore[misc]
    """A kazoo client that remembers failures to connect, and accepts a ZooKeeper with older data.

    A server refuses, without telling why, clients that have seen later changes (zxids) than the server has:
    for ever, if all servers were emptied or restored from an older backup. So after twice the session
    time-out without a connection, the client claims to have seen no changes. By then its session must be
    taken for expired; if it still exists, because no server ran meanwhile, the client goes on with it.

    In a forked child requests raise Forked, and stop() and close() do nothing: session and connection belong
    to the parent.
    """

    greeting: Greeting | None = None
    _at_exit: Callable[[], None] | None = None
    _zxid = 0
    ended = False
    """Whether end() was called: the process ends."""
    _zxid_forgotten = 0
    """The latest change seen before the client claimed to have seen none; else 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = ForkGuard("this ZooKeeper client")
        self.failures: list[_Failure] = []
        """The latest failed attempts since the last connection, at most one more than there are servers."""
        self.granted_s: float = self._session_timeout / 1000
        """The session time-out that the server granted, which may be shorter than the one asked for."""
        self.greeted = threading.Event()
        """Set when the greeting has succeeded once."""
        self._away_since: float | None = None
        """When the first attempt after the last connection began, in monotonic s."""
        connect = self._connection._connect

        def connect_and_remember(*address: Any) -> Any:
            self._forget_if_expired()
            try:
                made = connect(*address)
                if self.greeting is not None:
                    self.greeting(self, address, made[1] / 1000)
                    self.greeted.set()
            except Exception as error:
                at_once = isinstance(error, AuthFailedError)
                self._remember(_Failure(_cause_text(error), _denial_text(error), at_once))
                raise
            self.failures = []
            self._away_since = None
            self.granted_s = made[0] / 1000 * _SESSION_PER_READ_TIMEOUT
            return made

        self._connection._connect = connect_and_remember
        resolve = self._connection._expand_client_hosts

        def resolve_and_remember() -> Any:
            addresses = resolve()
            if not addresses:
                self._remember(_Failure("no host name can be resolved", None, at_once=False))
            return addresses

        self._connection._expand_client_hosts = resolve_and_remember
        read_response = self._connection._read_response

        def read_in_order(header: Any, *more: Any) -> Any:
            # After the session has moved to another connection, servers leave out answers. kazoo's thread
            # would end at the next answer, and then this client would get no answers any more.
            if not self._pending or self._pending[0][-1] != header.xid:
                raise ConnectionDropped("an answer is not that to the oldest request")
            return read_response(header, *more)

        self._connection._read_response = read_in_order

    @property
    def last_zxid(self) -> int:
        """The latest change that this client has seen; kazoo sends it to a server when it connects."""
        return self._zxid

    @last_zxid.setter
    def last_zxid(self, zxid: int) -> None:
        if zxid and self._zxid_forgotten:
            if zxid < self._zxid_forgotten:
                log.warning(
                    "ZooKeeper at %s has forgotten changes: it was emptied or restored from an older backup; "
                    "check the queues with kmq doctor, and create missing ones again",
                    address(self),
                )
            self._zxid_forgotten = 0
        self._zxid = zxid

    def _remember(self, failure: _Failure) -> None:
        self.failures = [*self.failures[-len(self.hosts) :], failure]

    def _forget_if_expired(self) -> None:
        """Claim to have seen no changes if there was no connection for twice the session time-out."""
        now = SYSTEM_CLOCK.monotonic()
        if self._away_since is None:
            self._away_since = now
        elif self._zxid and now - self._away_since > 2 * self.granted_s:
            self._zxid_forgotten, self._zxid = self._zxid, 0

    def _call(self, *request: Any) -> Any:
        self._guard.raise_if_inherited()
        return super()._call(*request)

    def start_async(self) -> Any:
        live = super().start_async()
        if self._at_exit is None:  # after kazoo's, so that it is called before
            self._at_exit = partial(_end_session, weakref.ref(self))
            atexit.register(self._at_exit)
        return live

    def stop(self) -> None:
        self._forget_at_exit()
        if not self._guard.inherited:
            super().stop()

    def end(self, timeout_s: float) -> None:
        """End the session like stop(), but wait for ZooKeeper at most `timeout_s`, and for no thread."""
        self._forget_at_exit()
        if self._guard.inherited or self._stopped.is_set():
            return
        self.ended = True
        self._stopped.set()  # so a later stop() does nothing
        self._queue.append((CloseInstance, None))
        with suppress(OSError):
            self._connection._write_sock.send(b"\0")
        self._connection.connection_stopped.wait(timeout_s)

    def close(self) -> None:
        if not self._guard.inherited:
            super().close()

    def _forget_at_exit(self) -> None:
        at_exit, self._at_exit = self._at_exit, None
        if at_exit is not None:
            atexit.unregister(at_exit)


def _end_session(client: weakref.ref[_Client]) -> None:
    """End the session of a client that the program did not close: its ephemeral znodes vanish.

    Called at the end of the process, while threads still run. Without it stop() would be called when the
    client is collected, and wait 10 s for a thread that runs no more.
    """
    found = client()
    if found is not None:
        found.end(_AT_EXIT_S)


class _NoSecrets(logging.Filter):
    """Keeps passwords out of kazoo's log: those in requests, and those that resume a session."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple("***" if isinstance(arg, Auth | SASL) else arg for arg in record.args)
        return "passwd" not in record.msg


_kazoo_log = logging.getLogger("kmqpy.zookeeper.session.kazoo")
_kazoo_log.addFilter(_NoSecrets())


def new_client(zookeeper: ZooKeeperConnection, session_timeout_ms: int = 6_000) -> KazooClient:
    """Return a KazooClient, not started yet, that reconnects quickly and for ever, and logs errors only.

    Raises ConfigError if a file of `zookeeper.security` can't be used, and MissingExtra if its scheme is
    "sasl" and the extra kmqpy[sasl] is not installed.
    """
    if green_library() == "eventlet":
        tell_once()
    hosts, security = check_zookeeper(zookeeper).hosts, zookeeper.security
    if _kazoo_log.level == logging.NOTSET:
        _kazoo_log.setLevel(logging.ERROR)
    attempts = 2 * max(1, len(hosts.split(",")))
    return _Client(
        hosts,
        timeout=session_timeout_ms / 1000,
        handler=_Handler(session_timeout_ms / 1000 / attempts, _tls(security)),
        connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 0.5},
        logger=_kazoo_log,
        **_settings(security),
    )


@contextmanager
def connect(
    zookeeper: ZooKeeperConnection,
    session_timeout_ms: int = 6_000,
    *,
    timeout: float = 10.0,
    greeting: Greeting | None = None,
) -> Iterator[KazooClient]:
    """Yield a started client, and stop it at the end of the block.

    A command that somebody typed waits less for the first answer.

    Args:
        zookeeper: Where ZooKeeper is.
        session_timeout_ms: After so long without its client ZooKeeper ends the session, in ms.
        timeout: Seconds to wait for ZooKeeper's first answer.
        greeting: Sends requests over each new connection, before any others.

    Raises:
        Unavailable: ZooKeeper does not answer within `timeout`; the text names the addresses.
        AccessDenied: ZooKeeper refuses the user, or the user may not use the znodes.
        ConfigError: An address or a setting of TLS is wrong.
    """
    zk = new_client(zookeeper, session_timeout_ms)
    zk.greeting = greeting
    try:
        connected = zk.start_async()
        deadline = SYSTEM_CLOCK.monotonic() + patience_s(Service.ZOOKEEPER, timeout)
        while not (connected.wait(_POLL_S) and (greeting is None or zk.greeted.wait(_POLL_S))):
            check_access(zk)
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise no_answer(zk)
        note_answer(Service.ZOOKEEPER)
        yield zk
    finally:
        stop(zk)


def check_access(zk: KazooClient) -> None:
    """Raise AccessDenied if ZooKeeper refuses this client, or this client refuses ZooKeeper.

    That is the case if a server rejected the password in the latest refused attempt. It is also the case if
    as many attempts were refused as there are servers, by a server or by this client (for its certificate).
    """
    failures: list[_Failure] = getattr(zk, "failures", [])
    denied = [failure for failure in failures if failure.denied]
    if denied and (len(denied) >= len(zk.hosts) or denied[-1].at_once):
        raise AccessDenied(f"ZooKeeper at {address(zk)}: {denied[-1].denied}")


def stop(zk: KazooClient) -> None:
    """End the session (its ephemeral znodes vanish) and free the client; never raises."""
    try:
        zk.stop()
        zk.close()
    except Exception as error:
        log.debug("stopping the ZooKeeper client: %r", error)


def has_ended(zk: KazooClient) -> bool:
    """Return True if the session was ended since the process ends: then errors of threads tell nothing."""
    return bool(getattr(zk, "ended", False))


def address(zk: KazooClient) -> str:
    """Return the address of ZooKeeper as `host:port[,host:port][/chroot]`."""
    return ",".join(f"{host}:{port}" for host, port in zk.hosts) + (zk.chroot or "")


def no_answer(zk: KazooClient) -> Unavailable:
    return Unavailable(
        f"ZooKeeper at {address(zk)} does not answer{last_failure(zk)}; check the address, and that it runs"
    )


@contextmanager
def unavailable(zk: KazooClient) -> Iterator[None]:
    """Turn kazoo's errors inside the block into kmqpy's, which name the address.

    Refusals become AccessDenied. ConfigError tells of a znode that can't be deleted because it has children.
    All others become Unavailable.
    """
    try:
        yield
    except KazooTimeoutError:
        check_access(zk)
        raise no_answer(zk) from None
    except KazooException as error:
        check_access(zk)
        if type(error) in _DENIAL_TEXTS:
            raise AccessDenied(f"ZooKeeper at {address(zk)}: {_DENIAL_TEXTS[type(error)]}") from error
        if isinstance(error, NotEmptyError):
            raise ConfigError(
                f"ZooKeeper at {address(zk)}: a znode to delete has znodes of others below it; delete them"
            ) from error
        detail = f"{type(error).__name__} {error}".strip()
        raise Unavailable(f"ZooKeeper at {address(zk)}: {detail}") from error


def gather(results: Iterable[Any], timeout: float) -> list[Any]:
    """Return the answers to pipelined requests, None if a znode is missing; wait `timeout` s for each."""
    values = []
    for result in results:
        try:
            values.append(result.get(timeout=timeout))
        except NoNodeError as missing:
            missing.__traceback__ = None  # `result` keeps it, and so the frames of our callers
            values.append(None)
    return values


def session_of(stat: Any) -> int | None:
    """Return the session that owns an ephemeral znode; None if there is no znode, or it is not ephemeral."""
    return None if stat is None else stat.ephemeralOwner or None


def failure(results: Iterable[Any]) -> Exception | None:
    """Return why a kazoo transaction was rolled back; None if it was committed."""
    errors = [result for result in results if isinstance(result, Exception)]
    causes = [e for e in errors if not isinstance(e, RolledBackError | RuntimeInconsistency)]
    return next(iter(causes or errors), None)


def _settings(security: ZooKeeperSecurity) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if security.username and security.scheme == "digest":
        found["auth_data"] = [("digest", f"{security.username}:{security.password}")]
    elif security.username:
        if find_spec("puresasl") is None:
            raise MissingExtra("sasl", 'zookeeper_security: scheme "sasl"')
        user = {"username": security.username, "password": security.password}
        found["sasl_options"] = {"mechanism": "DIGEST-MD5", **user}
    if security.authenticated:
        found["default_acl"] = [*CREATOR_ALL_ACL, *map(_acl, security.acl)]
    return found


def _acl(entry: str) -> ACL:
    scheme, _, rest = entry.partition(":")
    who, _, may = rest.rpartition(":")
    return ACL(sum(_PERMISSIONS[letter] for letter in set(may)), Id(scheme, who))


def _tls(security: ZooKeeperSecurity) -> ssl.SSLContext | None:
    if not security.encrypted:
        return None
    try:
        context = ssl.create_default_context(cafile=security.ca or None)
    except OSError as error:
        raise ConfigError(f"zookeeper_security.ca: {security.ca!r}: {_text(error)}") from None
    context.check_hostname = security.check_hostname
    try:
        if security.certificate:
            # With None, OpenSSL would ask for the password of an encrypted key at the terminal.
            context.load_cert_chain(security.certificate, security.key or None, security.key_password)
    except OSError as error:
        files = ", ".join(filter(None, (security.certificate, security.key)))
        raise ConfigError(
            f"zookeeper_security.certificate: {files}: {_text(error)}; check both files and key_password"
        ) from None
    return context


def _denial_text(error: BaseException) -> str | None:
    """Return for the user why one side refuses the other; None for an error that may pass by itself."""
    if type(error) in _DENIAL_TEXTS:
        return _DENIAL_TEXTS[type(error)]
    cause = _root_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        what = f"the server's certificate is not accepted ({_text(cause)})"
        return f"{what}; check zookeeper_security.ca and the host"
    if isinstance(cause, ssl.SSLError) and "alert" in str(cause).lower():
        return f"TLS failed ({_text(cause)}); check zookeeper_security.certificate and key"
    return None


def last_failure(zk: KazooClient) -> str:
    """Return why the last attempt to connect failed, in brackets; empty if it did not fail."""
    failures: list[_Failure] = getattr(zk, "failures", [])
    return f" ({failures[-1].text})" if failures else ""


def _cause_text(error: BaseException) -> str:
    root = _root_cause(error)
    dropped = isinstance(root, ssl.SSLError | ConnectionDropped | ConnectionResetError)
    return _text(root) + ("; check whether the address is one for TLS" if dropped else "")


def _root_cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _text(error: BaseException) -> str:
    return getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error) or repr(error)
