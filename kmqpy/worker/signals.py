"""SIGTERM and SIGINT, while a worker runs."""

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
    """A list that SIGTERM and SIGINT are appended to; in the main thread only, elsewhere it stays empty.

    The handler does no more than that: whatever takes a lock could wait for the code it interrupted.
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
    """Have the event loop call back at SIGTERM and SIGINT, where it can look after signals."""
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
