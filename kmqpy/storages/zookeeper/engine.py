"""Implements Engine over ZooKeeper: its methods change a queue by commits of the queue's directory."""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, TypeVar

from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError
from kmqpy.queue import Capabilities
from kmqpy.storages.engine import Counts, MessageRow, NewRow, QueueRow, Taken, TakeRef
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.zookeeper.body_cache import BodyCache
from kmqpy.storages.zookeeper.directory import Directory
from kmqpy.storages.zookeeper.draft import Draft
from kmqpy.storages.zookeeper.live_queue import BodyPlace, LiveQueue
from kmqpy.storages.zookeeper.rows import Content, Row, Status, packs
from kmqpy.storages.zookeeper.turns import Turns
from kmqpy.storages.zookeeper.znodes import Znodes

log = logging.getLogger(__name__)

_RESERVED_BYTES = 128 * 1024
"""The largest body is this many bytes smaller than a request, which holds states and directory as well."""
_MOST_DELAY_MS = 2**62
"""Longer delays and leases are cut to this, so that the times of their ends fit into the bytes of a row."""

_GONE_PER_COMMIT = 10
"""The most rows that one commit adds again: each may be on another page, and needs a pack."""

K = TypeVar("K")
Rows = list[tuple[Row, BodyPlace]]
Contents = Sequence[Content | ConfigError]


