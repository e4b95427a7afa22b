"""Asks Kafka every 2 s whether it answers, and whether the topics that this tracker reads are still the same.

A topic that was recreated (deleted and made again) has another id; offsets of the former don't count then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import TopicInfo, Topics
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.membership import Membership
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.reading.markers_consumer import MarkersConsumer

_log = logging.getLogger(__name__)

_PROBE_EVERY_S = 2.0
_REGISTER_EVERY_S = 10.0
"""After an attempt to register new partitions of a queue, the next attempt begins this long later."""


class TopicProbe(TrackerPart):
    """Tells the Membership whether Kafka answers, and starts new takeovers where topics were recreated.

    Calls of `topics` must time out soon, because writes of offsets and releases wait for a running probe.
    The main loop calls `probe`; threads that redeliver call `has_its_topics`.
    """

    def __init__(
        self, context: TrackerContext, topics: Topics, member: Membership, markers: MarkersConsumer
    ) -> None:
        super().__init__(context)
        self._topics = topics
        self._member = member
        self._markers = markers
        self._next_probe = 0.0
        self._probing = False
        self._next_registration_at: dict[str, float] = {}

    def probe(self, now: float) -> None:
        """Begin a job that asks Kafka for the topics of all queues that are read, if that is due.

        Without an answer the tracker withdraws (rule R13 of docs/rules.md); where a topic id has changed, the
        partitions are taken over again (rule R8).
        """
        if now < self._next_probe or self._probing:
            return
        self._probing = True
        self._next_probe = now + _PROBE_EVERY_S
        queues = {part.queue.name: part.queue for part in self._partitions.values() if part.reading}
        self._jobs.run(
            Pool.HOUSEKEEPING, partial(self._describe, queues), partial(self._probed, queues.keys())
        )

    def has_its_topics(self, part: OwnedPartition) -> bool:
        """True if Kafka says that the partition's topics still have the ids they had at its takeover.

        If an id is another one (rule R24), the next probe begins at once and has the partition taken over
        again.
        """
        queue = part.queue
        try:
            found = self._topics.describe([queue.name, queue.markers_topic])
        except KmqError:
            return False  # Kafka does not answer; the caller tries again soon
        if _ids_of(found, queue) == part.topic_ids:
            return True
        self._next_probe = 0.0
        return False

    def _describe(self, queues: Mapping[str, QueueSettings]) -> dict[str, TopicInfo]:
        # Any broker can answer this. A missing controller alone is no reason to withdraw.
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
        for part in self._partitions.values():
            known = part.phase in (TrackingPhase.CATCHING_UP, TrackingPhase.ACTIVE)
            if not found or not known or part.queue.name not in queues:
                continue
            if _ids_of(found, part.queue) != part.topic_ids:
                part.problems.takeover = "a topic was deleted or recreated"
                self._problems.warn("topics", part.key, part.problems.takeover)
                self._markers.stop(part)
                part.take_over_again(self._clock.monotonic())
            elif part.number == 0 and part.phase is TrackingPhase.ACTIVE:  # so that one tracker does it
                self._register_partitions(part.queue.name, found[part.queue.name].partitions)

    def _register_partitions(self, name: str, existing: int) -> None:
        """Begin a job that registers partitions which were added with Kafka's own tools.

        No tracker redelivers messages of a partition that is not registered.
        """
        registered = self._leadership.snapshot().queues.get(name)
        if registered is None or registered.deleting or existing <= registered.partitions:
            self._problems.clear(_untracked_problem(name))
            return
        now = self._clock.monotonic()
        if now >= self._next_registration_at.get(name, 0.0):
            self._next_registration_at[name] = now + _REGISTER_EVERY_S
            finished = partial(self._registered, name, registered.partitions, existing)
            self._jobs.run(Pool.REDELIVERY, partial(self._follow_topic, name), finished)

    def _follow_topic(self, name: str) -> None:
        with Admin(self._connection, self._zookeeper) as admin:
            admin.follow_topic(name)

    def _registered(self, name: str, tracked: int, existing: int, error: Exception | None) -> None:
        if error is None:
            _log.info("partitions added to a queue", extra={"queue": name, "partitions": existing})
            return
        self._problems.show(
            _untracked_problem(name),
            f"queue {name}: of its {existing} partitions those from {tracked} on can't all be tracked: "
            f"{error}; run: kmq queue alter {name} --partitions {existing}",
        )
        if not isinstance(error, KmqError):
            raise error


def _untracked_problem(name: str) -> str:
    """The name under which Problems shows that partitions of a queue are not tracked."""
    return f"partitions of {name}"


def _ids_of(found: Mapping[str, TopicInfo], queue: QueueSettings) -> tuple[str, str]:
    """The ids of the queue topic and the markers topic; an empty text for a topic that does not exist."""
    topics = (found.get(name) for name in (queue.name, queue.markers_topic))
    queue_id, markers_id = ("" if topic is None else topic.topic_id for topic in topics)
    return queue_id, markers_id
