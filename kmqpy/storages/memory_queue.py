"""Keeps the messages of one queue in memory, and changes their states. The caller gives the time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from kmqpy.storages.engine import MessageRow, QueueRow, TakeRef
from kmqpy.storages.memory_groups import Group
from kmqpy.storages.memory_row import ALIVE, MemoryRow, RowState
from kmqpy.storages.settings import noise

_EXPIRED = "expired"


class _Heap:
    """Rows by a key, the smallest first. The entry of a row is void once the row changes its state."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, ...], int, int, MemoryRow]] = []
        self._pushes = count()  # so that no two entries are equal, and rows are never compared

    def push(self, key: tuple[int, ...], row: MemoryRow, row_count: int) -> None:
        """Add a row. Above 2 * `row_count` + 64 entries, of which most are void, it removes the void ones."""
        heapq.heappush(self._entries, (key, next(self._pushes), row.version, row))
        if len(self._entries) > 2 * row_count + 64:
            self.drop_void()

    def drop_void(self) -> None:
        """Remove the void entries, which keep their rows in memory."""
        self._entries = [entry for entry in self._entries if entry[2] == entry[3].version]
        heapq.heapify(self._entries)

    def first(self) -> tuple[tuple[int, ...], MemoryRow] | None:
        while self._entries:
            key, _, version, row = self._entries[0]
            if row.version == version:
                return key, row
            heapq.heappop(self._entries)
        return None


