"""Asks every few seconds if Kafka answers, and if the topics are still the ones that this tracker reads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import TopicInfo, Topics
from tracker.background import Pool
from tracker.context import TrackerContext
from tracker.membership import Membership
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.reading.markers_consumer import MarkersConsumer

_log = logging.getLogger(__name__)

_PROBE_EVERY_S = 2.0
_GROW_EVERY_S = 10.0
"""Between two attempts to register partitions of a queue that are not tracked yet."""


class TopicProbe:
    """Withdraws the tracker while Kafka does not answer; takes partitions over again whose topics changed.

    `topics` must answer soon: offsets and releases wait for a probe. `has_its_topics` is for the threads
    that redeliver, `probe` for the main loop.
    """

    def __init__(
        self, context: TrackerContext, topics: Topics, member: Membership, markers: MarkersConsumer
    ) -> None:
        self._topics = topics
        self._member = member
        self._markers = markers
        self._connection = context.connection
        self._zookeeper = context.zookeeper
        self._clock = context.clock
        self._leadership = context.leadership
        self._parts = context.parts
        self._jobs = context.jobs
        self._problems = context.problems
        self._next_probe = 0.0
        self._probing = False
        self._grow_at: dict[str, float] = {}

    def probe(self, now: float) -> None:
        """Ask Kafka for the topics of all queues that are read, in the background (rules R8, R13)."""
        if now < self._next_probe or self._probing:
            return
        self._probing = True
        self._next_probe = now + _PROBE_EVERY_S
        queues = {part.queue.name: part.queue for part in self._parts.values() if part.reading}
        self._jobs.run(
            Pool.HOUSEKEEPING, partial(self._describe, queues), partial(self._probed, queues.keys())
        )

    def has_its_topics(self, part: OwnedPartition) -> bool:
        """True if the topics are still those that the partition's entries are of (rule R24)."""
        queue = part.queue
        try:
            found = self._topics.describe([queue.name, queue.markers_topic])
        except KmqError:
            return False  # nobody could say; they are tried again soon
        if _ids(found, queue) == part.topic_ids:
            return True
        self._next_probe = 0.0  # it has the partition taken over again
        return False

    def _describe(self, queues: Mapping[str, QueueSettings]) -> dict[str, TopicInfo]:
        # Any broker can answer this; that no controller does is no reason to withdraw.
        self._topics.brokers()
        names = [name for queue in queues.values() for name in (queue.name, queue.markers_topic)]
        return self._topics.describe(names) if names else {}

    def _probed(self, queues: Collection[str], found: dict[str, TopicInfo] | Exception) -> None:
        self._probing = False
        self._member.kafka_probed(answered=not isinstance(found, Exception))
        if isinstance(found, Exception):
            if not isinstance(found, KmqError):
                raise found
            _log.debug("Kafka does not answer: %s", found)
            return
        for part in self._parts.values():
            known = part.phase in (TrackingPhase.CATCHING_UP, TrackingPhase.ACTIVE)
            if not found or not known or part.queue.name not in queues:
                continue
            if _ids(found, part.queue) != part.topic_ids:
                part.problems.takeover = "a topic was deleted or recreated"
                self._problems.warn("topics", part.key, part.problems.takeover)
                self._markers.stop(part)
                part.take_over_again(self._clock.monotonic())
            elif part.number == 0 and part.phase is TrackingPhase.ACTIVE:  # one tracker of each queue
                self._register_partitions(part.queue.name, found[part.queue.name].partitions)

    def _register_partitions(self, name: str, there: int) -> None:
        """Have partitions registered that were added with Kafka's own tools; nobody tracks them before."""
        registered = self._leadership.snapshot().queues.get(name)
        if registered is None or registered.deleting or there <= registered.partitions:
            self._problems.clear(_untracked(name))
            return
        now = self._clock.monotonic()
        if now >= self._grow_at.get(name, 0.0):
            self._grow_at[name] = now + _GROW_EVERY_S
            finished = partial(self._registered, name, registered.partitions, there)
            self._jobs.run(Pool.REDELIVERY, partial(self._follow_topic, name), finished)

    def _follow_topic(self, name: str) -> None:
        with Admin(self._connection, self._zookeeper) as admin:
            admin.follow_topic(name)

    def _registered(self, name: str, tracked: int, there: int, error: Exception | None) -> None:
        if error is None:
            _log.info("partitions added to a queue", extra={"queue": name, "partitions": there})
            return
        self._problems.show(
            _untracked(name),
            f"queue {name}: of its {there} partitions those from {tracked} on can't all be tracked: "
            f"{error}; run: kmq queue alter {name} --partitions {there}",
        )
        if not isinstance(error, KmqError):
            raise error


def _untracked(name: str) -> str:
    """The problem that partitions of a queue are not tracked."""
    return f"partitions of {name}"


def _ids(found: Mapping[str, TopicInfo], queue: QueueSettings) -> tuple[str, str]:
    """The ids of the queue topic and the markers topic; empty where there is no such topic."""
    topics = (found.get(name) for name in (queue.name, queue.markers_topic))
    queue_id, markers_id = ("" if topic is None else topic.topic_id for topic in topics)
    return queue_id, markers_id
