"""The memory engine, and open_storage() for urls `memory:`. Its queues live as long as this process.

It is made for tests and for trying things out.
"""

from __future__ import annotations

import heapq
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, QueueNotFound
from kmqpy.queue import Capabilities, QueueUrl
from kmqpy.storages.engine import Counts, MessageRow, NewRow, QueueRow, Taken, TakeRef
from kmqpy.storages.memory_queue import MemoryQueue
from kmqpy.storages.memory_row import ALIVE, MemoryRow, RowState
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.stored_storage import URL_SETTINGS, StoredStorage
from kmqpy.telemetry.base import Telemetry

_CAPABILITIES = Capabilities(
    durable=False,
    lossy_setting="memory",
    shared=False,
    collapse=True,
    groups=True,
    fair=True,
    dedup=True,
    retry_delays=True,
    blocking_take=True,
)


class MemoryEngine:
    """Implements Engine in the memory of this process.

    clock     gives the time for leases and delays
    patience  wait() returns after this many seconds of real time at most; for tests, whose `clock` stands
              still while a thread waits. None: wait() waits for the seconds that its caller gives
    """

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        *,
        patience: float | None = None,
        capabilities: Capabilities = _CAPABILITIES,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self.capabilities = capabilities
        self.storage_id = uuid.uuid4().hex
        self._lock = threading.RLock()
        self._queues: dict[str, MemoryQueue] = {}
        self._ids = count(1)
        # The wall clock may jump; leases must not.
        self._start_ms = clock.wall_ms() - round(clock.monotonic() * 1000)

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        with self._lock:
            if settings.name in self._queues:
                return False
            self._queues[settings.name] = MemoryQueue(QueueRow(uuid.uuid4().hex, settings))
            return True

    def find_queue(self, name: str) -> QueueRow | None:
        with self._lock:
            found = self._queues.get(name)
        return None if found is None else found.row

    def alter_queue(self, queue: QueueRow, settings: StoredQueueSettings) -> bool:
        with self._lock:
            found = self._queue(queue)
            if found.row != queue:
                return False
            found.row = QueueRow(queue.generation, settings)
        with found.changed:
            found.settle_all()
        return True

    def queue_names(self) -> list[str]:
        with self._lock:
            return list(self._queues)

    def delete_queue(self, queue: QueueRow) -> None:
        with self._lock:
            found = self._queue(queue)
            del self._queues[queue.name]
        with found.changed:
            found.deleted = True
            found.changed.notify_all()

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:  # noqa: ARG002
        with self._locked(queue) as (found, now_ms):
            ids: list[int] = []
            here: dict[str, int] = {}  # whatever the window
            for new in rows:
                if new.dedup is not None and (holder := here.get(new.dedup) or found.holder(new.dedup)):
                    ids.append(holder)
                    continue
                row_id = next(self._ids)
                ids.append(row_id)
                if new.dedup is not None:
                    found.keep_key(new.dedup, row_id)
                    here[new.dedup] = row_id
                row = MemoryRow(
                    id=row_id,
                    body=new.body,
                    key=new.key,
                    headers=new.headers,
                    priority=new.priority,
                    enqueued_ms=now_ms,
                    first_enqueued_ms=now_ms,
                    place=next(found.places),
                    until_ms=now_ms + new.delay_ms,
                    digest=new.digest,
                    group=new.group,
                )
                found.enter(row, RowState.DELAYED if new.delay_ms else RowState.READY)
            return ids

    def take(self, queue: QueueRow, limit: int, lease_ms: int, *, one_per_group: bool = False) -> Taken:
        with self._locked(queue) as (found, now_ms):
            last: MemoryRow | None = None
            taken: list[MessageRow] = []
            while len(taken) < limit and (row := _next(found, last)) is not None:
                digest = row.digest
                found.take(row, now_ms, lease_ms)
                found.remove_twins(digest)
                taken.append(row.shown())
                if queue.settings.at_most_once:
                    found.remove(row)
                elif queue.settings.in_groups and not one_per_group:
                    last = row
            due = found.due.first()
            return Taken(taken, now_ms, None if due is None else due[0][0], found.arrivals)

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:  # noqa: ARG002
        with self._locked(queue) as (found, _):
            done = 0
            for row in found.current(takes, *ALIVE):
                found.remove(row)
                done += 1
            return done

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
        with self._locked(queue) as (found, now_ms):
            found.add_again(gone)
            done = 0
            for row in found.current(takes, RowState.TAKEN):
                found.requeue(row, at_ms=now_ms, now_ms=now_ms, delay_ms=delay_ms, count=count, reason=reason)
                done += 1
            return done

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        with self._locked(queue) as (found, now_ms):
            return [one for one in takes if not found.extend(one, now_ms=now_ms, lease_ms=lease_ms)]

    def bury(
        self, queue: QueueRow, takes: Sequence[TakeRef], reason: str, *, gone: Sequence[MessageRow] = ()
    ) -> int:
        with self._locked(queue) as (found, now_ms):
            found.add_again(gone)
            done = 0
            for row in found.current(takes, *ALIVE):
                row.reason = reason
                row.since_ms = now_ms
                found.enter(row, RowState.DEAD)
                done += 1
            return done

    def release_all(self, queue: QueueRow) -> int:
        with self._locked(queue) as (found, now_ms):
            taken = [row for row in found.rows.values() if row.state is RowState.TAKEN]
            for row in taken:
                found.requeue(row, at_ms=now_ms, now_ms=now_ms, delay_ms=0, count=False, reason=row.reason)
            return len(taken)

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        with self._locked(queue) as (found, _):
            ready = (row for row in found.rows.values() if row.state is RowState.READY)
            first = heapq.nsmallest(limit, ready, key=found.order)
            return [row.shown() for row in first]

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:  # noqa: ARG002 - counting costs nothing
        with self._locked(queue) as (found, _):
            return Counts(
                ready=found.counts[RowState.READY] + found.counts[RowState.BEHIND],
                delayed=found.counts[RowState.DELAYED],
                in_flight=found.counts[RowState.TAKEN],
                dead=found.counts[RowState.DEAD],
                held_groups=sum(bool(group.dead) for group in found.groups.values())
                if queue.settings.holds
                else 0,
            )

    def taken_rows(
        self,
        queue: QueueRow,
        *,
        limit: int,
        after: int = 0,
        taken_for_ms: int | None = None,
        queued_before_ms: int | None = None,
    ) -> list[MessageRow]:
        with self._locked(queue) as (found, now_ms):
            matching = (
                row
                for row in found.rows.values()
                if row.state is RowState.TAKEN
                and row.id > after
                and (taken_for_ms is None or row.since_ms < now_ms - taken_for_ms)
                and (queued_before_ms is None or row.enqueued_ms < queued_before_ms)
            )
            return [row.shown() for row in heapq.nsmallest(limit, matching, key=lambda row: row.id)]

    def purge(self, queue: QueueRow) -> int:
        with self._locked(queue) as (found, _):
            return found.clear(*ALIVE)

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        with self._locked(queue) as (found, _):
            shown = [row.shown()._replace(size=len(row.body)) for row in _oldest_dead_rows(found, limit)]
        return shown if with_bodies else [row._replace(body=b"", headers=()) for row in shown]

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        with self._locked(queue) as (found, now_ms):
            chosen = _oldest_dead_rows(found, limit, None if ids is None else frozenset(ids))
            for row in chosen:
                row.requeues = 0
                row.enqueued_ms = now_ms
                row.reason = None
                row.until_ms = 0
                if not queue.settings.holds:
                    row.place = next(found.places)
                found.enter(row, RowState.READY)
            return len(chosen)

    def purge_dead(self, queue: QueueRow) -> int:
        with self._locked(queue) as (found, _):
            return found.clear(RowState.DEAD)

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        found = self._queue(queue)
        if self._patience is not None:
            seconds = min(seconds, self._patience)
        if taken.next_due_ms is not None:
            seconds = min(seconds, max(0, taken.next_due_ms - self._now_ms()) / 1000 + 0.001)
        with found.changed:
            found.changed.wait_for(lambda: found.deleted or found.arrivals != taken.seen, seconds)
            return (
                found.deleted
                or found.arrivals != taken.seen
                or (taken.next_due_ms is not None and self._now_ms() >= taken.next_due_ms)
            )

    def wake(self, queue: QueueRow) -> None:
        with self._lock:
            found = self._queues.get(queue.name)
        if found is not None:
            with found.changed:
                found.arrivals += 1
                found.changed.notify_all()

    def close(self) -> None:
        """Does nothing: the messages stay until the process ends."""

    def _now_ms(self) -> int:
        return self._now_us() // 1000

    def _now_us(self) -> int:
        return self._start_ms * 1000 + round(self._clock.monotonic() * 1_000_000)

    def _queue(self, queue: QueueRow) -> MemoryQueue:
        with self._lock:
            found = self._queues.get(queue.name)
        if found is None or found.row.generation != queue.generation:
            raise QueueNotFound(f"queue {queue.name!r} was deleted")
        return found

    def _locked(self, queue: QueueRow) -> _LockedQueue:
        return _LockedQueue(self._queue(queue), self._now_us)


