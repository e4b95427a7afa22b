"""After a fork, the child has our objects, but not the threads that do their work.

An acknowledgement given to such an object would never be written. So each object remembers whether a fork
has happened since it was made: then its calls raise Forked, and closing it does nothing, since its
connections belong to the parent.
"""

from __future__ import annotations

import ctypes
import os
from weakref import WeakSet

from kmqpy.errors import Forked

_forks = 0
"""How many forks lie between this process and the one that imported this module."""

_handles: WeakSet[object] = WeakSet()


class ForkGuard:
    """Tells whether this process was forked after the object was made; `what` names it in the error."""

    __slots__ = ("_made_at", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._made_at = _forks

    @property
    def inherited(self) -> bool:
        """True if the object was made before a fork, by a parent of this process."""
        return self._made_at != _forks

    def raise_if_inherited(self) -> None:
        """Raise Forked if the object is inherited; cheap enough for every call."""
        if self._made_at != _forks:
            raise Forked(
                f"{self._what} was made before this process was forked, and its threads are the parent's; "
                "make it after the fork, one in each process"
            )


def keep_in_children(handle: object) -> None:
    """Never free `handle`, a librdkafka client, in a child: that would wait for threads of the parent."""
    _handles.add(handle)


def _after_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1
    for handle in _handles:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # not even when the interpreter exits


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_after_fork)
