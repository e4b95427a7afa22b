"""Asks Kafka for the end offsets of many partitions at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.settings import KafkaConnection

TopicPlace = tuple[str, int]
"""A topic and the number of one of its partitions."""

_REQUEST_TIMEOUT_S = 1.0


class LogEnd(NamedTuple):
    """Where a log ends, and the latest leader epoch of its partition; -1: Kafka does not tell it."""

    offset: int
    epoch: int = -1

    def or_newer(self, other: LogEnd) -> LogEnd:
        """This or the other, whichever comes from the later leader, or is higher."""
        return max(self, other, key=lambda end: (end.epoch, end.offset))


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
        """The end offset of each partition, or the error that prevents it; see with_epochs()."""
        found = self.with_epochs(places, anew=anew)
        return {key: end.offset if isinstance(end, LogEnd) else end for key, end in found.items()}

    def with_epochs(
        self, places: Iterable[TopicPlace], *, anew: bool = False
    ) -> dict[TopicPlace, LogEnd | KmqError]:
        """The end of each partition, or the error that prevents it.

        Sends one request to each broker. If a broker does not answer, the whole call fails; then the
        partitions of each leader are asked for separately, which takes a second for each silent broker. So
        are single partitions that could not be had.
        `anew`: asks separately at once, after a look-up of the current leaders.
        """
        wanted = list(places)
        unknown = Unavailable("the end of the log is not known: Kafka names no leader of the partition")
        ends: dict[TopicPlace, LogEnd | KmqError] = dict.fromkeys(wanted, unknown)
        if not anew:
            self._look_up(wanted, ends)
        left = [place for place in wanted if not isinstance(ends[place], LogEnd)]
        for some in self._group_by_leader(left).values():
            self._look_up(some, ends)
        return ends

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _look_up(self, wanted: list[TopicPlace], ends: dict[TopicPlace, LogEnd | KmqError]) -> None:
        """Put the ends of all `wanted` partitions into `ends`, or the error where there is none."""
        # In a look-up by timestamp, the timestamp -1 (OFFSET_END) stands for the end of the log.
        places = [TopicPartition(topic, partition, OFFSET_END) for topic, partition in wanted]
        doing = "ask where the log ends"
        try:
            with kafka_errors.translating(doing, self._connection):
                found = self._consumer.offsets_for_times(places, timeout=_REQUEST_TIMEOUT_S)
        except KmqError as error:
            self._request_failed = True
            ends.update(dict.fromkeys(wanted, error))
            return
        self._request_failed = False
        for place in found:
            key = place.topic, place.partition
            if place.error is not None:
                ends[key] = kafka_errors.translated(place.error, doing, self._connection)
            elif place.offset < 0:
                ends[key] = Unavailable(f"end of {key[0]}, partition {key[1]}: Kafka does not say")
            else:
                ends[key] = LogEnd(place.offset, -1 if place.leader_epoch is None else place.leader_epoch)
            self._request_failed |= not isinstance(ends[key], LogEnd)

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
