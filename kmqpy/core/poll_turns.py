"""Lets one of several threads that wait for reports of one native client poll it, while the others sleep.

When each of them polls, each report wakes some thread, and seldom the one that waits for it. One that polls
all the time, a thread of its own, costs who sends alone a switch of threads for each message.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import get_ident

from kmqpy.core.clock import SYSTEM_CLOCK

_POLL_S = 0.01
"""Seconds of one poll: when it ends, Python runs handlers of signals."""
_SLEEP_S = 0.1
"""After so many seconds, who sleeps polls once himself: the one whose turn it is may stand still, as in a
handler of a signal or a debugger."""


class Waiter:
    """Sleeps until somebody calls `wake`. `left` says how many reports are still to come."""

    __slots__ = ("_woken", "left")

    def __init__(self) -> None:
        self.left: list[None] = []
        """One element for each; a list, since its changes are atomic, also beside handlers of signals."""
        self._woken: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Wake the thread that sleeps, or that will."""
        self._woken.put(None)

    def sleep(self, seconds: float) -> bool:
        """Return True once woken, False after `seconds`."""
        try:
            self._woken.get(timeout=seconds)
        except Empty:
            return False
        return True


class PollTurns:
    """The turns of one client: who polls it now, and who waits meanwhile. For any thread.

    It holds no lock. A thread that a handler of a signal has interrupted, whose handler waits here, too, has
    the turn already, and one that the handler makes raise gives it up.
    """

    def __init__(self) -> None:
        self._turn: dict[None, int] = {}
        """The thread that polls, if there is one."""
        self._waiters: list[Waiter] = []

    def wait(self, poll: Callable[[float], object], waiter: Waiter, timeout_s: float) -> None:
        """Return when all reports of `waiter` came, or after the time-out; `poll(seconds)` calls reports."""
        deadline, thread = SYSTEM_CLOCK.monotonic() + timeout_s, get_ident()
        self._waiters.append(waiter)
        try:
            while waiter.left and (left_s := deadline - SYSTEM_CLOCK.monotonic()) > 0:
                if self._turn.setdefault(None, thread) == thread:
                    poll(_POLL_S)
                elif not waiter.sleep(min(left_s, _SLEEP_S)):
                    poll(0)
        finally:
            if self._turn.get(None) == thread:
                self._turn.pop(None, None)
            self._waiters.remove(waiter)
            if not self._turn:
                self._call_another()

    def _call_another(self) -> None:
        for waiter in [*self._waiters]:  # others change the list
            if waiter.left:
                waiter.wake()
                return
