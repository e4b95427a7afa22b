"""The `Engine` protocol, which each storage but Kafka implements. `StoredQueue` is a queue over any engine.

An engine keeps messages as rows, and changes them in batches. Each method of an engine is one step: the
engine carries it out as a whole or not at all, and nobody else sees it half done. A step is one transaction
over one table with a lease column in SQL, one Lua function in Redis, one commit in ZooKeeper, and one lock in
memory. Redis and ZooKeeper need several steps where a method may change or read very many rows, and Redis to
make or delete a queue; put() is always one step. Engines neither check arguments nor know receipts.

The life of a row:

    put → ready (or delayed, then ready) → take → taken
    taken → finish: the row is gone
    taken → give_back, or the end of its lease → ready (or delayed)
    taken → bury, or over the limit of redeliveries → dead → redrive → ready

In an at-most-once queue, take deletes the row, and give_back and bury add it again.

Rules for every engine:

1. *Time* is the storage's own clock, in ms since 1970; callers give durations. An engine that has no server
   is given a clock.
2. *A take is a number*: a row's `take` grows by one each time it is taken, and is never set back, also not by
   redrive. `TakeRef(id, take)` names one take of one row. It is *current* while the row has that number and
   is not dead. finish() and bury() act on current takes, even when the lease has ended or the row was given
   back: a late acknowledgement counts until the row is taken anew. give_back() and extend() act on current
   takes that are still taken, so a second give_back(), or an extend() after the lease has ended, changes
   nothing. finish(), give_back() and bury() return for how many takes they did something; extend() returns
   the takes for which it did nothing. Ids are never used twice in a storage.

   `TakeRef(id, ANY_TAKE)` names whoever has the row, or nobody yet. finish() and bury() act on the row in
   any state but dead, give_back() if it is taken. extend() lets the lease of a taken row end `lease_ms` from
   now, unless it ends later already ("the later end counts"); a row that is not taken (ready, delayed, or
   its lease has ended) it takes anew: its `take` grows by one, and it is taken since now. A row that does
   not exist or is dead stays as it is.
3. *The end of a lease* is a counted give_back with the reason `expired`, at the time the lease ended. The
   next method that would notice it (take(), peek(), counts(), taken_rows(), dead_rows()) may carry it out.
   In a queue with manual redelivery the row stays taken.
4. *A counted give_back* adds one to `requeues` and sets `enqueued_ms` to now; an uncounted one
   leaves both. If `requeues` is the queue's max_redeliveries already, a counted one buries the row instead.
   One without a delay of its own, and so the end of a lease, is followed by the delay of the queue's
   `retries`; engines without the capability `retry_delays` are given no such queues.
5. *Order*: rows are taken by priority, the highest first, then by place. A row gets the last place when it
   is put, redriven, or given back in a queue that requeues to the back; with `requeue_to` front it keeps its
   place. A delayed row's place is that of its put or give_back. With `order` any, any order will do.
6. *Generations*: a generation is the id of a queue; a queue of the same name that is created later has
   another one. Each method with a QueueRow raises QueueNotFound once that generation is deleted; wait() and
   wake() need not.
7. *Text*: names of queues and reasons hold no NUL and no lone surrogates; names of headers may hold NUL.
   Bodies, keys and values of headers are any bytes.
8. Each method raises Unavailable when the storage does not answer. Then the caller does not know whether the
   storage has carried it out. Ids and takes make it harmless to call a method again, except put().
9. *Gone rows*: an at-most-once queue deletes the rows that take() returns. give_back() and bury() of such a
   queue are given these rows as `gone`. They add them again, with id, take, place and all, as if they had
   stayed taken since, and then do as ever. They add no row whose id the queue has. Calling them again is not
   harmless: the row may have been taken, and deleted, in between.
10. *Collapsing*: in a queue with the setting `collapse`, a row is put with a digest, and loses it when it is
   taken (also by extend()) or buried. Of the ready rows that share a digest, take() returns the first one,
   and deletes the others in the same step; it goes on until it has `limit` rows. No other method collapses
   anything, so peek() and counts() show all rows. Two takers at a time never get one each of rows that share
   a digest. Engines without the capability `collapse` are given no such queues.
11. *Groups*: in a queue with order `group`, a row keeps its place, and a row of a group is taken only if no
   other row of the group is taken, or in the same take, and if it has the smallest place of those that are
   ready, delayed or taken; in a queue that `holds`, only if none is dead, and a dead row is redriven to its
   own place. So a take may return several rows of a group, in order; it returns as many as there are of
   the group that has the smallest place, then of the others, as far as that costs little. extend() takes a
   row that is named with ANY_TAKE whatever its place. Rows without a group wait for none. peek() leaves out
   rows that wait for others, counts() counts them as ready. All rows have the priority 0. Engines without
   the capability `groups` are given no rows with a group and no such queues; other queues keep it, and do
   nothing with it.
12. *Dedup keys*: put() stores a row with a dedup key only if no row has the key, and returns the id of the
   row that has it. A row has it for `dedup_window_ms` since its put, or, in a queue that keeps them
   `until_acknowledged`, while it is neither finished nor dead; redriven, it has the key again, unless another
   row got it meanwhile. That counts within one put(), and for puts
   at a time: one waits until the transaction of the other is decided. Needs the capability `dedup`.
13. *Shares*: in a queue with `max_in_flight_per_group` a take returns no row of a group of which so many are
   taken already, rows of the same take included. In a queue that is `fair`, it returns next a row of the
   group of which least is taken, of several such groups the one with the smallest place (on Redis about the
   smallest, where 8 or more of each are taken), and of a group the row with the smallest place that is ready.
   With `fair_by` "noise", groups that are not noisy come first, by
   place, then those of which least is taken; noise() of settings.py says which are noisy, and what is taken
   counts as of the last take or end of a row of the group, or of later. A row without a group is a group of
   its own. extend() takes a row that is named with ANY_TAKE whatever is taken. peek() may leave out rows
   behind the first one of a group. All rows have the priority 0. An alteration of these settings counts from
   the next take on, also in queues that are open. Needs the capability `fair`; a queue has shares from its
   creation on, or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kmqpy.message import Headers
from kmqpy.queue import Capabilities
from kmqpy.storages.settings import StoredQueueSettings


@runtime_checkable
class DamageChecks(Protocol):
    """What an engine has besides if its data can be looked through for damage."""

    def unchecked_setting(self) -> str:
        """The setting, `name=value`, that lets the server hand out what its disk has changed; "": none."""
        ...

    def read_all(self) -> str:
        """Read all messages; returns what is damaged, in the words of the database, "": nothing.

        Raises Unavailable if the database does not read on for another reason.
        """
        ...


class QueueRow(NamedTuple):
    """A queue; no other queue of the storage ever has its `generation`."""

    generation: str
    settings: StoredQueueSettings

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.settings.name


class NewRow(NamedTuple):
    """A new message, for put().

    digest  in a queue that collapses, DIGEST_BYTES bytes that rows of equal bodies share (rule 10); else None
    group   its group (rule 11); None: none
    dedup   22 characters, for which the queue stores one row at a time (rule 12); None: it is stored
    """

    body: bytes
    key: bytes | None = None
    headers: Headers = ()
    delay_ms: int = 0
    priority: int = 0
    digest: bytes | None = None
    group: str | None = None
    dedup: str | None = None


class MessageRow(NamedTuple):
    """A message in a queue: ready, delayed, taken or dead.

    take               the number of its last take; 0: never taken
    requeues           its counted redeliveries since it was sent or redriven
    enqueued_ms        when it was sent, redriven or last requeued and counted
    first_enqueued_ms  when it was sent
    since_ms           of a taken row, when it was taken; of a dead one, when it was buried; else 0
    until_ms           of a taken row, when its lease ends; of a delayed one, when it is due; else 0
    size               of a dead row, the bytes of its body; else 0
    reason             why it was last given back or buried; None: it never was, or without a reason
    place              its order among rows of one priority: engines compare it with other places of theirs
    """

    id: int
    take: int
    body: bytes
    key: bytes | None
    headers: Headers
    priority: int
    requeues: int
    enqueued_ms: int
    first_enqueued_ms: int
    since_ms: int = 0
    until_ms: int = 0
    reason: str | None = None
    size: int = 0
    place: int = 0
    group: str | None = None


ANY_TAKE = -1
"""As the `take` of a TakeRef: whoever has the message, or nobody yet (rule 2)."""


class TakeRef(NamedTuple):
    """Names one take of one message, or with ANY_TAKE the message."""

    id: int
    take: int

    @property
    def is_any(self) -> bool:
        """True if it names the message, whoever has it."""
        return self.take == ANY_TAKE


class Taken(NamedTuple):
    """The result of take().

    now_ms       the storage's clock at the take
    next_due_ms  when the next row becomes ready by itself (a delay or a lease ends); None: not known. For
                 wait(), when the take found no rows
    seen         for wait(): the engine's number for the arrivals that the take has seen. An arrival is an
                 event after which another take may find more, for example a put()
    """

    rows: Sequence[MessageRow]
    now_ms: int
    next_due_ms: int | None = None
    seen: int = 0


class Counts(NamedTuple):
    """The numbers of a queue's rows in each state, and of groups that dead ones hold (without a limit)."""

    ready: int
    delayed: int
    in_flight: int
    dead: int
    held_groups: int = 0


