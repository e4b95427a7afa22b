"""The clients with which a tracker talks to Kafka, besides those of its redeliveries."""

from __future__ import annotations

from contextlib import ExitStack

from kmqpy.core.clock import Clock
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topics import Topics
from tracker.reading.markers_consumer import MarkersConsumer
from tracker.reading.queue_ends import QueueEnds
from tracker.redelivery.tick_writer import TickWriter

_PROBE_TIMEOUT_S = 3.0
"""A probe waits for Kafka for at most this long. The time is short, because writes of offsets and releases
wait for a running probe."""


class KafkaClients:
    """Opens and closes the clients together. If a client can't be made, its constructor closes the others.

    markers        reads the markers of all partitions
    ends           asks Kafka for the end offsets of queues
    tick_writer    appends ticks: markers that only tell the broker's time
    topics         describes topics at takeovers and for the doctor's checks, makes and writes kmq.queues, and
                   looks for dead-letter topics
    probed_topics  describes topics for TopicProbe; its calls time out after `_PROBE_TIMEOUT_S`
    """

    def __init__(self, connection: KafkaConnection, clock: Clock) -> None:
        with ExitStack() as undo:
            self.markers = MarkersConsumer(connection)
            undo.callback(self.markers.close)
            self.tick_writer = TickWriter(connection, clock)
            self.ends = QueueEnds(connection)
            undo.callback(self.ends.close)
            self.topics = Topics(connection)
            self.probed_topics = Topics(connection, _PROBE_TIMEOUT_S)
            self._consumers = undo.pop_all()

    def close(self) -> None:
        """Close the consumers. The other clients end when the last reference to each is gone."""
        self._consumers.close()
        self.tick_writer.close()
        del self.tick_writer, self.topics, self.probed_topics