class ZooKeeperEngine:
    """Implements Engine in the znodes of `znodes`."""

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        self._closing = ExitStack()
        self._lock = threading.Lock()
        self._queues: dict[str, LiveQueue] = {}
        self._bodies = BodyCache()
        self._turns = Turns(znodes)
        self._is_cleaned_up = False
        self.capabilities = Capabilities(
            lossy_setting="forceSync=unknown",  # no request of ZooKeeper's protocol tells
            blocking_take=True,
            max_body_bytes=znodes.max_packet_bytes - _RESERVED_BYTES,
        )
        self.storage_id = znodes.prepare()

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        if not self._is_cleaned_up:
            self._is_cleaned_up = True
            self._znodes.clean_up()
        values = dataclasses.asdict(settings)
        return self._znodes.create_queue(settings.name, values, Directory().to_bytes())

    def find_queue(self, name: str) -> QueueRow | None:
        found = self._znodes.find_queue(name)
        if found is None:
            return None
        generation, settings = found
        row = QueueRow(generation, StoredQueueSettings.from_json(json.dumps(settings), name))
        with self._lock:
            if generation in self._queues:
                self._queues[generation].row = row  # somebody may have altered the queue
        return row

    def alter_queue(self, queue: QueueRow, settings: StoredQueueSettings) -> bool:
        def is_unchanged(found: dict[str, Any]) -> bool:
            return StoredQueueSettings.from_json(json.dumps(found), queue.name) == queue.settings

        new = dataclasses.asdict(settings)
        altered = self._znodes.alter_queue(queue.name, queue.generation, is_unchanged, new)
        if altered is None:
            self._live(queue).raise_deleted()
        return bool(altered)

    def queue_names(self) -> list[str]:
        return self._znodes.queue_names()

    def delete_queue(self, queue: QueueRow) -> None:
        live = self._live(queue)
        if not self._znodes.delete_queue(queue.name, queue.generation):
            live.raise_deleted()
        with self._lock:
            self._queues.pop(queue.generation, None)
        live.watch.wake()

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:  # noqa: ARG002
        rows = [row._replace(delay_ms=min(row.delay_ms, _MOST_DELAY_MS)) for row in rows]
        return self._live(queue).change(lambda draft: draft.put(rows), ids=len(rows))[0] if rows else []

    def take(
        self,
        queue: QueueRow,
        limit: int,
        lease_ms: int,
        *,
        one_per_group: bool = False,  # noqa: ARG002
    ) -> Taken:
        live = self._live(queue)
        lease_ms = min(lease_ms, _MOST_DELAY_MS)
        at_most_once = queue.settings.at_most_once

        def take(draft: Draft) -> tuple[Rows, Contents, int, int | None]:
            taken: Rows = []
            for row in [*islice(self._fitting(draft), limit)]:
                taken.append((draft.taken(row, lease_ms), draft.body_place(row)))
            if not taken and draft.damage is not None:
                raise draft.damage
            # Bodies that the commit deletes with their rows have to be read before it.
            bodies = live.contents([place for _, place in taken]) if at_most_once else []
            for row, _ in taken:
                draft.replace(row)
            for (row, _), body in zip(taken, bodies, strict=False):
                if isinstance(body, Content):
                    draft.remove(row)
            return taken, bodies, draft.now.low, draft.next_due_ms()

        (taken, bodies, now_ms, due_ms), version = live.change(take)
        if not at_most_once:
            bodies = live.contents([place for _, place in taken])
        found = [(row, body) for (row, _), body in zip(taken, bodies, strict=True)]
        shown = [row.shown(body) for row, body in found if isinstance(body, Content)]
        if len(shown) < len(found):
            self._bury_damaged(queue, {row.id: (row, body) for row, body in found})
        return Taken(shown, now_ms, due_ms, live.watch.ticket(version))

    def _bury_damaged(self, queue: QueueRow, taken: Mapping[int, tuple[Row, Content | ConfigError]]) -> None:
        """Make messages dead letters whose bodies can't be read, unless they were finished meanwhile."""
        errors = {key: body for key, (_, body) in taken.items() if isinstance(body, ConfigError)}

        def bury(draft: Draft, row: Row) -> None:
            reason = f"damaged: {errors[row.id]}"
            draft.replace(row._replace(status=Status.DEAD, since_ms=draft.now.high, reason=reason))

        refs = [TakeRef(key, taken[key][0].take) for key in errors]
        buried = self._change_takes(queue, refs, bury, late=True)
        if buried:
            found = next(iter(errors.values()))
            log.error("queue %r: %d damaged messages are dead letters: %s", queue.name, buried, found)

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:  # noqa: ARG002
        return self._change_takes(queue, takes, lambda draft, row: draft.remove(row), late=True)

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
        delay_ms = min(delay_ms or 0, _MOST_DELAY_MS)

        def give_back(draft: Draft, row: Row) -> None:
            draft.requeue(row, draft.now.high, delay_ms=delay_ms, count=count, reason=reason)

        return self._change_takes(queue, takes, give_back, late=False, gone=gone)

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        """See Engine. If some takes are lost, a second look finds out which; they stay lost."""
        lease_ms = min(lease_ms, _MOST_DELAY_MS)
        any_ids = {one.id for one in takes if one.is_any}

        def find(draft: Draft, ref: TakeRef) -> Row | None:
            return draft.current_row(ref) if ref.is_any else _taken_row(draft, ref)

        def extend(draft: Draft, row: Row) -> None:
            if row.status is not Status.TAKEN:
                draft.replace(draft.taken(row, lease_ms))
                return
            least_ms = row.until_ms if row.id in any_ids else 0
            draft.replace(row._replace(until_ms=max(least_ms, draft.now.high + lease_ms)))

        def lost(draft: Draft) -> list[TakeRef]:
            return [one for one in takes if _taken_row(draft, one) is None]

        if self._change_each(queue, takes, find, extend) == len(takes):
            return []
        return self._live(queue).change(lost)[0]

    def bury(
        self, queue: QueueRow, takes: Sequence[TakeRef], reason: str, *, gone: Sequence[MessageRow] = ()
    ) -> int:
        def bury(draft: Draft, row: Row) -> None:
            draft.replace(row._replace(status=Status.DEAD, since_ms=draft.now.high, reason=reason))

        return self._change_takes(queue, takes, bury, late=True, gone=gone)

    def release_all(self, queue: QueueRow) -> int:
        def release(draft: Draft, row: Row) -> None:
            draft.requeue(row, draft.now.high, delay_ms=0, count=False, reason=row.reason)

        return self._change_all(queue, (Status.TAKEN,), release)

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        return _shown_rows(self._with_bodies(queue, lambda draft: islice(draft.ready_rows(), limit)))

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:  # noqa: ARG002 - counting costs nothing
        return self._live(queue).change(lambda draft: draft.counts())[0]

    def taken_rows(
        self,
        queue: QueueRow,
        *,
        limit: int,
        after: int = 0,
        taken_for_ms: int | None = None,
        queued_before_ms: int | None = None,
    ) -> list[MessageRow]:
        def matching(draft: Draft) -> Iterator[Row]:
            rows = (
                row
                for row in draft.rows_of(Status.TAKEN)
                if row.id > last_id
                and (taken_for_ms is None or row.since_ms < draft.now.low - taken_for_ms)
                and (queued_before_ms is None or row.enqueued_ms < queued_before_ms)
            )
            return islice(rows, limit - len(found))

        found: list[MessageRow] = []
        last_id = after
        while len(found) < limit:
            rows = self._with_bodies(queue, matching)
            if not rows:
                break
            found += _shown_rows(rows)
            last_id = rows[-1][0].id
        return found

    def purge(self, queue: QueueRow) -> int:
        alive = (Status.READY, Status.DELAYED, Status.TAKEN)
        return self._change_all(queue, alive, lambda draft, row: draft.remove(row))

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        found = self._with_bodies(queue, lambda draft: _oldest_dead(draft, limit))
        rows = [row.shown(body if isinstance(body, Content) else Content()) for row, body in found]
        rows = [row._replace(size=len(row.body)) for row in rows]
        return rows if with_bodies else [row._replace(body=b"", headers=()) for row in rows]

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        chosen = None if ids is None else frozenset(ids)

        def wanted(draft: Draft) -> list[Row]:
            found = _oldest_dead(draft, None)
            return [row for row in found if chosen is None or row.id in chosen][:limit]

        rows = self._live(queue).change(wanted)[0]
        takes = [row.id for row in rows]

        def redrive(draft: Draft, row: Row) -> None:
            draft.replace(
                row._replace(
                    status=Status.READY,
                    requeues=0,
                    enqueued_ms=draft.now.high,
                    reason=None,
                    place=draft.draw_place(),
                )
            )

        return self._change_each(queue, takes, lambda draft, one: draft.dead_row(one), redrive)

    def purge_dead(self, queue: QueueRow) -> int:
        return self._change_all(queue, (Status.DEAD,), lambda draft, row: draft.remove(row))

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        pause_s = seconds
        if taken.next_due_ms is not None:
            pause_s = min(seconds, max(0, taken.next_due_ms - taken.now_ms) / 1000 + 0.001)
        return self._live(queue).watch.wait(taken.seen, pause_s) or pause_s < seconds

    def wake(self, queue: QueueRow) -> None:
        self._live(queue).watch.wake()

    def close(self) -> None:
        self._znodes.close()
        self._closing.close()

    def on_close(self, call: Callable[[], object]) -> None:
        """Register a function that close() calls."""
        self._closing.callback(call)

    # --- what these methods share -----------------------------------------------------------------

    def _live(self, queue: QueueRow) -> LiveQueue:
        with self._lock:
            found = self._queues.get(queue.generation)
            if found is None:
                found = LiveQueue(self._znodes, queue, self._bodies, self._turns)
                self._queues[queue.generation] = found
            return found

    def _fitting(self, draft: Draft) -> Iterator[Row]:
        """Ready rows in order, as many as a commit can change; not those that the same commit puts."""
        pages: set[int] = set()
        for row in draft.ready_rows():
            pages.add(draft.body_place(row)[0])
            if len(pages) > draft.room or draft.is_new(row):
                return
            yield row

    def _with_bodies(
        self, queue: QueueRow, choose: Callable[[Draft], Iterable[Row]]
    ) -> list[tuple[Row, Content | ConfigError]]:
        """Rows that `choose` gives, with their bodies. Raises ConfigError if there are only damaged pages."""
        live = self._live(queue)

        def chosen(draft: Draft) -> Rows:
            rows = [(row, draft.body_place(row)) for row in choose(draft)]
            if not rows and draft.damage is not None:
                raise draft.damage
            return rows

        rows = live.change(chosen)[0]
        bodies = live.contents([place for _, place in rows])
        return [(row, body) for (row, _), body in zip(rows, bodies, strict=True)]

    def _change_takes(
        self,
        queue: QueueRow,
        takes: Sequence[TakeRef],
        change: Callable[[Draft, Row], None],
        *,
        late: bool,
        gone: Sequence[MessageRow] = (),
    ) -> int:
        """Change the rows of current takes; `late`: also rows that were given back.

        Rows that are `gone` are added again, by several commits if need be.
        """
        find = Draft.current_row if late else _taken_row
        if not gone:
            return self._change_each(queue, takes, find, change)

        def find_or_add(draft: Draft, row: MessageRow) -> Row | None:
            if draft.row(row.id) is None:
                return draft.add_again(row)
            return find(draft, TakeRef(row.id, row.take))

        return sum(
            self._change_each(queue, some, find_or_add, change, ids=len(some))
            for piece in pieces(gone, _GONE_PER_COMMIT)
            for some in packs(piece)
        )

    def _change_all(
        self, queue: QueueRow, states: tuple[Status, ...], change: Callable[[Draft, Row], None]
    ) -> int:
        """Change all rows in one of these states. Raises ConfigError in the end, if a page is unreadable."""

        def chosen(draft: Draft) -> tuple[list[int], ConfigError | None]:
            return [row.id for one in states for row in draft.rows_of(one)], draft.damage

        (rows, damage), _ = self._live(queue).change(chosen)

        def find(draft: Draft, row_id: int) -> Row | None:
            row = draft.row(row_id)
            return row if row is not None and row.status in states else None

        done = self._change_each(queue, sorted(rows), find, change)
        if damage is not None:
            raise damage
        return done

    def _change_each(
        self,
        queue: QueueRow,
        keys: Sequence[K],
        find: Callable[[Draft, K], Row | None],
        change: Callable[[Draft, Row], None],
        *,
        ids: int = 0,
    ) -> int:
        """Change the rows that `find` gives for the keys, by several commits if need be; returns how many.

        `find` may add rows, and use up to `ids` new ids for them.
        Raises ConfigError in the end, if pages of some could not be read.
        """
        live = self._live(queue)
        done = begin = 0
        damage: ConfigError | None = None

        def change_some(draft: Draft) -> tuple[int, int, ConfigError | None]:
            changed, error = 0, None
            for used, key in enumerate(keys[begin:]):
                if draft.is_full:
                    return changed, used, error
                try:
                    row = find(draft, key)
                except ConfigError as unreadable:
                    error = unreadable
                    continue
                if row is not None:
                    change(draft, row)
                    changed += 1
            return changed, len(keys) - begin, error

        while begin < len(keys):
            (changed, used, error), _ = live.change(change_some, ids=ids)
            done += changed
            begin += used
            damage = damage or error
        if damage is not None:
            raise damage
        return done


def _taken_row(draft: Draft, ref: TakeRef) -> Row | None:
    """The row of a current take, unless it was given back."""
    row = draft.current_row(ref)
    return row if row is not None and row.status is Status.TAKEN else None


def _shown_rows(rows: Iterable[tuple[Row, Content | ConfigError]]) -> list[MessageRow]:
    return [row.shown(body) for row, body in rows if isinstance(body, Content)]


def _oldest_dead(draft: Draft, limit: int | None) -> list[Row]:
    """Dead rows, `limit` at most, those that were buried first before others."""
    rows = draft.rows_of(Status.DEAD)

    def age(row: Row) -> tuple[int, int]:
        return row.since_ms, row.id

    return sorted(rows, key=age) if limit is None else heapq.nsmallest(limit, rows, key=age)
