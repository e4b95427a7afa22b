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
"""Short: offsets and releases wait for a probe."""


class KafkaClients:
    """Made together and closed together; if one of them can't be made, those before it are closed.

    markers        reads the markers of all partitions
    ends           asks where queues end
    tick_writer         appends ticks
    topics         checks topics at takeovers
    probed_topics  the same, but gives up soon
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
        """Close the consumers, and let go of the other clients, which end with their last user."""
        self._consumers.close()
        self.tick_writer.close()
        del self.tick_writer, self.topics, self.probed_topics
