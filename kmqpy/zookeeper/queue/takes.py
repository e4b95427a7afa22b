"""Locks the items that a transaction takes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import AccessDenied, ConfigError, KmqError
from kmqpy.zookeeper.multi_read import MISSING
from kmqpy.zookeeper.queue.layout import QueuePaths, missing_queue, sequence_of
from kmqpy.zookeeper.queue.policies import Meta, Policy, Refusal
from kmqpy.zookeeper.queue.sessions import Reads, SessionWatch
from kmqpy.zookeeper.session import LOST_ANSWER, failure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item that a transaction has taken.

    Attributes:
        queue: The queue's name.
        name: The name of its znode.
        body: What was put.
        taken: How often it was handed out, this time included; None where the policy does not count.
    """

    queue: str
    name: str
    body: bytes
    taken: int | None = None


class NotTaken(Enum):
    """Why an item was not taken."""

    GONE = "gone"
    """The item is not there any more."""
    LOCKED = "locked"
    """Another transaction has it."""
    NOT_YET = "not yet"
    """The back-off of the item is not over."""
    REFUSED = "refused"
    """The item was handed out too often, and is a dead letter now."""


TakeResult = Item | NotTaken | KmqError
"""What take() found for one name; an error stands for an item that can't be taken."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that is ours or, after a lost answer, may be ours.

    name      the name of the locked item
    token     the UUID of the lock
    has_meta  whether the policy counts takes, so that the item has a meta znode once it is locked
    """

    paths: QueuePaths
    name: str
    token: str
    has_meta: bool


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An item that the policy allows to take.

    meta          the next content of its meta znode, where a policy counts
    meta_version  the version of the present meta znode; None if there is none
    """

    lock: Lock
    meta: Meta
    meta_version: int | None

    def item(self, body: bytes) -> Item:
        taken = self.meta.taken if self.lock.has_meta else None
        return Item(queue=self.lock.paths.queue, name=self.lock.name, body=body, taken=taken)


class Takes:
    """Locks items for one transaction, in the session of number `number`.

    Its methods raise Closed, SessionExpired, and kazoo's errors.
    """

    def __init__(
        self, session: SessionWatch, reads: Reads, policy_of: Callable[[str], Policy], number: int
    ) -> None:
        self.locks: list[Lock] = []
        """The locks that may be ours."""
        self.number = number
        """The session in which the last locks were requested: the next one, if ours ended just before."""
        self._session = session
        self._zk = session.zk
        self._reads = reads
        self._policy_of = policy_of

    def take(self, paths: QueuePaths, names: Sequence[str]) -> list[TakeResult]:
        """Lock items, by one request if possible; return for each name its item, or why it was not taken.

        Raises QueueNotFound if the queue is missing.
        """
        decided = self._ask_policy(paths, names)
        wanted = [one for one in decided if isinstance(one, _Wanted)]
        found = iter(self._lock(paths, wanted) if wanted else ())
        return [next(found) if isinstance(one, _Wanted) else one for one in decided]

    def unlock(self, deadline: float) -> None:
        """Remove all locks; raises one of LOST_ANSWER if ZooKeeper does not answer before `deadline`."""
        for result in self._send_unlocks(self.locks):
            self._session.get(result, deadline)  # NoNodeError: it is gone, or was never ours

    def _ask_policy(self, paths: QueuePaths, names: Sequence[str]) -> list[_Wanted | NotTaken | KmqError]:
        """Ask the policy about each item, and move those that were handed out too often to the dlq."""
        policy = self._policy_of(paths.queue)
        counts = policy.counts
        metas = self._reads.send([paths.meta(name) for name in names])() if counts else [MISSING] * len(names)
        found: list[_Wanted | NotTaken | KmqError] = []
        for name, (data, stat) in zip(names, metas, strict=True):
            if (unusable := _unusable(paths.meta(name), stat)) is not None:
                found.append(unusable)
                continue
            decision = policy.next(Meta.decode(data), SYSTEM_CLOCK.wall_ms())
            if decision is Refusal.TOO_OFTEN:
                found.append(self._move_to_dlq(paths, name, Meta.decode(data).taken, stat))
            elif isinstance(decision, Meta):
                lock = Lock(paths, name, uuid.uuid4().hex, counts)
                found.append(_Wanted(lock, decision, None if stat is None else stat.version))
            else:
                found.append(NotTaken.NOT_YET)
        return found

    def _lock(self, paths: QueuePaths, wanted: Sequence[_Wanted]) -> list[TakeResult]:
        """Lock items and read them; both requests are sent before the first answer."""
        self._session.check(self.number)
        # Noted before they are requested: whatever happens, rollback() removes these locks.
        self.locks += [one.lock for one in wanted]
        refusals = self._send_locks([wanted])
        bodies = self._reads.send([paths.item(one.lock.name) for one in wanted])
        errors = refusals() * len(wanted)
        read = bodies()
        if errors[0] is not None and len(wanted) > 1:  # another taker has one of the items, or one is gone
            errors = self._lock_the_rest(paths, wanted, [stat for _, stat in read])
        self._forget({one.lock.token for one, error in zip(wanted, errors, strict=True) if error is not None})
        found: list[TakeResult] = []
        for one, error, (body, stat) in zip(wanted, errors, read, strict=True):
            unusable = _unusable(paths.item(one.lock.name), stat)
            if error is None and stat is not None and unusable is None:
                found.append(one.item(body))
            elif error is None:  # somebody deleted the item while we locked it, or it can't be deleted
                [unlocked] = self._send_unlocks([one.lock])
                self._session.get(unlocked)
                self._forget({one.lock.token})
                found.append(unusable or NotTaken.GONE)
            elif unusable is not None:
                found.append(unusable)
            elif isinstance(error, NoNodeError):
                if stat is not None:
                    self._check_parents(paths)
                found.append(NotTaken.GONE)
            elif isinstance(error, NodeExistsError | BadVersionError):
                found.append(NotTaken.LOCKED)
            else:
                raise error
        return found

    def _forget(self, tokens: set[str]) -> None:
        self.locks = [lock for lock in self.locks if lock.token not in tokens]

    def _lock_the_rest(
        self, paths: QueuePaths, wanted: Sequence[_Wanted], stats: Sequence[Any]
    ) -> list[Exception | None]:
        """After a refusal of all, lock the items that nobody has; return for each why it was refused."""
        listing = self._zk.get_children_async
        deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
        try:
            locked = set(self._session.ask(lambda: listing(paths.locks), deadline))
        except NoNodeError:
            raise missing_queue(paths, paths.locks) from None
        errors: dict[str, Exception | None] = {}
        rest = []
        for one, stat in zip(wanted, stats, strict=True):
            if stat is None or isinstance(stat, Exception):
                errors[one.lock.token] = stat or NoNodeError()
            elif f"lock-{sequence_of(one.lock.name)}" in locked:
                errors[one.lock.token] = NodeExistsError()
            else:
                rest.append(one)
        if rest:
            found = self._send_locks([rest])() * len(rest)
            if found[0] is not None and len(rest) > 1:
                found = self._send_locks([[one] for one in rest])()
            errors.update(zip((one.lock.token for one in rest), found, strict=True))
        return [errors[one.lock.token] for one in wanted]

    def _send_locks(self, groups: Iterable[Sequence[_Wanted]]) -> Callable[[], list[Exception | None]]:
        """Request locks, one transaction for each group; what is returned waits for each refusal, or None."""
        sent = [(group[0].lock, self._lock_request(group).commit_async()) for group in groups]
        # kazoo does not send in the next session what was requested before it told of the end of this one. So
        # if the number has changed by now, only the next session can have these locks.
        number, self.number = self.number, self._session.number
        self._session.check(number)
        return lambda: [self._refusal(lock, result) for lock, result in sent]

    def _lock_request(self, group: Sequence[_Wanted]) -> Any:
        multi = self._zk.transaction()
        for one in group:
            lock = one.lock
            paths, name = lock.paths, lock.name
            multi.check(paths.item(name), -1)
            multi.create(paths.lock(name), lock.token.encode(), ephemeral=True)
            multi.create(paths.owner(name, lock.token), ephemeral=True)
            if lock.has_meta and one.meta_version is None:
                multi.create(paths.meta(name), one.meta.encode())
            elif lock.has_meta:
                multi.set_data(paths.meta(name), one.meta.encode(), one.meta_version)
        return multi

    def _refusal(self, lock: Lock, result: Any) -> Exception | None:
        try:
            return failure(self._session.get(result))
        except LOST_ANSWER:
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            mine = lock.paths.owner(lock.name, lock.token)
            self._session.ask(lambda: self._zk.sync_async(mine), deadline)
            found = self._session.ask(lambda: self._zk.exists_async(mine), deadline)
            self._session.check(self.number)
            return None if found is not None else NodeExistsError()

    def _move_to_dlq(self, paths: QueuePaths, name: str, taken: int, stat: Any) -> NotTaken | KmqError:
        """Move an item, and its meta znode of this `stat`, to the dlq, unless another taker has locked it."""
        [(body, item_stat)] = self._reads.send([paths.item(name)])()
        if item_stat is None:
            return NotTaken.GONE
        if (unusable := _unusable(paths.item(name), item_stat)) is not None:
            return unusable
        multi = self._zk.transaction()
        multi.create(paths.lock(name), ephemeral=True)
        multi.delete(paths.item(name))
        if stat is not None:
            multi.delete(paths.meta(name), stat.version)
        multi.create(paths.new_dead_letter(name, taken), body, sequence=True)
        multi.delete(paths.lock(name))
        error = failure(self._session.get(multi.commit_async()))
        if error is None:
            log.warning("queue %s: %s was handed out too often; it is in its dlq now", paths.queue, name)
            return NotTaken.REFUSED
        if isinstance(error, NodeExistsError | BadVersionError):
            return NotTaken.LOCKED
        self._check_parents(paths)
        return NotTaken.GONE

    def _check_parents(self, paths: QueuePaths) -> None:
        """Raise QueueNotFound if a parent znode is missing, without which no item can be taken."""
        deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
        for parent in paths.parents:
            exists = partial(self._zk.exists_async, parent)
            if self._session.ask(exists, deadline) is None:
                raise missing_queue(paths, parent)

    def _send_unlocks(self, locks: Iterable[Lock]) -> list[Any]:
        sent = []
        for lock in locks:
            multi = self._zk.transaction()
            multi.delete(lock.paths.owner(lock.name, lock.token))  # refused if the lock is not ours
            multi.delete(lock.paths.lock(lock.name))
            sent.append(multi.commit_async())
        return sent


def _unusable(path: str, stat: Any) -> KmqError | None:
    if isinstance(stat, Exception):
        return AccessDenied(f"znode {path}: we may not read it; check its ACL")
    if stat is not None and stat.numChildren:
        return ConfigError(f"znode {path}: there are znodes of others below it; delete them")
    return None
