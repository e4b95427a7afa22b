"""Lists the items of a queue, and shares out among threads which items each may try to take."""

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

_MIN_TRIED_PER_LISTING = 100
_LISTING_LIFETIME_FACTOR = 10
"""A listing is used until 100 of its items were tried and ten times the time that it took is over, or until
no name is left. Only the next listing finds items of new priorities, and items given back. In a deep queue
one listing costs as much as hundreds of takes."""
_SKIPPED_PER_WANTED = 8
"""A taker that finds an item locked skips at most this many names for each item that it wants. Each further
time, it may skip twice as many as before."""


class Candidates:
    """Gives threads the names of one queue's items that may be free, each name to one thread. Thread-safe.

    One thread lists the queue for all threads. No other thread gets a name that a thread has drawn, until
    that thread gives the name back.
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
        self._listings_begun = self._last_done = 0
        """The numbers of the last listing that was begun, and of the last one that is done."""
        self._tried = 0  # names drawn from the last listing
        self._next_listing_at = 0.0  # when the next listing may be made, in monotonic s
        self._jump_reach = 0  # the most names that _jump() may skip

    def begin(self) -> int:
        """Begin a take; return the number of the last listing begun, which draw() wants."""
        with self._mutex:
            if self._session_number != self._session.number:  # all locks have gone with the session
                self._session_number = self._session.number
                self._drawn.clear()
                self._names.clear()
            if self._tried >= _MIN_TRIED_PER_LISTING and SYSTEM_CLOCK.monotonic() >= self._next_listing_at:
                self._names.clear()
            return self._listings_begun

    def draw(self, count: int, number: int) -> list[str]:
        """Return up to `count` names, in the order in which to try them.

        Lists the queue when no name is left, unless a listing was begun after begin() and is done: then
        draw() returns no names. Raises Unavailable, QueueNotFound.
        """
        while True:
            with self._mutex:
                drawn = [self._names.popleft() for _ in range(min(count, len(self._names)))]
                self._drawn.update(drawn)
                self._tried += len(drawn)
                if drawn or self._last_done > number:
                    return drawn
            with self._listing:
                if not self._names and self._last_done <= number:
                    self._list()

    def step_aside(self, count: int) -> None:
        """Go on further back, because another process was faster; each time, the reach may double."""
        with self._mutex:
            self._jump_reach = min(max(_SKIPPED_PER_WANTED * count, 2 * self._jump_reach), len(self._names))
            self._jump()

    def _jump(self) -> None:
        """Rotate the names within reach that have the first one's priority, by a random number of names."""
        some = [self._names.popleft() for _ in range(min(self._jump_reach, len(self._names)))]
        alike = sum(have_same_priority(name, some[0]) for name in some)
        start = random.randrange(alike) if alike else 0
        self._names.extendleft(reversed([*some[start:alike], *some[:start], *some[alike:]]))

    def give_back(self, names: Iterable[str], *, free: bool = False) -> None:
        """Let the next listing have these names again; if they are `free` now, wake those who wait."""
        with self._mutex:
            self._drawn.difference_update(names)
        if free:
            self.changed.set()

    def all_in_order(self) -> list[str]:
        """Return the names of all items that are committed by now, locked ones too, in order."""
        zk, path = self._session.zk, self._paths.items
        with unavailable(zk):
            zk.sync(path)
            return self._ordered(zk.get_children(path) if zk.exists(path) else [], [])

    def _list(self) -> None:
        self.changed.clear()  # first: the listing leaves out a name given back meanwhile, which sets it again
        with self._mutex:
            self._listings_begun += 1
            drawn = set(self._drawn)
        started = SYSTEM_CLOCK.monotonic()
        with unavailable(self._session.zk):
            locks = self._locks.names()
            names = self._ordered(self._items.names(), locks)
        now = SYSTEM_CLOCK.monotonic()
        with self._mutex:
            drawn |= self._drawn
            self._names = deque(name for name in names if name not in drawn)
            self._jump_reach //= 2
            self._jump()  # else all processes would begin at the same item
            self._last_done = self._listings_begun
            self._tried = 0
            self._next_listing_at = now + _LISTING_LIFETIME_FACTOR * (now - started)

    def _ordered(self, names: Iterable[str], locks: Iterable[str]) -> list[str]:
        names = [*names]
        if not names and self._session.zk.exists(self._paths.items) is None:
            raise missing_queue(self._paths, self._paths.items)
        return in_order(names, locks)
