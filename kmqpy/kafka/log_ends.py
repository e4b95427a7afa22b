"""Asks Kafka for the end offsets of many partitions at once."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection

TopicPlace = tuple[str, int]
"""A topic and the number of one of its partitions."""

_REQUEST_TIMEOUT_S = 1.0


class LogEnds:
    """Asks Kafka for end offsets: the next offset that a partition will give. Safe to use from any thread.

    committed  True: asks for last stable offsets instead, up to which readers of committed records read
    """

    def __init__(self, connection: KafkaConnection, *, committed: bool = False) -> None:
        self._connection = connection
        self._isolation = "read_committed" if committed else "read_uncommitted"
        self._consumer = self._new_consumer()
        self._request_failed = False

    @property
    def consumer(self) -> Consumer:
        """The consumer of librdkafka, for CutOffCheck."""
        return self._consumer

    def is_silent(self) -> bool:
        """Return True if the last request failed."""
        return self._request_failed

    def renew(self) -> None:
        """Replace the consumer, which is cut off. Calls that run go on with the former one."""
        self._consumer = self._new_consumer()

    def _new_consumer(self) -> Consumer:
        return librdkafka.new_consumer(self._connection, {"isolation.level": self._isolation})

    def each_of(
        self, places: Iterable[TopicPlace], *, anew: bool = False
    ) -> dict[TopicPlace, int | KmqError]:
        """The end offset of each partition, or the error that prevents it.

        Sends one request to each broker. If a broker does not answer, the whole call fails; then the
        partitions of each leader are asked for separately, which takes a second for each silent broker.
        `anew`: asks separately at once, after a look-up of the current leaders.
        """
        wanted = list(places)
        ends: dict[TopicPlace, int | KmqError] = {}
        failure: KmqError | None = None
        if anew:
            failure = Unavailable("the end of the queue is not known: Kafka names no leader of the partition")
        failure = failure or self._look_up(wanted, ends)
        if failure is not None:
            found = self._group_by_leader(wanted)
            ends = dict.fromkeys(wanted, failure)
            for some in found.values():
                if error := self._look_up(some, ends):
                    ends.update(dict.fromkeys(some, error))
        return ends

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _look_up(self, wanted: list[TopicPlace], ends: dict[TopicPlace, int | KmqError]) -> KmqError | None:
        """Put the ends of all `wanted` partitions into `ends`; returns the error if one can't be had."""
        # In a look-up by timestamp, the timestamp -1 (OFFSET_END) stands for the end of the log.
        places = [TopicPartition(topic, partition, OFFSET_END) for topic, partition in wanted]
        try:
            with librdkafka.kafka_errors("ask where the queue ends", self._connection):
                found = self._consumer.offsets_for_times(places, timeout=_REQUEST_TIMEOUT_S)
                for place in found:
                    if place.error is not None:
                        raise KafkaException(place.error)
                    if place.offset < 0:
                        raise Unavailable(
                            f"end of {place.topic}, partition {place.partition}: Kafka does not say"
                        )
        except KmqError as error:
            self._request_failed = True
            return error
        self._request_failed = False
        ends.update({(place.topic, place.partition): place.offset for place in found})
        return None

    def _group_by_leader(self, places: Iterable[TopicPlace]) -> dict[int, list[TopicPlace]]:
        """Look up the current leader of each partition; returns the partitions that have one, by leader.

        Without this look-up, librdkafka may go on asking a former leader that does not answer, although
        another broker has taken over. And it would not find new partitions.
        """
        places = list(places)
        found: dict[int, list[TopicPlace]] = {}
        for topic in {topic for topic, _ in places}:
            try:
                known = self._consumer.list_topics(topic, _REQUEST_TIMEOUT_S).topics[topic].partitions
            except KafkaException:
                break  # the broker that librdkafka asked does not answer; next time it asks another
            for place in places:
                leader = known[place[1]].leader if place[0] == topic and place[1] in known else -1
                if leader >= 0:
                    found.setdefault(leader, []).append(place)
        return found
