"""Opens the connections that several queues on one Kafka share, and closes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.forks import ForkGuard
from kmqpy.kafka.client.client_options import DEFAULT_LIMITS, SendLimits
from kmqpy.kafka.client.sender import new_producer
from kmqpy.kafka.cut_off import RenewedProducer
from kmqpy.kafka.settings import KafkaConnection, check_connection
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection

if TYPE_CHECKING:
    from kmqpy.kafka.admin.admin import Admin

_FLUSH_TIMEOUT_S = 2
"""Seconds that close() waits for messages that are still to be sent."""


class SharedConnections:
    """The producers, the Topics and the Admin of several queues; for any thread.

    Producers and the Topics connect when they are first asked for, the Admin in its first call.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        *,
        clock: Clock = SYSTEM_CLOCK,
        limits: SendLimits = DEFAULT_LIMITS,
    ) -> None:
        self.connection = check_connection(connection)
        self.zookeeper = zookeeper
        self._limits = limits
        self._guard = ForkGuard("the connections of a storage")
        self._opening = threading.Lock()
        self._producers: dict[bool, RenewedProducer] = {}
        """That of single messages, and (True) that of batches."""
        self._topics: Topics | None = None
        self._administering = threading.RLock()
        self._clock = clock
        self._admin: Admin | None = None

    def producer(self, messages: int) -> RenewedProducer:
        """The producer that sends so many messages at once, of all queues."""
        self._guard.raise_if_inherited()  # before the lock, which may be held for ever in a child
        with self._opening:
            lingers = messages > 1
            if lingers not in self._producers:
                self._producers[lingers] = new_producer(self.connection, self._limits, lingers=lingers)
            return self._producers[lingers]

    def topics(self) -> Topics:
        """The Topics that describe the topics of all queues."""
        self._guard.raise_if_inherited()
        with self._opening:
            if self._topics is None:
                self._topics = Topics(self.connection)
            return self._topics

    @contextmanager
    def admin(self) -> Iterator[Admin]:
        """Yield the Admin; other threads wait until the block has ended."""
        self._guard.raise_if_inherited()
        from kmqpy.kafka.admin.admin import Admin  # who only sends needs none

        with self._administering:
            if self._admin is None:
                self._admin = Admin(self.connection, self.zookeeper, clock=self._clock)
            yield self._admin

    def close(self) -> None:
        """Send the messages that are still to be sent, for up to 2 s, and close the Admin.

        Does nothing in a child process.
        """
        if self._guard.inherited:
            return
        with self._opening:
            producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.flush(_FLUSH_TIMEOUT_S)
        with self._administering:
            if self._admin is not None:
                self._admin.close()
