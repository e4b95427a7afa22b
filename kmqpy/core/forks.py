"""Detects objects that a process inherited from its parent by a fork.

The child of a fork has copies of the parent's objects, but not the threads that do the work of the objects.
An acknowledgement that is given to such a copy would never be written. So each object has a ForkGuard: in
the child, methods of the object raise Forked, and closing it does nothing, because the connections belong to
the parent.
"""

from __future__ import annotations

import ctypes
import os
from weakref import WeakSet

from kmqpy.errors import Forked

_fork_count = 0
"""The number of forks between the process that imported this module and this process."""

_librdkafka_clients: WeakSet[object] = WeakSet()
"""Clients that a child must never free (see keep_in_children)."""


class ForkGuard:
    """Tells whether this process was forked after an object was made; errors name the object as `what`."""

    __slots__ = ("_fork_count_when_made", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._fork_count_when_made = _fork_count

    @property
    def inherited(self) -> bool:
        """True if a parent of this process made the object, before the fork."""
        return self._fork_count_when_made != _fork_count

    def raise_if_inherited(self) -> None:
        """Raise Forked if the object is inherited; cheap enough to be called in every operation."""
        if self._fork_count_when_made != _fork_count:
            raise Forked(
                f"{self._what} was made before this process was forked, and its threads are the parent's; "
                "make it after the fork, one in each process"
            )


def keep_in_children(handle: object) -> None:
    """Never free `handle`, a librdkafka client, in a child: that would wait for threads of the parent."""
    _librdkafka_clients.add(handle)


def _after_fork() -> None:
    global _fork_count  # noqa: PLW0603
    _fork_count += 1
    for handle in _librdkafka_clients:
        # Nobody drops this reference, so the client is not freed even when the interpreter exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_after_fork)
