"""Lends OriginalsReaders to the threads that redeliver."""

from __future__ import annotations

import queue as queues
from collections.abc import Iterator
from contextlib import contextmanager

from kmqpy.core.clock import Clock
from kmqpy.kafka.settings import KafkaConnection
from tracker.redelivery.originals import OriginalsReader


class OriginalsReaders:
    """A pool of readers. Makes a reader when all are lent; lends the last used reader first."""

    def __init__(self, connection: KafkaConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._idle: queues.LifoQueue[OriginalsReader] = queues.LifoQueue()

    @contextmanager
    def lend(self) -> Iterator[OriginalsReader]:
        """Lend a reader to the calling thread until the block ends."""
        try:
            reader = self._idle.get_nowait()
        except queues.Empty:
            reader = OriginalsReader(self._connection, self._clock)
        try:
            yield reader
        finally:
            self._idle.put(reader)

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()
