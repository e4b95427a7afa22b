"""Empties queues in ZooKeeper, even those with more items than their own consumers can list."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kazoo.client import KazooClient
from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    SessionExpiredError,
)

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError, QueueNotFound, Unfinished
from kmqpy.zookeeper.session import address, unavailable

_DELETIONS_AT_ONCE = 1_000
"""drain() sends at most this many deletions before it waits for the answers."""
_ATTEMPTS = 4
"""A listing or deletion whose answers are lost is sent this many times; then plan() or drain() raises
Unfinished."""
_RECONNECT_WAIT_S = 10.0
"""After a lost answer, the next attempt begins after this many seconds, or earlier with a connection."""
_LOST_ANSWER = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, OperationTimeoutError)
_UNIT_OF_WORK_PARTS = {"items", "locks", "meta", "dlq"}
"""The children of a queue of kmqpy's unit of work (kmqpy/zookeeper/queue/layout.py)."""
_STORAGE_PARTS = ("storage", "names", "queues", "ids")
"""Children of the root of a storage in ZooKeeper (kmqpy/storages/zookeeper/znodes.py)."""
_ITEM_PREFIXES = ("queue-", "item-", "entry-", "meta-", "qn-")
"""Names of items begin so: Curator's, kmqpy's, kazoo's, meta znodes of kmqpy, those of ZooKeeper's recipe."""
_LEAST_ADVISED_BYTES = 1_000_000
"""An error advises a jute.maxbuffer of 100 bytes for each child, but of at least this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The children of one znode that drain() removes, and those that stay.

    path     the znode; it stays itself
    names    the names of the children that drain() removes
    locked   the number of items that stay because a consumer has locked them
    foreign  the names of children that stay because these are no names of items
    """

    path: str
    names: tuple[str, ...]
    locked: int
    foreign: tuple[str, ...]


def plan(zk: KazooClient, path: str, *, lock_path: str | None = None, any_name: bool = False) -> list[Plan]:
    """Return what drain() would remove; removes nothing.

    `path` is the znode of a queue of Curator, kazoo or ZooKeeper's recipe, or of kmqpy's unit of work. Of the
    unit of work, items and their meta znodes are planned, without those that are locked. Of other queues,
    items with a lock in `lock_path` stay. With `any_name`, children of any name are planned.

    Raises ConfigError if `path` is not a queue or belongs to a storage of kmqpy's, QueueNotFound if there is
    no such znode, and Unfinished if the connection breaks each time that the children are listed: their list
    may be too large. Raises Unavailable.
    """
    _refuse_roots(path)
    _refuse_storages(zk, path)
    children = _children(zk, path)
    if set(children) & _UNIT_OF_WORK_PARTS and set(children) <= _UNIT_OF_WORK_PARTS:
        names = _children(zk, f"{path}/locks") if "locks" in children else []
        locks = {name.partition(".")[0][-10:] for name in names}  # the numbers of their items
        parts = [f"{path}/{part}" for part in ("items", "meta") if part in children]
        return [_planned(part, _children(zk, part), locks, any_name=any_name) for part in parts]
    locks = {name[-10:] for name in _children(zk, lock_path)} if lock_path else set()
    found = _planned(path, children, locks, any_name=any_name)
    if children and not found.names and not found.locked:
        raise ConfigError(
            f"PATH: {path!r} is not a queue: none of its {len(children)} children is named like an item "
            f"({', '.join(found.foreign[:3])} …)"
        )
    if found.foreign and not any_name:
        raise ConfigError(
            f"PATH: {path!r}: {len(found.foreign)} of its {len(children)} children are not named like items "
            f"({', '.join(found.foreign[:3])} …); is it a queue? With --any-name they are removed as well"
        )
    return [found]


def drain(zk: KazooClient, plans: list[Plan], progress: Callable[[int], None] = lambda _done: None) -> int:
    """Remove the planned znodes, and return how many it removed; `progress` gets the number after each 1,000.

    Raises Unfinished, with the number that was certainly removed, if the connection breaks again and again.
    plan() and drain() remove the rest then.
    """
    done = 0
    with unavailable(zk):
        for one in plans:
            for piece in pieces(one.names, _DELETIONS_AT_ONCE):
                try:
                    done += _delete(zk, one.path, piece)
                except _LOST_ANSWER as error:
                    raise Unfinished(
                        f"{one.path}: the connection to ZooKeeper at {address(zk)} broke again and again "
                        f"({type(error).__name__}); {done} were removed, run it again for the rest",
                        done,
                    ) from error
                progress(done)
    return done


