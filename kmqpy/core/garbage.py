"""Keeps Python's garbage collector from scanning messages again and again, none of which is garbage yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 500
"""For fewer messages, the collector goes on as ever."""
_OBJECTS = 6
"""Each message is two objects, and there may be three batches: two of a caller, and one ahead."""
_MOST_OBJECTS = 100_000

_usual: dict[int, int] = {}
"""By the threshold that put_off() has set, that of the program; empty while the program's own holds."""


@contextmanager
def paused(messages: int) -> Iterator[None]:
    """Make no collections in the block if it may make that many messages."""
    if messages < _MANY or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def put_off(messages: int) -> None:
    """Put the next collection off until so many messages are gone, or a few times as many objects were made.

    It would scan them for nothing, which takes a tenth of the time of receiving and acknowledging them. Call
    resume() soon. A threshold of the program that is higher, or none at all, stays.
    """
    young, *older = gc.get_threshold()
    wanted = min(_OBJECTS * messages, _MOST_OBJECTS)
    if messages >= _MANY and 0 < young < wanted:
        _usual[wanted] = _usual.pop(young, young)
        gc.set_threshold(wanted, *older)


def resume() -> None:
    """Collect again as often as the program wants."""
    young, *older = gc.get_threshold()
    if (usual := _usual.pop(young, None)) is not None:
        gc.set_threshold(usual, *older)
