"""Negative controls: kmqpy with one of its safeguards taken out. The checker must find each of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.assigned_partition import ReceivePhase
from kmqpy.kafka.copies.copy_transaction import NewRecord
from kmqpy.kafka.copies.late_acks import CheckedCopies
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.finished import StoredFinished
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.replay import ALL_EXIST
from kmqpy.message import headers_of, last_header

from .clients import Claim, CrashRecovery, GroupMember, LateAckCheck, MarkerWriter
from .collapsing import Collapsing
from .connection import Connection
from .lanes import LaneRemoval
from .model import decoded
from .producers import Transactions
from .simulate import Controls
from .surroundings import NoWatch
from .trackers import (
    LastAttempts,
    MarkerReader,
    OffsetKeeper,
    OriginalsReader,
    PartitionLifecycle,
    PartitionRedelivery,
    Redeliverer,
    Takeover,
    TopicProbe,
    TrackerClaim,
    aborted,
    broken,
    original_of,
)
from .world import Steps


class UnfencedTransactions(Transactions):
    """Every producer has a transactional.id of its own, so none fences a predecessor."""

    def __init__(self, connection: Connection, transactional_id: str, backoff_ms: float) -> None:
        super().__init__(connection, f"{transactional_id}-{connection.process.name}", backoff_ms)


class UsedOn(Transactions):
    """A producer is used on after an end that may have been repeated (rule R36)."""

    @property
    def may_end_again(self) -> bool:
        return False

    @may_end_again.setter
    def may_end_again(self, _may: bool) -> None:
        pass


class PlainSends(Transactions):
    """Copies and end markers are sent one by one, by a producer that is fenced but has no transaction."""

    def _send(self, number: int, place: tuple[str, int], key: bytes | None, value: Any, headers: Any) -> Any:
        self._broker.add_partition(self._id, self._epoch, self._by, number, place)
        record = super()._send(number, place, key, value, headers)
        self._end_request(commit=True)()
        return record

    def _end(self, **_: Any) -> Steps:
        yield 0.0


class UnsafeOffsets(OffsetKeeper):
    """Stores how far it has read, past the takes of what is in flight."""

    def offset_of(self, part: Any) -> Any:
        made = super().offset_of(part)
        if made is None:
            return None
        stored = StoredOffset(part.state._position, made().markers_id, part.state.now_ms)
        return lambda: stored


class BelievesLies(MarkerReader):
    """Takes every marker for true that can be decoded (rule R22)."""

    def apply(self, part: Any, records: Any, now: float) -> None:
        part.queue_end = ALL_EXIST
        super().apply(part, records, now)


class BelievesClocks(MarkerReader):
    """Takes every timestamp for the broker's time (rule R23)."""

    def apply(self, part: Any, records: Any, now: float) -> None:
        part.clock._last_tick = None
        super().apply(part, records, now)


class LateOperationsOpen(Takeover):
    """Any operation opens an entry, not only a take (rule R2)."""

    def _start_reading(self, part: Any, result: Any) -> None:
        super()._start_reading(part, result)
        part.state.missed_markers = True


class UnconfirmedStarts(MarkerWriter):
    """Does not wait for start markers: they are on their way when the messages are handed out."""

    def start(self, takes: Any, delays: Any, *more: Any) -> Steps:
        yield self._world.latency()
        self._connection.process.spawn(super().start(takes, delays, *more), 50 * self._world.random())
        return Claim({**takes, **{partition: None for partition, _ in delays}})


class IgnoredFailures(MarkerWriter):
    """Goes on when start markers could not be written, as the JVM client does (case F1)."""

    def start(self, takes: Any, delays: Any, *more: Any) -> Steps:
        starting = yield from super().start(takes, delays, *more)
        return Claim({**takes, **{partition: None for partition, _ in delays}}, starting)


class ForgetsFailures(MarkerWriter):
    """Writes again what failed, and tells who waits for it that it is written (rule R26)."""

    def _send_failed_later(self, group: Any, *failed: Any) -> None:
        group.confirmed += 1
        super()._send_failed_later(self._new_group(), *failed)


class RetriesFromMemory(Redeliverer):
    """Opens a new producer after a commit of unknown outcome and sends the same again (rule R1)."""

    def _transact(self, *batch: Any) -> Steps:
        try:
            return (yield from super()._transact(*batch))
        except broken as error:
            yield from self.open(1.0)
            raise aborted() from error


