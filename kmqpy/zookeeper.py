"""The ZooKeeper client as kmqpy uses it: bounded waits, quick reconnection, one clear error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError, RolledBackError, RuntimeInconsistency
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler

from kmqpy.errors import Unavailable

log = logging.getLogger(__name__)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo ships no types
    """Gives one address up in time to try the next within the session; kazoo waits a whole one."""

    def __init__(self, connect_timeout_s: float) -> None:
        super().__init__()
        self._connect_timeout_s = connect_timeout_s

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_connection(*args, **{**kwargs, "timeout": self._connect_timeout_s})


def new_client(
    hosts: str, session_timeout_ms: int = 6_000, settings: Mapping[str, Any] | None = None
) -> KazooClient:
    """A KazooClient that is not started yet, reconnects quickly and for ever, and logs errors only.

    `settings` are those of KazooClient (`auth_data`, `use_ssl`, `ca`, …), handed on untouched.
    """
    kazoo_log = logging.getLogger("kmqpy.zookeeper.kazoo")
    if kazoo_log.level == logging.NOTSET:
        kazoo_log.setLevel(logging.ERROR)
    attempts = 2 * max(1, len(hosts.split(",")))
    return KazooClient(
        hosts,
        timeout=session_timeout_ms / 1000,
        handler=_Handler(session_timeout_ms / 1000 / attempts),
        connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 0.5},
        logger=kazoo_log,
        **(settings or {}),
    )


@contextmanager
def connect(
    hosts: str,
    session_timeout_ms: int = 6_000,
    *,
    timeout: float = 10.0,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[KazooClient]:
    """A started client, stopped at the end of the block.

    Raises Unavailable, naming `hosts`, when ZooKeeper does not answer within `timeout` s.
    """
    zk = new_client(hosts, session_timeout_ms, settings)
    try:
        with unavailable(zk):
            zk.start(timeout)
        yield zk
    finally:
        stop(zk)


def stop(zk: KazooClient) -> None:
    """End the session (its ephemeral znodes vanish) and free the client; never raises."""
    try:
        zk.stop()
        zk.close()
    except Exception as error:
        log.debug("stopping the ZooKeeper client: %r", error)


def address(zk: KazooClient) -> str:
    """`host:port[,host:port][/chroot]`."""
    return ",".join(f"{host}:{port}" for host, port in zk.hosts) + (zk.chroot or "")


@contextmanager
def unavailable(zk: KazooClient) -> Iterator[None]:
    """Turn what kazoo raises inside the block into Unavailable, naming the address."""
    try:
        yield
    except KazooTimeoutError:
        raise Unavailable(f"ZooKeeper at {address(zk)} does not answer") from None
    except KazooException as error:
        detail = f"{type(error).__name__} {error}".strip()
        raise Unavailable(f"ZooKeeper at {address(zk)}: {detail}") from error


def gather(results: Iterable[Any], timeout: float) -> list[Any]:
    """The values of pipelined kazoo calls; None for each whose znode is missing."""
    values = []
    for result in results:
        try:
            values.append(result.get(timeout=timeout))
        except NoNodeError:
            values.append(None)
    return values


def failure(results: Iterable[Any]) -> Exception | None:
    """Why a kazoo transaction was rolled back; None when it was committed."""
    errors = [result for result in results if isinstance(result, Exception)]
    causes = [e for e in errors if not isinstance(e, RolledBackError | RuntimeInconsistency)]
    return next(iter(causes or errors), None)
