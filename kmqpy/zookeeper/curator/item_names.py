"""Builds, orders and reads the names of znodes in Curator's queues; pure.

A name is a prefix, which may hold an id, a priority or a due time, and the sequence number of ten digits that
ZooKeeper appends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kmqpy.errors import ConfigError

PREFIX = "queue-"
_SEPARATOR = "|"


_SEQUENCE_DIGITS = 10


def same_prefix(name: str) -> str:
    """Return the prefix of a name: an item that is requeued under it keeps its id, priority or due time.

    Curator's requeued items keep only their id.
    """
    prefix = name[:-_SEQUENCE_DIGITS]
    return prefix if prefix.startswith(PREFIX) else PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemNames:
    """The functions of names in which the kinds of queues differ.

    order           sorts names into the order of consumption
    due_ms          returns when the item of a name may be consumed, in ms since 1970 UTC; 0 is at once
    requeue_prefix  returns the prefix under which the item of a name is requeued after a failure
    """

    order: Callable[[Iterable[str]], list[str]] = sorted
    due_ms: Callable[[str], int] = lambda _name: 0
    requeue_prefix: Callable[[str], str] = same_prefix


def priority_prefix(priority: int) -> str:
    """Return the prefix for items of a priority queue. A lower number comes first; 32 bits, signed."""
    if not -(2**31) <= priority < 2**31:
        raise ConfigError(f"priority: {priority} is not a signed number of 32 bits")
    return f"{PREFIX}{'1' if priority >= 0 else '0'}{priority & 0xFFFFFFFF:08X}"


def id_prefix(item_id: str) -> str:
    """Return the prefix for items of an id queue; `/` and `|` in the id become `_`, as in Curator."""
    if not item_id:
        raise ConfigError("item_id: must not be empty")
    return f"{PREFIX}{_SEPARATOR}{cleaned_id(item_id)}{_SEPARATOR}"


def cleaned_id(item_id: str) -> str:
    return item_id.replace("/", "_").replace(_SEPARATOR, "_")


def id_of(name: str) -> str | None:
    _, first, rest = name.partition(_SEPARATOR)
    item_id, second, _ = rest.partition(_SEPARATOR)
    return item_id if first and second else None


def delay_prefix(due_ms: int) -> str:
    """Return the prefix for items of a delay queue that are due at `due_ms`, ms since 1970 UTC."""
    if not 0 <= due_ms < 2**63:
        raise ConfigError(f"due_ms: {due_ms} is not from 0 to 2**63 - 1")
    return f"{PREFIX}{_SEPARATOR}{due_ms:08X}{_SEPARATOR}"


def due_ms_of(name: str) -> int:
    """Return when the item of a delay queue is due; 0 (at once) if its name holds no number of 63 bits."""
    hexadecimal = id_of(name)
    try:
        due_ms = int(hexadecimal or "0", 16)
    except ValueError:
        return 0
    return due_ms if due_ms < 2**63 else 0


def _by_sequence(names: Iterable[str]) -> list[str]:

    def without_id(name: str) -> str:
        before, first, rest = name.partition(_SEPARATOR)
        _, second, after = rest.partition(_SEPARATOR)
        return before + after if first and second else name

    return sorted(names, key=without_id)


def _by_due_time(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (due_ms_of(name), name))


PLAIN = ItemNames()
BY_ID = ItemNames(order=_by_sequence)
DELAYED = ItemNames(order=_by_due_time, due_ms=due_ms_of)