class CommitsUnseen(Redeliverer):
    """Looks at the topics before a transaction, and not again before it is committed (rule R24)."""

    def _transact(self, batch: Any, gone: Any, _may_go_on: Any) -> Steps:
        return (yield from super()._transact(batch, gone, lambda: True))


class CommitsUnled(Redeliverer):
    """Looks not whether it leads before it commits: only the fencing keeps it from that.

    Where topics are recreated, it looks at these and at that together.
    """

    def _transact(self, batch: Any, gone: Any, may_go_on: Any) -> Steps:
        looks = self._connection.world.topics_change
        return (yield from super()._transact(batch, gone, may_go_on if looks else lambda: True))


class OnlyRetryLane(Redeliverer):
    """Copies to the retry lane, whether it can be written or not (rule R47)."""

    def _lane(self, _exists: Any, _outcome: Any) -> str:
        return self.queue.copies_topic  # type: ignore[no-any-return]


class RemovesFullLanes(LaneRemoval):
    """Removes a lane at once, whatever is in it (rule R47)."""

    def _wait_until_drained(self, _lane: Any, _deadline: float) -> Steps:
        yield 0.0


_TICKS_LATER_MS = 500


class TicksLater(MarkerWriter):
    """Takes messages before it is written from where it takes them (rule R30)."""

    def write_assignments(self, ticks: Any, timeout_s: float) -> Steps:
        again = [tick for tick in ticks if tick.takes_again]
        for tick in ticks:
            if not tick.takes_again:
                self._connection.world.at(_TICKS_LATER_MS, partial(self._put_late, tick))
        return (yield from super().write_assignments(again, timeout_s))

    def _put_late(self, tick: Marker) -> None:
        with suppress(KmqError):  # it is closed
            self._put_unflushed(tick)


class NoClaim(TrackerClaim):
    """Writes a tick for a claim: what it planned is copied, whatever was acknowledged since (rule R27)."""

    @property
    def record(self) -> NewRecord:
        return NewRecord(self._partition, *codec.encode(codec.tick(self._partition)))

    def decide(self, _position: int) -> Steps:
        return []
        yield


class ClaimsAfterReading(TrackerClaim):
    """Looks at what was there before its claim was written, not at what is there before the claim (R27)."""

    def decide(self, _position: int) -> Steps:
        return (yield from super().decide(self._since_plan._position))


class HandsOutAll(LateAckCheck):
    """Hands every copy out, whatever was acknowledged (rule R32)."""

    def examine(self, _copies: Any, _within_s: float) -> Steps:
        yield 0.0
        return CheckedCopies()


class IgnoresLate(LateAckCheck):
    """Takes no notice of one kind of late operations (rule R32)."""

    ignored: Op

    def _apply_operations(self, known: Any, place: Any, headers: Any, checked: Any) -> None:
        own = known[0]
        left = [one for one in own.operations(place[1], headers) if one.op is not self.ignored]
        heeded = SimpleNamespace(now_ms=own.now_ms, operations=lambda *_: left)
        super()._apply_operations([heeded], place, headers, checked)


class IgnoresLateDeadLetters(IgnoresLate):
    ignored = Op.DEAD_LETTER


class IgnoresLateExtensions(IgnoresLate):
    ignored = Op.EXTEND


class IgnoresLateNacks(IgnoresLate):
    ignored = Op.NACK


class LosesAll(LateAckCheck):
    """Says of each copy whose lease is extended that it is acknowledged (rule R33)."""

    def find_acknowledged(self, copies: Any, _within_s: float) -> Steps:
        yield 0.0
        return [(partition, offset) for partition, ones in copies.items() for offset in ones]


class LooksFromItsTake(LateAckCheck):
    """Looks for acknowledgements behind its own start marker only (rule R31)."""

    def examine(self, copies: Any, within_s: float) -> Steps:
        self._known.clear()
        logs = self._connection.broker.logs
        ends = {partition: logs[self._queue.markers_topic, partition].end - 1 for partition in copies}
        later = {
            partition: {one: copy._replace(planned_at=ends[partition]) for one, copy in ones.items()}
            for partition, ones in copies.items()
        }
        return (yield from super().examine(later, within_s))


class ComparesLanes(LateAckCheck):
    """Reads the markers of other lanes to the position where those of the copy's lane end (rule R46)."""

    def _visit(self, known: Any, until: float, stopped: Any, partition: int, records: Any) -> bool:
        end = self._connection.broker.logs[self._queue.markers_topic, partition].end
        own = [one for one in records if one.topic() == self._queue.markers_topic or one.at < end]
        return super()._visit(known, until, stopped, partition, own)


