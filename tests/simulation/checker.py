"""What must hold of every run: judged from the logs alone, against a naive reading of the markers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kmqpy import message as m
from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, named_offsets
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE, Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY, RecordPlace, read_ancestors, read_copies
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.message_headers import redelivery_count
from kmqpy.kafka.settings import MARKERS_SUFFIX, QueueSettings

from . import collapsing
from .history import History, SetBack
from .invariants import is_of_the_model, model_state, violations
from .journal import Decided, Written
from .lanes import parts_of
from .late_ack_judge import LateAckJudge
from .model import LIAR, Broker, Log, Record, decoded, main_partition, part_of, topic_of
from .refinement import original_place, refused_steps

REASON = "kmq-reason"


def _begin_of_transaction(markers: Log, copy: Record) -> int:
    """Where the claim of the transaction stands that made a copy."""
    return next((one.at for one in markers.records if _are_together(one, copy)), markers.end)


def _are_together(record: Record, copy: Record) -> bool:
    """Whether they are of one transaction."""
    ours, theirs = record.hung or record.txn, copy.hung or copy.txn
    return ours is not None and theirs is not None and ours.is_part_of(theirs)


def _is_torn(copy: Record) -> bool:
    return copy.txn is not None and copy.txn.early


@dataclass
class _Open:
    """A message in flight, as a naive reader of the markers sees it."""

    at: int
    due: int
    counts: bool
    leased: bool
    dead: bool = False
    lapsed: bool = False
    waits: bool = False
    is_held: bool = False
    ended_at: int = -1
    # Once its time is up, a tracker may act on any of what it read since.
    counted: set[bool] = field(default_factory=set)
    failures: list[tuple[int, bool]] = field(default_factory=list)
    """When its time was up, by each operation since, and whether the queue's `retry_delays` follow."""
    was_dead: set[bool] = field(default_factory=set)


