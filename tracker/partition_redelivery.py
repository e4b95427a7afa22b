"""Redelivers due messages of a partition, and applies the result to its state, metrics and problems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from kmqpy.errors import KmqError
from kmqpy.kafka.markers.entry import Entry
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.topics import Topics
from kmqpy.telemetry.base import Telemetry
from tracker.context import TrackerContext, TrackerPart
from tracker.cut_keeper import CutKeeper
from tracker.log_check import LogCheck
from tracker.partition.owned_partition import OwnedPartition
from tracker.reading.queue_ends import QueueEnds
from tracker.redelivery.known_log import KnownLog
from tracker.redelivery.last_attempts import LastAttempts, PartitionAttempts
from tracker.redelivery.originals_readers import OriginalsReaders
from tracker.redelivery.redeliverer import RedeliveryResult
from tracker.topic_probe import TopicProbe

_log = logging.getLogger(__name__)

_TOPIC_KNOWN_S = 10.0
"""A topic for copies that Kafka described counts as existing for this long, without another request."""
_ELECTED_RETRY_S = 0.25
"""What waits for a look at the log after an election is tried again after this time."""


class PartitionRedelivery(TrackerPart):
    """First a background job calls `redeliver`, then the main loop calls `redelivered` with its result."""

    def __init__(
        self,
        context: TrackerContext,
        topics: Topics,
        probe: TopicProbe,
        originals: OriginalsReaders,
        last_attempts: LastAttempts,
        telemetry: Telemetry,
        ends: QueueEnds,
        cuts: CutKeeper,
    ) -> None:
        super().__init__(context)
        self._ends = ends
        self._cuts = cuts
        self._topics = topics
        self._probe = probe
        self._originals = originals
        self._last_attempts = last_attempts
        self._telemetry = telemetry
        self._topic_seen_at: dict[tuple[str, int], float] = {}

    def redeliver(
        self,
        part: OwnedPartition,
        entries: list[Entry],
        position: int,
        taken_late: frozenset[int],
        log: KnownLog,
        now_ms: int,
    ) -> RedeliveryResult:
        """See Redeliverer.redeliver; a background job."""
        check = LogCheck(self._ends, part.key, log)
        with self._originals.lend() as reader:
            result = part.redeliverer.redeliver(
                entries,
                reader,
                partial(self._may_go_on, part, check),
                partial(self._may_have_topic, part),
                position,
                taken_late,
                PartitionAttempts(self._last_attempts, part.queue, part.number, part.topic_ids),
                log,
                now_ms,
            )
        result.new_end = check.new_end
        return result

    def mend(self, part: OwnedPartition, torn: Sequence[TornClaim], log: KnownLog) -> int:
        """Finish what torn transactions have copied; a background job. Returns the number of messages."""
        exists = partial(self._has_topic, part)
        check = LogCheck(self._ends, part.key, log)
        return part.redeliverer.mend(torn, partial(self._may_go_on, part, check), exists, log)

    def mended(self, part: OwnedPartition, torn: Sequence[TornClaim], copied: int | Exception) -> None:
        """Count and log the transactions; those of their messages that were not copied are redelivered.

        First the partition is taken over again: the end markers have to be read before anything is planned.
        If `copied` is an error, the claims are looked at again after that.
        """
        if isinstance(copied, KmqError):
            self._not_mended(part, copied)
            return
        if isinstance(copied, Exception):
            raise copied
        part.state.claims.forget([claim.id for claim in torn])
        part.take_over_again(self._clock.monotonic())
        self._metrics.torn_transactions.labels(part.key[0]).inc(len(torn))
        _log.warning(
            "a late request had ended transactions before they were complete; mended",
            extra={**self._problems.about(part.key), "transactions": len(torn), "copied": copied},
        )

    def _not_mended(self, part: OwnedPartition, error: KmqError) -> None:
        part.problems.takeover = f"torn transactions can't be mended: {error}"
        self._metrics.failures.labels(part.key[0]).inc()
        self._problems.warn(
            "mending", part.key, "torn transactions can't be mended; taking over again", error=str(error)
        )
        part.back_off(self._clock.monotonic())

    def _may_go_on(self, part: OwnedPartition, check: LogCheck) -> bool:
        return (
            self._leadership.may_redeliver()
            and self._probe.has_its_topics(part)
            and check.nobody_was_elected()
        )

    def redelivered(
        self, part: OwnedPartition, entries: list[Entry], result: RedeliveryResult | Exception
    ) -> None:
        """Count and report the result; make messages that failed due again later.

        If the producer can't be used any more, the partition is taken over again.
        """
        if isinstance(result, Exception):
            raise result  # outcome unknown: take the partition over again (rule R1 of docs/rules.md)
        self._count(part, result)
        problems = [text for text in (result.problem, result.dead_letter_problem) if text]
        part.problems.redelivered([entry.offset for entry in entries], result.failed, "; ".join(problems))
        problems += result.refused[:1]  # Failures.refused() names all of them
        for problem in problems:
            self._metrics.failures.labels(part.key[0]).inc()
            self._problems.warn("redelivery", part.key, "redelivery failed; trying again", error=problem)
        if result.lane_problem is not None:
            self._problems.warn(
                "retry lane",
                part.key,
                "the retry lane can't be written; copies stay in their own lane, behind what waits there",
                error=result.lane_problem,
            )
        if result.new_end is not None:
            self._cuts.end_told(part, result.new_end)
        if result.doubtful is not None:
            self._cuts.look(part, result.doubtful)
        if result.broken:
            part.take_over_again(self._clock.monotonic())
            return
        least_s = 0.0 if result.new_end is None else _ELECTED_RETRY_S
        for offset, delay_s in result.failed.items():
            part.state.retry(offset, int(max(least_s, delay_s) * 1000))
        for offset, held_ms in result.held.items():
            part.state.retry(offset, held_ms)  # until the marker is read that says so

    def _count(self, part: OwnedPartition, result: RedeliveryResult) -> None:
        name, now = part.key[0], self._clock.monotonic()
        self._metrics.redelivered.labels(name).inc(len(result.redelivered))
        if (lane := part.queue.copies_topic) != part.queue.name:
            stay = sum(copy.topic != lane for copy in result.redelivered)
            self._metrics.lane_fallbacks.labels(name).inc(stay)
        self._metrics.dead_lettered.labels(name).inc(len(result.dead_lettered))
        self._metrics.taken_late.labels(name).inc(len(result.taken_late))
        self._metrics.dead_letters_spared.labels(name).inc(len(result.acknowledged))
        if result.unread:
            self._problems.warn(
                "last attempts",
                part.key,
                "copies became dead letters before it was known whether they had been acknowledged",
                count=result.unread,
            )
        self._metrics.undecodable_counts.labels(name).inc(result.undecodable_counts)
        if result.undecodable_ancestors:
            self._problems.warn(
                "ancestors",
                part.key,
                "kmq-ancestors of messages can't be read; those of their copies begin with them",
                count=result.undecodable_ancestors,
            )
        lateness = self._metrics.lateness.labels(name)
        for copy in result.copies:
            lateness.observe(part.clock.seconds_since(copy.entry.due_ms, now))
            self._telemetry.moved(name, copy.headers, dead_letter=copy.dead_letter)
        if result.gone:
            self._metrics.lost_to_retention.labels(name).inc(len(result.gone))
            about = self._problems.about(part.key)
            _log.error(
                "messages in flight are gone from the queue topic; raise its retention",
                extra={**about, "count": len(result.gone), "offsets": result.gone[:10]},
            )

    def _may_have_topic(self, part: OwnedPartition, topic: str) -> bool:
        """True if a topic for copies exists, as far as is known. If it is gone, sending fails."""
        try:
            return self._has_topic(part, topic)
        except KmqError:  # Kafka does not answer
            return (topic, part.number) in self._topic_seen_at

    def _has_topic(self, part: OwnedPartition, topic: str) -> bool:
        """True if a topic for copies exists, and, if it is a lane, has this partition.

        Raises KmqError. Never makes a broker create the topic.
        """
        key = topic, part.number
        if self._clock.monotonic() - self._topic_seen_at.get(key, -100.0) < _TOPIC_KNOWN_S:
            return True
        found = self._topics.describe([topic]).get(topic)
        is_lane = topic != part.queue.dead_letter_topic
        if found is None or (is_lane and found.partitions <= part.number):
            self._topic_seen_at.pop(key, None)
            return False
        self._topic_seen_at[key] = self._clock.monotonic()
        return True
