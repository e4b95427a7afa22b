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
    """

    def __init__(self, limit: int, queue: str, telemetry: Telemetry, clock: Clock) -> None:
        self._limit = limit
        self._queue = queue
        self._telemetry = telemetry
        self._clock = clock
        self._leases = LocalLeases()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            self._leases.expire(self._clock.monotonic())
            return len(self._leases)

    def wait_for_room(self, wait_s: float) -> int:
        """Return how many more messages may be in flight; if none may, wait for up to `wait_s` first."""
        with self._changed:
            if len(self._leases) >= self._limit:
                self._leases.expire(self._clock.monotonic())
            if len(self._leases) >= self._limit:
                self._changed.wait(wait_s)
            return max(0, self._limit - len(self._leases))

    def add(self, offsets: Offsets, until: float) -> None:
        """Count messages whose leases end at the monotonic time `until`."""
        with self._changed:
            self._leases.expire(self._clock.monotonic())
            for partition, ascending in offsets.items():
                self._leases.add(partition, ascending, until)
            self._telemetry.in_flight(self._queue, len(self._leases))

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
            self._telemetry.in_flight(self._queue, len(self._leases))

    def clear(self) -> None:
        """Count no message as in flight any more."""
        with self._changed:
            self._leases = LocalLeases()
            self._changed.notify_all()
