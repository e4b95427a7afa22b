"""Checks commits against the logs that they speak of: these may have been cut back since (rule R39).

The log of a queue partition, or that of its markers, ends earlier than before after a power cut of all
replicas, or an unclean election. Where the queue was cut, messages that came later have the offsets of
messages that were started, and are no longer in the log; see `log_cuts`. Where the markers were cut, start
markers are lost; no tracker redelivers their messages, so these are taken again. Leader epochs tell: Kafka
raises the epoch of a partition with each election, and each record keeps the epoch in which it was written.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from kmqpy.core.clock import Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.cut_search import find_cut
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.telemetry.base import Telemetry

_log = logging.getLogger(__name__)

_READ_MARKERS_TIMEOUT_S = 2.0
"""Seconds without a marker from Kafka, after which reading has failed."""
_FIRST_LOOK_BACK = 1_000
"""So many markers before a cut are read first, and eight times as many each time that they have no take."""


class PartitionEnd(NamedTuple):
    """Where the log of a partition ends, and its latest leader epoch; None: Kafka names none."""

    offset: int
    epoch: int | None


class PartitionEnds(NamedTuple):
    """The ends of a queue partition, and of its markers. The end of the markers is the last stable offset."""

    queue: PartitionEnd
    markers: PartitionEnd


class CommitCheck:
    """Compares commits with the logs of a queue and its markers topic."""

    def __init__(
        self, connection: KafkaConnection, queue: QueueSettings, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._telemetry = telemetry
        self._clock = clock

    def ask(self, consumer: Consumer, partitions: list[int], timeout_s: float) -> dict[int, PartitionEnds]:
        """Where the logs of these partitions end, without those of which Kafka does not tell it.

        Raises KafkaException or Unavailable if Kafka tells it of none.
        """
        topics = self._queue.name, self._queue.markers_topic
        places = [TopicPartition(topic, number, OFFSET_END) for topic in topics for number in partitions]
        ends: dict[tuple[str, int], PartitionEnd] = {}
        errors: list[Exception] = []
        for place in consumer.offsets_for_times(places, timeout=timeout_s):
            if place.error is not None:
                errors.append(KafkaException(place.error))
            elif place.offset < 0:
                about = f"{place.topic}, partition {place.partition}"
                errors.append(Unavailable(f"{about}: Kafka does not say where it ends"))
            else:
                ends[place.topic, place.partition] = PartitionEnd(place.offset, place.leader_epoch)
        told = [number for number in partitions if all((topic, number) in ends for topic in topics)]
        if not told:
            raise errors[0]
        return {number: PartitionEnds(*(ends[topic, number] for topic in topics)) for number in told}

    def cut_back(
        self,
        partition: int,
        commit: Commit,
        offset: int,
        epoch: int | None,
        end: PartitionEnd,
        claim_id: bytes = b"",
    ) -> Commit:
        """Return the commit for the log as it is, where a message of this epoch stood at this offset.

        The message may be that before the commit, the last that has a start marker, or the last copy that an
        end marker names, which has this `claim_id`. Raises KmqError.
        """
        if offset < 0 or epoch is None or (offset < end.offset and (end.epoch or 0) <= epoch):
            return commit
        cut = find_cut(
            self._connection,
            self._queue.name,
            partition,
            offset=offset,
            epoch=epoch,
            claim_id=claim_id,
            clock=self._clock,
        )
        if cut is None or commit.cuts.knows(cut):
            return commit
        self._tell("the log of a queue was cut back: messages are lost", partition, cut.start, offset)
        return commit.cut_back(cut)

    def with_markers_cut_back(self, partition: int, commit: Commit, end: PartitionEnd) -> Commit:
        """Return the commit for the markers as they are: all messages without a start marker lie behind it.

        Raises KmqError.
        """
        at, epoch = commit.markers_offset, commit.markers_epoch
        if not at or epoch is None or (end.epoch or 0) <= epoch:
            return commit
        topic = self._queue.markers_topic
        cut = find_cut(
            self._connection,
            topic,
            partition,
            offset=at - 1,
            epoch=epoch,
            starts=commit.offset - 1,
            clock=self._clock,
        )
        if cut is None:
            return commit
        taken_to = min(commit.offset, self._taken_to(partition, cut.start))
        self._tell(
            "markers of a queue were cut away: messages are taken again", partition, taken_to, commit.offset
        )
        return replace(commit, offset=taken_to, markers_offset=cut.start, markers_epoch=None)

    def _taken_to(self, partition: int, before: int) -> int:
        """Up to which queue offset messages were taken, by the markers before this markers offset.

        Clients take messages in the order of their offsets, so the last start markers tell. So do assignment
        ticks. 0 if there is neither.
        """
        reader = RepeatedReader(
            self._connection,
            self._queue.markers_topic,
            uncommitted=True,
            timeout_s=_READ_MARKERS_TIMEOUT_S,
            clock=self._clock,
        )
        taken_to = 0

        def visit(_partition: int, records: list[Any]) -> bool:
            nonlocal taken_to
            for record in records:
                if record.offset() < before:
                    taken_to = _taken_to(record, taken_to)
            return bool(records[-1].offset() + 1 >= before)

        try:
            begin, span = before, _FIRST_LOOK_BACK
            while begin > 0 and not taken_to:
                end, begin = begin, max(0, begin - span)
                reached = reader.scan({partition: begin}, visit)
                if reached[partition].low >= end:
                    break
                span *= 8
        finally:
            reader.close()
        return taken_to

    def _tell(self, what: str, partition: int, first: int, last: int) -> None:
        _log.error(
            "%s", what, extra={"queue": self._queue.name, "partition": partition, "from": first, "to": last}
        )
        self._telemetry.failed(self._queue.name, "cut log")


def _taken_to(record: Any, before: int) -> int:
    """Up to which queue offset messages were taken, if up to `before` by the markers before this one."""
    try:
        marker = read_marker(record)
    except DecodeError:
        return before
    if marker.takes_from is not None:
        from_offset = offset_of(marker.takes_from)
        return from_offset if marker.takes_again else max(before, from_offset)
    if marker.op in (Op.TAKE, Op.DELAY) and not marker.by_tracker:  # trackers name old messages, too
        return max(before, offset_of(marker.highest) + 1)
    return before
