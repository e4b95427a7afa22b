"""Keeps a signal handler from waiting for ever for a lock that the interrupted code holds.

Python runs a signal handler in the main thread, in the middle of whatever that thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SignalSafeEvent(threading.Event):
    """An event that a signal handler may set, even if the handler interrupted a method of the same event.

    The lock of threading.Event is not reentrant: a handler that sets a threading.Event could wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition()  # with a reentrant lock


@contextmanager
def released(*locks: threading.Condition | threading.RLock) -> Iterator[None]:
    """Release the reentrant locks that this thread holds, for the `with` block; then take these locks again.

    A signal handler uses this while it waits for another thread: the interrupted call may hold a lock that
    the other thread needs.
    """
    held: list[threading.Condition | threading.RLock] = []
    for lock in locks:
        try:
            while True:
                lock.release()
                held.append(lock)
        except RuntimeError:  # this thread does not hold the lock (any more)
            pass
    try:
        yield
    finally:
        for lock in reversed(held):
            lock.acquire()
