"""Limits how many messages a client has in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kmqpy.core.clock import Clock
from kmqpy.kafka.client.local_leases import LocalLeases
from kmqpy.kafka.places import Offsets, Place
from kmqpy.telemetry.base import Telemetry


class InFlightLimit:
    """Counts the messages that a client has in flight, and waits for room; safe to use from any thread.

    By rule R12 of docs/rules.md, a message is in flight from its hand-out until it is finished or its lease
    ends.

    beside  that of another lane of the queue: the limit is one for both
    """

    def __init__(
        self, limit: int, queue: str, telemetry: Telemetry, clock: Clock, beside: InFlightLimit | None = None
    ) -> None:
        self._limit = limit
        self._queue = queue
        self._telemetry = telemetry
        self._clock = clock
        self._leases = LocalLeases()
        self._lanes: list[InFlightLimit] = [] if beside is None else beside._lanes
        self._lanes.append(self)
        self._changed: threading.Condition = threading.Condition() if beside is None else beside._changed

    def __len__(self) -> int:
        """How many messages of all lanes are in flight."""
        with self._changed:
            self._expire()
            return self._count()

    def wait_for_room(self, wait_s: float) -> int:
        """Return how many more messages may be in flight; if none may, wait for up to `wait_s` first."""
        with self._changed:
            if self._count() >= self._limit:
                self._expire()
            if self._count() >= self._limit:
                self._changed.wait(wait_s)
            return max(0, self._limit - self._count())

    def add(self, offsets: Offsets, until: float) -> None:
        """Count messages whose leases end at the monotonic time `until`."""
        with self._changed:
            self._leases.expire(self._clock.monotonic())
            for partition, ascending in offsets.items():
                self._leases.add(partition, ascending, until)
            self._telemetry.in_flight(self._queue, self._count())

    def extend_leases(self, places: Iterable[Place], until: float) -> None:
        """Let the leases of these messages end at `until`, where the messages are in flight."""
        with self._changed:
            self._leases.extend(places, until)

    def discard(self, offsets: Offsets) -> None:
        """Count these messages as in flight no more."""
        with self._changed:
            for partition, ascending in offsets.items():
                self._leases.discard(partition, ascending)
            self._changed.notify_all()
            self._telemetry.in_flight(self._queue, self._count())

    def clear(self) -> None:
        """Count no message as in flight any more."""
        with self._changed:
            self._leases = LocalLeases()
            self._changed.notify_all()

    def _count(self) -> int:
        return sum(len(one._leases) for one in self._lanes)

    def _expire(self) -> None:
        for one in self._lanes:
            one._leases.expire(self._clock.monotonic())
