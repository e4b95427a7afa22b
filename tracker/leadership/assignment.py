"""Decides which tracker should own which partition. Pure, so that every tracker computes the same.

Consistent hashing: every member has some points on a ring, and a partition goes to the member whose
point comes next after its own place (Karger et al., "Consistent hashing and random trees", 1997),
with bounded loads: a member that has `LOAD` times its even share keeps the nearest and the rest go on
(the idea of Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016). So a
member that joins or leaves moves little besides its own partitions, and the work grows with
partitions + members rather than with their product, as it does in rendezvous hashing.

Trackers of all versions share partitions: places and order must not change between versions.
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

Partition = tuple[str, int]
"""Queue and partition number."""

Ranking = Mapping[Partition, tuple[str, ...]]
"""For each partition the proposed owner's id, then those who stand in, in this order."""

LOAD = 1.4
"""At 100 partitions each, three standard deviations: few are ever passed on, so few move back."""
STAND_INS = 2
"""How many look after a partition besides its proposed owner, and take it when that does not."""

_POINTS = 128  # of each member; loads differ by 1/sqrt of it, besides chance
_RING_BITS = 44
_INDEX_BITS = 20  # of a member, below its point: one integer sorts and compares as both
_INDEX = (1 << _INDEX_BITS) - 1
_RING = (1 << _RING_BITS) - 1


@dataclass(frozen=True)
class Member:
    """A tracker as the assignment sees it; `queues` None means that it serves all of them."""

    id: str
    queues: frozenset[str] | None = None
    kafka_ok: bool = True

    def serves(self, queue: str) -> bool:
        """True if a partition of `queue` may be proposed to it."""
        return self.kafka_ok and (self.queues is None or queue in self.queues)


@dataclass(frozen=True)
class Plan:
    """The next actions of a member.

    acquire    make the leader znode of these
    releasing  of those held: finish work and let go
    stand_in   of those held or to acquire: proposed to another who did not take them; kept until
               the membership changes
    next_due   when, on the clock of `now`, the next partition may be acquired; None: no such time
    """

    acquire: tuple[Partition, ...]
    releasing: frozenset[Partition]
    stand_in: frozenset[Partition]
    next_due: float | None


@functools.lru_cache(maxsize=4096)
def _points(member: str) -> array[int]:
    stream = hashlib.shake_128(f"tracker {member}".encode()).digest(8 * _POINTS)
    return array("Q", (int.from_bytes(stream[i : i + 8], "big") & _RING for i in range(0, len(stream), 8)))


def _place(partition: Partition) -> int:
    text = f"{partition[0]}/{partition[1]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _RING


