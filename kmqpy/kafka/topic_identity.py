"""Notices topics of a queue that were recreated: deleted and made again under the same name.

Kafka tells by the topic id. Positions, receipts and markers of the former topic must not count for the new
one (rule R24 of docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import TopicError
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import markers_topics

_ASK_EVERY_S = 1.0
"""A TopicWatch asks Kafka once in this many seconds while nobody needs an answer sooner."""
_MIN_ASK_INTERVAL_S = 0.05
"""A TopicWatch waits for at least this many seconds between two questions when knows_since() needs an
answer."""
_ANSWER_TIMEOUT_S = 3.0
"""Seconds after which a question without an answer has failed."""
_ASK_FOR_OTHERS_EVERY_S = 5.0
"""In one of its questions in this many seconds, a TopicWatch asks for the other topics, too."""
_ASK_FOR_DENIED_EVERY_S = 300.0
"""It asks this often for those of them that it may not see: brokers log each refusal, and say nothing else of
a topic that is to be made, so who grants the right and then makes the topic is noticed late."""
_MAX_BROKER_LAG_S = 10.0
"""Seconds for which a lagging broker may report the ids of deleted topics. Former ids that all answers have
named for this long are believed."""


@dataclass(frozen=True, slots=True)
class TopicIds:
    """The ids of a queue's topic and of its markers topic; a topic that is recreated gets another id."""

    queue: str
    markers: str

    def has_stale_markers(self, before: TopicIds) -> bool:
        """True if the queue topic was recreated since `before`, but not the markers topic."""
        return self.markers == before.markers and self.queue != before.queue


def find_stale_markers(
    queue: QueueSettings, before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, str]:
    """Topics of `queue` that were recreated while their markers topics were not: topic -> its markers topic.

    The old markers would count for the new messages, which have the same offsets as the former ones. `before`
    and `now` are topic ids by name. A topic is left out if either lacks its id or that of its markers topic.
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
        "is taken or redelivered, so that nothing is lost. "
        f"Recreate it with: kmq queue create {queue.queue_name}"
    )


class TopicWatch:
    """Notices that the queue topic or the markers topic of a queue was recreated; for one thread at a time.

    The watch asks Kafka for the topic ids at most once a second, or up to every 0.05 s while knows_since()
    needs an answer. It never waits for an answer: look() takes in an answer that has come.

    others  names of topics that may be made or deleted: see `others_there`. Of those that this client may not
            see, Kafka is asked every five minutes
    admin   a client to ask with, until it may be cut off; by default, and then, one of its own
    """

    others_there: frozenset[str] | None = None
    """Which of the others there are, as of some seconds ago; None: not known yet."""

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        ids: TopicIds,
        clock: Clock = SYSTEM_CLOCK,
        others: Iterable[str] = (),
        admin: AdminClient | None = None,
    ) -> None:
        self._others = set(others)
        self._denied: set[str] = set()
        self._ask_for_denied_at = 0.0
        self._ask_for_others_at = clock.monotonic() + _ASK_FOR_OTHERS_EVERY_S
        self._connection = connection
        self._names = [queue.name, queue.markers_topic]
        self._clock = clock
        self._admin = admin
        self._pending: dict[str, Future[Any]] = {}
        self._asked_at = self._known_at = clock.monotonic()
        self._next_ask = self._asked_at + _ASK_EVERY_S
        self._ids = ids
        self._former_ids: set[TopicIds] = set()
        self._last_answer = ids, self._known_at
        """The ids in the last answer, and since when all answers have named these ids."""

    def look(self) -> TopicIds:
        """Take in the answer of Kafka if there is one, ask again if it is time to; returns the current ids.

        An answer that does not name both topics changes nothing. Neither does an answer with former ids,
        unless answers have named these ids for 10 s.
        """
        now = self._clock.monotonic()
        if self._pending and all(future.done() for future in self._pending.values()):
            found = [one for name in self._names if (one := self._answered_id(name)) is not None]
            if others := self._pending.keys() - {*self._names}:
                self._note_others(others)
            self._pending = {}
            if len(found) == len(self._names):
                self._known_at = self._asked_at
                self._note_answer(TopicIds(*found))
        if not self._pending and now >= self._next_ask:
            self._ask(now)
        return self._ids

    def knows_since(self, moment: float) -> bool:
        """True if the last complete answer is to a question asked at `moment` (monotonic) or later.

        If not, one of the next look() calls asks, without waiting for the usual second to pass.
        """
        if self._known_at >= moment:
            return True
        self._next_ask = min(
            self._next_ask, max(self._clock.monotonic(), self._asked_at + _MIN_ASK_INTERVAL_S)
        )
        return False

    def _note_answer(self, ids: TopicIds) -> None:
        # A broker that does not know of the new topics yet answers with the ids of the former topics, for
        # `_MAX_BROKER_LAG_S` at most. A watch that is made meanwhile can't tell former from new ids.
        if ids != self._last_answer[0]:
            self._last_answer = ids, self._known_at
        lasts = self._known_at - self._last_answer[1] >= _MAX_BROKER_LAG_S
        if ids != self._ids and (lasts or ids not in self._former_ids):
            self._former_ids.add(self._ids)
            self._ids = ids

    def _note_others(self, names: Collection[str]) -> None:
        there, denied = set(), set()
        for name in names:
            try:
                self._pending[name].result(0)
                there.add(name)
            except KafkaException as exception:
                error = kafka_errors.error_of(exception)
                code = None if error is None else error.code()
                if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    denied.add(name)
                elif code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    return
        if denied:
            self._ask_for_denied_at = self._asked_at + _ASK_FOR_DENIED_EVERY_S
        self._denied = self._denied.difference(names) | denied
        self.others_there = frozenset(there)

    def _answered_id(self, name: str) -> str | None:
        try:
            return str(self._pending[name].result(0).topic_id)
        except KafkaException as exception:
            if may_be_cut_off(kafka_errors.error_of(exception)):
                self._admin = None
            return None  # Kafka does not answer, or the topic is gone; readers of the topic notice that

    def _ask(self, now: float) -> None:
        if self._admin is None:
            self._admin = librdkafka.new_admin(self._connection)
        self._admin.poll(0)  # serves the client's log lines, which would heap up
        self._asked_at, self._next_ask = now, now + _ASK_EVERY_S
        names = self._names
        if self._others and now >= self._ask_for_others_at:
            self._ask_for_others_at = now + _ASK_FOR_OTHERS_EVERY_S
            left_out = self._denied if now < self._ask_for_denied_at else set()
            names = [*names, *self._others - left_out]
        self._pending = self._admin.describe_topics(TopicCollection(names), request_timeout=_ANSWER_TIMEOUT_S)
