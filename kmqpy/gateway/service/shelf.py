"""Keeps messages that came when their poll had been answered, for the next poll. Pure: no I/O."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kmqpy.message import Message

_KEEP_S = 3.0
"""Messages that nobody asks for in this time, in seconds, are given back."""
_KEEP_SHARE = 0.25
"""The same, as a share of their lease."""


class _Late(NamedTuple):
    message: Message
    until_s: float


class Shelf:
    """The late messages of one queue. Times are those of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._late: deque[_Late] = deque()

    def __len__(self) -> int:
        return len(self._late)

    def put(self, messages: list[Message], lease_s: float, now_s: float) -> None:
        """Keep messages that were taken with this lease just now."""
        until_s = now_s + min(_KEEP_S, lease_s * _KEEP_SHARE)
        self._late.extend(_Late(message, until_s) for message in messages)

    def take(self, limit: int, now_s: float) -> list[Message]:
        """Up to `limit` messages, the first ones first."""
        found: list[Message] = []
        while self._late and len(found) < limit and self._late[0].until_s > now_s:
            found.append(self._late.popleft().message)
        return found

    def clear(self) -> list[Message]:
        """Remove and return all messages."""
        found = [one.message for one in self._late]
        self._late.clear()
        return found

    def stale(self, now_s: float) -> list[Message]:
        """Remove and return the messages that were kept long enough."""
        found = [one.message for one in self._late if one.until_s <= now_s]
        self._late = deque(one for one in self._late if one.until_s > now_s)
        return found