class BelievesAncestors(LateAckCheck):
    """Takes the ancestors that a message names for its own (rule R33)."""

    believed = Op.END

    def copies_among(self, records: Any, place_of: Any) -> Any:
        self._headers = {(one.partition(), one.offset()): headers_of(one.headers()) for one in records}
        return super().copies_among(records, place_of)

    def examine(self, copies: Any, within_s: float) -> Steps:
        checked = yield from super().examine(copies, within_s)
        log_of = self._connection.broker.logs
        for partition, ones in copies.items():
            log = log_of[self._queue.markers_topic, partition]
            for offset, headers in ones.items():
                place = RecordPlace(self._queue.name, partition, offset)
                named = read_ancestors(last_header(self._headers[partition, offset], ANCESTORS), place)
                found = {
                    marker.offset
                    for record in log.records[headers.planned_at :]
                    if record.is_data
                    for marker in decoded(record)
                    if marker.op is self.believed and not marker.by_tracker
                }
                if {one.offset for one in named} & found and (partition, offset) not in checked.places():
                    self._believe((partition, offset), checked)
        return checked

    def _believe(self, place: Any, checked: CheckedCopies) -> None:
        checked.acknowledged.append(place)


class BelievesAncestorsOfDeadLetters(BelievesAncestors):
    """The same of dead-letter requests."""

    believed = Op.DEAD_LETTER

    def _believe(self, place: Any, checked: CheckedCopies) -> None:
        checked.rejected[place] = "simulated"


class DeadLettersAll(LastAttempts):
    """Makes dead letters of copies, whatever was acknowledged (rule R32)."""

    def examine(self, *_: Any) -> Steps:
        yield 0.0
        return CheckedCopies()


class ForgetsPredecessors(CrashRecovery):
    """Hands out what a crashed client had started and not committed (rule R10)."""

    def _activate(self, recovered: Any) -> Steps:
        to_seek = yield from super()._activate(recovered)
        for one in recovered.values():
            one.assigned._started = OffsetRuns()
        return to_seek


class TakesAgainUnread(GroupMember):
    """Takes messages again whose start markers failed, written or not."""

    def _rewind(self, partition: int, known: Any, offset: int) -> None:
        super()._rewind(partition, known, offset)
        known.phase = ReceivePhase.ACTIVE


class ReadsTooEarly(GroupMember):
    """Reads which of its start markers were written while they still may be."""

    def __init__(self, *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **{**more, "outcome_known": lambda partition: True})


class TakesWhatIsReadAgain(GroupMember):
    """Takes whatever librdkafka reads, also what it reads again."""

    def _receive_record(self, record: Any, log_bounds: Any, wrong: Any) -> bool:
        if (known := self._partitions.get(record.partition())) is not None:
            known.position = 0
        return super()._receive_record(record, log_bounds, wrong)


class BelievesCommits(CrashRecovery):
    """Takes every commit for one of the topics that there are (rule R24)."""

    def _recover(self, partition: int, known: Any, consumer: Any, ids: Any) -> Steps:
        committed = self._connection.group.committed
        if partition in committed:
            offset, metadata = committed[partition]
            version, covered, _, _, *log = metadata.split(":")
            committed[partition] = offset, ":".join((version, covered, ids.queue, ids.markers, *log))
        return (yield from super()._recover(partition, known, consumer, ids))


class AnyOriginal(OriginalsReader):
    """Takes the next record for one that is gone, as the JVM tracker does (case F5)."""

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> Steps:
        fetched = yield from super().fetch(topic, partition, offsets)
        log = self._consumer._connection.broker.logs[topic, partition]
        for offset in list(fetched.gone):
            following, _ = log.read(max(offset, log.start), 1)
            if following:
                fetched.gone.remove(offset)
                fetched.found[offset] = original_of(following[0])
        return fetched


class AllGone(OriginalsReader):
    """Takes every original for one that is gone, and so ends it without a copy (rule R14)."""

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> Steps:
        fetched = yield from super().fetch(topic, partition, offsets)
        fetched.gone.extend(fetched.found)
        fetched.found.clear()
        return fetched


class AnyEpoch(OriginalsReader):
    """Takes whatever record stands where an original stood for the original (rule R39)."""

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> Steps:
        fetched = yield from super().fetch(topic, partition, offsets)
        fetched.found = {offset: one._replace(epoch=-1) for offset, one in fetched.found.items()}
        return fetched


