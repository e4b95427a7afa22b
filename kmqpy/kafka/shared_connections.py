"""Connections that several queues on one Kafka share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.forks import ForkGuard
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.client.producer import new_producer
from kmqpy.kafka.cut_off import RenewedProducer
from kmqpy.kafka.settings import KafkaConnection, check_connection
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection

_FLUSH_S = 5


class SharedConnections:
    """A producer of messages and an administrator, each made when it is first used; for any thread."""

    def __init__(
        self, connection: KafkaConnection, zookeeper: ZooKeeperConnection, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.connection = check_connection(connection)
        self.zookeeper = zookeeper
        self._guard = ForkGuard("the connections of a storage")
        # Reentrant: a handler of signals may call close() in the middle of any call.
        self._opening = threading.RLock()
        self._producer: RenewedProducer | None = None
        self._topics: Topics | None = None
        self._administering = threading.RLock()
        self._admin = Admin(connection, zookeeper, clock=clock)

    def producer(self) -> RenewedProducer:
        """The producer for the messages of all queues."""
        self._guard.raise_if_inherited()  # before the lock, which may be held for ever in a child
        with self._opening:
            if self._producer is None:
                self._producer = new_producer(self.connection)
            return self._producer

    def topics(self) -> Topics:
        """The administrator that describes the topics of all queues."""
        self._guard.raise_if_inherited()
        with self._opening:
            if self._topics is None:
                self._topics = Topics(self.connection)
            return self._topics

    @contextmanager
    def admin(self) -> Iterator[Admin]:
        """The administrator, for one thread at a time."""
        self._guard.raise_if_inherited()
        with self._administering:
            yield self._admin

    def close(self) -> None:
        """Leave Kafka and ZooKeeper. Does nothing in a child process."""
        if self._guard.inherited:
            return
        with self._opening:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.flush(_FLUSH_S)
        with self._administering:
            self._admin.close()
