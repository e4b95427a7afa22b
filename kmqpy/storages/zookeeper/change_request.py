"""A change of a queue that one thread asks for and perhaps another carries out, and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kmqpy.storages.zookeeper.draft import Draft

T = TypeVar("T")


class ChangeRequest(Generic[T]):
    """A change that a thread asks for; the thread that has the lock of the queue carries it out.

    work  makes the change in a draft; called again with a new draft each time another process was faster
    ids   how many new messages `work` adds
    """

    def __init__(self, work: Callable[[Draft], T], ids: int) -> None:
        self.work = work
        self.ids = ids
        self.is_done = False
        self._woken = threading.Event()
        self._result: tuple[T, int] | Exception

    def succeed(self, result: T, version: int) -> None:
        """End with the result of `work`, and the version of the directory that it saw or wrote."""
        self._result = result, version
        self.is_done = True
        self._woken.set()

    def fail(self, error: Exception) -> None:
        self._result = error
        self.is_done = True
        self._woken.set()

    def wake(self) -> None:
        """Let the thread that asked check whether it can carry out the change itself."""
        self._woken.set()

    def wait(self, timeout: float) -> None:
        """Wait until the change is done, or wake() is called, for `timeout` seconds at most."""
        self._woken.wait(timeout)
        self._woken.clear()

    def outcome(self) -> tuple[T, int]:
        """Return what succeed() was given, or raise the exception that fail() was given."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