class CommitsInAnyEpoch(PartitionRedelivery):
    """Looks not whether a leader was elected since the log was known to be whole (rule R39)."""

    def _may_go_on(self, part: Any, _check: Any) -> bool:
        return self._leadership.may_redeliver() and self._probe.has_its_topics(part)


class CutsUnseen(CrashRecovery):
    """Looks not whether the log was cut back (rule R39)."""

    def _find_in_log(self, partition: int, commit: Any, ends: Any, consumer: Any) -> Steps:
        found = yield from self._find_starts(partition, commit.markers_offset, commit.offset)
        found.cuts = NO_CUTS
        return replace(commit, epoch=ends.queue.epoch, markers_epoch=ends.markers.epoch), found


class OffsetsForNumbers(GroupMember):
    """Names messages by their offsets, also behind a cut (rule R39)."""

    cuts: Mapping[int, LogCuts] = MappingProxyType({})

    def _numbers(self, offsets: Any) -> Any:
        return offsets


class CutsToldLater(MarkerWriter):
    """Takes messages behind a cut before the tick that tells it is written (rule R39)."""

    def write_assignments(self, ticks: Any, timeout_s: float) -> Steps:
        for tick in ticks:
            if tick.cuts:
                wait_ms = 300 * self._world.random()
                self._world.at(wait_ms, partial(self._put_unflushed, tick))
        rest = [tick for tick in ticks if not tick.cuts]
        return (yield from super().write_assignments(rest, timeout_s))


class CutsNotApplied(Takeover):
    """Keeps what it knows of messages that were cut away (rule R39)."""

    def _start_reading(self, part: Any, result: Any) -> None:
        super()._start_reading(part, result)
        part.state._cut = lambda _cuts, _at: None


class OldReceiptsBelieved(Takeover):
    """Ends messages by receipts of former topics, whose clients could not know (rule R24)."""

    def _start_reading(self, part: Any, result: Any) -> None:
        super()._start_reading(part, result)
        part.state.topic = None


class TakenLate(PartitionRedelivery):
    """Redelivers what was taken after its end like everything else (rule R30)."""

    def redeliver(self, part: Any, entries: Any, position: int, _taken_late: Any, *more: Any) -> Steps:
        return (yield from super().redeliver(part, entries, position, frozenset(), *more))


class HoldsNothing(PartitionRedelivery):
    """Copies at once, whatever delays the queue has before redeliveries (rule R44)."""

    def redeliver(self, part: Any, entries: Any, position: int, late: Any, log: Any, _now_ms: int) -> Steps:
        return (yield from super().redeliver(part, entries, position, late, log, 2**62))


class MendsNothing(PartitionRedelivery):
    """Looks not for the copies of torn transactions (rule R37)."""

    def mend(self, _part: Any, _torn: Any, _cuts: Any) -> Steps:
        yield 0.0
        return 0


class ForgetsFinished(OffsetKeeper):
    """Stores the safe offset without what was ended before it (rule R30)."""

    def offset_of(self, part: Any) -> Any:
        make = super().offset_of(part)
        return None if make is None else lambda: replace(make(), finished=StoredFinished())


class TakesAgainUnsaid(CrashRecovery):
    """Does not say that it may take messages again, after the group was set back (rule R30)."""

    def _activate(self, recovered: Any) -> Steps:
        for one in recovered.values():
            one.found.complete = True
        return (yield from super()._activate(recovered))


class KeepsState(TopicProbe):
    """Looks not whether the topics are still those that it has read (rules R8, R24)."""

    def has_its_topics(self, _part: Any) -> bool:
        return True

    def probe(self, _now: float) -> None:
        self._next_probe = float("inf")


class Hasty(MarkerReader):
    """Adds the time since the last marker by its own guess (rule R5)."""

    def apply(self, part: Any, records: Any, now: float) -> None:
        super().apply(part, records, now)
        part.state.now_ms += 300


class NoTicks(PartitionLifecycle):
    """Waits for markers of others to learn the time (rule R4)."""

    def advance(self, part: Any, now: float) -> None:
        part.clock.tick_sent(now)
        super().advance(part, now)


class EndsLater(Collapsing):
    """Asks only before the next poll where the log ended when messages were taken (rule R41)."""

    def poll(self, *what: Any) -> Steps:
        if self._polled:
            yield from super().note_ends()
        return (yield from super().poll(*what))

    def note_ends(self) -> Steps:
        yield 0.0


class TakesCopiesForTwins(Collapsing):
    """Passes over copies, too: what somebody has had and given back (rule R41)."""

    def _are_copies(self, records: Sequence[Any]) -> list[bool]:
        return [False for _ in records]