class Checker:
    """Finds what went wrong in a run; `problems` in words.

    Where the topics were recreated, those that are gone are looked at, too, as far as they went.

    A client learns of new topics a moment after they were made. A marker that it writes until then for a
    message of the old topic may get to the new one, and counts there for the message at the same offset. That
    is known (rule R24), so the checker forgives what comes of it: a message that such an end marker ended
    while it was in flight, or of which such a start marker spoke before the message existed. So it does with
    what trackers ended while some brokers still told them the ids of the topics before. `stats` tells how
    many were lost by that.
    """

    def __init__(self, broker: Broker, history: History, queue: QueueSettings, *, strict_time: bool) -> None:
        self.broker = broker
        self._names = history.names if broker.world.cut_logs else None
        self._originals: set[Record] = set()
        """Where logs may be cut back, messages of which copies were made."""
        self.history = history
        self.queue = queue
        self.strict_time = strict_time
        self.problems: list[str] = []
        self.stats: Counter[str] = Counter()
        self._number = 0
        self._logs = broker.logs
        self._forgiven: set[tuple[int, int]] = set()
        """Messages of which nobody can know any more what is true."""
        self._acked: set[bytes] = set()
        self._ended_as_former: set[tuple[int, int]] = set()
        """Messages that somebody ended who had stood still, and meant those that had their offsets before a
        cut: a gap of rule R39."""
        self._late: dict[tuple[int, int], _Open] = {}
        self._copied: set[tuple[int, int]] = set()
        self._late_ends: dict[tuple[int, int], int] = {}
        """Where clients ended messages whose leases were over, until they are taken again."""
        self._windows: list[int] = []
        """From where messages of the partition were taken, by each assignment."""
        self._finished: set[int] = set()
        """Messages of the partition that were ended after such an assignment, and of which no assignment has
        said since that they may be taken again."""
        self._taken_again: list[tuple[int, int]] = []
        """Where in the partition ticks say that their client may take messages again, and from where."""
        self._ended_since: set[int] = set()
        """Messages of the partition that were ended, since the group was set back where it was."""
        self._late_acks = LateAckJudge()
        self._written = {
            event.record: index
            for index, event in enumerate(broker.world.journal)
            if isinstance(event, Written)
        }
        """When each record was written: positions in the logs of two lanes don't compare (rule R46)."""
        self._collapsed: list[Record] = []

    def check(self) -> list[str]:
        self.problems += self.history.problems
        decided = [event.txn for event in self.broker.world.journal if isinstance(event, Decided)]
        self.stats["ended by late requests"] = sum(txn.early for txn in decided)
        for number, logs in enumerate([*self.broker.past, self.broker.logs]):
            self._number, self._logs = number, logs
            self._acked, self._late, self._copied, self._forgiven = set(), {}, set(), set()
            self._late_ends = {}
            self._late_acks = LateAckJudge()
            for partition in parts_of(self.broker, self.queue.name):
                self._windows, self._finished, self._ended_since = [], set(), set()
                self._taken_again.clear()
                self._read_markers(partition)
        self.problems += self.history.names.problems
        self._check_copies()
        self._check_dead_letters()
        self._check_deliveries()
        self._check_loss()
        self._check_collapsed()
        if is_of_the_model(self.broker, self.history):
            self.stats["judged by the model"] += 1
            self.problems += violations(model_state(self.broker, self.history, self.queue))
            self.problems += refused_steps(
                self.broker.world.journal, self.broker, self.queue, self.history.unread
            )
        return self.problems

    @property
    def _is_past(self) -> bool:
        return self._number < self.broker.number

    def _log(self, topic: str, part: int) -> Log:
        return self._logs[topic_of(topic, part), main_partition(part)]

    def _time(self, log: Log, at: int) -> int:
        """When the record at this offset was written."""
        return self._written[log.records[at]] if at < log.end else len(self.broker.world.journal)

    def _check_copies(self) -> None:
        """Every copy that can be read ends what it replaces; others are duplicates to come.

        Nobody can find a copy of a torn transaction whose claim was deleted, or cut away with what it names,
        before it was mended.
        """
        for (topic, partition), log in self.broker.logs.items():
            if topic.endswith(MARKERS_SUFFIX):
                continue
            of = [
                part for part in parts_of(self.broker, self.queue.name) if main_partition(part) == partition
            ]
            markers = [self._log(self.queue.markers_topic, part) for part in of]
            for record in log.records:
                is_gone = record.hung is not None or (
                    _is_torn(record)  # with the topics of its original, or with its claim
                    and (
                        bool(self.broker.past)
                        or self._is_of_cut(record)
                        or any(_begin_of_transaction(one, record) < one.start for one in markers)
                    )
                )
                if record.is_data and record.by.startswith("tracker") and not record.has_end and not is_gone:
                    self.problems.append(f"a copy without end marker: {topic} {partition}@{record.at}")

    def _is_of_cut(self, copy: Record) -> bool:
        """Whether this is the copy of a message of another lane that was cut away: nothing is left to end."""
        if self._names is None or ANCESTORS not in dict(copy.headers()):
            return False
        place = original_place(copy)
        original = self._names.of((part_of(place.topic, place.partition), place.offset))
        return original is not None and original.is_cut

    def _message(self, queue: Log, offset: int) -> Record | None:
        """The message at this offset; where logs may be cut back, the one that has this number."""
        if self._names is not None:
            return self._names.of((part_of(queue.topic, queue.partition), offset))
        return queue.records[offset] if offset < len(queue.records) else None

    def _mistaken_for(self, original: Record, copy: Record, number: int) -> Record:
        """The message behind the cut of which a tracker made this copy, taking it for one that was cut away.

        It can't know better where the tick that told the cut, or a leader epoch, was deleted before its time.
        And who takes a message behind that tick by its former number may know no cuts, and mean the new one.
        A second copy comes of that, a gap of rule R39.
        """
        known = not (
            self.history.markers_deleted or self.history.names.was_gone((original.part, number), original)
        )
        if known:
            return original
        found = self._with_value_of(copy, original)
        self.stats["copied for what was cut away"] += found is not original
        return found

    def _with_value_of(self, copy: Record, original: Record) -> Record:
        """The last record before the copy that stood where the original did, and has the copy's value.

        Before and behind a cut there may be copies of the same message, with other counts.
        """
        made_at = self._written[copy]
        written = [one for one, at in self._written.items() if at < made_at and one.log is original.log]
        there = (one for one in reversed(written) if one.at == original.at)
        return next((one for one in there if one.value() == copy.value()), original)

    def _was_missed(self, copy: Record) -> bool:
        """Whether an earlier cut has taken away a later copy of the same transaction: a gap of rule R39.

        Of each transaction the highest copy is known, and the first of two cuts has it forgotten.
        """
        if copy.cut_at is None:
            return False
        written = [event.record for event in self.broker.world.journal if isinstance(event, Written)]
        later = (one for one in written if one.log is copy.log and one.at > copy.at)
        return any(one.is_cut and one.cut_at < copy.cut_at for one in later if _are_together(one, copy))

    def _check_is_whole(self, original: Record, copy: Record, what: str) -> None:
        if (copy.key(), copy.value()) != (original.key(), original.value()):
            self.problems.append(f"F5: {what} became {copy.value()!r}")
        if ("h", b"1") not in copy.headers():
            self.problems.append(f"F8: the copy of {what} lost a header")

    def _named_by(self, end: Record, offset: int) -> RecordPlace | None:
        """The copy of the message at `offset` that an end marker names; None: it names none."""
        ended = [marker.offset for marker in decoded(end)]
        named = dict(end.headers()).get(COPY)
        lane = end.topic().removesuffix(MARKERS_SUFFIX)
        return read_copies(named, lane, len(ended))[ended.index(offset)] if named else None

    def _check_lineage(self, original: Record, copy: Record, end: Record, offset: int, what: str) -> None:
        """The end marker names the copy, and the copy its original behind the original's ancestors."""
        place = RecordPlace(copy.topic(), copy.partition(), copy.at)
        if self._names is not None:
            self._check_lineage_of_numbers(copy, end, offset, what)
            return
        if (named := self._named_by(end, offset)) != place:
            self.problems.append(f"lineage: the end of {what} names {named}, not its copy {place}")
        parent = RecordPlace(original.topic(), original.partition(), offset)
        try:
            before = read_ancestors(m.last_header(m.headers_of(original.headers()), ANCESTORS), parent)
        except DecodeError:
            return  # somebody forwarded the headers of a copy to where they can't stand
        if read_ancestors(dict(copy.headers())[ANCESTORS], place) != (*before, parent):
            self.problems.append(f"lineage: {place} is a copy of {what} with other ancestors")

    def _check_lineage_of_numbers(self, copy: Record, end: Record, number: int, what: str) -> None:
        """The same where logs may be cut back, as far as it can be known: a number may come too late."""
        place = self._named_by(end, number)
        stands_at = copy.topic(), copy.partition(), copy.at
        if place is None or (*place[:2], offset_of(place.offset)) != stands_at:
            self.problems.append(f"lineage: the end of {what} names {place}, not its copy {copy.at}")
        elif f"{copy.topic()}{MARKERS_SUFFIX}" == end.topic() and not (
            self.history.markers_deleted or self._was_missed(copy)
        ):  # in another lane it is named by its offset
            names = self.history.names
            names.copied((copy.part, place.offset), copy, end.by)
            self.stats["copies named otherwise than taken"] += names.number_of(copy) not in (
                None,
                place.offset,
            )
        ancestors = read_ancestors(dict(copy.headers())[ANCESTORS], RecordPlace("", -1, 0))
        if ancestors[-1][1:] != (copy.partition(), number):
            self.problems.append(f"lineage: the copy of {what} names {ancestors}")

    def _read_markers(self, partition: int) -> None:
        log, queue = self._log(self.queue.markers_topic, partition), self._log(self.queue.name, partition)
        state: dict[int, _Open] = {}
        takes: dict[int, list[tuple[Record, int]]] = defaultdict(list)
        ends: dict[tuple[str, int], int] = {}
        for copy in queue.records if not self.broker.past else ():
            if copy.is_data and (_is_torn(copy) or (copy.hung and copy.copied)):
                number = self.history.names.number_of(copy)
                named = original_place(copy)
                original = part_of(named.topic, named.partition), named.offset
                self._late_acks.torn(original, (partition, copy.at if number is None else number))
        now = 0
        set_backs = self._set_backs(partition)
        for record in log.records:
            while set_backs and set_backs[0].markers_end <= record.at:
                back = set_backs.pop(0)
                self._ended_since = {one for one in self._ended_since if offset_of(one) < back.offset}
                self._copied = {
                    (p, at) for p, at in self._copied if p != partition or offset_of(at) < back.offset
                }
            if record.by.startswith("tracker"):
                claimed = named_offsets(record.headers(), CLAIM, record.partition())
                self._late_acks.claimed([(partition, at) for at in claimed], self._written[record])
            if not record.is_data:
                continue
            now = max(now, record.ms if record.by != LIAR else 0)
            for entry in state.values():
                if not entry.lapsed and entry.due <= now + self.history.clock_lead_ms:
                    self._lapse(entry)
            for marker in decoded(record):
                if self._is_of_none(record, marker):
                    self._forgiven.add((partition, marker.offset))
                elif marker.takes_from is not None:
                    self._read_assignment(record.at, marker)
                elif marker.op is Op.END:
                    ends.setdefault((record.by, marker.offset), record.at)
                    self._read_end(partition, queue, record, marker, state, takes)
                elif marker.op in (Op.TAKE, Op.DELAY):
                    takes[marker.offset].append((record, marker.redeliver_after_ms))
                    self._late_ends.pop((partition, marker.offset), None)
                    state[marker.offset] = self._opened(marker, record.at, now, state.get(marker.offset))
                else:
                    if not marker.by_tracker:
                        self._check_late_operation(partition, record, marker)
                    if (entry := state.get(marker.offset)) is not None:
                        if marker.by_tracker and not entry.lapsed and self.strict_time:
                            self.problems.append(
                                f"R5: {partition}@{marker.offset} held back, due {entry.due}"
                            )
                        self._changed(entry, marker, now)
        for offset, entry in state.items():
            if self._is_there(queue, offset) and not self.history.markers_deleted and not self._is_past:
                self.problems.append(f"stuck: {partition}@{offset} is in flight at the end: {entry}")
        self._check_handouts(partition, takes)
        self._note_collapsed(queue, takes)
        for number, name, where, offset, end in self.history.waits:
            if (number, where) == (self._number, partition) and not ends.get((name, offset), end) < end:
                self.problems.append(f"R26: {name} was told that the end of {partition}@{offset} is written")

    def _note_collapsed(self, queue: Log, takes: Mapping[int, list[tuple[Record, int]]]) -> None:
        """Note the messages that were finished because equal ones waited, too."""
        collapses = self.history.collapses
        taken = {self._message(queue, offset) for offset in takes}
        passed = [one for one in queue.records if one.is_data and one not in taken and collapses.has(one)]
        if not self._is_past:
            self._acked.update(record.value() for record in passed)
            self._collapsed += passed
            self.stats["collapsed"] += len(passed)

    def _check_collapsed(self) -> None:
        if self.history.markers_deleted:
            return
        letters = (
            record
            for partition in range(self.broker.partitions)
            for record in self._log(self.queue.dead_letter_topic, partition).records
        )
        gone = {*self.history.deleted, *(one.value() for one in letters if one.is_data)}
        self.problems += collapsing.problems(self.broker, self.history.collapses, self._collapsed, gone)

    def _is_there(self, queue: Log, offset: int) -> bool:
        """Whether a message was neither deleted nor cut away."""
        named = self._message(queue, offset) if self._names is not None else None
        return offset_of(offset) >= queue.start and not (named is not None and named.is_cut)

    def _is_of_none(self, record: Record, marker: Marker) -> bool:
        """Whether a marker of messages of the topics before speaks of one that did not exist yet.

        A tracker believes it or not, and so does a client: it depends on when they read it (rule R22).
        """
        speaks = marker.op in (Op.TAKE, Op.DELAY) and record.believed < self._number
        if not speaks or record.by.startswith("tracker"):
            return False
        return any(one.offset >= record.queue_end for one in decoded(record))

    def _set_backs(self, partition: int) -> list[SetBack]:
        return [one for one in self.history.set_backs if one[:2] == (self._number, partition)]

    def _read_assignment(self, at: int, tick: Marker) -> None:
        """Rule R30: from now on ends are noted, and what was set back is open again."""
        takes_from = tick.takes_from
        assert takes_from is not None
        self._windows.append(takes_from)
        if tick.takes_again:
            self._finished = {offset for offset in self._finished if offset < takes_from}
            self._taken_again.append((at, takes_from))

    def _opened(self, marker: Marker, at: int, now: int, before: _Open | None) -> _Open:
        if before is not None and before.dead:
            return before
        if marker.by_tracker:  # its copy was cut away
            self._finished.discard(marker.offset)
            self._ended_since.discard(marker.offset)
        entry = _Open(at, now + max(0, marker.redeliver_after_ms), marker.counts, leased=marker.op is Op.TAKE)
        entry.waits = entry.leased and entry.counts
        if before is not None and before.lapsed:
            entry.lapsed, entry.counted, entry.was_dead = True, before.counted, before.was_dead
            entry.failures = before.failures
            entry.counted.add(entry.counts)
        if entry.due <= now + self.history.clock_lead_ms:
            self._lapse(entry)
        return entry

    def _wait_ms(self, marker: Marker) -> int:
        """How long after the marker the message is due: what was asked for, up to the queue's limit (R16)."""
        if marker.op is Op.DEAD_LETTER:
            return 0
        limit_ms = self.queue.max_lease_ms if marker.op in (Op.TAKE, Op.EXTEND) else self.queue.max_delay_ms
        return min(max(0, marker.redeliver_after_ms), limit_ms)

    def _changed(self, entry: _Open, marker: Marker, now: int) -> None:
        if entry.dead or (marker.op is Op.EXTEND and not entry.leased):
            return
        entry.due = now + self._wait_ms(marker)
        entry.counts = marker.counts
        entry.is_held = marker.by_tracker
        entry.waits = marker.counts and (marker.op is Op.EXTEND or not marker.redeliver_after_ms)
        entry.dead = marker.op is Op.DEAD_LETTER
        entry.leased = marker.op is Op.EXTEND
        if entry.lapsed or entry.due <= now + self.history.clock_lead_ms:
            self._lapse(entry)

    def _lapse(self, entry: _Open) -> None:
        entry.lapsed = True
        entry.counted.add(entry.counts)
        entry.was_dead.add(entry.dead)
        if not entry.is_held:
            entry.failures.append((entry.due, entry.waits))

    def _read_end(
        self,
        partition: int,
        queue: Log,
        record: Record,
        marker: Marker,
        state: dict[int, _Open],
        takes: Mapping[int, list[tuple[Record, int]]],
    ) -> None:
        offset = marker.offset
        if offset < 0:
            is_refused = any(not name for name, _ in record.headers())
            self.stats["old receipts refused" if is_refused else "ticks"] += 1
            return
        entry = state.pop(offset, None)
        was_finished = offset in self._finished
        was_ended = offset in self._ended_since
        if entry is not None:
            self._ended_since.add(offset)
            if any(first <= offset for first in self._windows):
                self._finished.add(offset)
        if not marker.by_tracker:
            self._check_late_ack(partition, record, offset)
            if self._number and (self._number, record.by, partition, offset) not in self.history.acked:
                self.stats["old ends in new topics"] += 1
                if entry is not None:
                    self._forgiven.add((partition, offset))
            elif self._names is not None:
                bodies = self.history.acked_as[record.by, partition, offset]
                self._acked |= bodies
                if self._names.meant_former((partition, offset), record.by, bodies):
                    self._ended_as_former.add((partition, offset))
            elif offset < len(queue.records):
                self._acked.add(queue.records[offset].value())
            if entry is not None and entry.lapsed:
                entry.ended_at = record.at
                self._late[partition, offset] = entry
                self._late_ends[partition, offset] = record.at
            return
        what = f"{partition}@{offset} by {record.by}"
        if record.at < record.log.lag_end:
            self._forgiven.add((partition, offset))
            return
        copy = record.copies.get(offset)
        plans = self.history.plans[f"{record.topic()}-{self._number}", record.partition(), offset]
        read_to = max((read for markers_end, read in plans if markers_end <= record.at), default=0)
        late = (REASON, TAKEN_LATE.encode()) in record.headers()
        if not self.history.markers_deleted and (partition, offset) not in self._forgiven:
            taker = None if entry is None else takes[offset][-1][0].by
            if (
                late
                and not was_ended
                and (taker is None or taker in self.history.taking_again.get(partition, ()))
            ):
                self.problems.append(f"R30: {what} was ended as taken late, and had not been ended before")
            if not late and was_finished and entry is not None and entry.at < read_to:
                self.problems.append(f"R30: {what} was copied, although it was taken after its end")
        if late:
            self.stats["taken late"] += 1
            return
        if (REASON, ACKNOWLEDGED.encode()) in record.headers():
            self.stats["ended, not dead letters"] += 1
            problem = self._late_acks.spared((partition, offset), record.by)
            if not self.broker.past and problem is not None:
                self.problems.append(problem)
            return
        if copy is None:
            self._check_gone(queue, offset, what)
            return
        dead = copy.topic() == self.queue.dead_letter_topic
        self.stats["dead letters" if dead else "redeliveries"] += 1
        self.stats["mended"] += copy.txn is not record.txn
        self.stats["copies to another lane"] += not dead and part_of(copy.topic(), 0) != part_of(
            record.topic(), 0
        )
        # A copy that is here since a broker told the old ids is a message like others.
        original = self._message(queue, offset)
        is_here = original is not None and original.value() == copy.value()
        of = self.history.sent_to.get(copy.value(), self._number)
        if original is None or (not is_here and of != self._number):
            self.problems.append(f"R24: {what}, of other topics, ended in these")
            return
        is_mistaken = False
        if original.is_cut:
            self.stats["copies of what was cut away"] += 1
            meant, original = original, self._mistaken_for(original, copy, offset)
            is_mistaken = original is not meant
        elif self._names is not None and self.history.markers_deleted:
            # Its start marker was deleted, and perhaps the claim of its copy: its number was given again.
            original = self._with_value_of(copy, original)
        self._originals.add(original)
        self._check_is_whole(original, copy, what)
        self._check_lineage(original, copy, record, offset, what)
        takers = {taken.by for taken, _ in takes[offset]}
        if (partition, offset) in self._forgiven or any(r.believed < self._number for r, _ in takes[offset]):
            return
        again = any(
            first <= offset for _, first in self._taken_again
        )  # on purpose, perhaps by the same taker
        if (
            (partition, offset) in self._copied
            and len(takers) == 1
            and not (again or self.history.markers_deleted)
        ):
            self.problems.append(f"a second copy of {what}, which only {takers} had taken")
        self._copied.add((partition, offset))
        self._check_claim(record, copy, offset, what)
        claim_at = self._time(record.log, _begin_of_transaction(record.log, copy))
        message = partition, offset
        if not dead:
            # By another number than that by which it is taken, if the cut before it was not told yet. Then
            # its taker can't know of what it is a copy.
            # Of a copy in another lane he knows it by the copy's own headers.
            named = self._named_by(record, offset)
            number = named.offset if named else copy.at
            is_untaken = False
            if self._names is not None and copy.part != partition:
                taken_as = self._names.number_of(copy)
                number, is_untaken = taken_as or copy.at, taken_as is None and copy.is_cut
            place = copy.part, number
            if is_untaken:
                pass  # its number is that of another one since
            elif is_mistaken:  # late operations apply to it or not: it stands a second time anyway
                self._late_acks.torn(message, place)
            else:
                self._late_acks.copied(message, place, claim_at, self._written[record])
        elif self.queue.late_acks and not self.broker.past and (partition, offset) not in self.history.unread:
            problem = self._late_acks.dead_lettered(message, claim_at)
            if problem is not None and not self.history.markers_deleted:
                self.problems.append(problem)
        if entry is not None and entry.at >= read_to:  # taken late, after it was planned to copy it
            ended = self._late.pop((partition, offset), entry)
            entry = ended if ended.ended_at >= read_to else entry
        if entry is None:
            entry = self._late.pop((partition, offset), None)
            if entry is None:
                if not self.history.markers_deleted:
                    self.problems.append(f"duplicate or F14: a copy of {what}, which is not in flight")
                return
        if self.history.markers_deleted:
            return
        if not entry.lapsed and self.strict_time:
            self.problems.append(f"R5: {what} redelivered before its lease ended, due {entry.due}")
        self._check_count(original, entry, copy, dead=dead, what=what)
        if not dead and self.strict_time and not self.history.clock_lead_ms:
            self._check_retry(original, entry, record, what)

    def _check_retry(self, original: Record, entry: _Open, end: Record, what: str) -> None:
        """Rule R44: a redelivery that counts comes when the delay is over that the queue has for it."""
        if not self.queue.retry_delays:
            return
        count = redelivery_count(m.headers_of(original.headers()), self.queue.redelivery_count_header)
        delay_ms = self.queue.retries.delay_ms(count)
        ready = min(due + (delay_ms if waits else 0) for due, waits in entry.failures)
        self.stats["redeliveries held back"] += any(waits for _, waits in entry.failures) and delay_ms > 0
        if end.ms < ready:
            self.problems.append(f"R44: {what} came at {end.ms}, was to wait until {ready}: {entry}")

    def _check_claim(self, end: Record, copy: Record, offset: int, what: str) -> None:
        """Rules R27, R28: the transaction of `copy` began with a claim, and no client's end is before that.

        A transaction that is torn may have been ended before it had decided.
        """
        partition = end.partition()
        message = part_of(end.topic(), partition), offset
        written = [record for record in end.log.records[: end.at] if _are_together(record, copy)]
        ended_at = self._late_ends.get(message)
        claim_at = written[0].at if written else end.at
        if ended_at is not None:
            self.stats["ended before the claim" if ended_at < claim_at else "ended behind the claim"] += 1
            if ended_at < claim_at and not self.history.markers_deleted and not _is_torn(copy):
                self.problems.append(f"R27: {what} was copied, ended at {ended_at}, claimed at {claim_at}")
        claimed = {at for record in written[:1] for at in named_offsets(record.headers(), CLAIM, partition)}
        dropped = {at for record in written for at in named_offsets(record.headers(), DROPPED, partition)}
        if offset not in claimed - dropped:
            self.problems.append(f"R28: {what} was copied and not claimed")

    def _check_late_ack(self, partition: int, record: Record, offset: int) -> None:
        """Rule R33: a client ends unasked only what somebody has acknowledged."""
        if self.queue.late_acks and not self.broker.past:
            asked = (self._number, record.by, partition, offset) in self.history.acked
            self.stats["copies ended unseen"] += not asked and record.by != LIAR
            problem = self._late_acks.ended(
                (partition, offset), self._written[record], record.by, asked=asked or record.by == LIAR
            )
            if problem is not None and not self.history.markers_deleted:
                self.problems.append(problem)

    def _check_late_operation(self, partition: int, record: Record, marker: Marker) -> None:
        """Rule R33: a client defers and rejects unasked only what somebody has asked that for."""
        if self.queue.late_acks and not self.broker.past:
            asked = (self._number, record.by, partition, marker.offset) in self.history.asked
            message = partition, marker.offset
            problem = self._late_acks.operated(
                message, marker, self._written[record], record.ms, record.by, asked=asked
            )
            unseen = not asked and (marker.op is Op.DEAD_LETTER or marker.redeliver_after_ms > 0)
            self.stats[f"copies unseen: {marker.op}"] += unseen
            if problem is not None and not self.history.markers_deleted:
                self.problems.append(problem)

    def _check_count(self, original: Record, entry: _Open, copy: Record, *, dead: bool, what: str) -> None:
        name = self.queue.redelivery_count_header
        before = redelivery_count(m.headers_of(original.headers()), name)
        after = redelivery_count(m.headers_of(copy.headers()), name)
        limit = self.queue.max_redeliveries
        assert limit is not None
        if dead:
            over = True in entry.counted and before >= limit
            if not over and True not in entry.was_dead and not entry.dead:
                self.problems.append(f"dead letter below the limit and not rejected: {what}")
            return
        if before + 1 > limit and entry.counted == {True}:
            self.problems.append(f"redelivered beyond the limit: {what}")
        if after - before not in {int(counts) for counts in entry.counted} and self.strict_time:
            self.problems.append(f"count: {before} became {after}, {entry}: {what}")

    def _check_gone(self, queue: Log, offset: int, what: str) -> None:
        self.stats["gone"] += 1
        original = self._message(queue, offset)
        if (
            offset_of(offset) >= queue.start
            and original is not None
            and original.is_data
            and not original.is_cut
            and not original.was_aborted  # then, until the log was cut back once more
        ):
            self.problems.append(f"R14: end marker without copy of {what}, whose original is there")

    def _check_dead_letters(self) -> None:
        for partition in range(self.broker.partitions):
            for record in self._log(self.queue.dead_letter_topic, partition).records:
                if record.is_data:
                    self._acked.add(record.value())

    def _check_handouts(self, partition: int, takes: dict[int, list[tuple[Record, int]]]) -> None:
        """R10, F16: nothing of which a start stands in what was read before. R11: in time.

        Markers are read when the partition is assigned, and after starts that were not confirmed: what
        a client hands out it has started once.
        """
        if self.history.markers_deleted:
            return
        for number, name, where, offset, recovered, at_ms, end in self.history.handouts:
            if (number, where) != (self._number, partition):
                continue
            # Where the group was set back, what was started before is started again; and until somebody has
            # committed after that, without a look at the markers.
            starts = [
                one.markers_end for one in self._set_backs(partition) if one.offset <= offset_of(offset)
            ]
            if starts:
                starts += [tick_at for tick_at, first in self._taken_again if first <= offset]
            after = max(starts, default=0)
            # What was meant for the topics before is no start of this message. And starts of who stood still,
            # or whose last request came when its partition was another's, may stand where no successor looks.
            starts_of_it = [
                r
                for r, _ in takes[offset]
                if r.at >= after and r.believed >= self._number and not r.is_of_halted
                if not self._is_parted(r)
            ]
            if any(record.at < recovered for record in starts_of_it):
                self.problems.append(f"R10: {name} was given {partition}@{offset}, which had been started")
            taken_at = [self._written[record] for record, _ in takes[offset] if record.by == name]
            if self.queue.late_acks and not self.broker.past and taken_at:
                reliable = self.strict_time and not self.history.clock_lead_ms
                problem = self._late_acks.handed_out(
                    (partition, offset), taken_at[0], end, at_ms if reliable else None
                )
                if problem is not None:
                    self.problems.append(f"{problem}; {name} was given it")
            own_takes = [record for record in starts_of_it if record.by == name]
            if sum(record.ms <= at_ms for record in own_takes) > 1:
                self.problems.append(f"R10: {name} started {partition}@{offset} twice and was given it")
            own = [record.ms + lease_ms for record, lease_ms in takes[offset] if record.by == name]
            if self.strict_time and (not own or at_ms >= max(own)):
                self.problems.append(f"R11: {name} was given {partition}@{offset} when its lease was over")

    def _is_parted(self, start: Record) -> bool:
        """Whether some of the messages that a start marker names were cut away, and others were not.

        Who reads it later takes it for a lie (rule R22), or leaves it out since others may have done that.
        """
        if self._names is None:
            return False
        named = [self._names.of((start.part, one.offset)) for one in decoded(start)]
        return len({one is None or one.is_cut for one in named}) > 1

    def _check_deliveries(self) -> None:
        for body in self.history.delivered:
            if body not in self.history.attempted:
                self.problems.append(f"unexpected: {body!r} was delivered, never sent")
        self.stats["delivered"] = sum(self.history.delivered.values())
        self.stats["messages"] = len(self.history.sent)

    def _check_loss(self) -> None:
        if self._names is not None:
            self._check_loss_where_cut()
            return
        forgiven = {
            self._log(self.queue.name, partition).records[offset].value()
            for partition, offset in self._forgiven
            if offset < self._log(self.queue.name, partition).end
        }
        for body in sorted(self.history.sent - self._acked - self.history.deleted):
            if self.history.sent_to[body] < self._number:
                continue
            if body in forgiven:
                self.stats["lost by old markers"] += 1
            elif not self.history.markers_deleted:
                seen = self.history.delivered[body]
                self.problems.append(f"lost: {body!r} was sent and never finished, delivered {seen} times")

    def _check_loss_where_cut(self) -> None:
        """Each message in the log at the end was taken; it was finished as itself, or a copy of it was made.

        What was cut away is lost; so is a message whose last copy was. A copy that was aborted may be visible
        later, when clients have passed it: the abort was cut away, and the next transaction of its producer
        has committed it.
        """
        if self.history.markers_deleted:
            return
        done = self._acked | self.history.deleted
        for partition in parts_of(self.broker, self.queue.name):
            log = self._log(self.queue.name, partition)
            records = log.records[log.start :]
            left = {one.value() for one in records if one.is_data and one not in self._originals}
            for record in records:
                if not record.is_data:
                    if not record.was_committed or record.value() in done | left:
                        continue
                    original = original_place(record)
                    if part_of(original.topic, original.partition) != partition:
                        self.stats["copies lost in another lane"] += 1  # a gap of rule R46
                    else:
                        self.problems.append(
                            f"lost: the last copy of {record.value()!r} was aborted after its commit"
                        )
                    continue
                seen = self.history.delivered[record.value()]
                what = f"{record.value()!r} at {partition}@{record.at}, epoch {record.epoch}"
                if record in self._collapsed:
                    continue
                if record in self._originals:
                    continue  # perhaps by the start marker of another message, which was cut away
                if not self.history.names.knows(record):
                    if record.was_aborted:
                        self.stats["aborted copies that came back"] += 1
                        continue
                    if self.history.names.is_hidden(record):
                        self.stats["ended as one of the former log"] += 1
                        continue
                    self.problems.append(f"lost: {what} was never taken, delivered {seen} times")
                elif record.value() in done:
                    continue
                elif not self._ended_as_former.isdisjoint(
                    self._late_acks.chain((partition, self.history.names.number_of(record)))
                ):
                    self.stats["ended as one of the former log"] += 1
                else:
                    self.problems.append(f"lost: {what} was never finished, delivered {seen} times")
