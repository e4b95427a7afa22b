"""The memory engine, and what `memory:` opens: queues that live as long as this process.

Made for tests and for trying things out. See kmqpy.storages.engine for what each call promises.
"""

from __future__ import annotations

import heapq
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, islice
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, QueueNotFound
from kmqpy.message import Headers
from kmqpy.queue import Capabilities, QueueUrl
from kmqpy.storages.engine import Counts, MessageRow, NewRow, QueueRow, Taken, TakeRef
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.stored_storage import URL_SETTINGS, StoredStorage
from kmqpy.telemetry.base import Telemetry

_CAPABILITIES = Capabilities(durable=False, shared=False, blocking_take=True)
_EXPIRED = "expired"


class _State(Enum):
    READY = "ready"
    DELAYED = "delayed"
    TAKEN = "taken"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class _Row:
    """A message; `version` grows with each change of state, and makes older entries in heaps void."""

    id: int
    body: bytes
    key: bytes | None
    headers: Headers
    priority: int
    enqueued_ms: int
    first_enqueued_ms: int
    place: int
    state: _State = _State.READY
    version: int = 0
    take: int = 0
    requeues: int = 0
    since_ms: int = 0
    until_ms: int = 0
    reason: str | None = None

    def shown(self) -> MessageRow:
        return MessageRow(
            id=self.id,
            take=self.take,
            body=self.body,
            key=self.key,
            headers=self.headers,
            priority=self.priority,
            requeues=self.requeues,
            enqueued_ms=self.enqueued_ms,
            first_enqueued_ms=self.first_enqueued_ms,
            since_ms=self.since_ms if self.state in (_State.TAKEN, _State.DEAD) else 0,
            until_ms=self.until_ms if self.state in (_State.TAKEN, _State.DELAYED) else 0,
            reason=self.reason,
        )


class _Heap:
    """Rows by a key, the smallest first; entries of rows that have changed since are void."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, ...], int, _Row]] = []

    def push(self, key: tuple[int, ...], row: _Row, live: int) -> None:
        """Add a row; `live` is how many rows there are at most, so that void entries don't pile up."""
        heapq.heappush(self._entries, (key, row.version, row))
        if len(self._entries) > 2 * live + 64:
            self.drop_void()

    def drop_void(self) -> None:
        """Let go of the entries that are void, and so of their rows."""
        self._entries = [entry for entry in self._entries if entry[1] == entry[2].version]
        heapq.heapify(self._entries)

    def first(self) -> tuple[tuple[int, ...], _Row] | None:
        while self._entries:
            key, version, row = self._entries[0]
            if row.version == version:
                return key, row
            heapq.heappop(self._entries)
        return None


@dataclass(eq=False)
class _Queue:
    """The rows of one queue; its lock guards all of it."""

    row: QueueRow
    changed: threading.Condition = field(default_factory=threading.Condition)
    rows: dict[int, _Row] = field(default_factory=dict)
    counts: dict[_State, int] = field(default_factory=lambda: dict.fromkeys(_State, 0))
    ready: _Heap = field(default_factory=_Heap)
    due: _Heap = field(default_factory=_Heap)  # delays and leases that end by themselves
    places: Iterator[int] = field(default_factory=count)
    arrivals: int = 0
    deleted: bool = False

    # Every change of state goes through these three.

    def enter(self, row: _Row, state: _State) -> None:
        if row.id in self.rows:
            self.counts[row.state] -= 1
        self.rows[row.id] = row
        self.counts[state] += 1
        row.state = state
        row.version += 1
        if state is _State.READY:
            self.ready.push((-row.priority, row.place), row, len(self.rows))
            self.arrivals += 1
            self.changed.notify_all()
        elif state is _State.DELAYED or (state is _State.TAKEN and not self.row.settings.is_manual):
            self.due.push((row.until_ms, row.place), row, len(self.rows))
            if (first := self.due.first()) is not None and first[1] is row:
                self.arrivals += 1  # who waits must look again earlier
                self.changed.notify_all()

    def remove(self, row: _Row) -> None:
        del self.rows[row.id]
        self.counts[row.state] -= 1
        row.version += 1
        row.body, row.key, row.headers = b"", None, ()  # a void entry in a heap may keep the row for long

    def clear(self, *states: _State) -> int:
        gone = [row for row in self.rows.values() if row.state in states]
        for row in gone:
            self.remove(row)
        self.ready.drop_void()
        self.due.drop_void()
        return len(gone)

    def requeue(
        self, row: _Row, *, at_ms: int, now_ms: int, delay_ms: int, count: bool, reason: str | None
    ) -> None:
        """Rule 4 of Engine."""
        settings = self.row.settings
        row.reason = reason
        if count and settings.max_redeliveries is not None and row.requeues >= settings.max_redeliveries:
            row.since_ms = at_ms
            self.enter(row, _State.DEAD)
            return
        if count:
            row.requeues += 1
            row.enqueued_ms = at_ms
        if not settings.to_front:
            row.place = next(self.places)
        row.until_ms = at_ms + delay_ms
        self.enter(row, _State.DELAYED if row.until_ms > now_ms else _State.READY)

    def pass_time(self, now_ms: int) -> None:
        """Carry out what the clock has brought: delays and leases that are over."""
        while (first := self.due.first()) is not None and first[0][0] <= now_ms:
            row = first[1]
            if row.state is _State.DELAYED:
                self.enter(row, _State.READY)
            else:
                at_ms = row.until_ms
                self.requeue(row, at_ms=at_ms, now_ms=now_ms, delay_ms=0, count=True, reason=_EXPIRED)

    def current(self, takes: Sequence[TakeRef], *states: _State) -> Iterator[_Row]:
        for take in takes:
            row = self.rows.get(take.id)
            if row is not None and row.take == take.take and row.take > 0 and row.state in states:
                yield row