CONTROLS = {
    "fencing off": Controls(transactions=UnfencedTransactions, redeliverer=CommitsUnled),
    "a producer used on after an end that was repeated": Controls(transactions=UsedOn, late_requests=True),
    "torn transactions not looked for": Controls(redelivery=MendsNothing, late_requests=True),
    "two sends instead of a transaction": Controls(transactions=PlainSends),
    "safe offset past the oldest start": Controls(offset_keeper=UnsafeOffsets),
    "start markers not waited for": Controls(marker_writer=UnconfirmedStarts),
    "failed start markers ignored": Controls(marker_writer=IgnoredFailures),
    "failed markers count as written": Controls(marker_writer=ForgetsFailures),
    "any record for one that is gone": Controls(reader=AnyOriginal),
    "every original taken for gone": Controls(reader=AllGone),
    "a clock that runs ahead": Controls(marker_reader=Hasty),
    "no ticks": Controls(lifecycle=NoTicks),
    "timestamps believed": Controls(marker_reader=BelievesClocks),
    "lies believed": Controls(marker_reader=BelievesLies),
    "retry from memory": Controls(redeliverer=RetriesFromMemory),
    "late operations open": Controls(takeover=LateOperationsOpen),
    "no claim": Controls(claim=NoClaim),
    "claim after reading": Controls(claim=ClaimsAfterReading),
    "unfenced take": Controls(redelivery=TakenLate),
    "finished messages forgotten at takeover": Controls(offset_keeper=ForgetsFinished),
    "ticks of assignments not waited for": Controls(marker_writer=TicksLater),
    "taken again unsaid": Controls(recovery=TakesAgainUnsaid, set_back=True),
    "copies handed out whatever was acknowledged": Controls(late_ack_check=HandsOutAll, late_acks=True),
    "dead letters made whatever was acknowledged": Controls(last_attempts=DeadLettersAll, late_acks=True),
    "late acks looked for from the own take on only": Controls(
        late_ack_check=LooksFromItsTake, late_acks=True
    ),
    "every ancestor believed": Controls(late_ack_check=BelievesAncestors, late_acks=True),
    "every ancestor of a dead letter believed": Controls(
        late_ack_check=BelievesAncestorsOfDeadLetters, late_acks=True
    ),
    "late dead letters ignored": Controls(late_ack_check=IgnoresLateDeadLetters, late_acks=True),
    "late extensions ignored": Controls(late_ack_check=IgnoresLateExtensions, late_acks=True),
    "late nacks ignored": Controls(late_ack_check=IgnoresLateNacks, late_acks=True),
    "every copy lost": Controls(late_ack_check=LosesAll, late_acks=True),
    "predecessors forgotten": Controls(recovery=ForgetsPredecessors),
    "failed starts taken again unread": Controls(member=TakesAgainUnread),
    "own starts read too early": Controls(member=ReadsTooEarly),
    "what is read again taken again": Controls(member=TakesWhatIsReadAgain),
    "commits of other topics believed": Controls(recovery=BelievesCommits, topics_change=True),
    "topics not watched": Controls(watch=NoWatch, topics_change=True),
    "state kept for other topics": Controls(topic_probe=KeepsState, topics_change=True),
    "old receipts believed": Controls(takeover=OldReceiptsBelieved, topics_change=True),
    "committed without a look": Controls(redeliverer=CommitsUnseen, topics_change=True),
    "ends asked for after messages were handed out": Controls(collapsing=EndsLater, collapse=True),
    "copies taken for twins": Controls(collapsing=TakesCopiesForTwins, collapse=True),
    "retry delays not waited for": Controls(redelivery=HoldsNothing, retries=True),
    "positions of two lanes compared": Controls(late_ack_check=ComparesLanes, late_acks=True, lanes=True),
    "no fallback from the retry lane": Controls(redeliverer=OnlyRetryLane, lanes=True),
    "lane removed before it is empty": Controls(lane_removal=RemovesFullLanes, lanes=True),
    "cut logs not looked for by clients": Controls(recovery=CutsUnseen, cut_logs=True),
    "cut ticks ignored by trackers": Controls(takeover=CutsNotApplied, cut_logs=True),
    "numbers are offsets": Controls(member=OffsetsForNumbers, cut_logs=True),
    "takes before the cut tick is confirmed": Controls(marker_writer=CutsToldLater, cut_logs=True),
    "originals of another epoch copied": Controls(  # each of the two would notice
        reader=AnyEpoch, redelivery=CommitsInAnyEpoch, cut_logs=True
    ),
}
