"""The checker: what must hold of every run, judged from journals and topics alone. Pure.

The core is Jepsen's total-queue: lost are acknowledged sends that nobody was given, unexpected is what was
given and never sent, duplicates are counted apart. Beyond it: each acknowledged send is finished in the
end, and no tracker makes a copy too many, too few or of another message.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

Place = tuple[int, int]
"""Partition and offset in the queue topic."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Stored:
    """A record of the queue or dead-letter topic; `origin`: where the first of its line stands."""

    body: int
    origin: Place


@dataclass
class Seen:
    """One queue as it was seen by its users (journals) and as it is in Kafka (read_committed).

    attempted, sent   bodies whose sending began; whose sending was acknowledged
    handed_out        how often each place was given to a consumer
    delivered, acked  how often each body was given to one; bodies that one began to acknowledge
    records, dead     what stands in the queue topic by place, and in the dead-letter topic
    taken, ended      places with a start marker, with an end marker of a consumer
    moved             how often trackers ended a place
    lives             how often a place was taken that was not in flight. More than once: by a consumer that
                      was halted between fetching and taking, while others were given its messages
    copied_after_ack  places that a tracker ended although an acknowledgement stands before its claim
    handed_out_late   copies that were handed out although a message of which they are copies had been
                      acknowledged before they were taken; ended_unseen: those that therefore were not
    acked_late        how many acknowledgements consumers made when the lease was over
    undecodable       markers that are none
    interruptions     kills and pauses of consumers: each may cost what was in flight a second delivery
    log_start         by partition, the first offset there is
    deleted           places below it that were in flight when they were deleted, and all bodies there
    """

    attempted: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    handed_out: Counter[Place] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    records: dict[Place, Stored] = field(default_factory=dict)
    dead: list[Stored] = field(default_factory=list)
    taken: set[Place] = field(default_factory=set)
    ended: set[Place] = field(default_factory=set)
    moved: Counter[Place] = field(default_factory=Counter)
    lives: Counter[Place] = field(default_factory=Counter)
    copied_after_ack: set[Place] = field(default_factory=set)
    handed_out_late: set[Place] = field(default_factory=set)
    ended_unseen: set[Place] = field(default_factory=set)
    acked_late: int = 0
    undecodable: int = 0
    interruptions: int = 0
    max_in_flight: int = 0
    log_start: dict[int, int] = field(default_factory=dict)
    deleted: set[Place] = field(default_factory=set)
    deleted_bodies: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Verdict:
    """`problems` in words, empty when every promise was kept; `counts` for the report.

    `found` holds what the problems are about: places, or bodies.
    """

    problems: list[str]
    counts: dict[str, int]
    found: dict[str, list[Place | int]] = field(default_factory=dict)


def judge(seen: Seen) -> Verdict:
    """Everything that is wrong with one queue."""
    found = _Findings()
    wanted = seen.sent - seen.deleted_bodies
    acknowledged = {seen.records[place].body for place in seen.ended if place in seen.records}
    if any(seen.log_start.values()):
        # Of what was deleted after it had been acknowledged, no place says any more whose it was.
        acknowledged |= seen.acked - {record.body for record in seen.records.values()}
    dead = {record.body for record in seen.dead}
    duplicates, missing, wrong = _copies(seen)
    repeated = sum(count - 1 for count in seen.handed_out.values())
    allowed = seen.interruptions * seen.max_in_flight
    stored = Counter(record.body for place, record in seen.records.items() if record.origin == place)

    found.add("lost", "acknowledged sends that no consumer was given", wanted - seen.delivered.keys())
    found.add("unfinished", "sends neither acknowledged nor dead-lettered", wanted - acknowledged - dead)
    found.add("unexpected", "delivered, never sent", seen.delivered.keys() - seen.attempted)
    found.add("sent_twice", "stored twice by one send", {b for b, n in stored.items() if n > 1})
    found.add("acks_of_nobody", "ended by no consumer", acknowledged - seen.acked)
    found.add("tracker_duplicates", "copies too many, by trackers", duplicates)
    found.add("missing_copies", "ended by a tracker without a copy", missing)
    found.add("wrong_copies", "copies of another message", wrong)
    there = {place for place in seen.moved if place[1] >= seen.log_start.get(place[0], 0)}
    found.add("not_there", "ended by a tracker where no message stands", there - seen.records.keys())
    found.add("not_given_up", "deleted in flight, not ended by a tracker", seen.deleted - seen.moved.keys())
    found.add(
        "stuck",
        "in flight at the end",
        {place for place in seen.taken - seen.ended - seen.moved.keys() if place in seen.records},
    )
    found.add("copied_after_ack", "redelivered although acknowledged before the claim", seen.copied_after_ack)
    found.add("handed_out_late", "copied and handed out after a late ack", seen.handed_out_late)
    found.counts["ended_unseen"] = len(seen.ended_unseen)
    found.counts["consumer_duplicates"] = repeated
    if repeated > allowed:
        found.problems.append(
            f"consumer duplicates: {repeated} second deliveries, more than {seen.interruptions} "
            f"interruptions of consumers x {seen.max_in_flight} in flight"
        )
    if seen.undecodable:
        found.problems.append(f"undecodable: {seen.undecodable} markers")
    found.counts |= {
        "sent": len(seen.sent),
        "deliveries": sum(seen.handed_out.values()),
        "acknowledged": len(acknowledged),
        "copies": sum(record.origin != place for place, record in seen.records.items()),
        "dead_letters": len(seen.dead),
        "lost_to_retention": len(seen.deleted & seen.moved.keys()),
        "unknown_sends": len(seen.attempted - seen.sent),
        "taken_again": sum(count - 1 for count in seen.lives.values()),
        "acked_late": seen.acked_late,
        "late_acks": sum(place in seen.moved for place in seen.ended - seen.copied_after_ack),
    }
    return Verdict(found.problems, found.counts, found.found)


