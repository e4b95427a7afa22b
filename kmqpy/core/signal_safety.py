"""For what signal handlers may call while the thread that they interrupt is in the middle of another call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SignalSafeEvent(threading.Event):
    """An event that a signal handler may set although it interrupted a call of the same event.

    The lock of threading.Event is not reentrant: there, such a handler would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition()  # with a reentrant lock


@contextmanager
def released(*locks: threading.Condition | threading.RLock) -> Iterator[None]:
    """Release reentrant locks for a while, as far as this thread holds them; then hold them again.

    For a signal handler that waits for another thread: the call that it interrupted may hold a lock that
    the other thread needs.
    """
    held: list[threading.Condition | threading.RLock] = []
    for lock in locks:
        try:
            while True:
                lock.release()
                held.append(lock)
        except RuntimeError:  # it is not held, or not any more
            pass
    try:
        yield
    finally:
        for lock in reversed(held):
            lock.acquire()
