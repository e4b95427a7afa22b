"""Lets a worker learn of SIGTERM and SIGINT while it runs; restores the handlers of signals afterwards."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list to which the numbers of SIGTERM and SIGINT are appended when they arrive.

    The list stays empty outside the main thread. The signal handler only appends: anything that takes a lock
    could wait for the code that the handler interrupted.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, note)
        yield noted
    finally:
        _restore(before)


@contextmanager
def called_at_signals(
    loop: asyncio.AbstractEventLoop, callback: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Let the event loop call `callback` at SIGTERM and SIGINT.

    Does nothing outside the main thread, and where event loops can't handle signals (Windows).
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            try:
                loop.add_signal_handler(number, callback, number)
            except (NotImplementedError, RuntimeError):  # Windows
                continue
            before[number] = previous
    try:
        yield
    finally:
        for number in before:
            loop.remove_signal_handler(number)
        _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