class Engine(Protocol):
    """The operations of a storage; the module's docstring has their rules. Safe to use from any thread."""

    @property
    def storage_id(self) -> str:
        """The id of the storage in receipts: made once, kept in the storage, equal for all that open it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""
        ...

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        """Make a queue of a new generation; returns False if a queue of this name exists already."""
        ...

    def find_queue(self, name: str) -> QueueRow | None:
        """The queue of this name; None if there is none."""
        ...

    def alter_queue(self, queue: QueueRow, settings: StoredQueueSettings) -> bool:
        """Replace the settings of the queue; returns False if they are not those of `queue` any more."""
        ...

    def queue_names(self) -> list[str]:
        """The names of all queues, in any order."""
        ...

    def delete_queue(self, queue: QueueRow) -> None:
        """Delete the queue with its rows."""
        ...

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:
        """Add rows, all or none; returns their ids in order.

        `connection` is one of the application's, in whose transaction the engine adds the rows. Only an
        engine with the capability `transactions` is given one, here and in finish().
        """
        ...

    def take(self, queue: QueueRow, limit: int, lease_ms: int, *, one_per_group: bool = False) -> Taken:
        """Take up to `limit` ready rows for `lease_ms`; does not wait.

        one_per_group  in a queue with order `group`, not more than one row of a group

        Several takers at a time get different rows. In an at-most-once queue the engine deletes the rows that
        it returns.
        """
        ...

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:
        """Delete the rows of current takes; returns how many it deleted."""
        ...

    def give_back(
        self,
        queue: QueueRow,
        takes: Sequence[TakeRef],
        *,
        delay_ms: int | None,
        count: bool,
        reason: str | None,
        gone: Sequence[MessageRow] = (),
    ) -> int:
        """Make taken rows ready again after `delay_ms`, or bury them (rule 4); returns how many were taken.

        delay_ms None: after the delay of the queue's `retries`, if it is counted; else at once.

        `reason` is stored as it is, even when the row is buried. `gone` are the rows of the takes, in an
        at-most-once queue (rule 9).
        """
        ...

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        """Let leases of taken rows end `lease_ms` from now; returns takes that have no lease to extend.

        With ANY_TAKE the later end counts, and rows that are not taken are taken anew (rule 2).
        """
        ...

    def bury(
        self, queue: QueueRow, takes: Sequence[TakeRef], reason: str, *, gone: Sequence[MessageRow] = ()
    ) -> int:
        """Make the rows of current takes dead; returns how many it buried. `gone` as for give_back()."""
        ...

    def release_all(self, queue: QueueRow) -> int:
        """Give back every taken row, in the order of the ids, without delay, uncounted; returns how many."""
        ...

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        """The first `limit` ready rows, in the order in which they will be taken."""
        ...

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:
        """The exact sizes; the engine may stop counting each at `limit`."""
        ...

    def taken_rows(
        self,
        queue: QueueRow,
        *,
        limit: int,
        after: int = 0,
        taken_for_ms: int | None = None,
        queued_before_ms: int | None = None,
    ) -> list[MessageRow]:
        """The first `limit` taken rows with ids above `after`, sorted by id. All ids are above 0.

        taken_for_ms      only rows that were taken more than this many ms ago
        queued_before_ms  only rows whose enqueued_ms is smaller
        """
        ...

    def purge(self, queue: QueueRow) -> int:
        """Delete every row that is not dead; returns how many."""
        ...

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        """The `limit` dead rows that were buried first, the oldest first.

        Without bodies, `body` and `headers` are empty. `size` is the number of bytes of the body in any case.
        """
        ...

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        """Make dead rows ready, with no requeues and enqueued now; returns how many.

        The rows are the dead rows with these ids, or the oldest `limit`, or, if both are None, all.
        """
        ...

    def purge_dead(self, queue: QueueRow) -> int:
        """Delete every dead row; returns how many."""
        ...

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        """Wait until another take may find rows that `taken` did not find; returns False after `seconds`.

        Returns True too early rather than too late: after an arrival that `taken` has not seen, when a delay
        or lease ends, and after wake().
        """
        ...

    def wake(self, queue: QueueRow) -> None:
        """Let every wait() of this process for the queue return."""
        ...

    def close(self) -> None:
        """Close connections and end threads; a second close does nothing."""
        ...
