"""Replays a run as steps of spec/Delivery.tla: each must be one that the model has in that state.

Some steps can't be seen in a log, and are put in where they must have been:

- A plan is a step of the moment when all before its position was decided.
- A tracker decides before it writes its first end marker, if it drops nothing.
- It mends a message, one by one, when the transaction of all these end markers is committed.
- A client looks after its take, and some time before it hands the copy out. So what stands before the take
  decides; what stands behind it may count or not.
- Markers that move a lease are no steps, since the model has no clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import singledispatchmethod

from kmqpy import message as m
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, named_offsets
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TICK_OFFSET, Op
from kmqpy.kafka.markers.entry import SnapshotRow, TakenRun
from kmqpy.kafka.markers.finished import WINDOW
from kmqpy.kafka.markers.late_operations import read_planned_at
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.settings import QueueSettings

from .journal import Acked, Decided, EndedLong, HandedOut, Journal, Opened, Planned, Stored, Written
from .model import CONTROL, LIAR, Broker, Record, Txn, decoded
from .protocol import NotEnabled, Protocol, Window

_TRACKERS_ID = re.compile(r"kmq-tracker-[^-]+-(\d+)")


def refused_steps(
    journal: Journal, broker: Broker, queue: QueueSettings, unread: Collection[tuple[int, int]]
) -> Iterator[str]:
    """The first step that the model does not have, in words; none is the rule.

    unread  partition and offset of copies of which a tracker could not find out if they were acknowledged
    """
    replay = _Replay(broker, queue, unread)
    for number, event in enumerate(journal):
        try:
            replay.step(event)
        except _WentOn:
            return
        except NotEnabled as why:
            yield f"{replay.action}: {replay.who}, step {number}: {why}"
            return


def original_place(copy: Record) -> RecordPlace:
    """Where the message is of which this is a copy; with its number, where logs may be cut back."""
    here = RecordPlace(copy.topic(), -1, 0)
    return read_ancestors(m.last_header(m.headers_of(copy.headers()), ANCESTORS), here)[-1]


def _claimed_by(part: Protocol, txn: Txn) -> Txn:
    """The transaction with the claim of this one."""
    claimed = part.tracker.tx
    return claimed if claimed is not None and txn.is_part_of(claimed) else txn


def _messages(row: SnapshotRow) -> Iterator[int]:
    if isinstance(row, TakenRun):
        yield from (row.first + bit for bit in range(row.bits.bit_length()) if row.bits >> bit & 1)
    else:
        yield row.offset


class _WentOn(Exception):
    """A late request ended a transaction after its claim, and another one let in what the tracker wrote then.

    The model knows no such step, so the replay ends; the checker judges what came of it.
    """


class _Replay:
    def __init__(self, broker: Broker, queue: QueueSettings, unread: Collection[tuple[int, int]]) -> None:
        self.action = self.who = ""
        self._broker = broker
        self._queue = queue
        self._unread = unread
        self._parts = [Protocol(late_acks=queue.late_acks) for _ in range(broker.partitions)]
        self._plans: dict[tuple[str, int], list[Planned]] = defaultdict(list)
        self._records: dict[Txn, list[Record]] = defaultdict(list)
        self._mends: dict[Txn, list[Record]] = defaultdict(list)
        """End markers of transactions without claims."""
        self._begun: set[Txn] = set()
        self._ended_early: list[Txn] = []

    @singledispatchmethod
    def step(self, event: object) -> None:
        raise TypeError(event)

    def _at(self, action: str, who: str, partition: int) -> Protocol:
        """The state of a partition, for an action of somebody, which is named if it is refused."""
        self.action, self.who = action, f"{who} in {partition}"
        return self._parts[partition]

    # --- what stands in no log ------------------------------------------------------------------------

    @step.register
    def _(self, plan: Planned) -> None:
        self._plans[plan.tracker, plan.partition].append(plan)

    @step.register
    def _(self, event: Opened) -> None:
        if found := _TRACKERS_ID.match(event.transactional_id):
            self._at("Takeover", event.transactional_id, int(found[1])).takeover()

    @step.register
    def _(self, event: Decided) -> None:
        txn = event.txn
        if txn.early:
            self._ended_early.append(txn)
        if txn.state == "committed" and (found := _TRACKERS_ID.match(txn.transactional_id)):
            self._tracker_commits(txn, int(found[1]))
        elif txn.state == "committed":
            for part in self._parts:
                part.open.pop(txn, None)
        else:
            for part in self._parts:
                part.some_transaction_aborts(_claimed_by(part, txn))
        for record in self._records.pop(txn, ()):
            self._appears(record)

    def _tracker_commits(self, txn: Txn, partition: int) -> None:
        part, copies = self._parts[partition], self._records[txn]
        if txn not in self._begun and not copies:
            part.some_transaction_aborts(txn)  # its ends are committed here, one by one
            for record in self._mends[txn]:
                self._mend(record)
            return
        claimed = _claimed_by(part, txn)
        is_whole = claimed is txn and part.tracker.step == "copying" and not part.tracker.left
        if txn.early and not is_whole and claimed in self._begun:
            made = {original_place(one).offset: self._in_queue(one) for one in copies}
            torn = {m: copy for m, copy in made.items() if m in part.tracker.left}
            if any(copy is None and m in part.parent for m, copy in torn.items()):
                if claimed is not txn:
                    raise _WentOn
                self._settle(claimed, partition)  # for dead letters of copies it waits before it writes them
            self._at("LateEndTxn", txn.by, partition).late_end_txn(claimed, torn)
        else:
            self._has_begun(txn, partition)
            self._settle(txn, partition)
            self._at("TrackerCommits", txn.by, partition).tracker_commits()

    def _mend(self, record: Record) -> None:
        for marker in decoded(record):
            if marker.offset == TICK_OFFSET or marker.op is Op.NACK:
                continue  # the leader epoch of the copies; a message that is held back: no steps
            copy = record.copies.get(marker.offset)
            part = self._at("TrackerMends", record.by, record.partition())
            part.tracker_mends(marker.offset, copy and self._in_queue(copy), record.at, record.by)

    def _in_queue(self, copy: Record) -> int | None:
        """The offset of a copy; None for a dead letter."""
        return copy.at if copy.topic() == self._queue.name else None

    @step.register
    def _(self, event: EndedLong) -> None:
        if found := _TRACKERS_ID.match(event.transactional_id):
            self._parts[int(found[1])].end_may_come_once_more()

    @step.register
    def _(self, event: Stored) -> None:
        part = self._at("StoredOffset", "a tracker", event.partition)
        part.stored_offset(event.stored.offset, {m for row in event.stored.in_flight for m in _messages(row)})

    @step.register
    def _(self, event: HandedOut) -> None:
        part = self._at("Looks", event.client, event.partition)
        part.looks(event.client, event.offset, recovered=event.recovered)

    @step.register
    def _(self, event: Acked) -> None:
        part = self._at("Acknowledges", event.client, event.partition)
        part.is_given_receipt(event.client, event.offset)

    # --- records --------------------------------------------------------------------------------------

    @step.register
    def _(self, event: Written) -> None:
        record = event.record
        if self._is_marker(record):
            self._marker(record)
        elif record.txn is not None:
            self._records[record.txn].append(record)
        elif record.topic() == self._queue.name:
            self._appears(record)

    def _is_marker(self, record: Record) -> bool:
        return record.topic() == self._queue.markers_topic

    def _appears(self, record: Record) -> None:
        is_message = record.topic() == self._queue.name
        if is_message and (record.txn is None or record.txn.state == "committed"):
            part = self._parts[record.partition()]
            part.visible.add(record.at)
            if not record.copied and (planned := self._planned_at(record)) is not None:
                part.planned[record.at] = planned  # the headers of a copy, forwarded: its copies keep them

    def _settle(self, txn: Txn, partition: int) -> None:
        """It goes on with its transaction: so it has begun, and decided what to drop."""
        self._has_begun(txn, partition)
        if self._parts[partition].tracker.step == "claimed":
            self._at("TrackerDecides", txn.by, partition).tracker_decides(())

    def _has_begun(self, txn: Txn, partition: int) -> None:
        self._check_went_on(txn)
        if txn not in self._begun:
            self._at("TrackerBegins", txn.by, partition)
            raise NotEnabled("it makes no claim")

    def _check_went_on(self, txn: Txn) -> None:
        if txn not in self._begun and any(txn.is_part_of(one) for one in self._ended_early):
            raise _WentOn

    def _begin(self, txn: Txn, partition: int, at: int, claimed_ms: int, claimed: set[int]) -> None:
        self._begun.add(txn)
        if (
            self._parts[partition].tracker.tx in self._ended_early
        ):  # it gave that up, with nothing written since
            self._parts[partition].tracker_is_refused()
        self._parts[partition].claimed_ms = claimed_ms
        plans = [one for one in self._plans[txn.by, partition] if claimed <= set(one.offsets)]
        part = self._at("TrackerPlans", txn.by, partition)
        if not plans:
            raise NotEnabled(f"it has no plan for {sorted(claimed)}")
        part.tracker_plans(claimed, plans[-1].position, plans[-1].taken_late)
        self._at("TrackerBegins", txn.by, partition).tracker_begins(txn, at, claimed)

    def _marker(self, record: Record) -> None:
        partition, txn = record.partition(), record.txn
        part = self._parts[partition]
        if record.by == LIAR or record.value() is CONTROL:
            pass
        elif txn is None:
            self._by_client(part, record)
        else:
            self._check_went_on(txn)
            headers = m.headers_of(record.headers())
            claimed = set(named_offsets(headers, CLAIM, partition))
            dropped = set(named_offsets(headers, DROPPED, partition))
            if claimed:
                self._begin(txn, partition, record.at, record.ms, claimed)
            elif dropped:
                self._at("TrackerDecides", txn.by, partition).tracker_decides(dropped, record.at)
            elif txn in self._begun:
                self._settle(txn, partition)
                self._by_tracker(part, record)
            else:
                part.open.setdefault(txn, record.at)
                self._mends[txn].append(record)
        part.end = record.at + 1

    def _by_tracker(self, part: Protocol, record: Record) -> None:
        partition = record.partition()
        log = self._broker.logs[self._queue.name, partition]
        for marker in decoded(record):
            offset, copy = marker.offset, record.copies.get(marker.offset)
            if copy is None and record.txn is not None and record.txn.state != "committed":
                part.append(record.at, "end", (offset,), record.by, record.txn)  # cut short
            elif copy is None and marker.reason == ACKNOWLEDGED:
                self._at("TrackerSpares", record.by, partition).tracker_spares(offset, record.at, record.by)
            elif copy is None:
                gone = offset < log.start or not log.records[offset].is_data
                self._at("TrackerEndsLate", record.by, partition)
                part.tracker_ends_late(offset, record.at, record.by, gone=gone)
            elif copy.topic() == self._queue.name:
                self._at("TrackerCopies", record.by, partition)
                part.tracker_copies(offset, copy.at, record.at, record.by)
                if self._queue.late_acks:
                    self._check_planned_at(part, copy)
            else:
                self._at("TrackerDeadLetters", record.by, partition)
                unread = (partition, offset) in self._unread
                part.tracker_dead_letters(offset, record.at, record.by, unread=unread)

    def _check_planned_at(self, part: Protocol, copy: Record) -> None:
        """A copy names the position that the model keeps for it."""
        planned = self._planned_at(copy)
        if planned != part.planned[copy.at]:
            raise NotEnabled(f"copy {copy.at} names {planned}, and was planned at {part.planned[copy.at]}")

    def _planned_at(self, record: Record) -> int | None:
        name = self._queue.name
        return read_planned_at(m.headers_of(record.headers()), record.partition(), [name]).get(name)

    def _by_client(self, part: Protocol, record: Record) -> None:
        partition, by = record.partition(), record.by
        for marker in decoded(record):
            if marker.takes_from is not None:
                first = marker.takes_from
                part.windows.append(Window(record.at, first, first + WINDOW, marker.takes_again))
            elif marker.offset < 0:
                continue
            elif marker.op in (Op.TAKE, Op.DELAY):
                part = self._at("Takes", by, partition)
                part.lease_ends[record.at] = record.ms + marker.redeliver_after_ms
                part.takes(by, marker.offset, record.at, paused=record.is_of_halted)
            elif marker.op is Op.NACK and not marker.redeliver_after_ms:
                part.given_back[marker.offset].append(record.at)
            elif marker.op is Op.DEAD_LETTER:
                part.rejected[marker.offset].append(record.at)
            elif marker.op is Op.END and marker.offset in part.received[by]:
                self._at("Acknowledges", by, partition).acknowledges(by, marker.offset, record.at)
            elif marker.op is Op.END:
                self._at("Looks", by, partition).looks(by, marker.offset, unseen_at=record.at)
