"""Takes a partition over: fences earlier owners, verifies leadership, finds where to begin to read markers.

Fencing: the tracker opens a producer with the partition's `transactional.id`, and Kafka refuses writes of
every older producer with this id.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.context import AdminContext
from kmqpy.kafka.admin.doctor import Doctor
from kmqpy.kafka.admin.findings import Severity
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.assigned_partition import StartsFound
from kmqpy.kafka.client.crash_recovery import find_starts
from kmqpy.kafka.copies.own_hanging import end_transaction, open_transactions_of_tracker, original_of
from kmqpy.kafka.cut_search import find_cut
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.codec import Marker, Op, topic_tag
from kmqpy.kafka.markers.log_cuts import Cut
from kmqpy.kafka.topic_identity import TopicIds, stale_markers_error
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.cut_keeper import CutKeeper
from tracker.kafka_clients import KafkaClients
from tracker.offset_keeper import OffsetKeeper
from tracker.partition.owned_partition import OwnedPartition
from tracker.partition.start_position import StartPosition, start_position
from tracker.redelivery.originals_readers import OriginalsReaders
from tracker.redelivery.tick_writer import Tick

_log = logging.getLogger(__name__)

_FENCING_TIMEOUT_S = 10.0
"""A takeover fails when opening the producer, or then writing the tick, takes longer than this."""
_BELIEVED_TIMES = 4
"""So many takeovers fail before a stored offset is not believed that names what its log does not have."""
_SHARED_TOPIC_RETRY_S = 10.0
"""A takeover that finds two queues with the same markers topic is tried again after this time."""


@dataclass(frozen=True)
class TakeoverResult:
    """The result of `prepare`.

    topic_ids  ids of the queue topic and the markers topic
    tick       written after the fencing: once the tracker has read it, it knows all earlier markers
    queue_end  the queue's end after the tick
    existed    the messages below this offset existed at some time before the tick
    known_end  the log has what the stored offset says it had below this offset, as of this leader epoch
    begin      where to begin to read markers, and with which state
    markers_epoch  the latest leader epoch of the markers partition
    is_held_back   True if an open transaction keeps markers before the tick from being read
    """

    topic_ids: tuple[str, str]
    tick: Tick
    queue_end: LogEnd
    existed: int
    known_end: LogEnd
    begin: StartPosition
    markers_epoch: int
    is_held_back: bool = False


class Takeover(TrackerPart):
    """First a background job calls `prepare`, then the main loop calls `begin` with its result."""

    def __init__(
        self,
        context: TrackerContext,
        kafka: KafkaClients,
        offsets: OffsetKeeper,
        originals: OriginalsReaders,
        cuts: CutKeeper,
    ) -> None:
        super().__init__(context)
        self._cuts = cuts
        self._kafka = kafka
        self._offsets = offsets
        self._originals = originals
        self._diagnosed: set[str] = set()

    def prepare(self, part: OwnedPartition) -> TakeoverResult | None:
        """Fence earlier owners, verify leadership, and find where to begin to read.

        Returns None when this tracker does not lead the partition. Raises KmqError or KafkaException.
        """
        queue, number = part.queue, part.number
        topics = self._kafka.topics.check(queue, number)
        topic_ids = (topics.queue.topic_id, topics.markers.topic_id)
        if part.has_topics and TopicIds(*topic_ids).has_stale_markers(TopicIds(*part.topic_ids)):
            raise stale_markers_error(queue)
        part.redeliverer.open(_FENCING_TIMEOUT_S)
        if not self._leadership.verify(queue.name, number):
            return None
        stored = self._offsets.read_offset(part)
        if stored is not None and stored.is_of_earlier_queue(*topic_ids):
            raise stale_markers_error(queue)
        stored = self._believed(part, stored)
        # The tick comes after all markers of fenced owners: whoever has read the tick has read those, too.
        tick = self._kafka.tick_writer.send_tick(queue.markers_topic, number, _FENCING_TIMEOUT_S)
        markers_end = self._kafka.ends.end_of((queue.markers_topic, number))
        with self._originals.lend() as reader:
            log_start, markers_stable = reader.bounds(queue.markers_topic, number)
        markers_cut = self._markers_cut_since(stored, topics.markers.topic_id, markers_end, part)
        begin = start_position(stored, topics.markers.topic_id, log_start, tick.markers_offset, markers_cut)
        if markers_cut is None:
            begin = begin._replace(at=_with_own_evidence(begin.at, part, topic_ids, markers_end.epoch))
        queue_end = self._kafka.ends.end_beyond((queue.name, number), begin.highest)
        with self._originals.lend() as reader:
            _, stable = reader.bounds(queue.name, number)
        is_open = markers_stable < markers_end.offset or stable < queue_end.offset
        if is_open and self._end_hanging(part, stored):
            return self.prepare(part)
        cut = self._cut_since(begin.at, queue_end, part)
        known_end = LogEnd(0 if cut else begin.at.taken_end, queue_end.epoch if cut else begin.at.queue_epoch)
        # Where markers were cut away, the ticks that have told cuts may be lost.
        known = begin.at.cuts if markers_cut is None or stored is None else stored.cuts
        if cut is not None and known.knows(cut):
            cut = None
        existed_to = 0 if cut is None else begin.at.taken_end
        if cut is not None:
            since = self._markers_since(part, begin.at, queue_end.epoch)
            if not known.merged(since.cuts).is_current(known.number_of(begin.at.taken_end - 1)):
                cut = None  # told: clients know of later cuts what is to be known
            elif since.epoch is not None and since.epoch >= cut.epoch:
                begin, existed_to, cut = begin.without_takes_behind(cut), 0, None
        cuts = known if cut is None else known.with_cut(cut)
        if cuts != begin.at.cuts:
            # Messages that stood behind them are dropped, and counted, when this tick is read.
            tick = self._kafka.tick_writer.send_tick(queue.markers_topic, number, _FENCING_TIMEOUT_S, cuts)
            queue_end = self._kafka.ends.end_beyond((queue.name, number), begin.highest)  # after the tick
        existed = max(queue_end.offset, existed_to)
        begin = begin.corrected(tick.now_ms, queue, existed, self._settings.max_clock_lead_ms)
        if begin.problem is not None:
            _log.error(begin.problem, extra=self._problems.about(part.key))
        if begin.markers_lost:
            self._metrics.markers_lost.labels(queue.name).inc()
        held_back = markers_stable < markers_end.offset
        return TakeoverResult(
            topic_ids, tick, queue_end, existed, known_end, begin, markers_end.epoch, held_back
        )

    def _believed(self, part: OwnedPartition, stored: StoredOffset | None) -> StoredOffset | None:
        """What can be true of the stored offset. A leader may not know for a while that it is none."""
        if stored is None or stored == stored.within(0):
            return stored
        believed = stored.within(self._kafka.ends.end_of(part.key).epoch)
        if believed != stored:
            if part.failures < _BELIEVED_TIMES:
                raise Unavailable(
                    "the stored offset names leader epochs that the log does not have; trying again"
                )
            _log.error(
                "the stored offset names leader epochs that the log never had; they are not believed",
                extra=self._problems.about(part.key),
            )
        return believed

    def _end_hanging(self, part: OwnedPartition, stored: StoredOffset | None) -> bool:
        """End a transaction of an earlier owner that hangs (rule R38); True if it was tried: take over again.

        After the fencing, none of them is going on. End markers that were read when the offset was stored had
        been committed. Copies whose end markers are committed are committed by the next transaction with a
        copy; if they stand still, one of their messages is redelivered once more.
        """
        read_to = 0 if stored is None else stored.markers_read
        for own in open_transactions_of_tracker(self._connection, part.queue, part.number):
            topic, offset = own.hanging.topic, own.hanging.offset
            about = {**self._problems.about(part.key), "topic": topic, "offset": offset}
            if (topic, offset) in part.not_ended:
                continue  # Kafka has forgotten its producer, or it is forged: kmq doctor names the command
            if own.may_be_ended:
                _log.warning("a transaction of an earlier tracker hangs: ending it", extra=about)
                was_read = topic == part.queue.markers_topic and offset < read_to
                if not end_transaction(self._connection, replace(own, commits=own.commits or was_read)):
                    part.not_ended.add((topic, offset))
                return True
            if offset == part.copies_hang_at:  # no redelivery has come
                _log.warning("copies of an earlier tracker hang: copying one of them again", extra=about)
                again = Marker(
                    *(part.number, original_of(own), Op.DELAY, 0),
                    counts=False,
                    reason="copies hang",
                    by_tracker=True,
                )
                self._kafka.tick_writer.post(part.queue.markers_topic, again)
        return False

    def _markers_cut_since(
        self, stored: StoredOffset | None, markers_id: str, end: LogEnd, part: OwnedPartition
    ) -> Cut | None:
        """A cut of the markers after the offset was stored (rule R40)."""
        if stored is None or stored.markers_id != markers_id or not stored.markers_read:
            return None
        if not 0 <= stored.markers_epoch < end.epoch:
            return None
        return find_cut(
            self._connection,
            part.queue.markers_topic,
            part.number,
            offset=stored.markers_read - 1,
            epoch=stored.markers_epoch,
            clock=self._clock,
        )

    def _cut_since(self, stored: StoredOffset, end: LogEnd, part: OwnedPartition) -> Cut | None:
        """A cut of the queue's log after the offset was stored."""
        if not 0 <= stored.queue_epoch < end.epoch or not stored.taken_end:
            return None
        return find_cut(
            self._connection,
            *part.key,
            offset=stored.taken_end - 1,
            epoch=stored.queue_epoch,
            may_be_control=True,
            clock=self._clock,
        )

    def _markers_since(self, part: OwnedPartition, stored: StoredOffset, epoch: int) -> StartsFound:
        """What markers since the stored offset tell of cuts, and of the epoch from which clients take."""
        return find_starts(
            self._connection,
            part.queue,
            part.number,
            markers_offset=stored.offset,
            first_offset=INT64_MAX,
            latest_epoch=epoch,
            clock=self._clock,
        )

    def begin(self, part: OwnedPartition, result: TakeoverResult | Exception) -> None:
        """Begin to read markers, or go on if the partition is read already.

        After a failure the takeover is tried again later, even if another queue has the same markers topic.
        """
        now = self._clock.monotonic()
        if isinstance(result, Exception):
            part.back_off(now)
            part.problems.takeover = f"takeover failed: {result}"
            self._metrics.failures.labels(part.key[0]).inc()
            self._problems.warn("takeover", part.key, "takeover failed; trying again", error=str(result))
        elif (other := self._kafka.markers.other_reader(part)) is not None:
            problem = f"its markers topic is also that of queue {other.key[0]}; give each its own"
            part.problems.takeover = problem
            self._problems.warn("topics", part.key, problem)
            part.take_over_again(now + _SHARED_TOPIC_RETRY_S)
        else:
            part.problems.takeover = None
            if part.reading and result.topic_ids != part.topic_ids:
                self._kafka.markers.stop(part)
            if not part.reading:
                self._start_reading(part, result)
            part.is_held_back = result.is_held_back
            part.catch_up_to(result.tick, result.queue_end, result.existed, result.known_end)
            if result.begin.markers_cut:
                self._cuts.markers_cut_away(part, str(result.begin.problem))
            if result.begin.untold is not None:
                self._cuts.not_told(part, result.begin)
            self._cuts.end_told(part, result.queue_end)
            self._metrics.takeovers.labels(part.key[0]).inc()

    def _start_reading(self, part: OwnedPartition, result: TakeoverResult) -> None:
        if part.key[0] not in self._diagnosed:
            self._diagnosed.add(part.key[0])
            self._jobs.submit(Pool.REDELIVERY, partial(self._diagnose, part.key[0]))
        part.topic_ids = result.topic_ids
        part.stored_offset = part.stored_position = None
        now = self._clock.monotonic()
        at = result.begin.at
        state = result.begin.state(has_retries=bool(part.queue.retry_delays))
        state.topic = topic_tag(result.topic_ids[0])
        part.start_reading(state, now, at.told_below, at.queue_epoch, result.markers_epoch)
        if result.begin.ahead_s:
            part.problems.clock_was_wrong(str(result.begin.problem), now)
            self._problems.clock_ahead(part.key, result.begin.ahead_s)
        self._kafka.markers.start(part)

    def _diagnose(self, queue: str) -> None:
        """Log each problem that `kmq doctor` would find with the queue. Runs once per queue, as a job."""
        try:
            timeout_s, topics = self._connection.timeout_s, self._kafka.topics
            admin = AdminContext(self._connection, self._zookeeper, timeout_s, self._clock, topics)
            with closing(admin):
                findings = Doctor(admin).quick_look(queue)
        except Exception as error:
            _log.warning("queue can't be checked", extra={"queue": queue, "error": str(error)})
            return
        for finding in findings:
            if finding.severity is not Severity.OK:
                _log.warning(finding.what, extra={"queue": queue, "to_do": finding.to_do})


def _with_own_evidence(
    stored: StoredOffset, part: OwnedPartition, topic_ids: tuple[str, str], markers_epoch: int
) -> StoredOffset:
    """The stored offset with what this tracker knows of the queue's log, if it has read the partition before.

    It was stored seconds before, and messages that were taken since may have been cut away.
    """
    end, told_below = part.log_evidence
    if (
        part.topic_ids != topic_ids
        or end.epoch < max(0, stored.queue_epoch)
        or end.offset <= stored.taken_end
    ):
        return stored
    if markers_epoch != part.markers_epoch:  # takes of later epochs may stand behind what was stored
        told_below = min(told_below, stored.told_below)
    return replace(stored, taken_end=end.offset, queue_epoch=end.epoch, told_below=told_below)