@dataclass(eq=False)
class MemoryQueue:
    """The rows of one queue. A caller holds the lock of `changed` while it uses any of these.

    ready, due  the ready rows by order; the delayed and taken rows by when they become ready by themselves
    twins       the ready rows that have a digest, by it and by id
    groups      with order="group", the groups of the rows by name
    dedup       by dedup key, the id of the row that has it, and until when
    now_ms      the time of the call under way
    arrivals    counts the events after which waiting threads look again: a row has become ready, a delay or
                lease ends before all others, wake()
    """

    row: QueueRow
    changed: threading.Condition = field(default_factory=threading.Condition)
    rows: dict[int, MemoryRow] = field(default_factory=dict)
    counts: dict[RowState, int] = field(default_factory=lambda: dict.fromkeys(RowState, 0))
    ready: _Heap = field(default_factory=_Heap)
    due: _Heap = field(default_factory=_Heap)
    twins: dict[bytes, dict[int, MemoryRow]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    dedup: dict[str, tuple[int, int]] = field(default_factory=dict)
    now_ms: int = 0
    places: Iterator[int] = field(default_factory=count)
    arrivals: int = 0
    deleted: bool = False

    # Every change of state goes through enter() or remove().

    def enter(self, row: MemoryRow, state: RowState) -> None:
        """Put a row, new or old, into this state; wake threads that can take it now or have to wait less.

        A row of a group that waits for another one of it is ready or delayed when its turn has come.
        """
        settings = self.row.settings
        if row.group is None or not settings.keeps_groups:
            self._enter(row, state)
            return
        group = self.groups.setdefault(row.group, Group())
        group.forget(row)
        if state is RowState.TAKEN:
            group.taken[row.id] = row
        elif state is RowState.DEAD:
            group.dead[row.id] = row
        elif settings.in_groups or state is not RowState.DELAYED:
            group.wait(row)
            state = RowState.BEHIND
        self._enter(row, state)
        self._settle(row.group, group)

    def successor(self, row: MemoryRow) -> MemoryRow | None:
        """Of the row's group the first that waits, if it could come at once behind it."""
        group = self.groups.get(row.group) if row.group is not None else None
        first = None if group is None else group.first_behind()
        return first if first is not None and first.until_ms <= self.now_ms else None

    def _settle(self, name: str, group: Group) -> None:
        def show(row: MemoryRow) -> None:
            self._enter(row, RowState.DELAYED if row.until_ms > self.now_ms else RowState.READY)

        def hide(row: MemoryRow) -> None:
            self._enter(row, RowState.BEHIND)

        before, rank = group.head, group.rank
        group.rank = self._rank(len(group.taken))
        group.settle(is_free=self._is_free(group), show=show, hide=hide)
        if before is not None and before is group.head and group.rank != rank:
            show(before)
        if group.is_empty:
            del self.groups[name]

    def _rank(self, taken: int) -> int:
        settings = self.row.settings
        if settings.by_noise:
            return noise(taken, self.counts[RowState.TAKEN])
        return taken if settings.fair else 0

    def _is_free(self, group: Group) -> bool:
        """True if one more of a group may be taken."""
        settings = self.row.settings
        if settings.shares:
            most = settings.max_in_flight_per_group
            return most is None or len(group.taken) < most
        return not group.taken and not (settings.holds and group.dead)

    def settle_all(self) -> None:
        """Let the first row of each group come, if other settings let it."""
        for name, group in [*self.groups.items()]:
            self._settle(name, group)

    def _enter(self, row: MemoryRow, state: RowState) -> None:
        if row.id in self.rows:
            self.counts[row.state] -= 1
        self._forget_twin(row)
        if state is RowState.READY and row.digest is not None:
            self.twins.setdefault(row.digest, {})[row.id] = row
        elif state in (RowState.TAKEN, RowState.DEAD):
            row.digest = None
        self.rows[row.id] = row
        self.counts[state] += 1
        row.state = state
        row.version += 1
        if state is RowState.READY:
            self.ready.push(self.order(row), row, len(self.rows))
            self.arrivals += 1
            self.changed.notify_all()
        elif state is RowState.DELAYED or (state is RowState.TAKEN and not self.row.settings.is_manual):
            self.due.push((row.until_ms, row.place), row, len(self.rows))
            if (first := self.due.first()) is not None and first[1] is row:
                self.arrivals += 1  # threads that wait must look again earlier
                self.changed.notify_all()

    def order(self, row: MemoryRow) -> tuple[int, int]:
        """Where a ready row is among the others."""
        group = None if row.group is None else self.groups.get(row.group)
        return (-row.priority if group is None else group.rank), row.place

    def holder(self, key: str) -> int | None:
        """The id of the row that has this dedup key; None if it is free: rule 12 of the engine."""
        row_id, until_ms = self.dedup.get(key, (0, 0))
        row = self.rows.get(row_id)
        if self.row.settings.until_acknowledged:
            return row_id if row is not None and row.state is not RowState.DEAD else None
        return row_id if until_ms > self.now_ms else None

    def _may_have(self, key: str) -> bool:
        """True if a row has this dedup key, or would have it if it were redriven."""
        return self.holder(key) is not None or (
            self.row.settings.until_acknowledged and self.dedup[key][0] in self.rows
        )

    def keep_key(self, key: str, row_id: int) -> None:
        """Let a row have this dedup key; forget keys whose time is over."""
        self.dedup.pop(key, None)
        for other in [*islice(self.dedup, 2)]:
            if not self._may_have(other):
                del self.dedup[other]
        self.dedup[key] = (row_id, self.now_ms + self.row.settings.dedup_window_ms)

    def add_again(self, gone: Sequence[MessageRow]) -> None:
        """Add rows that a take has deleted, as taken rows: rule 9 of kmqpy.storages.engine."""
        for one in gone:
            if one.id not in self.rows:
                row = MemoryRow(
                    id=one.id,
                    body=one.body,
                    key=one.key,
                    headers=one.headers,
                    priority=one.priority,
                    enqueued_ms=one.enqueued_ms,
                    first_enqueued_ms=one.first_enqueued_ms,
                    place=one.place,
                    take=one.take,
                    requeues=one.requeues,
                    until_ms=one.until_ms,
                    group=one.group,
                )
                self.enter(row, RowState.TAKEN)

    def remove(self, row: MemoryRow) -> None:
        del self.rows[row.id]
        self.counts[row.state] -= 1
        self._forget_twin(row)
        row.version += 1
        row.body, row.key, row.headers = b"", None, ()  # a void entry in a heap may keep the row for long
        group = None if row.group is None else self.groups.get(row.group)
        if group is not None and row.group is not None:
            group.forget(row)
            self._settle(row.group, group)

    def remove_twins(self, digest: bytes | None) -> None:
        """Delete the ready rows with this digest: rule 10 of kmqpy.storages.engine."""
        if digest is not None:
            for row in [*self.twins.get(digest, {}).values()]:
                self.remove(row)

    def _forget_twin(self, row: MemoryRow) -> None:
        if row.digest is not None:
            same = self.twins.get(row.digest, {})
            same.pop(row.id, None)
            if not same:
                self.twins.pop(row.digest, None)

    def clear(self, *states: RowState) -> int:
        """Delete all rows in these states; returns how many."""
        gone = [row for row in self.rows.values() if row.state in states]
        for row in gone:
            self.remove(row)
        self.ready.drop_void()
        self.due.drop_void()
        return len(gone)

    def requeue(
        self,
        row: MemoryRow,
        *,
        at_ms: int,
        now_ms: int,
        delay_ms: int | None,
        count: bool,
        reason: str | None,
    ) -> None:
        """Give a row back, or bury it over the limit of redeliveries: rule 4 of kmqpy.storages.engine."""
        settings = self.row.settings
        row.reason = reason
        if count and settings.max_redeliveries is not None and row.requeues >= settings.max_redeliveries:
            row.since_ms = at_ms
            self.enter(row, RowState.DEAD)
            return
        if delay_ms is None:
            delay_ms = settings.retries.delay_ms(row.requeues) if count else 0
        if count:
            row.requeues += 1
            row.enqueued_ms = at_ms
        if not settings.to_front:
            row.place = next(self.places)
        row.until_ms = at_ms + delay_ms
        self.enter(row, RowState.DELAYED if row.until_ms > now_ms else RowState.READY)

    def take(self, row: MemoryRow, now_ms: int, lease_ms: int) -> None:
        row.take += 1
        row.since_ms = now_ms
        row.until_ms = now_ms + lease_ms
        self.enter(row, RowState.TAKEN)

    def extend(self, ref: TakeRef, *, now_ms: int, lease_ms: int) -> bool:
        """Extend a lease, or take the row anew: rule 2 of kmqpy.storages.engine; False if it is lost."""
        row = next(self.current([ref], *ALIVE), None)
        if row is None or (row.state is not RowState.TAKEN and not ref.is_any):
            return False
        if row.state is not RowState.TAKEN:
            self.take(row, now_ms, lease_ms)
            return True
        ends_ms = now_ms + lease_ms
        row.until_ms = max(row.until_ms, ends_ms) if ref.is_any else ends_ms
        self.enter(row, RowState.TAKEN)
        return True

    def pass_time(self, now_ms: int) -> None:
        """Make rows ready whose delays are over, and requeue rows whose leases are over."""
        while (first := self.due.first()) is not None and first[0][0] <= now_ms:
            row = first[1]
            if row.state is RowState.DELAYED:
                enter = self.enter if self.row.settings.shares else self._enter
                enter(row, RowState.READY)
            else:
                at_ms = row.until_ms
                self.requeue(row, at_ms=at_ms, now_ms=now_ms, delay_ms=None, count=True, reason=_EXPIRED)

    def current(self, takes: Sequence[TakeRef], *states: RowState) -> Iterator[MemoryRow]:
        """Yield the rows of current takes, if they are in one of these states."""
        for take in takes:
            row = self.rows.get(take.id)
            is_current = row is not None and (take.is_any or row.take == take.take > 0)
            if row is not None and is_current and row.state in states:
                yield row
