"""Lists, redrives and purges the dead letters of a StoredQueue."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kmqpy.core.settings import check_limit
from kmqpy.queue import DeadLetter
from kmqpy.queue.arguments import check_redrive
from kmqpy.storages.engine import Engine, MessageRow, QueueRow
from kmqpy.storages.receipts import parse_number

Listed = list[DeadLetter]
"""The result of list(): inside the class, the name `list` means that method, not the type."""


class StoredDeadLetters:
    """Implements kmqpy.queue.DeadLetters over an engine. `check_open` raises if the queue is closed."""

    def __init__(self, engine: Engine, queue: QueueRow, check_open: Callable[[], None]) -> None:
        self._engine = engine
        self._queue = queue
        self._check_open = check_open

    def list(self, limit: int = 100) -> Listed:
        """See DeadLetters.list."""
        return self._letters(limit, with_bodies=False)

    def peek(self, limit: int = 100) -> Listed:
        """See DeadLetters.peek."""
        return self._letters(limit, with_bodies=True)

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """See DeadLetters.redrive."""
        self._check_open()
        check_redrive(ids, limit)
        known = None
        if ids is not None:  # without texts that can't be an id of a message
            known = [number for number in map(parse_number, ids) if number is not None]
        if known == []:
            return 0
        return self._engine.redrive(self._queue, ids=known, limit=limit)

    def purge(self) -> int:
        """See DeadLetters.purge."""
        self._check_open()
        return self._engine.purge_dead(self._queue)

    def _letters(self, limit: int, *, with_bodies: bool) -> Listed:
        self._check_open()
        rows = self._engine.dead_rows(self._queue, check_limit(limit, "limit"), with_bodies=with_bodies)
        return [_letter(row) for row in rows]


def _letter(row: MessageRow) -> DeadLetter:
    return DeadLetter(
        id=str(row.id),
        key=row.key,
        attempts=row.requeues + 1,
        first_enqueued_ms=row.first_enqueued_ms,
        dead_since_ms=row.since_ms,
        reason=row.reason or "",
        size=row.size,
        body=row.body,
        headers=row.headers,
        group=row.group,
    )
