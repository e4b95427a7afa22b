"""Builds and reads the paths and names of the znodes of a queue; pure.

The default root of queues is /zms:

/zms/.transactions/<uuid>                 a commit record: holds the UUID of the last commit that wrote it
/zms/<queue>/items/item-0000000001        the body of an item; item-p5-0000000001 has priority 5
/zms/<queue>/locks/lock-0000000001        ephemeral: the item is taken; holds a UUID of its own
/zms/<queue>/locks/lock-0000000001.<uuid> ephemeral: made with the lock, and named by its UUID
/zms/<queue>/meta/meta-0000000001         JSON, where a policy counts takes: see policies.py
/zms/<queue>/dlq/item-0000000001-t3-0000000000
                                          an item that a policy refused: the name that it had, how often it
                                          was taken, and a number of its own

A process names each commit record that it makes by a new UUID, and its commits use the record one after the
other. A process that lost the answer to a commit reads there whether the commit happened (commit_records.py).
A taker that lost the answer to its request for a lock looks for the znode with the UUID of the lock: if the
znode exists, the taker has the lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kmqpy.errors import ConfigError, QueueNotFound

_ITEM_NAME = re.compile(r"item-(?:p([1-9])-)?(-?[0-9]{10})")
_DEAD_NAME = re.compile(rf"({_ITEM_NAME.pattern})(?:-t([0-9]+)-(-?[0-9]{{10}}))?")
"""Earlier versions numbered dead letters anew: those have no further number."""
_LOCK_NAME = re.compile(r"lock-(-?[0-9]{10})")
_QUEUE_NAME = re.compile(r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*")


class QueuePaths:
    """The paths of the znodes of one queue; raises ConfigError if no queue can have this name.

    parents  all znodes that must exist before the queue is used
    """

    def __init__(self, root: str, queue: str) -> None:
        if not is_queue_name(queue):
            raise ConfigError(f"queue: {queue!r} is not a valid name: use no '/', and no '.' in front")
        self.queue = queue
        self.base = f"{root}/{queue}"
        self.items, self.locks = f"{self.base}/items", f"{self.base}/locks"
        self.metas, self.dead_letters = f"{self.base}/meta", f"{self.base}/dlq"
        self.parents = self.items, self.locks, self.metas, self.dead_letters

    def item(self, name: str) -> str:
        return f"{self.items}/{name}"

    def new_item(self, priority: int = 0) -> str:
        """Return the path to which ZooKeeper appends the sequence number of a new item."""
        return self.item(f"item-p{priority}-" if priority else "item-")

    def new_item_like(self, name: str) -> str:
        """Return new_item() for the priority of the item or dead letter `name`."""
        return self.new_item(_priority_of(name))

    def dead_letter(self, znode: str) -> str:
        return f"{self.dead_letters}/{znode}"

    def new_dead_letter(self, name: str, taken: int) -> str:
        """Return the path to which ZooKeeper appends a number when item `name` becomes a dead letter."""
        return self.dead_letter(f"{name}-t{taken}-")

    def lock(self, name: str) -> str:
        return f"{self.locks}/lock-{sequence_of(name)}"

    def owner(self, name: str, token: str) -> str:
        """Return the path of the second znode of a lock, which tells that the lock has the UUID `token`."""
        return f"{self.lock(name)}.{token}"

    def meta(self, name: str) -> str:
        """Return the path of the znode in which a policy counts the takes of item `name`."""
        return f"{self.metas}/meta-{sequence_of(name)}"


@dataclass(frozen=True, slots=True)
class DeadName:
    """The name of a dead letter's znode.

    znode   the name itself
    item    the name that the item had in its queue
    taken   how often it was taken; None if the name does not tell it
    number  ZooKeeper's number: the order in which items became dead letters
    """

    znode: str
    item: str
    taken: int | None
    number: int

    @classmethod
    def read(cls, znode: str) -> DeadName | None:
        """Return what the name of a znode tells; None if it is no dead letter."""
        found = _DEAD_NAME.fullmatch(znode)
        if found is None:
            return None
        item, _, sequence, taken, number = found.groups()
        return cls(znode, item, None if taken is None else int(taken), int(number or sequence))

    @property
    def place(self) -> tuple[int, int]:
        """The key that sorts dead letters: higher priorities first, then the oldest."""
        return -_priority_of(self.item), self.number


def missing_queue(paths: QueuePaths, parent: str) -> QueueNotFound:
    return QueueNotFound(f"queue {paths.queue!r}: there is no {parent}; make it with init()")


def transactions_path(root: str) -> str:
    return f"{root}/.transactions"


def is_item(name: str) -> bool:
    return _ITEM_NAME.fullmatch(name) is not None


def is_lock(name: str) -> bool:
    """Return True if `name` is the name of a lock; each lock has another znode, which does not count."""
    return _LOCK_NAME.fullmatch(name) is not None


def is_queue_name(name: str) -> bool:
    return _QUEUE_NAME.fullmatch(name) is not None


def sequence_of(name: str) -> str:
    """Return the sequence number that the names of an item, its lock and its meta znode have in common."""
    found = _ITEM_NAME.fullmatch(name)
    assert found is not None, name
    return found[2]


def have_same_priority(name: str, other: str) -> bool:
    return _priority_of(name) == _priority_of(other)


def _priority_of(name: str) -> int:
    found = _ITEM_NAME.fullmatch(name)
    return int(found[1] or 0) if found else 0


def in_order(names: Iterable[str], locks: Iterable[str]) -> list[str]:
    """Return the items that are not locked: higher priorities first, then in the order of their puts.

    Names that are not those of items are left out.
    """
    locked = {found[1] for lock in locks if (found := _LOCK_NAME.fullmatch(lock))}
    matches = [(_ITEM_NAME.fullmatch(name), name) for name in names]
    keyed = [
        (-int(match[1] or 0), int(match[2]), name)
        for match, name in matches
        if match and match[2] not in locked
    ]
    return [name for _, _, name in sorted(keyed)]
