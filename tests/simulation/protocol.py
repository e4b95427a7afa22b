"""spec/Delivery.tla in Python, as far as kmqpy has its actions: guards and effects, one partition at a time.

An action of Delivery.tla that is called Takes is the method `takes` here. Where its guard does not hold, it
raises NotEnabled. Positions are offsets of the markers topic; messages are offsets of the queue's topic.

Three things are smaller or larger here. The bounds (`MaxMessages` and the like) are left out. A snapshot may
stand for the takes before a stored offset. And a message may be ended without a copy because retention has
deleted it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOT_IN_KMQPY = frozenset(
    (
        "ClientBegins",
        "ClientEnds",
        "ClientLooks",
        "ClientCommits",
        "ClientIsRefused",
        "Retention",
        "TrackerFences",
    )
)
"""Actions of the model that no method has: those of clients' transactions, deletion of markers, and a new
epoch that is no take-over."""


class NotEnabled(Exception):
    """The model does not have this step in this state."""


def _need(holds: object, why: str) -> None:
    if not holds:
        raise NotEnabled(why)


class Spoken(NamedTuple):
    """A record that speaks of a message: a "take", "ack", "unseen" or "end", as the model calls them."""

    at: int
    kind: str
    tx: Any
    by: str


class Window(NamedTuple):
    """An assignment, told at a position: ends of messages from `first` on are remembered from now on (R30).

    again  those that were ended before are forgotten: they may be taken again
    """

    at: int
    first: int
    end: int
    again: bool


@dataclass
class Plan:
    """The model's tracker[p]."""

    step: str = "idle"
    tx: Any = None
    ms: frozenset[int] = frozenset()
    left: set[int] = field(default_factory=set)
    late: frozenset[int] = frozenset()
    at: int = 0


class Torn(NamedTuple):
    """What the model's txs and log say of a transaction that a late request has committed.

    at      where its claim stands
    copies  by message that has no end in it: its copy, None for a dead letter
    """

    at: int
    copies: Mapping[int, int | None]


@dataclass
class State:
    """The model's variables of one partition; `TrackerClaims` is TRUE.

    late_acks  the constants TakerLooks and TrackerLooks
    """

    late_acks: bool
    end: int = 0
    """NextPosition of the log."""
    spoken: defaultdict[int, list[Spoken]] = field(default_factory=lambda: defaultdict(list))
    """The log, by message."""
    open: dict[Any, int] = field(default_factory=dict)
    """Open transactions, each with the position of its first record (FirstOf)."""
    committed: set[Any] = field(default_factory=set)
    tracker: Plan = field(default_factory=Plan)
    begun_at: int = 0
    """LastStable when the tracker that leads took over: it has read all before it (R1)."""
    visible: set[int] = field(default_factory=set)
    parent: dict[int, int] = field(default_factory=dict)
    planned: dict[int, int] = field(default_factory=dict)
    received: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    looking: defaultdict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    paused: set[int] = field(default_factory=set)
    """Where takes stand of clients that had lost the partition."""
    unseen: set[tuple[str, int]] = field(default_factory=set)
    """What clients ended unseen."""
    windows: list[Window] = field(default_factory=list)
    late_ends: bool = False
    """lateEnds[p] > 0: the end of a transaction of this tracker may come once more."""
    torn: list[Torn] = field(default_factory=list)
    """Also those that are mended."""
    named: dict[int, int] = field(default_factory=dict)
    """By copy, where the end stands that names it (IsNamed)."""
    undecided: dict[int, int] = field(default_factory=dict)
    """By copy of a transaction that was committed before it had decided: the position of its claim. What was
    acknowledged before that, the tracker would have dropped."""
    lease_ends: dict[int, int] = field(default_factory=dict)
    claimed_ms: int = 0
    """By the position of a take, when its lease is over; when the tracker wrote its claim. A take that gives
    no more time changes nothing, which the model does not know."""
    given_back: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By message, where the log says that it was given back at once, which the model does not know."""
    rejected: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By message, where the log asks for its dead letter, which the model does not know either."""

    @property
    def last_stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def is_committed(self, one: Spoken) -> bool:
        return one.tx is None or one.tx in self.committed

    def ends(self, m: int, begin: int, end: int) -> Iterator[Spoken]:
        """The ends of a message from `begin` to `end`, as a reader of committed records sees them."""
        for one in self.spoken[m]:
            if begin <= one.at < end and one.kind != "take" and self.is_committed(one):
                yield one

    def last_take(self, m: int, end: int) -> int | None:
        return max((one.at for one in self.spoken[m] if one.kind == "take" and one.at < end), default=None)

    def in_flight(self, m: int, end: int) -> bool:
        """InFlight, of one message, for who has read all before `end`."""
        taken = self.last_take(m, end)
        return taken is not None and not any(self.ends(m, taken, end))

    def finished(self, m: int, end: int) -> int | None:
        """IsFinished: where the message was ended last while it was in flight."""
        return max((one.at for one in self.ends(m, 0, end) if self.in_flight(m, one.at)), default=None)

    def is_acked(self, m: int, begin: int, end: int, *, must_be_known: bool = True) -> bool:
        """IsAcked, of it and of all its ancestors; `must_be_known`: so that nobody may overlook it."""
        chain: int | None = m
        while chain is not None:
            if any(one.kind in ("ack", "unseen") for one in self.ends(chain, begin, end)):
                return True
            if must_be_known:
                begin = max(begin, self.undecided.get(chain, 0))
            is_known = not must_be_known or self.named.get(chain, end) < end
            chain = self.parent.get(chain) if is_known else None
        return False

    def torn_messages(self) -> list[tuple[int, int]]:
        """Torn: what is to be mended yet, each with the position of its claim."""
        return [(one.at, m) for one in self.torn for m in one.copies if self._is_torn(one.at, m)]

    def _is_torn(self, claim_at: int, m: int) -> bool:
        return not any(one.kind == "end" for one in self.ends(m, claim_at, self.end))

    def planned_from(self, m: int) -> int:
        """PlannedFrom: from where to look for late acknowledgements of a copy of `m` that is made now."""
        return self.planned.get(m, self.tracker.at)

    def _changes_nothing(self, take: Spoken, m: int, end: int) -> bool:
        """Whether the message is due at `end` all the same: it was given back since, or rejected before."""
        return any(take.at < back < end for back in self.given_back[m]) or any(
            asked < take.at and self.in_flight(m, asked) and not any(self.ends(m, asked, take.at))
            for asked in self.rejected[m]
        )

    def append(self, at: int, kind: str, ms: Collection[int], by: str, tx: Any = None) -> None:
        if tx is not None:
            self.open.setdefault(tx, at)
        for m in ms:
            self.spoken[m].append(Spoken(at, kind, tx, by))
        self.end = max(self.end, at + 1)


