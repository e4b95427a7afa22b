"""Keeps the ids of the topics that a client works with, and the writer of their markers."""

from __future__ import annotations

import logging
from typing import NamedTuple

from kmqpy.core.clock import Clock
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import check_topics
from kmqpy.kafka.topic_identity import TopicIds, TopicWatch, stale_markers_error
from kmqpy.kafka.topics import Topics

_log = logging.getLogger(__name__)


class _Current(NamedTuple):
    """Ids of topics, and the writer of their markers: another one for each id of the queue topic."""

    ids: TopicIds
    writer: MarkerWriter


class TopicsInUse:
    """The ids of the queue's topics, as the client knows them, and the writer of their markers.

    ids, writer        change_to() replaces both at once, and never brings a former writer back. A caller
                       reads `writer`, compares `ids`, and reads `writer` again. If it is the same one, it
                       belongs to these ids. If not, the caller starts over: the new writer would write the
                       markers of former messages to the new topic (rule R24 of docs/rules.md)
    has_stale_markers  True: the queue topic was recreated (deleted and made again under the same name), its
                       markers topic was not; the client receives nothing

    `topics` is one that asks Kafka already, if there is one; else the constructor makes one. It raises
    QueueNotFound, TopicError, Unavailable.
    """

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, clock: Clock, topics: Topics | None = None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._topics = topics or Topics(connection)
        found = self._topics.check(queue)
        check_topics(queue, found, connection)
        self._current = _Current(found.ids, self._new_writer(found.ids))
        self.has_stale_markers = False
        lanes, admin = queue.possible_lanes(), self._topics.admin
        self._watch = TopicWatch(connection, queue, found.ids, clock, lanes, admin)
        self._partitions = found.markers.partitions

    @property
    def ids(self) -> TopicIds:
        return self._current.ids

    @property
    def writer(self) -> MarkerWriter:
        """The writer of the markers; after change_to() it may be another one."""
        return self._current.writer

    def has(self, partition: int) -> bool:
        """Return True if the queue has this partition; asks Kafka about partitions above the known ones."""
        if partition >= self._partitions:  # a queue can grow
            self._partitions = self._topics.check(self._queue).partitions
        return partition < self._partitions

    @property
    def lanes_differ(self) -> bool:
        """True if the queue has topics of lanes that its settings do not name, or lacks some."""
        there = self._watch.others_there
        return there is not None and there != {lane.name for lane in self._queue.lanes()[:-1]}

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
        """Use the topics of these ids. If the queue topic is a new one, abandon the writer for a new one."""
        _log.warning("the queue was recreated; beginning anew", extra={"queue": self._queue.name})
        before = self._current
        if ids.queue == before.ids.queue:
            self._current = _Current(ids, before.writer)
            return
        self._partitions = 0  # so that has() asks Kafka
        self._current = _Current(ids, self._new_writer(ids))
        before.writer.abandon()

    def _new_writer(self, ids: TopicIds) -> MarkerWriter:
        return MarkerWriter(self._connection, self._queue, topic_id=ids.queue, clock=self._clock)
