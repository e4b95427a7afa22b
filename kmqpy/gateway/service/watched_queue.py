"""Watches the calls of a queue, to know whether its storage answers, and how soon."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kmqpy.core.clock import Clock
from kmqpy.errors import Unavailable
from kmqpy.gateway.service.pulse import Pulse
from kmqpy.queue import Queue

P = ParamSpec("P")
T = TypeVar("T")

_SHORT = ("send_many", "receive", "ack", "nack", "extend", "peek", "orphans")
_LONG = ("size", "in_flight", "purge", "release_all")
"""These may have much to do, so how long they take tells nothing."""


def watched_queue(queue: Queue, pulse: Pulse, clock: Clock) -> Queue:
    """The queue; each of its calls, in whatever thread, is noted in `pulse`."""
    return cast("Queue", _WatchedQueue(queue, pulse, clock))


def watched(function: Callable[P, T], pulse: Pulse, clock: Clock, *, is_short: bool) -> Callable[P, T]:
    """The function; its calls are noted in `pulse`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        begun_s = clock.monotonic()
        try:
            result = function(*args, **kwargs)
        except Unavailable:
            pulse.fail(clock.monotonic())
            raise
        except Exception:  # of a server that has understood, or of our own
            pulse.answer(clock.monotonic())
            raise
        now_s = clock.monotonic()
        pulse.answer(now_s, now_s - begun_s if is_short else None)
        return result

    return call


class _WatchedQueue:
    """A queue, of which some methods are watched."""

    def __init__(self, queue: Queue, pulse: Pulse, clock: Clock) -> None:
        self._queue = queue
        for names, is_short in ((_SHORT, True), (_LONG, False)):
            for name in names:
                # Whatever became of the servers, a consumer of Kafka answers that nothing came.
                if name != "receive" or queue.capabilities.immediate:
                    setattr(self, name, watched(getattr(queue, name), pulse, clock, is_short=is_short))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
