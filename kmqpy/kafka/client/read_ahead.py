"""Keeps messages that a client has received for `for message in client`, until it is their turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kmqpy.core.clock import Clock
from kmqpy.kafka.client.in_flight_limit import InFlightLimit
from kmqpy.kafka.client.message_places import offsets_by_partition
from kmqpy.kafka.client.receiver import MIN_LEASE_LEFT
from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.kafka.client.topics_in_use import TopicsInUse
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import QueueSettings


class ReadAhead:
    """Received messages that an iteration has not yielded yet; safe to use from any thread.

    Each message is kept with the monotonic time at which its lease ends.
    """

    def __init__(
        self, queue: QueueSettings, topics: TopicsInUse, in_flight: InFlightLimit, clock: Clock
    ) -> None:
        self._min_lease_left_s = queue.lease_ms / 1000 * MIN_LEASE_LEFT
        self._topics = topics
        self._in_flight = in_flight
        self._clock = clock
        self._waiting: deque[tuple[float, KafkaMessage]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def extend(self, messages: Iterable[KafkaMessage], until: float) -> None:
        """Add messages whose leases end at `until`: not before the leases of the messages that wait here."""
        with self._lock:
            self._waiting.extend((until, message) for message in messages)

    def pop(self) -> KafkaMessage | None:
        """Remove and return the next message; None if there is none."""
        with self._lock:
            return self._waiting.popleft()[1] if self._waiting else None

    def pop_all(self) -> list[Place]:
        """Remove all messages; returns their places."""
        with self._lock:
            places = [message.place for _, message in self._waiting]
            self._waiting.clear()
            return places

    def give_back_stale(self) -> None:
        """Remove messages with too little of their leases left, and give them back.

        Too little is less than half of lease_ms (rule R11 of docs/rules.md). The method holds the lock
        meanwhile, so that close(), which calls pop_all(), does not close the writer before the messages are
        given back.
        """
        needed = self._clock.monotonic() + self._min_lease_left_s
        with self._lock:
            if not self._waiting or self._waiting[0][0] >= needed:
                return  # the lease of the first message ends first
            stale = [one.place for until, one in self._waiting if until < needed]
            self._in_flight.discard(offsets_by_partition(stale))
            self._topics.writer.give_back(stale)
            # Removed only now, so that none is lost when a signal handler raises meanwhile.
            self._waiting = deque((until, one) for until, one in self._waiting if until >= needed)
