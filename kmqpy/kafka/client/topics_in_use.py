"""Keeps the ids of the topics that a client works with, and the writer of their markers."""

from __future__ import annotations

import logging

from kmqpy.core.clock import Clock
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.settings_mirror import check_topics
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds, TopicWatch, stale_markers_error
from kmqpy.kafka.topics import Topics

_log = logging.getLogger(__name__)


class TopicsInUse:
    """The ids of the queue's topics, as the client knows them, and the writer of their markers.

    coalesce_ms        see MarkerWriter
    ids, writer        read `writer` first, then `ids`: change_to() sets them the other way round. A caller
                       may get an old writer with new ids, and the old writer refuses markers. No caller gets
                       a new writer with old ids, with which markers of former messages would count for the
                       new topic's (rule R24 of docs/rules.md)
    has_stale_markers  True: the queue topic was recreated (deleted and made again under the same name), its
                       markers topic was not; the client receives nothing

    The constructor raises QueueNotFound, TopicError, Unavailable.
    """

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, clock: Clock, *, coalesce_ms: float | None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._coalesce_ms = coalesce_ms
        topics = Topics(connection).check(queue)
        check_topics(queue, topics, connection)
        self.ids = topics.ids
        self.writer = self._new_writer()
        self.has_stale_markers = False
        self._watch = TopicWatch(connection, queue, topics.ids, clock)
        self._partitions = topics.markers.partitions

    def has(self, partition: int) -> bool:
        """Return True if the queue has this partition; asks Kafka about partitions above the known ones."""
        if partition >= self._partitions:  # a queue can grow
            self._partitions = Topics(self._connection).check(self._queue).partitions
        return partition < self._partitions

    def knows_since(self, moment: float) -> bool:
        """Return True if the ids are known as of this monotonic time; else has them looked up soon."""
        return self._watch.knows_since(moment)

    def look(self) -> TopicIds | None:
        """Return the ids of the topics that there are now, if the client has to change to them; else None."""
        ids = self._watch.look()
        stale = ids.has_stale_markers(self.ids)
        if stale and not self.has_stale_markers:
            _log.error("%s", stale_markers_error(self._queue))
        self.has_stale_markers = stale
        return None if stale or ids == self.ids else ids

    def change_to(self, ids: TopicIds) -> None:
        """Use the topics of these ids. If the queue topic is a new one, abandon the writer; make another."""
        _log.warning("the queue was recreated; beginning anew", extra={"queue": self._queue.name})
        before, self.ids = self.ids, ids
        if ids.queue != before.queue:
            self._partitions = 0  # so that has() asks Kafka
            former, self.writer = self.writer, self._new_writer()
            former.abandon()

    def _new_writer(self) -> MarkerWriter:
        return MarkerWriter(
            self._connection, self._queue.markers_topic, coalesce_ms=self._coalesce_ms, clock=self._clock
        )
