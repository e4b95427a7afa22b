"""What happens in a run, in order: records, and what stands in no log. For the replay (see refinement.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kmqpy.kafka.admin.registry_entries import StoredOffset

    from .model import Record, Txn


class Written(NamedTuple):
    """A record was appended to a log."""

    record: Record


class Decided(NamedTuple):
    """A transaction was committed or aborted: `txn.state` says which."""

    txn: Txn


class EndedLong(NamedTuple):
    """To end a transaction took this producer so long that it may have sent the request for it twice."""

    transactional_id: str


class Opened(NamedTuple):
    """A producer with this transactional id fenced its predecessors."""

    transactional_id: str


class Planned(NamedTuple):
    """A tracker is to redeliver messages of a partition, or only to end those that were `taken_late`.

    position  the offset before which it knew the markers then
    """

    tracker: str
    partition: int
    offsets: Collection[int]
    position: int
    taken_late: Collection[int]


class HandedOut(NamedTuple):
    """A client gave a message to its user; it had read the markers before `recovered` when it took it."""

    client: str
    partition: int
    offset: int
    recovered: int


class Acked(NamedTuple):
    """The user of a client acknowledges a message, which may have been handed out to another client."""

    client: str
    partition: int
    offset: int


class Stored(NamedTuple):
    """A tracker stored an offset in ZooKeeper."""

    partition: int
    stored: StoredOffset


Journal = list[Any]
