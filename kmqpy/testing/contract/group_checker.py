"""Judges in which order messages of groups were handed out, by what takers saw, not by a storage's state."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Numbered = tuple[str, int]
"""A message: its group, and its number among those that were sent in the group, from 0 on."""


@dataclass(slots=True)
class _GroupLog:
    finished: set[int] = field(default_factory=set)
    in_flight: dict[int, int] = field(default_factory=dict)
    low: int = 0

    def first_unfinished(self, batch: int) -> int:
        """The number that comes next in this batch."""
        while self.low in self.finished:
            self.finished.discard(self.low)
            self.low += 1
        number = self.low
        while number in self.finished or self.in_flight.get(number) == batch:
            number += 1
        return number


class CapChecker:
    """Notes of how many messages of a group takers have at most; safe to use from any thread.

    A taker calls handed_out() when receive() has returned, and ended() before it ends messages in any way.
    """

    def __init__(self, most: int) -> None:
        self.problems: list[str] = []
        self._most = most
        self._in_flight: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handed_out(self, groups: Iterable[str]) -> None:
        """One receive() has returned messages of these groups."""
        with self._lock:
            self._in_flight.update(groups)
            over = {group: count for group, count in self._in_flight.items() if count > self._most}
            if over:
                self.problems.append(f"more than {self._most} in flight: {over}")

    def ended(self, groups: Iterable[str]) -> None:
        """A taker is about to finish or give back messages of these groups."""
        with self._lock:
            self._in_flight.subtract(groups)


class GroupChecker:
    """Notes what takers got and what they are about to do; safe to use from any thread.

    A taker calls handed_out() when receive() has returned, ended() before it finishes messages, and back()
    before it gives them back or lets their leases end. `problems` says what must not be:

    overlap    a message was handed out while another one of its group was in flight, in another batch
    inversion  a message was handed out before one of its group that was sent earlier
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._groups: dict[str, _GroupLog] = {}
        self._batches = 0
        self._lock = threading.Lock()

    def handed_out(self, messages: Sequence[Numbered]) -> None:
        """One receive() has returned these messages, in this order."""
        with self._lock:
            self._batches += 1
            for group, number in messages:
                log = self._groups.setdefault(group, _GroupLog())
                others = sorted(one for one, batch in log.in_flight.items() if batch != self._batches)
                if others:
                    self.problems.append(f"overlap: {group} {number} beside {others}")
                expected = log.first_unfinished(self._batches)
                if number != expected:
                    self.problems.append(f"inversion: {group} {number} before {expected}")
                log.in_flight[number] = self._batches

    def ended(self, messages: Iterable[Numbered]) -> None:
        """A taker is about to acknowledge or dead-letter these messages."""
        with self._lock:
            for group, number in messages:
                log = self._groups.setdefault(group, _GroupLog())
                log.in_flight.pop(number, None)
                if number >= log.low:
                    log.finished.add(number)

    def back(self, messages: Iterable[Numbered]) -> None:
        """A taker is about to give these messages back, or their leases are about to end."""
        with self._lock:
            for group, number in messages:
                self._groups.setdefault(group, _GroupLog()).in_flight.pop(number, None)

    def unfinished(self, sent: dict[str, int]) -> dict[str, int]:
        """By group, how many of the `sent` messages were never finished; groups without any are left out."""
        with self._lock:
            left = {
                group: count - log.low - len(log.finished)
                for group, count in sent.items()
                for log in [self._groups.get(group, _GroupLog())]
            }
        return {group: count for group, count in left.items() if count}
