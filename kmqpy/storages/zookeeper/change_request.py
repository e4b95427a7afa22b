"""A change of a queue that a thread asks for, and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kmqpy.storages.zookeeper.draft import Draft

T = TypeVar("T")


class ChangeRequest(Generic[T]):
    """A change that a thread asks for; the thread that has the lock of the queue carries it out.

    work  makes the change in a draft, anew each time somebody else was faster
    ids   how many new messages it adds
    """

    def __init__(self, work: Callable[[Draft], T], ids: int) -> None:
        self.work = work
        self.ids = ids
        self.is_done = False
        self._news = threading.Event()
        self._result: tuple[T, int] | Exception

    def succeed(self, result: T, version: int) -> None:
        """End with a result, and the version of the directory that has the change."""
        self._result = result, version
        self.is_done = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End with an exception."""
        self._result = error
        self.is_done = True
        self._news.set()

    def wake(self) -> None:
        """Let its thread look whether it can carry it out."""
        self._news.set()

    def wait(self, timeout: float) -> None:
        """Wait until it is done, or wake() is called, at most `timeout` s."""
        self._news.wait(timeout)
        self._news.clear()

    def outcome(self) -> tuple[T, int]:
        """The result, or its exception raised."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
