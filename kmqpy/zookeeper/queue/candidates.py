"""The items of a queue that a process may try to take."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterable

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.queue.layout import QueuePaths, have_same_priority, in_order, missing_queue
from kmqpy.zookeeper.queue.sessions import SessionWatch
from kmqpy.zookeeper.session import unavailable
from kmqpy.zookeeper.watched_children import WatchedChildren

_LISTED = 100
_LISTING_SHARE = 10
"""A listing serves for 100 items at least, and for ten times as long as it took. The next one finds new
priorities, and items given back; in a deep queue it costs as much as hundreds of takes."""
_RUNS = 8
"""A taker that finds items locked skips up to this many times the items it wants; then twice as many."""


class Candidates:
    """The names of one queue's items that may be free; each is given to one thread. Thread-safe.

    One thread lists the queue for all. What a thread has drawn is not given to another, until it is given
    back.
    """

    def __init__(self, session: SessionWatch, paths: QueuePaths) -> None:
        self.changed = threading.Event()
        """Set when the items or locks may have changed."""
        self._session = session
        self._paths = paths
        self._items = WatchedChildren(session.zk, paths.items, self.changed)
        self._locks = WatchedChildren(session.zk, paths.locks, self.changed)
        self._listing = threading.Lock()
        self._mutex = threading.Lock()
        self._names: deque[str] = deque()
        self._drawn: set[str] = set()
        self._session_number = session.number
        self._begun = self._done = 0
        self._tried = 0
        self._due_at = 0.0
        self._reach = 0

    def begin(self) -> int:
        """Begin a take; returns the number that draw() wants."""
        with self._mutex:
            if self._session_number != self._session.number:  # all locks have gone with the session
                self._session_number = self._session.number
                self._drawn.clear()
                self._names.clear()
            if self._tried >= _LISTED and SYSTEM_CLOCK.monotonic() >= self._due_at:
                self._names.clear()
            return self._begun

    def draw(self, count: int, number: int) -> list[str]:
        """Return up to `count` names, in the order in which to try them.

        Empty when all that were listed after begin() returned `number` have been drawn. Raises Unavailable,
        QueueNotFound.
        """
        while True:
            with self._mutex:
                drawn = [self._names.popleft() for _ in range(min(count, len(self._names)))]
                self._drawn.update(drawn)
                self._tried += len(drawn)
                if drawn or self._done > number:
                    return drawn
            with self._listing:
                if not self._names and self._done <= number:
                    self._list()

    def step_aside(self, count: int) -> None:
        """Another process was faster: try names further back next, the further the more often it happens."""
        with self._mutex:
            self._reach = min(max(_RUNS * count, 2 * self._reach), len(self._names))
            self._jump()

    def _jump(self) -> None:
        """Go on somewhere within reach, among names of the same priority; the others come after these."""
        some = [self._names.popleft() for _ in range(min(self._reach, len(self._names)))]
        alike = sum(have_same_priority(name, some[0]) for name in some)
        start = random.randrange(alike) if alike else 0
        self._names.extendleft(reversed([*some[start:alike], *some[:start], *some[alike:]]))

    def give_back(self, names: Iterable[str], *, free: bool = False) -> None:
        """Let names be drawn again; `free`: others can take them now, and are to be told."""
        with self._mutex:
            self._drawn.difference_update(names)
        if free:
            self.changed.set()

    def all_in_order(self) -> list[str]:
        """Return the names of all items, locked ones too; it sees all that was committed before.

        Raises as draw().
        """
        zk, path = self._session.zk, self._paths.items
        with unavailable(zk):
            zk.sync(path)
            return self._ordered(zk.get_children(path) if zk.exists(path) else [], [])

    def _list(self) -> None:
        self.changed.clear()  # first: a name given back during the listing is left out, but sets it again
        with self._mutex:
            self._begun += 1
            drawn = set(self._drawn)
        started = SYSTEM_CLOCK.monotonic()
        with unavailable(self._session.zk):
            locks = self._locks.names()
            names = self._ordered(self._items.names(), locks)
        now = SYSTEM_CLOCK.monotonic()
        with self._mutex:
            drawn |= self._drawn
            self._names = deque(name for name in names if name not in drawn)
            self._reach //= 2
            self._jump()  # not at the item where all processes begin
            self._done = self._begun
            self._tried = 0
            self._due_at = now + _LISTING_SHARE * (now - started)

    def _ordered(self, names: Iterable[str], locks: Iterable[str]) -> list[str]:
        names = [*names]
        if not names and self._session.zk.exists(self._paths.items) is None:
            raise missing_queue(self._paths, self._paths.items)
        return in_order(names, locks)