class _LockedQueue:
    """Holds a queue's lock in a `with` block; carries out the delays and leases that are over at its start.

    The block gets the time rounded up to ms. A delay or lease is over when the clock, rounded down, has
    reached its end. So no delay or lease is shorter than asked.
    """

    def __init__(self, queue: MemoryQueue, now_us: Callable[[], int]) -> None:
        self._queue = queue
        self._now_us = now_us

    def __enter__(self) -> tuple[MemoryQueue, int]:
        self._queue.changed.acquire()
        try:
            now_us = self._now_us()
            if self._queue.deleted:
                raise QueueNotFound(f"queue {self._queue.row.name!r} was deleted")
            self._queue.now_ms = -(-now_us // 1000)
            self._queue.pass_time(now_us // 1000)
        except BaseException:  # Ctrl-C, too: other threads must not wait for ever
            self._queue.changed.release()
            raise
        return self._queue, -(-now_us // 1000)

    def __exit__(self, *_: object) -> None:
        self._queue.changed.release()


def _next(queue: MemoryQueue, last: MemoryRow | None) -> MemoryRow | None:
    """The row to take next: the next one of the last one's group, or else the first that is ready."""
    follower = None if last is None else queue.successor(last)
    if follower is not None:
        return follower
    first = queue.ready.first()
    return None if first is None else first[1]


def _oldest_dead_rows(
    queue: MemoryQueue, limit: int | None, ids: frozenset[int] | None = None
) -> list[MemoryRow]:
    """The dead rows with these ids, or all; those that were buried first, `limit` at most."""
    dead = [
        row for row in queue.rows.values() if row.state is RowState.DEAD and (ids is None or row.id in ids)
    ]
    dead.sort(key=lambda row: (row.since_ms, row.id))
    return dead if limit is None else dead[:limit]


_engines_by_name: dict[str, MemoryEngine] = {}
"""The engines of `memory://name`, by name."""
_engines_lock = threading.Lock()


def _forget_engines_of_parent() -> None:
    """Drop the engines after a fork: they are copies of the parent's, whose threads may hold their locks."""
    global _engines_lock  # noqa: PLW0603
    _engines_by_name.clear()
    _engines_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_engines_of_parent)


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None) -> StoredStorage:
    """Open the storage of `memory:` or `memory://name`; all urls of one name share their queues.

    The setting `create` is true unless the url says false: opening a queue that is missing makes it, with the
    settings of the url.

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.

    Raises:
        ConfigError: For a url with a user, a path or unknown settings.
    """
    if url.user is not None or url.path not in ("", "/"):
        raise ConfigError("queue url: write it like memory:?queue=name, or memory://storage?queue=name")
    url.refuse_unknown(URL_SETTINGS)
    with _engines_lock:
        engine = _engines_by_name.setdefault(url.address, MemoryEngine())
    return StoredStorage(engine, telemetry=telemetry, create_missing=True)
