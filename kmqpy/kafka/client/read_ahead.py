"""Messages that a client has received to be iterated over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.kafka.places import Place


class ReadAhead:
    """Messages that wait for their turn, each with the end of its lease; safe to use from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, KafkaMessage]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def extend(self, messages: Iterable[KafkaMessage], until: float) -> None:
        """Add messages whose leases end at the monotonic time `until`, not before those that wait already."""
        with self._lock:
            self._waiting.extend((until, message) for message in messages)

    def pop(self) -> KafkaMessage | None:
        """The next message; None if there is none."""
        with self._lock:
            return self._waiting.popleft()[1] if self._waiting else None

    def pop_all(self) -> list[Place]:
        """Remove all messages; returns their places."""
        with self._lock:
            places = [(message.partition, message.offset) for _, message in self._waiting]
            self._waiting.clear()
            return places

    def give_back_stale(self, needed: float, give_back: Callable[[list[Place]], None]) -> None:
        """Remove messages whose leases end before `needed`, and call `give_back` with their places.

        Whoever calls pop_all() afterwards knows that these are given back.
        """
        with self._lock:
            if not self._waiting or self._waiting[0][0] >= needed:
                return  # the first is the first to run out
            stale = [(one.partition, one.offset) for until, one in self._waiting if until < needed]
            self._waiting = deque((until, one) for until, one in self._waiting if until >= needed)
            give_back(stale)
