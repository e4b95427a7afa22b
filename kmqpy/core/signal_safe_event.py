"""An event for threads that signal handlers may interrupt."""

from __future__ import annotations

import threading


class SignalSafeEvent(threading.Event):
    """An event that a signal handler may set although it interrupted a call of the same event.

    The lock of threading.Event is not reentrant: there, such a handler would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition()  # with a reentrant lock
