"""End offsets of many partitions in one request."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection
from tracker.leadership.assignment import Partition

_TIMEOUT_S = 1.0

ABSENCE_CONFIRMED_S = 3.0
"""How long Kafka must keep saying that a message does not exist before that is believed: a broker that was
paused answers as leader for a while, and does not know what its successor has written."""
ABSENCE_RECHECK_S = 0.5
"""How long Kafka is not asked again in that time."""


class QueueEnds:
    """Asks Kafka for the end offsets of logs; safe to use from any thread."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._consumer = self._new_consumer()
        self._failed = False

    @property
    def consumer(self) -> Consumer:
        """The consumer of librdkafka, for CutOffCheck."""
        return self._consumer

    def is_silent(self) -> bool:
        """Return True if the last look-up failed."""
        return self._failed

    def renew(self) -> None:
        """Ask with a new consumer from now on; calls under way keep the former, which is cut off."""
        self._consumer = self._new_consumer()

    def _new_consumer(self) -> Consumer:
        # JVM clients read uncommitted records by default, so these can be taken, too.
        return librdkafka.new_consumer(self._connection, {"isolation.level": "read_uncommitted"})

    def end_beyond(self, place: Partition, offset: int) -> int:
        """The next offset of a partition, which should be above `offset`; raises KmqError.

        Where it is not, that is asked for again before it is believed; see ABSENCE_CONFIRMED_S.
        """
        end = self._one(place, anew=False)
        deadline = SYSTEM_CLOCK.monotonic() + ABSENCE_CONFIRMED_S
        while end <= offset and SYSTEM_CLOCK.monotonic() < deadline:
            SYSTEM_CLOCK.sleep(ABSENCE_RECHECK_S)
            end = max(end, self._one(place, anew=True))
        return end

    def _one(self, place: Partition, *, anew: bool) -> int:
        end = self.each_of([place], anew=anew)[place]
        if isinstance(end, KmqError):
            raise end
        return end

    def each_of(self, places: Iterable[Partition], *, anew: bool = False) -> dict[Partition, int | KmqError]:
        """The next offset of each partition, or why it can't be had; `anew`: of leaders found out anew.

        All in one request to each broker. A broker that does not answer fails that call as a whole; then the
        partitions of each leader are asked for by themselves, which takes a second for each such broker.
        """
        wanted = list(places)
        ends: dict[Partition, int | KmqError] = {}
        failure: KmqError | None = None
        if anew:
            failure = Unavailable("the end of the queue is not known: Kafka names no leader of the partition")
        failure = failure or self._look_up(wanted, ends)
        if failure is not None:
            found = self._by_leader(wanted)
            ends = dict.fromkeys(wanted, failure)
            for some in found.values():
                if error := self._look_up(some, ends):
                    ends.update(dict.fromkeys(some, error))
        return ends

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def _look_up(self, wanted: list[Partition], ends: dict[Partition, int | KmqError]) -> KmqError | None:
        """Note the ends of all in `ends`, or return why one of them can't be had."""
        # A look-up by timestamp, of which Kafka takes -1, OFFSET_END, for the end of the log.
        places = [TopicPartition(topic, partition, OFFSET_END) for topic, partition in wanted]
        try:
            with librdkafka.kafka_errors("ask where the queue ends", self._connection):
                found = self._consumer.offsets_for_times(places, timeout=_TIMEOUT_S)
                for place in found:
                    if place.error is not None:
                        raise KafkaException(place.error)
                    if place.offset < 0:
                        raise Unavailable(
                            f"end of {place.topic}, partition {place.partition}: Kafka does not say"
                        )
        except KmqError as error:
            self._failed = True
            return error
        self._failed = False
        ends.update({(place.topic, place.partition): place.offset for place in found})
        return None

    def _by_leader(self, places: Iterable[Partition]) -> dict[int, list[Partition]]:
        """The partitions that have a leader, by that; found out anew.

        Else librdkafka may go on to ask a leader that does not answer for as long as that lasts, although
        another broker has taken over; nor would it find a partition that is new.
        """
        places = list(places)
        found: dict[int, list[Partition]] = {}
        for topic in {topic for topic, _ in places}:
            try:
                known = self._consumer.list_topics(topic, _TIMEOUT_S).topics[topic].partitions
            except KafkaException:
                break  # whom we asked does not answer; it will be another next time
            for place in places:
                leader = known[place[1]].leader if place[0] == topic and place[1] in known else -1
                if leader >= 0:
                    found.setdefault(leader, []).append(place)
        return found