def _refuse_roots(path: str) -> None:
    is_path = path.startswith("/") and not {"", ".", ".."}.intersection(path[1:].split("/"))
    if not is_path and path != "/":
        raise ConfigError(f"PATH: {path!r} must be the path of a znode, like /app/queue")
    if path == "/" or path.split("/")[1] == "zookeeper" or path in ("/kmq", "/zms"):
        raise ConfigError(f"PATH: {path!r} is not a queue; its znodes are not removed")


def _refuse_storages(zk: KazooClient, path: str) -> None:
    """Raise ConfigError if `path` is the root of a storage of kmqpy's (`zookeeper://…`), or below one.

    Without its ids and names, such a storage loses its queues. Raises Unavailable.
    """
    names = path.split("/")
    roots = ["/".join(names[:depth]) for depth in range(len(names), 1, -1)]
    if zk.chroot:  # it may be the root of a storage
        roots.append("")
    for root in roots:
        if all(_exists(zk, f"{root}/{part}") for part in _STORAGE_PARTS):
            hosts = address(zk).removesuffix(zk.chroot)
            url = shlex.quote(f"zookeeper://{hosts}{quote(zk.chroot + root)}")
            raise ConfigError(
                f"PATH: {path!r} belongs to a storage of kmqpy; empty one of its queues with: "
                f"kmq purge NAME --queue-url {url}"
            )


def _exists(zk: KazooClient, path: str) -> bool:
    with unavailable(zk):
        return _asked(zk, lambda: zk.exists_async(path)) is not None


def _asked(zk: KazooClient, request: Callable[[], Any]) -> Any:
    """Send a read, and again if its answer is lost; return the answer."""
    for attempt in range(_ATTEMPTS):
        try:
            return request().get(timeout=60)
        except _LOST_ANSWER:
            if attempt + 1 == _ATTEMPTS:
                raise
            _wait_until_connected(zk)
    raise AssertionError("not reached")


def _planned(path: str, children: list[str], locks: set[str], *, any_name: bool) -> Plan:
    named = [name for name in children if any_name or name.startswith(_ITEM_PREFIXES)]
    names = sorted(name for name in named if name[-10:] not in locks)
    foreign = sorted(set(children) - set(named))
    return Plan(path=path, names=tuple(names), locked=len(named) - len(names), foreign=tuple(foreign))


def _children(zk: KazooClient, path: str) -> list[str]:
    """List the children; a list that is too large ends the connection at each attempt, without an error."""
    count = 0
    with unavailable(zk):
        try:
            stat = _asked(zk, lambda: zk.exists_async(path))
            if stat is None:
                raise QueueNotFound(f"PATH: there is no znode {path!r}")
            count = stat.numChildren
            return list(_asked(zk, lambda: zk.get_children_async(path)))
        except _LOST_ANSWER as error:
            needed = max(_LEAST_ADVISED_BYTES, 100 * count)
            raise Unfinished(
                f"{path}: the connection to ZooKeeper at {address(zk)} breaks each time that its {count} "
                "children are listed. If something there limits the size of answers (jute.maxbuffer, a "
                f"proxy), raise that to {needed} bytes: start the servers with "
                f"SERVER_JVMFLAGS=-Djute.maxbuffer={needed}, then run this again"
            ) from error


def _wait_until_connected(zk: KazooClient) -> None:
    end = SYSTEM_CLOCK.monotonic() + _RECONNECT_WAIT_S
    while not zk.connected and SYSTEM_CLOCK.monotonic() < end:
        SYSTEM_CLOCK.sleep(0.05)


def _delete(zk: KazooClient, path: str, names: tuple[str, ...]) -> int:
    """Delete children and return how many; leave out those that are gone, or have children themselves.

    Each deletion is a request of its own, and many are under way: a single large request could exceed
    jute.maxbuffer. A child whose deletion happened, but whose answer was lost, is not counted.
    """
    done = 0
    for attempt in range(_ATTEMPTS):
        sent = [(name, zk.delete_async(f"{path}/{name}")) for name in names]
        again = []
        lost: KazooException | None = None
        for name, result in sent:
            try:
                result.get(timeout=60)
                done += 1
            except (NoNodeError, NotEmptyError):
                continue
            except _LOST_ANSWER as error:
                again.append(name)
                lost = error
        if lost is None:
            return done
        if attempt + 1 == _ATTEMPTS:
            raise lost
        names = tuple(again)
        _wait_until_connected(zk)
    return done
