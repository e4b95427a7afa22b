"""Tells a signal handler what it has interrupted: Python runs it on top of the main thread's stack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def is_inside(methods: Collection[Callable[..., Any]], owner: object) -> bool:
    """Return True if this thread is inside one of these methods (plain functions) of `owner`."""
    codes = {method.__code__ for method in methods}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False
