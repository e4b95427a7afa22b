"""A unit of work: one commit removes the items taken from queues and stores the items put, or neither."""

from __future__ import annotations

import threading
import uuid
from enum import Enum
from typing import Any, Self

from kazoo.exceptions import KazooException, NoNodeError, NotEmptyError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.settings import check_limit
from kmqpy.errors import (
    Closed,
    ConfigError,
    KmqError,
    MessageError,
    RolledBack,
    SessionExpired,
    UnknownOutcome,
)
from kmqpy.message import MAX_PRIORITY
from kmqpy.zookeeper.multi_read import MISSING
from kmqpy.zookeeper.packets import check_multi
from kmqpy.zookeeper.queue.commit_records import CommitRecord
from kmqpy.zookeeper.queue.shared import SharedQueues
from kmqpy.zookeeper.queue.takes import Item, NotTaken, Takes
from kmqpy.zookeeper.session import LOST_ANSWER, address, failure, unavailable

_MAX_LOCKS_PER_REQUEST = 100
"""The most items that one request locks; more are locked by further requests."""


class TransactionOutcome(Enum):
    """The outcome of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"
    """A commit was interrupted or unanswered, and rollback() got no answer to learn whether it happened."""


class Transaction:
    """Takes items from queues and puts items to queues, in one commit; made by ZkQueue.transaction().

    A transaction is thread-safe, and bound to the session in which it began. Leaving the `with` block without
    commit() rolls back. After a Ctrl-C inside commit(), rollback() still succeeds and tells whether the
    commit happened. A Ctrl-C inside rollback() ends rollback() at once; the locks may stay then until
    rollback() is called again or the session ends.
    """

    def __init__(self, queue: SharedQueues) -> None:
        self._queue = queue
        self._session = queue.session
        self._zk = queue.session.zk
        self._number = queue.session.number
        self._id = uuid.uuid4().hex
        self._takes = Takes(queue.session, queue.reads, queue.settings.policy_of, self._number)
        self._puts: list[tuple[str, bytes]] = []
        self._record: CommitRecord | None = None
        self._committing = False
        self._mutex = threading.RLock()
        self.outcome: TransactionOutcome | None = None
        """None while the transaction is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollback()

    def try_take(self, source: str) -> Item | None:
        """Lock the next item of a queue and return it; None if there is none.

        An item that we may not read, or that has znodes of others below it, stays where it is; a warning
        names it if no other item is left. With strict_fifo no item overtakes it.

        After any error only rollback() is of use.

        Args:
            source: The name of the queue.

        Raises:
            Closed: It was closed.
            SessionExpired: The session with ZooKeeper has ended.
            Unavailable: The storage does not answer.
            QueueNotFound: There is no such queue.
            AccessDenied: With strict_fifo: such an item is the next; the text names it. So with ConfigError.
        """
        taken = self.try_take_many(source, 1)
        return taken[0] if taken else None

    def try_take_many(self, source: str, limit: int) -> list[Item]:
        """Lock the next items of a queue, in few requests; raises as try_take().

        With strict_fifo each item is locked by a request of its own.

        Args:
            source: The name of the queue.
            limit: The most to take.
        """
        check_limit(limit)
        with self._mutex:
            self._check_open()
            if self._queue.settings.strict_fifo:
                return self._take_in_order(source, limit)
            return self._take_free(source, limit)

    def put(self, target: str, body: bytes | str, *, priority: int = 0) -> None:
        """Store an item in a queue when the transaction is committed; makes no network call.

        Args:
            target: The name of the queue.
            body: Text is stored as UTF-8; Item.body is bytes.
            priority: 0 to 9; a higher one is handed out first.

        Raises:
            ConfigError: An argument or setting is invalid.
            MessageError: The storage can't take the message.
            Closed: It was closed.
            SessionExpired: The session with ZooKeeper has ended.
        """
        body = _bytes_of(body)
        if not 0 <= priority <= MAX_PRIORITY:
            raise ConfigError(f"priority: {priority} is not from 0 to {MAX_PRIORITY}")
        with self._mutex:
            self._check_open()
            self._puts.append((self._queue.paths(target).new_item(priority), body))

    def commit(self) -> None:
        """Delete the items taken and store the items put, in one step; both have happened when it returns.

        After a lost connection commit() finds out whether this step happened; if not, it tries again. Raises
        RolledBack if the step did not happen and never will (a lock was lost, a queue is missing), and
        MessageError if it is too large for one request (nothing was sent, the transaction stays open). Raises
        UnknownOutcome if ZooKeeper does not answer for a whole session time-out: another commit(), or
        rollback(), finds out.
        """
        with self._mutex:
            if self.outcome is TransactionOutcome.COMMITTED:
                return
            if self.outcome is not None or not self._committing:
                try:
                    self._check_open()
                except SessionExpired as error:
                    raise self._expired(error) from error
            self._record = self._record or self._queue.records.borrow()
            multi = self._multi(self._record)
            check_multi(multi, self._queue.settings.max_packet_bytes, "commit")
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            resumed, self._committing = self._committing, True
            try:
                while resumed or not self._send_commit(multi, self._record):
                    if self._has_happened(deadline):
                        break
                    self._session.check(self._number)
                    # The commit did not happen: sending it again does no harm.
                    resumed, multi = False, self._multi(self._record)
            except SessionExpired as error:
                raise self._expired(error) from error
            except LOST_ANSWER as error:
                raise UnknownOutcome(
                    f"commit: ZooKeeper at {address(self._zk)} did not answer for "
                    f"{self._session.timeout_s:g} s; commit() again or rollback() tells whether it happened"
                ) from error
            except KazooException as error:
                self._committing = False
                self.rollback()
                raise RolledBack(f"nothing was committed: {self._reason(error)}") from error
            self._end(TransactionOutcome.COMMITTED)

    def rollback(self) -> TransactionOutcome:
        """Unlock the items taken, forget the items put, and return the outcome of the transaction.

        The outcome is COMMITTED if an interrupted commit() has happened. rollback() always succeeds: it
        removes the locks or, if ZooKeeper does not answer for a session time-out, gives up the session, with
        which the locks end.
        """
        with self._mutex:
            if self.outcome is not None:
                return self.outcome
            deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
            while not self._session.closed:
                try:
                    if self._committing and self._has_happened(deadline):
                        return self._end(TransactionOutcome.COMMITTED)
                    if self._takes.number == self._session.number:
                        self._takes.unlock(deadline)
                    return self._end(TransactionOutcome.ROLLED_BACK)
                except LOST_ANSWER:
                    if not self._session.wait_until_connected(self._takes.number, deadline):
                        if SYSTEM_CLOCK.monotonic() < deadline:
                            continue  # the session is over, or closed: the locks are gone
                        break
            self._session.give_up(self._takes.number)
            return self._end(
                TransactionOutcome.UNKNOWN if self._committing else TransactionOutcome.ROLLED_BACK
            )

    def _end(self, outcome: TransactionOutcome) -> TransactionOutcome:
        self.outcome = outcome
        if self._record is not None and outcome is not TransactionOutcome.UNKNOWN:
            self._queue.records.give_back(self._record)
        names: dict[str, list[str]] = {}
        for lock in self._takes.locks:
            names.setdefault(lock.paths.queue, []).append(lock.name)
        for source, taken in names.items():
            self._queue.source(source).give_back(taken, free=outcome is not TransactionOutcome.COMMITTED)
        return outcome

    def _expired(self, error: SessionExpired) -> RolledBack:
        self._end(TransactionOutcome.ROLLED_BACK)
        return RolledBack(f"nothing was committed: {error}")

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise Closed(f"transaction: it was {self.outcome.value} already")
        if self._committing:
            raise Closed("transaction: a commit was interrupted; call commit() again, or rollback()")
        self._session.check(self._number)

    def _take_free(self, source: str, limit: int) -> list[Item]:
        paths, candidates = self._queue.paths(source), self._queue.source(source)
        number = candidates.begin()
        taken: list[Item] = []
        unusable: KmqError | None = None
        while names := candidates.draw(min(_MAX_LOCKS_PER_REQUEST, limit - len(taken)), number):
            try:
                with unavailable(self._zk):
                    found = self._takes.take(paths, names)
            except BaseException:
                candidates.give_back(names, free=True)
                raise
            taken += [one for one in found if isinstance(one, Item)]
            unusable = next((one for one in found if isinstance(one, KmqError)), unusable)
            candidates.give_back(
                name for name, one in zip(names, found, strict=True) if not isinstance(one, Item)
            )
            if len(taken) == limit:
                break
            if NotTaken.LOCKED in found or NotTaken.GONE in found:
                candidates.step_aside(limit - len(taken))
        if unusable is not None and not taken:
            self._queue.warn_of_item(source, unusable)
        return taken

    def _take_in_order(self, source: str, limit: int) -> list[Item]:
        """Take the next items in order, up to the first that is locked, must wait, or is unusable."""
        paths = self._queue.paths(source)
        own = {lock.name for lock in self._takes.locks if lock.paths.queue == source}
        taken: list[Item] = []
        for name in self._queue.source(source).all_in_order():
            if name in own:
                continue
            with unavailable(self._zk):
                [found] = self._takes.take(paths, [name])
            if isinstance(found, Item):
                taken.append(found)
            if isinstance(found, KmqError) and not taken:
                raise found
            if found in (NotTaken.LOCKED, NotTaken.NOT_YET) or isinstance(found, KmqError):
                break  # no item overtakes this one
            if len(taken) == limit:
                break
        return taken

    def _multi(self, record: CommitRecord) -> Any:
        multi = self._zk.transaction()
        record.write(multi, self._id)
        for lock in self._takes.locks:
            multi.delete(lock.paths.owner(lock.name, lock.token))
            multi.delete(lock.paths.lock(lock.name))
            multi.delete(lock.paths.item(lock.name))
            if lock.has_meta:
                multi.delete(lock.paths.meta(lock.name))
        for path, body in self._puts:
            multi.create(path, body, sequence=True)
        return multi

    def _send_commit(self, multi: Any, record: CommitRecord) -> bool:
        """Send the commit; return False if the answer was lost, or an earlier attempt may have happened."""
        self._session.check(self._number)
        try:
            results = self._session.get(multi.commit_async())
        except LOST_ANSWER:
            return False
        if not record.note(results):
            return False
        error = failure(results)
        if error is not None:
            raise error
        return True

    def _has_happened(self, deadline: float) -> bool:
        """Read the record, and return True if this commit was the last that wrote it."""
        record = self._record
        assert record is not None
        self._session.ask(lambda: self._zk.sync_async(record.path), deadline)
        try:
            found = self._session.ask(lambda: self._zk.get_async(record.path), deadline)
        except NoNodeError:
            found = MISSING
        return record.read(*found) == self._id

    def _reason(self, error: Exception) -> str:
        if isinstance(error, NoNodeError) and not self._takes.locks:
            targets = sorted({path.rpartition("/")[0] for path, _ in self._puts})
            return f"one of {', '.join(targets)} is missing; make it with init()"
        if isinstance(error, NotEmptyError):
            return "an item or a lock of it has znodes of others below it; delete them"
        if isinstance(error, NoNodeError):
            return "a lock or an item of it is gone, or a queue that it puts to; make queues with init()"
        return f"{type(error).__name__} {error}".strip()


def _bytes_of(body: bytes | str) -> bytes:
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError as error:
            raise MessageError(f"body: this text can't be stored as UTF-8: {error}") from None
    if not isinstance(body, bytes):
        raise MessageError(f"body: {type(body).__name__} is neither bytes nor text; encode it, say as JSON")
    return body
