"""What a gateway knows of the claims of a queue on Kafka, beyond what is written there.

Kafka's log hands out a message though a client has acknowledged or claimed it that only saw it by a peek.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kmqpy.message import Message

_MOST = 10_000
"""So many ids are remembered of each kind: the latest."""
_ENDED = float("inf")


class Said(NamedTuple):
    """What a client says of messages: their claims end in `lease_s` seconds; None: they are acknowledged."""

    ids: Sequence[str]
    lease_s: float | None


class Heeded(NamedTuple):
    """Messages that were taken: to hand out; acknowledged before; claimed before, with the seconds left."""

    good: list[Message]
    ended: list[Message]
    claimed: list[tuple[Message, float]]


class Claims:
    """The claims of one queue, as far as this gateway knows. Safe for several threads.

    Times are those of a monotonic clock, in seconds.

    In a queue that collapses, nothing counts that is said of a message before it is handed out: equal ones
    that are sent after that collapse into it when it is taken, and nobody would get them.
    """

    def __init__(self) -> None:
        self.collapses = False
        self._lock = threading.Lock()
        self._handed_out: OrderedDict[str, float] = OrderedDict()  # until when
        self._early: OrderedDict[str, float] = OrderedDict()  # the same, said before anybody was handed them

    def hand_out(self, ids: Iterable[str], until_s: float) -> None:
        """Note that messages were handed out to clients of ours."""
        with self._lock:
            for one in ids:
                _put(self._handed_out, one, until_s)
            _shorten(self._handed_out)

    def shorter_than(self, ids: Sequence[str], until_s: float) -> list[str]:
        """The messages whose claims end before `until_s`, or may do so."""
        with self._lock:
            return [one for one in ids if self._handed_out.get(one, 0.0) < until_s]

    def note(self, said: Said, now_s: float) -> list[str]:
        """Note what was said; returns the ids that were never handed out, as far as we know."""
        until_s = _ENDED if said.lease_s is None else now_s + said.lease_s
        with self._lock:
            unknown = [one for one in said.ids if one not in self._handed_out]
            for one in self._handed_out.keys() & said.ids:
                _put(self._handed_out, one, until_s)
            for one in () if self.collapses else unknown:
                known_s = self._early.get(one, now_s)
                if until_s > known_s:  # of two claims the later end counts
                    _put(self._early, one, until_s)
                elif said.lease_s == 0 and known_s < _ENDED:
                    self._early.pop(one, None)
            _shorten(self._early)
        return unknown

    def forget_early(self, ids: Iterable[str]) -> None:
        """Forget what was said of messages that another gateway has handed out: Kafka's log heeds that."""
        with self._lock:
            for one in ids:
                self._early.pop(one, None)

    def end(self) -> None:
        """Note that all claims have ended."""
        with self._lock:
            self._handed_out = OrderedDict.fromkeys(self._handed_out, 0.0)
            self._early = OrderedDict(one for one in self._early.items() if one[1] == _ENDED)

    def count_early(self, now_s: float) -> int:
        """How many messages are claimed that nobody was handed."""
        with self._lock:
            return sum(now_s < until_s < _ENDED for until_s in self._early.values())

    def heed(self, messages: Iterable[Message], now_s: float) -> Heeded:
        """Tell apart messages that were taken; what was said of them before is forgotten."""
        found = Heeded([], [], [])
        with self._lock:
            if self.collapses:  # heard of before the queue was opened
                self._early.clear()
            for message in messages:
                until_s = self._early.pop(message.id, 0.0)
                if until_s == _ENDED:
                    found.ended.append(message)
                elif until_s > now_s:
                    found.claimed.append((message, until_s - now_s))
                else:
                    found.good.append(message)
        return found


def _put(ids: OrderedDict[str, float], one: str, until_s: float) -> None:
    """Remember an id as the latest."""
    ids[one] = until_s
    ids.move_to_end(one)


def _shorten(ids: OrderedDict[str, float]) -> None:
    while len(ids) > _MOST:
        ids.popitem(last=False)
