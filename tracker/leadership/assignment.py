"""Computes which tracker should own which partition. Pure, so that every tracker computes the same.

Consistent hashing: every member (tracker) has `_POINTS_PER_MEMBER` points on a ring. A partition has a place
on the ring, and goes to the member whose point comes next after this place (Karger et al., "Consistent
hashing and random trees", 1997). Loads are bounded: a member keeps the nearest partitions, at most
`LOAD_FACTOR` times its even share, and the others go to the members whose points follow (the idea of
Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016). So a member that joins or
leaves moves few partitions besides its own. The work grows with partitions + members; with rendezvous hashing
it would grow with their product.

Trackers of all versions share partitions, so places and order must not change between versions.
"""

from __future__ import annotations

import functools
import hashlib
import math
from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from kmqpy.kafka.settings import queue_of

Partition = tuple[str, int]
"""The name of a queue, and a partition number."""

Ranking = Mapping[Partition, tuple[str, ...]]
"""For each partition the id of its proposed owner, then the ids of the stand-ins in their order."""

LOAD_FACTOR = 1.4
"""At most this many times its even share of the partitions is proposed to a member. Where members have 100
partitions each, 0.4 of that is three standard deviations: few reach the limit, so few partitions move."""
STAND_INS = 2
"""This many members besides the proposed owner watch a partition, and take it if that owner does not."""

_POINTS_PER_MEMBER = 128  # unequal distances of the points make loads differ by 1/sqrt(128)
_RING_BITS = 44  # points and places are numbers of 44 bits
_INDEX_BITS = 20  # the low bits of a point hold its member's index, so that one integer is both
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_RING_MASK = (1 << _RING_BITS) - 1


@dataclass(frozen=True)
class Member:
    """A tracker, with all that the assignment of partitions depends on.

    queues    the queues that the tracker serves; None: all
    kafka_ok  False while the tracker does not reach Kafka: then no partition is proposed to it
    """

    id: str
    queues: frozenset[str] | None = None
    kafka_ok: bool = True

    def serves(self, queue: str) -> bool:
        """True if partitions of `queue`, or of the queue of which it is a lane, may be proposed to this."""
        return self.kafka_ok and (self.queues is None or not self.queues.isdisjoint((queue, queue_of(queue))))


@dataclass(frozen=True)
class Plan:
    """The next actions of a member.

    acquire    partitions whose leader znode the member should create
    releasing  partitions that the member holds and should give up once its work on them is done
    stand_in   partitions, held or to acquire, that were proposed to a member who did not take them; this
               member keeps them until the membership changes
    next_due   when, on the clock of `now`, the member may acquire the next partition; None: at no time
    """

    acquire: tuple[Partition, ...]
    releasing: frozenset[Partition]
    stand_in: frozenset[Partition]
    next_due: float | None


@functools.lru_cache(maxsize=4096)
def _points_of(member: str) -> array[int]:
    stream = hashlib.shake_128(f"tracker {member}".encode()).digest(8 * _POINTS_PER_MEMBER)
    return array(
        "Q", (int.from_bytes(stream[i : i + 8], "big") & _RING_MASK for i in range(0, len(stream), 8))
    )


def _place_of(partition: Partition) -> int:
    text = f"{partition[0]}/{partition[1]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _RING_MASK


