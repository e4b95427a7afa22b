"""Which topics the names of a queue stand for: a topic that was recreated is another one (rule R24)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicCollection

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import TopicError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import markers_topics

_WATCH_EVERY_S = 1.0
_WATCH_SOON_S = 0.05
_WATCH_TIMEOUT_S = 3.0
_WATCH_LAG_S = 10.0
"""A lagging broker may report the ids of deleted topics for this long."""


@dataclass(frozen=True, slots=True)
class TopicIds:
    """The ids of a queue's topics; a topic that is recreated gets another id (rule R24)."""

    queue: str
    markers: str

    def has_stale_markers(self, before: TopicIds) -> bool:
        """True if the queue topic was recreated since `before`, but not the markers topic."""
        return self.markers == before.markers and self.queue != before.queue


def find_stale_markers(
    queue: QueueSettings, before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, str]:
    """Topics that were recreated while their markers topic was not: topic -> its markers topic (rule R24).

    `before` and `now` are topic ids by name; topics that are missing from either are left out. Such markers
    would count for the new messages that now have the same offsets.
    """
    return {
        messages: markers
        for messages, markers in markers_topics(queue).items()
        if {messages, markers} <= before.keys() & now.keys()
        and TopicIds(now[messages], now[markers]).has_stale_markers(
            TopicIds(before[messages], before[markers])
        )
    }


def stale_markers_error(queue: QueueSettings) -> TopicError:
    """The error of clients and trackers when a queue topic was recreated and its markers topic was not."""
    return TopicError(
        f"queue {queue.name!r}: its topic was recreated, but not its markers topic {queue.markers_topic!r}, "
        "which says of messages of the former one that they are done; until that is recreated, too, nothing "
        f"is taken or redelivered, so that nothing is lost. Recreate it with: kmq queue create {queue.name}"
    )


class TopicWatch:
    """Notices that the topics of a queue were recreated under the same names (rule R24).

    It asks Kafka at most every second, sooner when knows_since() has to know; it never waits for the answer.
    Used by one thread at a time.
    """

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, ids: TopicIds, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._connection = connection
        self._names = [queue.name, queue.markers_topic]
        self._clock = clock
        self._admin: Any = None
        self._asked: dict[str, Future[Any]] = {}
        self._asked_at = self._known_at = clock.monotonic()
        self._next = self._asked_at + _WATCH_EVERY_S
        self._ids = ids
        self._before: set[TopicIds] = set()
        self._told = ids, self._known_at
        """The ids in the last answer, and the moment since which answers had the same."""

    def look(self) -> TopicIds:
        """The ids as of the last answer that named both topics; asks again when it is time to."""
        now = self._clock.monotonic()
        if self._asked and all(future.done() for future in self._asked.values()):
            found = [one for name in self._names if (one := self._id(name)) is not None]
            self._asked = {}
            if len(found) == len(self._names):
                self._known_at = self._asked_at
                self._found(TopicIds(*found))
        if not self._asked and now >= self._next:
            self._ask(now)
        return self._ids

    def knows_since(self, moment: float) -> bool:
        """True if the ids were read at that moment of the clock or later; if not, it asks soon."""
        if self._known_at >= moment:
            return True
        self._next = min(self._next, max(self._clock.monotonic(), self._asked_at + _WATCH_SOON_S))
        return False

    def _found(self, ids: TopicIds) -> None:
        # A broker that does not know of the new topics yet answers with the ids of the old ones, for
        # `_WATCH_LAG_S` at most. A watch made meanwhile can't tell which ids are the old ones.
        if ids != self._told[0]:
            self._told = ids, self._known_at
        lasts = self._known_at - self._told[1] >= _WATCH_LAG_S
        if ids != self._ids and (lasts or ids not in self._before):
            self._before.add(self._ids)
            self._ids = ids

    def _id(self, name: str) -> str | None:
        try:
            return str(self._asked[name].result(0).topic_id)
        except KafkaException as exception:
            if may_be_cut_off(librdkafka.error_of(exception)):
                self._admin = None
            return None  # nobody answers, or the topic is gone; whoever reads it is told so

    def _ask(self, now: float) -> None:
        if self._admin is None:
            self._admin = librdkafka.new_admin(self._connection)
        self._admin.poll(0)  # what it logs would heap up
        self._asked_at, self._next = now, now + _WATCH_EVERY_S
        self._asked = self._admin.describe_topics(
            TopicCollection(self._names), request_timeout=_WATCH_TIMEOUT_S
        )