class _Ring:
    """The points of some members, in order."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = sorted(ids)
        points = (point << _INDEX_BITS | i for i, member in enumerate(self.ids) for point in _points(member))
        self._points = array("Q", sorted(points))

    def next(self, place: int) -> int:
        """The number of the first point from `place` on."""
        return bisect_left(self._points, place << _INDEX_BITS) % len(self._points)

    def member(self, number: int) -> str:
        """Whose that point is."""
        return self.ids[self._points[number] & _INDEX]

    def leading_to(self, member: str, count: int) -> set[int]:
        """The numbers of the points from which `member` is among the first `count` members."""
        found: set[int] = set()
        if member in self.ids:
            wanted = self.ids.index(member)
            for number in (n for n, point in enumerate(self._points) if point & _INDEX == wanted):
                seen = {wanted}
                found.add(number)
                for back in range(number - 1, number - len(self._points), -1):
                    before = self._points[back] & _INDEX
                    seen.add(before)
                    if before == wanted or len(seen) > count:
                        break
                    found.add(back % len(self._points))
        return found

    def walk(self, place: int) -> Iterator[tuple[int, str]]:
        """Every member once, nearest first, with its distance from `place`."""
        seen: set[str] = set()
        first, count = self.next(place), len(self._points)
        for step in range(count):
            point = self._points[(first + step) % count]
            member = self.ids[point & _INDEX]
            if member not in seen:
                seen.add(member)
                yield ((point >> _INDEX_BITS) - place) & _RING, member
                if len(seen) == len(self.ids):
                    return


class LazyRanking(Mapping[Partition, tuple[str, ...]]):
    """The ranking of each partition that some member can serve; made when asked for, except owners.

    `owners`: the proposed owner of each.
    """

    def __init__(
        self, owners: Mapping[Partition, str], firsts: Iterable[int], rings: Mapping[str, _Ring]
    ) -> None:
        self.owners = owners
        self._firsts = array("L", firsts)  # for each of them, the number of the first point
        self._rings = rings

    def __getitem__(self, partition: Partition) -> tuple[str, ...]:
        return self.first(partition, len(self._rings[partition[0]].ids))

    def __contains__(self, partition: object) -> bool:
        return partition in self.owners  # Mapping would make its whole ranking to know

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.owners)

    def __len__(self) -> int:
        return len(self.owners)

    def first(self, partition: Partition, count: int) -> tuple[str, ...]:
        """The first `count` of its ranking."""
        found = [self.owners[partition]]
        for _, member in self._rings[partition[0]].walk(_place(partition)):
            if len(found) >= count:
                break
            if member != found[0]:
                found.append(member)
        return tuple(found)

    def near(self, member: str, count: int) -> dict[Partition, tuple[str, ...]]:
        """The first `count` of the ranking of each partition that has `member` among them."""
        leading = {ring: ring.leading_to(member, count) for ring in set(self._rings.values())}
        found = {}
        for (partition, owner), number in zip(self.owners.items(), self._firsts, strict=True):
            if owner == member or number in leading[self._rings[partition[0]]]:
                first = self.first(partition, count)
                if member in first:
                    found[partition] = first
        return found


def assign(partitions: Iterable[Partition], members: Iterable[Member]) -> LazyRanking:
    """The ranking of each partition that some member can serve, whatever the order of the input.

    The nearest pairs of partition and member choose first; who is at its bound keeps what fewer
    members serve, then its nearest. Where members serve different queues, a partition whose members
    are all at their bound goes to the least loaded of them.
    """
    wanted = sorted(set(partitions))
    rings = _rings({queue for queue, _ in wanted}, members)
    places = {partition: _place(partition) for partition in wanted if partition[0] in rings}
    firsts = {p: rings[p[0]].next(place) for p, place in places.items()}
    owners = {p: rings[p[0]].member(number) for p, number in firsts.items()}
    bound = capacity(len(owners), len({member for ring in set(rings.values()) for member in ring.ids}))
    load = Counter(owners.values())
    if any(count > bound for count in load.values()):
        _Matching(owners, places, rings, bound).run()
    return LazyRanking(owners, firsts.values(), rings)


def _rings(queues: Iterable[str], members: Iterable[Member]) -> dict[str, _Ring]:
    """The ring of each queue that is served; queues of the same members share one."""
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
"""By these a member chooses: few other members serve the queue; then the partition is near on the ring."""


class _Matching:
    """Gives what is beyond a member's bound to the next members on the ring.

    Deferred acceptance (Gale and Shapley, 1962): each partition asks members in the order in which it meets
    them on the ring; a member keeps the `bound` best bids and turns the others away, which ask further on.
    The result is stable and does not depend on the order of the questions. `owners` is changed in place.
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
        """By member, what it keeps, the best bid first; made when it is first asked for."""
        self._walks: dict[Partition, Iterator[tuple[int, str]]] = {}
        """By partition that was turned away, the members that it has not asked yet."""
        self._turned_away: list[Partition] = []

    def run(self) -> None:
        """Find owners for all partitions that are beyond the bound of their first choice."""
        for member in [m for m, those in self._first_choices.items() if len(those) > self._bound]:
            kept = self._kept_by(member)
            for *_, partition in kept[self._bound :]:
                self._turn_away(partition)
            del kept[self._bound :]
        homeless = []
        while self._turned_away:
            partition = self._turned_away.pop()
            if not self._ask(partition):
                homeless.append(partition)
        self._place_homeless(homeless)

    def _ask(self, partition: Partition) -> bool:
        """Ask the next members until one keeps the partition; False when all have turned it away."""
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
            next(walk)  # its first choice, which turns it away now
        self._turned_away.append(partition)

    def _place_homeless(self, homeless: Iterable[Partition]) -> None:
        """Give partitions whose members are all at their bound to the least loaded of them."""
        homeless = sorted(homeless)
        load = Counter(self._owners.values())
        load.subtract(self._owners[partition] for partition in homeless)
        for partition in homeless:
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
    """The most partitions that are proposed to one member when all serve all queues."""
    return math.ceil(LOAD * partitions / members) if members else 0


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

    held           partitions whose leader znode is of this session
    deleting       queues marked for removal
    unowned_since  partitions without a leader znode, and when that was first seen
    stand_in       those of the last plan, while the membership has not changed since

    The proposed owner takes a partition at once; rank i does after i times `takeover_delay` s.
    A partition that nobody can serve stays where it is.
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
    substituted = {partition for partition in acquire if ranking[partition][0] != me}
    return Plan(
        acquire=tuple(sorted(acquire)),
        releasing=frozenset(releasing),
        stand_in=frozenset((stand_in & held) | substituted),
        next_due=min(due_times, default=None),
    )