class Protocol(State):
    """The actions, and what else a journal tells of: an offset stored, a receipt given to another client."""

    # --- a tracker ------------------------------------------------------------------------------------

    def tracker_plans(self, ms: Collection[int], at: int, late: Collection[int]) -> None:
        """A step of the moment when all before `at` was decided: what was in flight there stays so.

        One plan may be several of the model, one for each transaction, if what the tracker itself has
        committed since it read to `at` is none of it. What was taken late then it drops when it decides.
        """
        _need(self.tracker.step == "idle", "it is not done with another transaction")
        _need(ms, "it has planned nothing")
        self._need_begin()
        _need(not self.torn_messages(), f"it has not mended {self.torn_messages()} (R37)")
        _need(at <= self.last_stable, f"it planned at {at}, behind what is decided")
        _need(at >= self.begun_at, f"it planned at {at}, and took over at {self.begun_at} (R1)")
        for m in ms:
            _need(self.in_flight(m, at), f"{m} was not in flight at {at}")
            own = [one.at for one in self.ends(m, at, self.end) if one.kind == "end" and m not in late]
            _need(not own, f"{m} was ended at {own}, by a tracker itself, after {at}")
            ended = self.finished(m, at)
            if m in late:
                _need(ended is not None, f"{m} was planned as taken late, and had not been ended at {at}")
            elif ended is not None:
                _need(not self._is_remembered(m, ended, at), f"{m}, ended at {ended}, was taken late (R30)")
        self.tracker = Plan("planned", ms=frozenset(ms), late=frozenset(late) & frozenset(ms), at=at)

    def _is_remembered(self, m: int, ended: int, end: int) -> bool:
        """Whether a tracker must know that a message was ended there (R30)."""
        since = [one for one in self.windows if ended < one.at < end and one.again and one.first <= m]
        return not since and any(one.at < ended and one.first <= m < one.end for one in self.windows)

    def tracker_begins(self, tx: Any, at: int, ms: Collection[int]) -> None:
        """`at`, `ms`: where its claim stands, and what that names."""
        plan = self.tracker
        _need(plan.step == "planned", "it has no plan")
        _need(set(ms) == plan.ms, f"it claims {sorted(ms)}, and planned {sorted(plan.ms)}")
        self.open[tx] = at
        self.end = at + 1
        plan.step, plan.tx, plan.left = "claimed", tx, set(plan.ms)

    def tracker_decides(self, dropped: Collection[int], at: int | None = None) -> None:
        """`at`: where it lists what it drops; it may drop more, of which the model does not know."""
        plan = self.tracker
        mine = self.open.get(plan.tx)
        _need(plan.step == "claimed" and mine is not None, "its transaction has no claim that stands")
        assert mine is not None
        _need(self.last_stable == mine, f"not all before its claim at {mine} is decided")
        for m in plan.ms - set(dropped):
            since = [
                one.at
                for one in self.spoken[m]
                if plan.at <= one.at < mine
                and self.is_committed(one)
                and not (one.kind == "take" and self._changes_nothing(one, m, mine))
                and not (one.kind == "take" and self.lease_ends[one.at] <= self.claimed_ms)
            ]
            _need(not since, f"{m} is not dropped, of which {since} speak, before the claim at {mine}")
        _need(set(dropped) <= plan.ms, f"it drops {sorted(dropped)}, which it has not claimed")
        plan.step, plan.left = "copying", plan.left - set(dropped)
        if at is not None:
            self.end = at + 1

    def tracker_copies(self, m: int, copy: int, at: int, by: str) -> None:
        """`copy`: its offset."""
        plan = self.tracker
        self._need_open("copying")
        _need(m in plan.left, f"{m} is not in its plan")
        _need(m not in plan.late, f"{m} was taken late, and is to be ended without a copy")
        self.append(at, "end", (m,), by, plan.tx)
        self.parent[copy] = m
        self.planned[copy] = self.planned_from(m)
        self.named[copy] = at
        plan.left.discard(m)

    def tracker_dead_letters(self, m: int, at: int, by: str, *, unread: bool = False) -> None:
        """`unread`: it could not find out in time whether the message was acknowledged."""
        plan = self.tracker
        self._need_open("copying")
        _need(m in plan.left, f"{m} is not in its plan")
        _need(m not in plan.late, f"{m} was taken late, and is to be ended without a copy")
        if not unread:
            self._need_unacked(m)
        self.append(at, "end", (m,), by, plan.tx)
        plan.left.discard(m)

    def tracker_spares(self, m: int, at: int, by: str) -> None:
        """It ends a copy that is no dead letter, since it was acknowledged."""
        plan = self.tracker
        self._need_open("copying")
        _need(m in plan.left, f"{m} is not in its plan")
        is_copy = m in self.parent and self.late_acks
        acked = is_copy and self.is_acked(m, self.planned[m], at, must_be_known=False)
        _need(acked, f"it ends {m}, which nobody acknowledged")
        self.append(at, "end", (m,), by, plan.tx)
        plan.left.discard(m)

    def tracker_ends_late(self, m: int, at: int, by: str, *, gone: bool = False) -> None:
        """`gone`: retention has deleted the message, which the model does not know."""
        plan = self.tracker
        self._need_open("copying")
        _need(m in plan.left, f"{m} is not in its plan")
        _need(m in plan.late or gone, f"{m} was not taken late, is there, and is ended without a copy")
        self.append(at, "end", (m,), by, plan.tx)
        plan.left.discard(m)

    def tracker_commits(self) -> None:
        plan = self.tracker
        self._need_open("copying")
        _need(not plan.left, f"{sorted(plan.left)} are neither copied nor dropped")
        self.committed.add(plan.tx)
        self.open.pop(plan.tx, None)
        self.tracker = Plan()

    def late_end_txn(self, tx: Any, copies: Mapping[int, int | None]) -> None:
        """A request of an earlier transaction commits this one, which has copies that it has not ended.

        So may another request, what was written since: once more the same transaction for the model.

        copies  by message: its copy, None for a dead letter
        """
        plan = self.tracker
        is_first = tx in self.open
        claim_at = self.open[tx] if is_first else self.torn[-1].at
        _need(plan.tx is tx and (is_first or tx in self.committed), "it has no such transaction")
        _need(copies.keys() <= plan.left - plan.late, f"{sorted(copies)} are not in its plan")
        for m, copy in copies.items():
            if copy is not None:
                self.parent[copy], self.planned[copy] = m, self.planned_from(m)
                if plan.step == "claimed":
                    self.undecided[copy] = claim_at
            else:
                _need(
                    plan.step == "copying" or m not in self.parent, f"dead letter {m} before it has decided"
                )
                self._need_unacked(m)
        plan.left -= copies.keys()
        self.open.pop(tx, None)
        self.torn.append(Torn(claim_at, copies))
        self.committed.add(tx)

    def tracker_mends(self, m: int, copy: int | None, at: int, by: str) -> None:
        """`copy`: what its end marker names; None for a dead letter."""
        _need(self.tracker.step == "idle", "it is not done with another transaction")
        self._need_begin()
        made = [one for one in self.torn if m in one.copies and one.copies[m] == copy]
        _need(made, f"no torn transaction has made {copy} of {m}")
        self.append(at, "end", (m,), by)
        if copy is not None:
            self.named[copy] = at

    def end_may_come_once_more(self) -> None:
        """It has committed or aborted, and may have sent the request for that twice."""
        self.late_ends = True

    def some_transaction_aborts(self, tx: Any) -> None:
        self.open.pop(tx, None)
        if self.tracker.tx is tx:
            self.tracker_is_refused()

    def tracker_is_refused(self) -> None:
        """At once: what it does until it knows is refused by the broker."""
        self.tracker = Plan()

    def takeover(self) -> None:
        """Its predecessor's transaction was aborted by the fencing, which comes first."""
        _need(not self.open, "a transaction of its predecessor is still open")
        self.tracker = Plan()
        self.begun_at = self.last_stable
        self.late_ends = False

    def stored_offset(self, offset: int, in_flight: Collection[int]) -> None:
        """StoredOffset: what is in flight was taken at or behind it, or is in the snapshot."""
        for m in self.spoken:
            if m not in in_flight and self.in_flight(m, self.last_stable):
                taken = self.last_take(m, self.last_stable)
                _need(taken is not None and taken >= offset, f"{m}, taken at {taken}, stands before {offset}")
        lost = [(at, m) for at, m in self.torn_messages() if at < offset]
        _need(not lost, f"{lost}, which are torn, stand before {offset}")

    def _need_begin(self) -> None:
        """MayBegin."""
        _need(not self.late_ends, "an end of its producer may come once more (R36)")

    def _need_unacked(self, m: int) -> None:
        """~AckedLate, of what becomes a dead letter."""
        claim_at = self.open.get(self.tracker.tx, self.torn[-1].at if self.torn else 0)
        if self.late_acks and m in self.parent:
            acked = self.is_acked(m, self.planned[m], claim_at)
            _need(not acked, f"{m}, claimed at {claim_at}, was acknowledged")

    def _need_open(self, step: str) -> None:
        _need(self.tracker.step == step, f"it is {self.tracker.step}, not {step}")

    # --- a client -------------------------------------------------------------------------------------

    def takes(self, c: str, m: int, at: int, *, paused: bool = False) -> None:
        """What it has read of others' takes is known when it hands the message out: see `looks`.

        paused  it was, between fetching the message and its take, and lost the partition (FetchedEarlier): no
                successor need look where this take stands
        """
        if paused:
            self.paused.add(at)
        _need(m in self.visible, f"{m} can't be seen")
        self.append(at, "take", (m,), c)
        self.looking[c].setdefault(m, at)

    def looks(self, c: str, m: int, *, recovered: int = 0, unseen_at: int | None = None) -> None:
        """It has taken a message, and hands it out, or ends it unseen at a position.

        recovered  it had read the takes before this position when it took the message (R10)
        """
        if unseen_at is not None and (c, m) in self.unseen:  # what was not confirmed is written again
            self.append(unseen_at, "unseen", (m,), c)
            return
        taken = self.looking[c].pop(m, None)
        _need(taken is not None, f"it has not taken {m}, or was handed it out before")
        assert taken is not None
        is_copy = m in self.parent and self.late_acks
        since = self.planned.get(m, 0)
        if unseen_at is not None:
            acked = is_copy and self.is_acked(m, since, unseen_at, must_be_known=False)
            _need(acked, f"it ends {m}, which nobody acknowledged")
            self.append(unseen_at, "unseen", (m,), c)
            self.unseen.add((c, m))
            return
        takes = [
            one for one in self.spoken[m] if one.kind == "take" and one.by != c and one.at not in self.paused
        ]
        before = [one.at for one in takes if one.at < recovered]
        _need(not before, f"it takes {m}, and had read that it was taken at {before} (R10)")
        _need(not is_copy or not self.is_acked(m, since, taken), f"{m}, taken at {taken}, was acknowledged")
        self.received[c].add(m)

    def is_given_receipt(self, c: str, m: int) -> None:
        """Clients share receipts: who acknowledges a message may have got its receipt from another."""
        _need(any(m in some for some in self.received.values()), f"{m} was handed out to nobody")
        self.received[c].add(m)

    def acknowledges(self, c: str, m: int, at: int) -> None:
        _need(m in self.received[c], f"it was not handed out {m}")
        self.append(at, "ack", (m,), c)
