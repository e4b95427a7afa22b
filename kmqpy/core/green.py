"""Tells whether threads are greenlets (gevent, eventlet), and waits for native code without blocking them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kmqpy.core.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Sequence[Any])
_SLICE_S = 0.01
"""Between two looks at native code, other greenlets run for this many seconds."""


def green_library() -> str | None:
    """Return `gevent` or `eventlet` if it has made greenlets of the threads of this process, else None."""
    gevent: Any = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("time"):
        return "gevent"
    eventlet: Any = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("time"):
        return "eventlet"
    return None


def tell_once() -> None:
    """Log, once in a process whose threads are greenlets, what that means for Kafka and ZooKeeper."""
    library = green_library()
    if library is None or _told:
        return
    _told.append(library)
    if library == "gevent":
        log.warning(
            "gevent: other greenlets run while receive() waits, but not while send(), acknowledgements and "
            "close() wait for Kafka (guide.md, Greenlets)"
        )
    else:
        log.warning("eventlet: clients of Kafka and ZooKeeper do not work with it; use gevent or threads")


_told: list[str] = []


def wait_for(look: Callable[[float], T], wait_s: float) -> T:
    """Return look(wait_s), which waits in native code for something that is not empty.

    Where threads are greenlets, all of them would stand still meanwhile: there it looks again and again, and
    others run in between.
    """
    if wait_s <= 0 or green_library() is None:
        return look(wait_s)
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    while not (found := look(0.0)):
        left = deadline - SYSTEM_CLOCK.monotonic()
        if left <= 0:
            break
        SYSTEM_CLOCK.sleep(min(left, _SLICE_S))
    return found