class _Ring:
    """The ring with the points of some members. A point's number is its index in ring order."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = sorted(ids)
        points = (
            point << _INDEX_BITS | i for i, member in enumerate(self.ids) for point in _points_of(member)
        )
        self._points = array("Q", sorted(points))

    def next(self, place: int) -> int:
        return bisect_left(self._points, place << _INDEX_BITS) % len(self._points)

    def member(self, number: int) -> str:
        return self.ids[self._points[number] & _INDEX_MASK]

    def leading_to(self, member: str, count: int) -> set[int]:
        """The numbers of the points from which a walk meets `member` among its first `count` members."""
        found: set[int] = set()
        if member in self.ids:
            wanted = self.ids.index(member)
            for number in (n for n, point in enumerate(self._points) if point & _INDEX_MASK == wanted):
                seen = {wanted}
                found.add(number)
                for back in range(number - 1, number - len(self._points), -1):
                    before = self._points[back] & _INDEX_MASK
                    seen.add(before)
                    if before == wanted or len(seen) > count:
                        break
                    found.add(back % len(self._points))
        return found

    def walk(self, place: int) -> Iterator[tuple[int, str]]:
        """Yield every member once, nearest first: the distance of its point from `place`, and its id."""
        seen: set[str] = set()
        first, count = self.next(place), len(self._points)
        for step in range(count):
            point = self._points[(first + step) % count]
            member = self.ids[point & _INDEX_MASK]
            if member not in seen:
                seen.add(member)
                yield ((point >> _INDEX_BITS) - place) & _RING_MASK, member
                if len(seen) == len(self.ids):
                    return


class LazyRanking(Mapping[Partition, tuple[str, ...]]):
    """The ranking of each partition that some member can serve; only `owners` are computed beforehand."""

    def __init__(
        self, owners: Mapping[Partition, str], firsts: Iterable[int], rings: Mapping[str, _Ring]
    ) -> None:
        self.owners = owners
        self._firsts = array("L", firsts)  # for each partition of `owners`, the number of its first point
        self._rings = rings

    def __getitem__(self, partition: Partition) -> tuple[str, ...]:
        return self.first(partition, len(self._rings[partition[0]].ids))

    def __contains__(self, partition: object) -> bool:
        return partition in self.owners  # Mapping's method would compute the whole ranking

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.owners)

    def __len__(self) -> int:
        return len(self.owners)

    def first(self, partition: Partition, count: int) -> tuple[str, ...]:
        found = [self.owners[partition]]
        for _, member in self._rings[partition[0]].walk(_place_of(partition)):
            if len(found) >= count:
                break
            if member != found[0]:
                found.append(member)
        return tuple(found)

    def near(self, member: str, count: int) -> dict[Partition, tuple[str, ...]]:
        """By partition the first `count` members of its ranking, where `member` is among these."""
        leading = {ring: ring.leading_to(member, count) for ring in set(self._rings.values())}
        found = {}
        for (partition, owner), number in zip(self.owners.items(), self._firsts, strict=True):
            if owner == member or number in leading[self._rings[partition[0]]]:
                first = self.first(partition, count)
                if member in first:
                    found[partition] = first
        return found


def assign(partitions: Iterable[Partition], members: Iterable[Member]) -> LazyRanking:
    """Rank the members for each partition that some member can serve. The order of the input is irrelevant.

    A member gets at most capacity() partitions. If it is the nearest member of more, it keeps those whose
    queue fewer members serve, then those that are nearest on the ring. Only where members serve different
    queues, all members of a partition can be full; then the least loaded of them gets one more.
    """
    wanted = sorted(set(partitions))
    rings = _rings({queue for queue, _ in wanted}, members)
    places = {partition: _place_of(partition) for partition in wanted if partition[0] in rings}
    firsts = {p: rings[p[0]].next(place) for p, place in places.items()}
    owners = {p: rings[p[0]].member(number) for p, number in firsts.items()}
    bound = capacity(len(owners), len({member for ring in set(rings.values()) for member in ring.ids}))
    load = Counter(owners.values())
    if any(count > bound for count in load.values()):
        _Matching(owners, places, rings, bound).run()
    return LazyRanking(owners, firsts.values(), rings)


def _rings(queues: Iterable[str], members: Iterable[Member]) -> dict[str, _Ring]:
    """The ring of each queue that some member serves; queues that the same members serve share one."""
    able = [member for member in members if member.kafka_ok]
    for_all = frozenset(member.id for member in able if member.queues is None)
    choosy = [member for member in able if member.queues is not None]
    made: dict[frozenset[str], _Ring] = {}
    rings = {}
    for queue in queues:
        ids = for_all.union(member.id for member in choosy if member.serves(queue))
        if ids:
            rings[queue] = made.get(ids) or made.setdefault(ids, _Ring(ids))
    return rings


_Bid = tuple[int, int, Partition]
"""How many members serve the queue, the distance on the ring, the partition. Members prefer smaller bids."""


class _Matching:
    """Gives the partitions beyond a member's bound to the next members on the ring. Changes `owners`.

    Deferred acceptance (Gale and Shapley, 1962): a partition asks members in the order of the ring; a member
    keeps the `bound` best bids. The result is stable and does not depend on the order of the questions.
    """

    def __init__(
        self,
        owners: dict[Partition, str],
        places: Mapping[Partition, int],
        rings: Mapping[str, _Ring],
        bound: int,
    ) -> None:
        self._owners = owners
        self._places = places
        self._rings = rings
        self._bound = bound
        self._first_choices: defaultdict[str, list[Partition]] = defaultdict(list)
        for partition, member in owners.items():
            self._first_choices[member].append(partition)
        self._kept: dict[str, list[_Bid]] = {}
        """By member: the bids that it keeps, the best first; computed when first needed."""
        self._walks: dict[Partition, Iterator[tuple[int, str]]] = {}
        """By partition that was turned away: the members that the partition has not asked yet."""
        self._turned_away: list[Partition] = []

    def run(self) -> None:
        for member in [m for m, chosen in self._first_choices.items() if len(chosen) > self._bound]:
            kept = self._kept_by(member)
            for *_, partition in kept[self._bound :]:
                self._turn_away(partition)
            del kept[self._bound :]
        unplaced = []
        while self._turned_away:
            partition = self._turned_away.pop()
            if not self._ask(partition):
                unplaced.append(partition)
        self._place_at_least_loaded(unplaced)

    def _ask(self, partition: Partition) -> bool:
        """Ask the next members until a member keeps the partition; False if all have turned it away."""
        for distance, member in self._walks[partition]:
            kept = self._kept_by(member)
            insort(kept, self._bid(partition, distance))
            if len(kept) > self._bound:
                worst = kept.pop()[-1]
                if worst == partition:
                    continue
                self._turn_away(worst)
            self._owners[partition] = member
            return True
        return False

    def _turn_away(self, partition: Partition) -> None:
        if partition not in self._walks:
            walk = self._walks[partition] = self._walk(partition)
            next(walk)  # the first choice is the member that turns the partition away now
        self._turned_away.append(partition)

    def _place_at_least_loaded(self, unplaced: Iterable[Partition]) -> None:
        unplaced = sorted(unplaced)
        load = Counter(self._owners.values())
        load.subtract(self._owners[partition] for partition in unplaced)
        for partition in unplaced:
            owner = min(self._rings[partition[0]].ids, key=lambda member: (load[member], member))
            self._owners[partition] = owner
            load[owner] += 1

    def _kept_by(self, member: str) -> list[_Bid]:
        if member not in self._kept:
            bids = (self._bid(p, next(self._walk(p))[0]) for p in self._first_choices[member])
            self._kept[member] = sorted(bids)
        return self._kept[member]

    def _walk(self, partition: Partition) -> Iterator[tuple[int, str]]:
        return self._rings[partition[0]].walk(self._places[partition])

    def _bid(self, partition: Partition, distance: int) -> _Bid:
        return len(self._rings[partition[0]].ids), distance, partition


def capacity(partitions: int, members: int) -> int:
    """The most partitions that are proposed to one member when all members serve all queues."""
    return math.ceil(LOAD_FACTOR * partitions / members) if members else 0


def next_actions(
    me: str,
    ranking: Ranking,
    *,
    held: Set[Partition],
    deleting: Collection[str],
    unowned_since: Mapping[Partition, float],
    stand_in: Set[Partition],
    now: float,
    takeover_delay: float,
) -> Plan:
    """The next actions of member `me`.

    held           partitions whose leader znode belongs to this member's session
    deleting       queues marked for removal
    unowned_since  partitions that no session leads, and when this was first seen
    stand_in       Plan.stand_in of the last plan; empty if the membership has changed since

    The proposed owner takes a partition at once, the member of rank i after i times `takeover_delay` seconds.
    A partition that no member can serve stays with the member that holds it.
    """
    acquire: list[Partition] = []
    releasing = {partition for partition in held if partition[0] in deleting}
    due_times: list[float] = []
    for partition in held & ranking.keys() - stand_in:
        if ranking[partition][0] != me:
            releasing.add(partition)
    for partition in unowned_since.keys() & ranking.keys() - held:
        rank = ranking[partition]
        if me in rank and partition[0] not in deleting:
            due = unowned_since[partition] + rank.index(me) * takeover_delay
            if due <= now:
                acquire.append(partition)
            else:
                due_times.append(due)
    taken_as_stand_in = {partition for partition in acquire if ranking[partition][0] != me}
    return Plan(
        acquire=tuple(sorted(acquire)),
        releasing=frozenset(releasing),
        stand_in=frozenset((stand_in & held) | taken_as_stand_in),
        next_due=min(due_times, default=None),
    )
