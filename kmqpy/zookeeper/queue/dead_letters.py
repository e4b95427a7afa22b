"""Lists, redrives and purges dead letters: items that a policy refused to hand out once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import NoAuthError, NoNodeError

from kmqpy.core.pieces import pieces
from kmqpy.core.settings import check_limit
from kmqpy.errors import ConfigError
from kmqpy.zookeeper.multi_read import DENIED, MISSING
from kmqpy.zookeeper.queue.layout import DeadName, QueuePaths, is_item, missing_queue
from kmqpy.zookeeper.queue.sessions import Reads, SessionWatch
from kmqpy.zookeeper.session import failure, unavailable

_REQUESTS_AT_ONCE = 100
"""DeadItems sends at most this many requests before it waits for the first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadItem:
    """An item that was handed out as often as the policy allows.

    Attributes:
        queue: The queue's name.
        name: The name that the item had in its queue; redrive() and purge() take it.
        body: What was put.
        died_ms: When the item became a dead letter, in ms since 1970 UTC by ZooKeeper's clock.
        taken: How often it was handed out; None if that is not known.
    """

    queue: str
    name: str
    body: bytes
    died_ms: int
    taken: int | None = None


class DeadItems:
    """Lists, redrives and purges the dead letters of one queue; made by ZkQueue.dead_letters(). Thread-safe.

    All methods raise Unavailable when ZooKeeper does not answer, and QueueNotFound when the queue is missing.
    An interrupted redrive() or purge() can be repeated: no dead letter is redriven twice.

    No dead letter holds up others. list() and redrive() leave out dead letters that this client may not read;
    if that leaves none to list or redrive, they raise AccessDenied. redrive() and purge() can't delete a dead
    letter below which somebody has made znodes; they raise ConfigError after they have moved or deleted the
    other dead letters.
    """

    def __init__(self, session: SessionWatch, reads: Reads, paths: QueuePaths) -> None:
        self._session = session
        self._reads = reads
        self._zk = session.zk
        self._paths = paths

    def list(self, limit: int = 100) -> list[DeadItem]:
        """Return dead letters: higher priorities first, then the oldest.

        Args:
            limit: The most to return.
        """
        check_limit(limit)
        queue, found = self._paths.queue, []
        denied: set[str] = set()
        with unavailable(self._zk):
            for names in pieces(self._names()[:limit], _REQUESTS_AT_ONCE):
                for name, body, stat in self._read(names, denied):
                    found.append(
                        DeadItem(queue=queue, name=name.item, body=body, died_ms=stat.ctime, taken=name.taken)
                    )
            if denied and not found:
                raise NoAuthError
        return found

    def size(self) -> int:
        """Return the number of dead letters."""
        with unavailable(self._zk):
            return len(self._names())

    def redrive(self, names: Iterable[str] | None = None) -> int:
        """Put dead letters, by default all, back as new items of the same priority; their takes count from 0.

        Returns how many it put back; a dead letter that is gone does not count.

        Args:
            names: DeadItem.name of each; default: all.
        """
        denied: set[str] = set()
        with unavailable(self._zk):
            groups = pieces(self._chosen(names), _REQUESTS_AT_ONCE)
            done = self._committed(self._redrives(some, denied) for some in groups)
            if denied and not done:
                raise NoAuthError
        return done

    def purge(self, names: Iterable[str] | None = None) -> int:
        """Delete dead letters, by default all; return how many. A dead letter that is gone does not count.

        Args:
            names: DeadItem.name of each; default: all.
        """
        with unavailable(self._zk):
            groups = pieces(self._chosen(names), _REQUESTS_AT_ONCE)
            return self._committed([self._removal(name) for name in some] for some in groups)

    def _redrives(self, names: Sequence[DeadName], denied: set[str]) -> Sequence[Any]:
        multis = []
        for name, body, _ in self._read(names, denied):
            multi = self._removal(name)
            multi.create(self._paths.new_item_like(name.item), body, sequence=True)
            multis.append(multi)
        return multis

    def _chosen(self, names: Iterable[str] | None) -> Sequence[DeadName]:
        if names is None:
            return self._names()
        if isinstance(names, str):  # its letters are no names
            names = [names]
        chosen = list(names)
        for name in chosen:
            if not isinstance(name, str) or not is_item(name):
                raise ConfigError(f"names: {name!r} is not the name of a dead letter, like item-0000000001")
        wanted = set(chosen)
        return [one for one in self._names() if one.item in wanted]

    def _names(self) -> Sequence[DeadName]:
        try:
            names = self._zk.get_children(self._paths.dead_letters)
        except NoNodeError:
            raise missing_queue(self._paths, self._paths.dead_letters) from None
        return sorted(filter(None, map(DeadName.read, names)), key=lambda name: name.place)

    def _read(self, names: Sequence[DeadName], denied: set[str]) -> Iterator[tuple[DeadName, bytes, Any]]:
        """Yield name, body and stat of dead letters that exist; add names of unreadable ones to `denied`."""
        found = self._reads.send([self._paths.dead_letter(name.znode) for name in names])()
        for name, one in zip(names, found, strict=True):
            if one is DENIED:
                denied.add(name.znode)
            elif one is not MISSING:
                yield name, *one

    def _removal(self, name: DeadName) -> Any:
        multi = self._zk.transaction()
        multi.delete(self._paths.dead_letter(name.znode))
        return multi

    def _committed(self, groups: Iterable[Sequence[Any]]) -> int:
        """Commit kazoo transactions, group by group; return how many of their dead letters still existed.

        The first refusal (there are znodes below a dead letter) is raised when all others are committed.
        """
        done = 0
        refused: Exception | None = None
        for multis in groups:
            for result in [multi.commit_async() for multi in multis]:
                error = failure(self._session.get(result))
                if error is None:
                    done += 1
                elif not isinstance(error, NoNodeError):
                    refused = refused or error
        if refused is not None:
            raise refused
        return done