class MemoryEngine:
    """See Engine.

    clock     what leases and delays follow
    patience  how long a wait really waits, in seconds, at most; for a clock that is moved by hand, and stands
              still while somebody waits. None: as long as is asked
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
        self._capabilities = capabilities
        self._storage_id = uuid.uuid4().hex
        self._lock = threading.RLock()
        self._queues: dict[str, _Queue] = {}
        self._ids = count(1)
        # The wall clock may jump; leases must not.
        self._start_ms = clock.wall_ms() - round(clock.monotonic() * 1000)

    @property
    def storage_id(self) -> str:
        """See Engine."""
        return self._storage_id

    @property
    def capabilities(self) -> Capabilities:
        """See Engine."""
        return self._capabilities

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        """See Engine."""
        with self._lock:
            if settings.name in self._queues:
                return False
            self._queues[settings.name] = _Queue(QueueRow(uuid.uuid4().hex, settings))
            return True

    def find_queue(self, name: str) -> QueueRow | None:
        """See Engine."""
        with self._lock:
            found = self._queues.get(name)
        return None if found is None else found.row

    def queue_names(self) -> list[str]:
        """See Engine."""
        with self._lock:
            return list(self._queues)

    def delete_queue(self, queue: QueueRow) -> None:
        """See Engine."""
        with self._lock:
            found = self._queue(queue)
            del self._queues[queue.name]
        with found.changed:
            found.deleted = True
            found.changed.notify_all()

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:  # noqa: ARG002
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            ids = list(islice(self._ids, len(rows)))
            for row_id, new in zip(ids, rows, strict=True):
                row = _Row(
                    id=row_id,
                    body=new.body,
                    key=new.key,
                    headers=new.headers,
                    priority=new.priority,
                    enqueued_ms=now_ms,
                    first_enqueued_ms=now_ms,
                    place=next(found.places),
                    until_ms=now_ms + new.delay_ms,
                )
                found.enter(row, _State.DELAYED if new.delay_ms else _State.READY)
            return ids

    def take(self, queue: QueueRow, limit: int, lease_ms: int) -> Taken:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            taken: list[MessageRow] = []
            while len(taken) < limit and (first := found.ready.first()) is not None:
                row = first[1]
                row.take += 1
                row.since_ms = now_ms
                row.until_ms = now_ms + lease_ms
                found.enter(row, _State.TAKEN)
                taken.append(row.shown())
                if not queue.settings.ephemeral:
                    found.remove(row)
            due = found.due.first()
            return Taken(taken, now_ms, None if due is None else due[0][0], found.arrivals)

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:  # noqa: ARG002
        """See Engine."""
        with self._entered(queue) as (found, _):
            done = 0
            for row in found.current(takes, _State.TAKEN, _State.READY, _State.DELAYED):
                found.remove(row)
                done += 1
            return done

    def give_back(
        self, queue: QueueRow, takes: Sequence[TakeRef], *, delay_ms: int, count: bool, reason: str | None
    ) -> int:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            done = 0
            for row in found.current(takes, _State.TAKEN):
                found.requeue(row, at_ms=now_ms, now_ms=now_ms, delay_ms=delay_ms, count=count, reason=reason)
                done += 1
            return done

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            done = set()
            for row in found.current(takes, _State.TAKEN):
                row.until_ms = now_ms + lease_ms
                found.enter(row, _State.TAKEN)
                done.add(TakeRef(row.id, row.take))
            return [one for one in takes if one not in done]

    def bury(self, queue: QueueRow, takes: Sequence[TakeRef], reason: str) -> int:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            done = 0
            for row in found.current(takes, _State.TAKEN, _State.READY, _State.DELAYED):
                row.reason = reason
                row.since_ms = now_ms
                found.enter(row, _State.DEAD)
                done += 1
            return done

    def release_all(self, queue: QueueRow) -> int:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            taken = [row for row in found.rows.values() if row.state is _State.TAKEN]
            for row in taken:
                found.requeue(row, at_ms=now_ms, now_ms=now_ms, delay_ms=0, count=False, reason=row.reason)
            return len(taken)

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        """See Engine."""
        with self._entered(queue) as (found, _):
            ready = (row for row in found.rows.values() if row.state is _State.READY)
            first = heapq.nsmallest(limit, ready, key=lambda row: (-row.priority, row.place))
            return [row.shown() for row in first]

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:  # noqa: ARG002 - counting costs nothing
        """See Engine."""
        with self._entered(queue) as (found, _):
            return Counts(
                ready=found.counts[_State.READY],
                delayed=found.counts[_State.DELAYED],
                in_flight=found.counts[_State.TAKEN],
                dead=found.counts[_State.DEAD],
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
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            matching = (
                row
                for row in found.rows.values()
                if row.state is _State.TAKEN
                and row.id > after
                and (taken_for_ms is None or row.since_ms < now_ms - taken_for_ms)
                and (queued_before_ms is None or row.enqueued_ms < queued_before_ms)
            )
            return [row.shown() for row in heapq.nsmallest(limit, matching, key=lambda row: row.id)]

    def purge(self, queue: QueueRow) -> int:
        """See Engine."""
        with self._entered(queue) as (found, _):
            return found.clear(_State.READY, _State.DELAYED, _State.TAKEN)

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        """See Engine."""
        with self._entered(queue) as (found, _):
            shown = [row.shown()._replace(size=len(row.body)) for row in _dead(found, limit)]
        return shown if with_bodies else [row._replace(body=b"", headers=()) for row in shown]

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        """See Engine."""
        with self._entered(queue) as (found, now_ms):
            chosen = _dead(found, limit, None if ids is None else frozenset(ids))
            for row in chosen:
                row.requeues = 0
                row.enqueued_ms = now_ms
                row.reason = None
                row.place = next(found.places)
                found.enter(row, _State.READY)
            return len(chosen)

    def purge_dead(self, queue: QueueRow) -> int:
        """See Engine."""
        with self._entered(queue) as (found, _):
            return found.clear(_State.DEAD)

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        """See Engine."""
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
        """See Engine."""
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

    def _queue(self, queue: QueueRow) -> _Queue:
        with self._lock:
            found = self._queues.get(queue.name)
        if found is None or found.row.generation != queue.generation:
            raise QueueNotFound(f"queue {queue.name!r} was deleted")
        return found

    def _entered(self, queue: QueueRow) -> _Entered:
        return _Entered(self._queue(queue), self._now_us)


class _Entered:
    """Holds a queue's lock; the queue is up to date with the clock.

    The time it gives is rounded up, and a time has come when the clock, rounded down, has reached it, so that
    no delay or lease is shorter than asked.
    """

    def __init__(self, queue: _Queue, now_us: Callable[[], int]) -> None:
        self._queue = queue
        self._now_us = now_us

    def __enter__(self) -> tuple[_Queue, int]:
        self._queue.changed.acquire()
        try:
            now_us = self._now_us()
            if self._queue.deleted:
                raise QueueNotFound(f"queue {self._queue.row.name!r} was deleted")
            self._queue.pass_time(now_us // 1000)
        except BaseException:  # Ctrl-C, too: other threads must not wait for ever
            self._queue.changed.release()
            raise
        return self._queue, -(-now_us // 1000)

    def __exit__(self, *_: object) -> None:
        self._queue.changed.release()


def _dead(queue: _Queue, limit: int | None, ids: frozenset[int] | None = None) -> list[_Row]:
    dead = [row for row in queue.rows.values() if row.state is _State.DEAD and (ids is None or row.id in ids)]
    dead.sort(key=lambda row: (row.since_ms, row.id))
    return dead if limit is None else dead[:limit]


_shared: dict[str, MemoryEngine] = {}
"""The engines of `memory://name`, by name."""
_opening = threading.Lock()


def _forget_parents() -> None:
    """Replace the engines after a fork: they are copies of the parent's, whose locks its threads may hold."""
    global _opening  # noqa: PLW0603
    _shared.clear()
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None) -> StoredStorage:
    """Open the storage of `memory:` or `memory://name`; all urls of one name share their queues.

    The setting `create` is true unless the url says false: a queue that is missing is made, with the settings
    of the url.
    """
    if url.user is not None or url.path not in ("", "/"):
        raise ConfigError("queue url: write it like memory:?queue=name, or memory://storage?queue=name")
    url.refuse_unknown(URL_SETTINGS)
    with _opening:
        engine = _shared.setdefault(url.address, MemoryEngine())
    return StoredStorage(engine, telemetry=telemetry, create_missing=True)
