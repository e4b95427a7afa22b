"""The znodes of a queue; pure.

/zms/.transactions/<uuid>                 the UUID of the last commit that used this znode: it happened
/zms/<queue>/items/item-0000000001        the body; item-p5-0000000001 has priority 5
/zms/<queue>/locks/lock-0000000001        ephemeral: taken; its data is the UUID of the lock
/zms/<queue>/locks/lock-0000000001.<uuid> ephemeral: made with the lock, tells whose it is
/zms/<queue>/meta/meta-0000000001         JSON, where a policy counts: see policies.py
/zms/<queue>/dlq/item-0000000001          what a policy refused (numbered anew, with its priority)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kmqpy.errors import ConfigError, QueueNotFound

_ITEM = re.compile(r"item-(?:p([1-9])-)?(-?[0-9]{10})")
_LOCK = re.compile(r"lock-(-?[0-9]{10})")
_NAME = re.compile(r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class QueuePaths:
    """The znodes of one queue."""

    root: str
    queue: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.queue):
            raise ConfigError(f"queue: {self.queue!r} can't be the name of a queue: no '/', no '.' in front")

    @property
    def base(self) -> str:
        """The znode of the queue itself."""
        return f"{self.root}/{self.queue}"

    @property
    def items(self) -> str:
        """The parent of the items."""
        return f"{self.base}/items"

    @property
    def locks(self) -> str:
        """The parent of the locks."""
        return f"{self.base}/locks"

    @property
    def dead_letters(self) -> str:
        """The parent of what policies refused."""
        return f"{self.base}/dlq"

    @property
    def parents(self) -> tuple[str, ...]:
        """All that must be there before the queue is used."""
        return self.items, self.locks, f"{self.base}/meta", self.dead_letters

    def item(self, name: str) -> str:
        """An item by its name."""
        return f"{self.items}/{name}"

    def new_item(self, priority: int = 0) -> str:
        """The path to which ZooKeeper appends the sequence number of a new item."""
        return self.item(_item_prefix(priority))

    def new_item_like(self, name: str) -> str:
        """The path of a new item with the priority of the item or dead letter `name`."""
        return self.new_item(_priority_of(name))

    def dead_letter(self, name: str) -> str:
        """A dead letter by its name."""
        return f"{self.dead_letters}/{name}"

    def new_dead_letter(self, name: str) -> str:
        """The path to which ZooKeeper appends the sequence number when item `name` becomes a dead letter."""
        return self.dead_letter(_item_prefix(_priority_of(name)))

    def lock(self, name: str) -> str:
        """The lock of an item."""
        return f"{self.locks}/lock-{sequence_of(name)}"

    def owner(self, name: str, token: str) -> str:
        """The second znode of a lock."""
        return f"{self.lock(name)}.{token}"

    def meta(self, name: str) -> str:
        """How often an item was taken."""
        return f"{self.base}/meta/meta-{sequence_of(name)}"


def missing_queue(paths: QueuePaths, parent: str) -> QueueNotFound:
    """Return the error that a znode which a queue needs is missing."""
    return QueueNotFound(f"queue {paths.queue!r}: there is no {parent}; make it with init()")


def transactions_path(root: str) -> str:
    """The parent of the znodes of commits."""
    return f"{root}/.transactions"


def is_item(name: str) -> bool:
    """True when `name` is the name of an item."""
    return _ITEM.fullmatch(name) is not None


def sequence_of(name: str) -> str:
    """The ten digits that an item, its lock and its meta have in common."""
    found = _ITEM.fullmatch(name)
    assert found is not None, name
    return found[2]


def have_same_priority(name: str, other: str) -> bool:
    """True when two items have the same priority."""
    return _priority_of(name) == _priority_of(other)


def _item_prefix(priority: int) -> str:
    return f"item-{f'p{priority}-' if priority else ''}"


def _priority_of(name: str) -> int:
    found = _ITEM.fullmatch(name)
    return int(found[1] or 0) if found else 0


def in_order(names: Iterable[str], locks: Iterable[str]) -> list[str]:
    """The items that are not locked: higher priorities first, then the order in which they were put.

    Names of anything else are left out.
    """
    locked = {found[1] for lock in locks if (found := _LOCK.fullmatch(lock))}
    matches = [(_ITEM.fullmatch(name), name) for name in names]
    keyed = [
        (-int(match[1] or 0), int(match[2]), name)
        for match, name in matches
        if match and match[2] not in locked
    ]
    return [name for _, _, name in sorted(keyed)]