def concerned(seen: Seen, found: Iterable[Place | int]) -> set[Place]:
    """The places of messages that were found (by place or body), and of all copies of them."""
    items = set(found)
    origins = {
        record.origin for place, record in seen.records.items() if place in items or record.body in items
    }
    origins |= {record.origin for record in seen.dead if record.body in items}
    copies = {place for place, record in seen.records.items() if record.origin in origins}
    return copies | origins | {item for item in items if isinstance(item, tuple)}


class _Findings:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}
        self.found: dict[str, list[Place | int]] = {}

    def add(self, name: str, text: str, found: Iterable[Place] | Iterable[int]) -> None:
        items: list[Place | int] = sorted(found)  # type: ignore[type-var, assignment]
        self.counts[name] = len(items)
        if items:
            self.found[name] = items
            shown = ", ".join(map(str, items[:_SHOWN])) + (" …" if len(items) > _SHOWN else "")
            self.problems.append(f"{name.replace('_', ' ')}: {len(items)} {text}: {shown}")


def _copies(seen: Seen) -> tuple[list[Place], list[Place], list[Place]]:
    """Origins with copies too many, with copies too few, and places with another message than theirs.

    A tracker ends a place once and makes one copy of it, both or neither; so of each message there are
    as many copies as places of it that trackers have ended. (A count in a header would not do: a message
    that is given back without counting the attempt has two copies with the same count.)

    A place that is taken again after it was ended has a second copy by rights. Clients don't do that,
    except one that is halted between fetching and taking; if such a rare thing is found here, the
    evidence shows it.

    Of a message that began below the log's start nobody can say: what was ended there is gone.
    """
    balance: Counter[Place] = Counter()
    wrong = []
    for place, record in seen.records.items():
        if record.origin != place:
            balance[record.origin] += 1
            first = seen.records.get(record.origin)
            if first is not None and first.body != record.body:
                wrong.append(place)
    for record in seen.dead:
        balance[record.origin] += 1
        first = seen.records.get(record.origin)
        if first is not None and first.body != record.body:
            wrong.append(record.origin)
    for place in seen.moved:
        if place in seen.records:
            balance[seen.records[place].origin] -= 1
    for origin in [place for place in balance if place[1] < seen.log_start.get(place[0], 0)]:
        del balance[origin]
    duplicates = [origin for origin, count in balance.items() for _ in range(count)]
    missing = [origin for origin, count in balance.items() for _ in range(-count)]
    return duplicates, missing, wrong


@dataclass(frozen=True)
class Silence:
    """The longest time, in seconds, that a partition went without; None: it never went on."""

    redelivery: float | None
    delivery: float | None


def silence(times: Iterable[list[int]], since_ms: int, until_ms: int) -> float | None:
    """The longest gap between events of any partition that begins from `since_ms` to `until_ms`.

    `times` holds the sorted moments (ms) of each partition's events. The time from `since_ms` to the
    next event is such a gap. None when a partition has no event after `since_ms` at all. A gap after a
    partition's last event is its end and not counted.
    """
    longest = 0
    for moments in times:
        before, first = since_ms, bisect_left(moments, since_ms)
        if first == len(moments):
            return None
        for moment in islice(moments, first, None):
            if before > until_ms:
                break
            longest = max(longest, moment - before)
            before = moment
    return longest / 1000
