"""A unit of work: items taken from queues and put to queues, all of it or nothing."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, ConfigError, RolledBack, SessionExpired, UnknownOutcome
from kmqpy.message import MAX_PRIORITY
from kmqpy.zookeeper.packets import check_multi
from kmqpy.zookeeper.queue.layout import QueuePaths, transactions_path
from kmqpy.zookeeper.queue.policies import Meta, Refusal
from kmqpy.zookeeper.queue.sessions import LOST_ANSWER
from kmqpy.zookeeper.session import address, failure, unavailable

if TYPE_CHECKING:
    from kmqpy.zookeeper.queue.queue import ZkQueue

log = logging.getLogger(__name__)
_IN_ONE_REQUEST = 100
"""So many items are locked at once at most."""
_MISSING: tuple[bytes, Any] = (b"", None)
"""The data and stat of a znode that is not there."""


class Outcome(Enum):
    """The outcome of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"
    """A commit was interrupted, and ZooKeeper did not answer for a whole session time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item that a transaction has taken.

    taken  how often it was handed out, this time included; None where the policy does not count
    """

    queue: str
    name: str
    body: bytes
    taken: int | None = None


@dataclass(frozen=True, slots=True)
class _Take:
    """A lock that is ours or, after a lost answer, may be."""

    paths: QueuePaths
    name: str
    token: str
    has_meta: bool


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An item that can be locked.

    meta          what its meta znode is to say, where a policy counts
    meta_version  of the present one; None if there is none
    """

    take: _Take
    body: bytes
    meta: Meta
    meta_version: int | None

    @property
    def item(self) -> Item:
        taken = self.meta.taken if self.take.has_meta else None
        return Item(queue=self.take.paths.queue, name=self.take.name, body=self.body, taken=taken)


@dataclass(slots=True)
class _Work:
    takes: list[_Take] = field(default_factory=list)
    puts: list[tuple[str, bytes]] = field(default_factory=list)


class Transaction:
    """Made by ZkQueue.transaction(); thread-safe, bound to the session in which it began.

    Leaving the `with` block without commit() rolls back. A Ctrl-C inside commit() leaves a transaction whose
    rollback() still succeeds and says what happened; one inside rollback() ends that at once, and then
    the locks may stay until rollback() is called again or the session ends.
    """

    def __init__(self, queue: ZkQueue) -> None:
        self._queue = queue
        self._session = queue.session
        self._zk = queue.session.zk
        self._number = queue.session.number
        self._id = uuid.uuid4().hex
        self._work = _Work()
        self._committing = False
        self._mutex = threading.RLock()
        self.outcome: Outcome | None = None
        """None while it is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollback()

    def try_take(self, source: str) -> Item | None:
        """Lock the next item of queue `source` and return it; None if there is none.

        Raises SessionExpired, Unavailable, QueueNotFound; after any of them only rollback() is of use.
        """
        taken = self.try_take_many(source, 1)
        return taken[0] if taken else None

    def try_take_many(self, source: str, limit: int) -> list[Item]:
        """Lock up to `limit` of the next items of queue `source`, in few requests; raises as try_take().

        With strict_fifo they are locked one by one.
        """
        check_limit(limit)
        with self._mutex:
            self._check_open()
            taken: list[Item] = []
            while len(taken) < limit and (more := self._take_listed(source, limit - len(taken))):
                taken += more
            return taken

    def put(self, target: str, body: bytes, *, priority: int = 0) -> None:
        """Put an item to queue `target` when the transaction is committed; makes no network call.

        priority  0 to 9; a higher one is handed out first
        """
        if not isinstance(body, bytes):
            raise ConfigError(f"body: {type(body).__name__} is not bytes")
        if not 0 <= priority <= MAX_PRIORITY:
            raise ConfigError(f"priority: {priority} is not from 0 to {MAX_PRIORITY}")
        with self._mutex:
            self._check_open()
            self._work.puts.append((self._queue.paths(target).new_item(priority), body))

    def commit(self) -> None:
        """Delete what was taken and store what was put, in one step; once it returns, that has happened.

        After a lost connection it finds out whether it has. Raises RolledBack when nothing of it happened and
        never will (a lock was lost, a queue is not there), MessageError when it is too large for one request
        (nothing was sent, the transaction stays open), UnknownOutcome when ZooKeeper does not answer for a
        whole session time-out: then commit() again, or rollback(), finds out.
        """
        with self._mutex:
            if self.outcome is Outcome.COMMITTED:
                return
            if self.outcome is not None or not self._committing:
                self._check_open()
            multi = self._multi()
            check_multi(multi, self._queue.settings.max_packet_bytes, "commit")
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            resumed, self._committing = self._committing, True
            try:
                while resumed or not self._sent(multi):
                    if self._has_happened(deadline):
                        break
                    self._session.check(self._number)
                    resumed, multi = False, self._multi()  # it did not: the same again does no harm
            except SessionExpired as error:
                self.outcome = Outcome.ROLLED_BACK
                raise RolledBack(f"nothing was committed: {error}") from error
            except LOST_ANSWER as error:
                raise UnknownOutcome(
                    f"commit: ZooKeeper at {address(self._zk)} did not answer for "
                    f"{self._session.timeout_s:g} s; commit() again or rollback() tells whether it happened"
                ) from error
            except KazooException as error:
                self._committing = False
                self.rollback()
                raise RolledBack(f"nothing was committed: {self._reason(error)}") from error
            self._end(Outcome.COMMITTED)

    def rollback(self) -> Outcome:
        """Give back what was taken, forget what was put; returns what became of the transaction.

        That is COMMITTED if a commit() before it was interrupted and has happened. It always succeeds: the
        locks are removed or, if ZooKeeper does not answer for a session time-out, the session is given up,
        with which they end.
        """
        with self._mutex:
            if self.outcome is not None:
                return self.outcome
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            while not self._session.closed:
                try:
                    if self._committing and self._has_happened(deadline):
                        return self._end(Outcome.COMMITTED)
                    if self._number == self._session.number:
                        self._unlock(deadline)
                    return self._end(Outcome.ROLLED_BACK)
                except LOST_ANSWER:
                    if not self._session.wait_until_connected(self._number, deadline):
                        if SYSTEM_CLOCK.monotonic() < deadline:
                            continue  # the session is over, or closed: the locks are gone
                        break
            self._session.give_up(self._number)
            return self._end(Outcome.UNKNOWN if self._committing else Outcome.ROLLED_BACK)

    def _end(self, outcome: Outcome) -> Outcome:
        self.outcome = outcome
        self._queue.forget(self, self._node if outcome is Outcome.COMMITTED else None)
        return outcome

    @property
    def _node(self) -> str:
        return f"{transactions_path(self._queue.settings.root)}/{self._id}"

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise Closed(f"transaction: it was {self.outcome.value} already")
        if self._committing:
            raise Closed("transaction: a commit was interrupted; call commit() again, or rollback()")
        self._session.check(self._number)

    def _take_listed(self, source: str, limit: int) -> list[Item]:
        """Take up to `limit` items of one listing of the queue; none only if none of them is free."""
        own = {take.name for take in self._work.takes if take.paths.queue == source}
        names = (name for name in self._queue.candidates(source) if name not in own)
        strict = self._queue.settings.strict_fifo
        at_once = 1 if strict else _IN_ONE_REQUEST
        taken: list[Item] = []
        while len(taken) < limit and (some := list(islice(names, min(at_once, limit - len(taken))))):
            with unavailable(self._zk):
                found = self._take(self._queue.paths(source), some)
            taken += [one for one in found if isinstance(one, Item)]
            if strict and found == [_LEFT]:
                break  # nothing overtakes it
        return taken

    def _take(self, paths: QueuePaths, names: Sequence[str]) -> list[Any]:
        """For each name its item, or why it is not ours; the items are locked in one request, if possible."""
        looked_at = self._looked_at(paths, names)
        wanted = [one for one in looked_at if isinstance(one, _Wanted)]
        if not wanted:
            return looked_at
        self._session.check(self._number)
        # Before the locks are asked for: whatever happens, rollback() looks after them.
        self._work.takes += [one.take for one in wanted]
        errors = self._locked([wanted]) * len(wanted)
        if errors[0] is not None and len(wanted) > 1:  # somebody has one of them, or it is gone
            errors = self._locked([[one] for one in wanted])
        refused = {
            one.take.token: error for one, error in zip(wanted, errors, strict=True) if error is not None
        }
        self._work.takes = [take for take in self._work.takes if take.token not in refused]
        for error in refused.values():
            if not isinstance(error, NoNodeError | NodeExistsError | BadVersionError):
                raise error
        return [
            one
            if not isinstance(one, _Wanted)
            else one.item
            if one.take.token not in refused
            else _GONE
            if isinstance(refused[one.take.token], NoNodeError)
            else _LEFT
            for one in looked_at
        ]

    def _looked_at(self, paths: QueuePaths, names: Sequence[str]) -> list[Any]:
        """For each name what is needed to lock the item, or why it can't be ours."""
        policy = self._queue.settings.policy
        items = self._read([paths.item(name) for name in names])
        metas = self._read([paths.meta(name) for name in names]) if policy.counts else [_MISSING] * len(names)
        found: list[Any] = []
        for name, (body, item_stat), (data, stat) in zip(names, items, metas, strict=True):
            if item_stat is None:
                found.append(_GONE)
                continue
            decision = policy.next(Meta.decode(data), SYSTEM_CLOCK.wall_ms())
            if decision is Refusal.TOO_OFTEN:
                found.append(self._refuse(paths, name, body, stat))
            elif isinstance(decision, Meta):
                take = _Take(paths, name, uuid.uuid4().hex, policy.counts)
                found.append(_Wanted(take, body, decision, None if stat is None else stat.version))
            else:
                found.append(_LEFT)
        return found

    def _read(self, paths: Sequence[str]) -> list[tuple[bytes, Any]]:
        """The data and stat of each znode; (b"", None) for one that is missing."""
        deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
        sent = [self._zk.get_async(path) for path in paths]
        found = []
        for path, first in zip(paths, sent, strict=True):
            try:
                try:
                    found.append(self._session.get(first, deadline))
                except LOST_ANSWER:
                    found.append(self._session.ask(partial(self._zk.get_async, path), deadline))
            except NoNodeError:
                found.append(_MISSING)
        return found

    def _locked(self, groups: Sequence[Sequence[_Wanted]]) -> list[Exception | None]:
        """Lock groups of items, each in one step; for each why it was refused, None if it is ours."""
        sent = [(group[0].take, self._locks(group).commit_async()) for group in groups]
        return [self._refusal(take, result) for take, result in sent]

    def _locks(self, group: Sequence[_Wanted]) -> Any:
        multi = self._zk.transaction()
        for one in group:
            paths, name = one.take.paths, one.take.name
            multi.check(paths.item(name), -1)
            multi.create(paths.lock(name), one.take.token.encode(), ephemeral=True)
            multi.create(paths.owner(name, one.take.token), ephemeral=True)
            if one.take.has_meta and one.meta_version is None:
                multi.create(paths.meta(name), one.meta.encode())
            elif one.take.has_meta:
                multi.set_data(paths.meta(name), one.meta.encode(), one.meta_version)
        return multi

    def _refusal(self, take: _Take, result: Any) -> Exception | None:
        """Why the locks that were made together with that of `take` were refused."""
        try:
            return failure(self._session.get(result))
        except LOST_ANSWER:
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            mine = take.paths.owner(take.name, take.token)
            self._session.ask(lambda: self._zk.sync_async(mine), deadline)
            found = self._session.ask(lambda: self._zk.exists_async(mine), deadline)
            self._session.check(self._number)
            return None if found is not None else NodeExistsError()

    def _refuse(self, paths: QueuePaths, name: str, body: bytes, stat: Any) -> Any:
        """Move an item to the dlq, unless somebody has locked it."""
        multi = self._zk.transaction()
        multi.create(paths.lock(name), ephemeral=True)
        multi.delete(paths.item(name))
        multi.delete(paths.meta(name), stat.version)
        multi.create(paths.new_dead_letter(name), body, sequence=True)
        multi.delete(paths.lock(name))
        error = failure(self._session.get(multi.commit_async()))
        if error is None:
            log.warning("queue %s: %s was handed out too often; it is in its dlq now", paths.queue, name)
            return _GONE
        return _LEFT if isinstance(error, NodeExistsError | BadVersionError) else _GONE

    def _multi(self) -> Any:
        multi = self._zk.transaction()
        multi.create(self._node)
        for take in self._work.takes:
            multi.delete(take.paths.owner(take.name, take.token))
            multi.delete(take.paths.lock(take.name))
            multi.delete(take.paths.item(take.name))
            if take.has_meta:
                multi.delete(take.paths.meta(take.name))
        for path, body in self._work.puts:
            multi.create(path, body, sequence=True)
        return multi

    def _sent(self, multi: Any) -> bool:
        """True if it was committed, False if the answer was lost. Raises what made ZooKeeper refuse it."""
        self._session.check(self._number)
        try:
            error = failure(self._session.get(multi.commit_async()))
        except LOST_ANSWER:
            return False
        if isinstance(error, NodeExistsError):
            return False  # the node of this transaction: an earlier attempt has happened
        if error is not None:
            raise error
        return True

    def _has_happened(self, deadline: float) -> bool:
        self._session.ask(lambda: self._zk.sync_async(self._node), deadline)
        return self._session.ask(lambda: self._zk.exists_async(self._node), deadline) is not None

    def _unlock(self, deadline: float) -> None:
        """Remove all our locks; raises one of LOST_ANSWER."""
        sent = []
        for take in self._work.takes:
            multi = self._zk.transaction()
            multi.delete(take.paths.owner(take.name, take.token))  # only then the lock is ours
            multi.delete(take.paths.lock(take.name))
            sent.append(multi.commit_async())
        for result in sent:
            self._session.get(result, deadline)  # NoNodeError: it is gone, or was never ours

    def _reason(self, error: Exception) -> str:
        if isinstance(error, NoNodeError) and not self._work.takes:
            targets = sorted({path.rpartition("/")[0] for path, _ in self._work.puts})
            return f"one of {', '.join(targets)} is missing; make it with init()"
        if isinstance(error, NoNodeError):
            return "a lock or an item of it is gone, or a queue that it puts to; make queues with init()"
        return f"{type(error).__name__} {error}".strip()


_GONE = object()
"""The item is not there any more."""
_LEFT = object()
"""It is there, but not for us now."""
