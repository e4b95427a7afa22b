"""A message in memory, and the states it can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kmqpy.message import Headers
from kmqpy.storages.engine import MessageRow


class RowState(Enum):
    """The state of a message."""

    READY = "ready"
    BEHIND = "behind"  # it waits for another one of its group
    DELAYED = "delayed"
    TAKEN = "taken"
    DEAD = "dead"


ALIVE = (RowState.READY, RowState.BEHIND, RowState.DELAYED, RowState.TAKEN)


@dataclass(slots=True, eq=False)
class MemoryRow:
    """A message. `version` grows with each change of state; heap entries with an older version are void."""

    id: int
    body: bytes
    key: bytes | None
    headers: Headers
    priority: int
    enqueued_ms: int
    first_enqueued_ms: int
    place: int
    state: RowState = RowState.READY
    version: int = 0
    take: int = 0
    requeues: int = 0
    since_ms: int = 0
    until_ms: int = 0
    reason: str | None = None
    digest: bytes | None = None
    group: str | None = None

    def shown(self) -> MessageRow:
        """The row as callers of the engine see it."""
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
            since_ms=self.since_ms if self.state in (RowState.TAKEN, RowState.DEAD) else 0,
            until_ms=self.until_ms if self.state in (RowState.TAKEN, RowState.DELAYED) else 0,
            reason=self.reason,
            place=self.place,
            group=self.group,
        )
