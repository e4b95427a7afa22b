"""Emptying a queue in ZooKeeper, also one with more items than its own consumers can list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
from kmqpy.errors import ConfigError, QueueNotFound, Unfinished
from kmqpy.zookeeper.session import address, unavailable

_PIECE = 1_000
"""Deletions in flight at a time."""
_ATTEMPTS = 4
_WAIT_S = 10.0
_LOST = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, OperationTimeoutError)
_OUR_PARTS = {"items", "locks", "meta", "dlq"}
_PREFIXES = ("queue-", "item-", "entry-", "meta-", "qn-")
"""Prefixes of items of Curator, of kmqpy and ZkQueue, of kazoo, and of ZooKeeper's own recipe."""
_MANY_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The items that a drain removes.

    path     the znode whose children go; it stays itself
    names    those children
    locked   children that are being consumed, and stay
    foreign  children whose names are not those of a queue's items, and stay
    """

    path: str
    names: tuple[str, ...]
    locked: int
    foreign: tuple[str, ...]


def plan(zk: KazooClient, path: str, *, lock_path: str | None = None, any_name: bool = False) -> list[Plan]:
    """See what is there to remove; removes nothing.

    `path` is the znode of a queue of Curator, kazoo or ZooKeeper's recipe, or of kmqpy's unit of work (then
    its items and their meta go). Items with a lock in `lock_path` stay. With `any_name`, all names go.

    Raises ConfigError where `path` is no queue, QueueNotFound, and Unfinished when the list of children is
    larger than the servers and the network between let pass.
    """
    _refuse_roots(path)
    children = _children(zk, path)
    if set(children) & _OUR_PARTS and set(children) <= _OUR_PARTS:
        locks = _numbers(_children(zk, f"{path}/locks") if "locks" in children else [])
        parts = [f"{path}/{part}" for part in ("items", "meta") if part in children]
        return [_planned(part, _children(zk, part), locks, any_name=any_name) for part in parts]
    locks = {name[-10:] for name in _children(zk, lock_path)} if lock_path else set()
    found = _planned(path, children, locks, any_name=any_name)
    if children and not found.names and not found.locked:
        raise ConfigError(
            f"PATH: {path!r} is no queue: none of its {len(children)} children is named like an item "
            f"({', '.join(found.foreign[:3])} …)"
        )
    if found.foreign and not any_name:
        raise ConfigError(
            f"PATH: {path!r}: {len(found.foreign)} of its {len(children)} children are not named like items "
            f"({', '.join(found.foreign[:3])} …); is it a queue? With --any-name they are removed as well"
        )
    return [found]


def drain(zk: KazooClient, plans: list[Plan], progress: Callable[[int], None] = lambda _done: None) -> int:
    """Remove what was planned, in pieces; returns how many znodes. `progress` is told how many so far.

    Raises Unfinished, with the number that is certain, when the connection does not stay; run it again then.
    """
    done = 0
    with unavailable(zk):
        for one in plans:
            for piece in _pieces(one.names):
                try:
                    done += _delete(zk, one.path, piece)
                except _LOST as error:
                    raise Unfinished(
                        f"{one.path}: the connection to ZooKeeper at {address(zk)} broke again and again "
                        f"({type(error).__name__}); {done} were removed, run it again for the rest",
                        done,
                    ) from error
                progress(done)
    return done


def _refuse_roots(path: str) -> None:
    if not path.startswith("/") or "//" in path or (path.endswith("/") and path != "/"):
        raise ConfigError(f"PATH: {path!r} must be the path of a znode, like /app/queue")
    if path == "/" or path.split("/")[1] == "zookeeper" or path in ("/kmq", "/zms"):
        raise ConfigError(f"PATH: {path!r} is not a queue; its znodes are not removed")


def _planned(path: str, children: list[str], locks: set[str], *, any_name: bool) -> Plan:
    named = [name for name in children if any_name or name.startswith(_PREFIXES)]
    names = sorted(name for name in named if name[-10:] not in locks)
    foreign = sorted(set(children) - set(named))
    return Plan(path=path, names=tuple(names), locked=len(named) - len(names), foreign=tuple(foreign))


def _numbers(locks: list[str]) -> set[str]:
    return {name.partition(".")[0][-10:] for name in locks}


def _children(zk: KazooClient, path: str) -> list[str]:
    """List them; a list that does not get through ends the connection each time, without an error."""
    count = 0
    for attempt in range(_ATTEMPTS):
        with unavailable(zk):
            try:
                stat = zk.exists_async(path).get(timeout=60)
                if stat is None:
                    raise QueueNotFound(f"PATH: there is no znode {path!r}")
                count = stat.numChildren
                return list(zk.get_children_async(path).get(timeout=60))
            except _LOST as error:
                if attempt + 1 == _ATTEMPTS:
                    raise Unfinished(_too_large(zk, path, count)) from error
                _wait_until_connected(zk)
    raise AssertionError("not reached")


def _too_large(zk: KazooClient, path: str, count: int) -> str:
    return (
        f"{path}: the connection to ZooKeeper at {address(zk)} breaks each time that its {count} children "
        f"are listed. If something there limits the size of answers (jute.maxbuffer, a proxy), raise that to "
        f"{max(_MANY_BYTES, 100 * count)} bytes: start the servers with "
        f"SERVER_JVMFLAGS=-Djute.maxbuffer={max(_MANY_BYTES, 100 * count)}, then run this again"
    )


def _wait_until_connected(zk: KazooClient) -> None:
    end = SYSTEM_CLOCK.monotonic() + _WAIT_S
    while not zk.connected and SYSTEM_CLOCK.monotonic() < end:
        SYSTEM_CLOCK.sleep(0.05)


def _pieces(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(names), _PIECE):
        yield names[start : start + _PIECE]


def _delete(zk: KazooClient, path: str, names: tuple[str, ...]) -> int:
    """Delete children; those that are gone, or have children themselves, are passed over.

    One request each, many under way: a single large one is what jute.maxbuffer refuses.
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
            except _LOST as error:
                again.append(name)
                lost = error
        if lost is None:
            return done
        if attempt + 1 == _ATTEMPTS:
            raise lost
        names = tuple(again)
        _wait_until_connected(zk)
    return done
