"""Who should track what: pure, so that every tracker computes the same.

Rendezvous (highest random weight) hashing: each partition goes to the member with the highest
hash of both (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking 6(1), 1998), with bounded loads: a member that has 1.25 times its even
share is passed over (the idea of Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with
bounded loads", 2016). So a member that joins or leaves moves little besides its own partitions.

Trackers of all versions share partitions: weights and order must not change between versions.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

Partition = tuple[str, int]
"""Queue and partition number."""

Ranking = Mapping[Partition, tuple[str, ...]]
"""For each partition the proposed owner's id, then those who stand in, in this order."""

LOAD = 1.25


@dataclass(frozen=True)
class Member:
    """A tracker as the assignment sees it; `queues` None means that it serves all of them."""

    id: str
    queues: frozenset[str] | None = None
    kafka_ok: bool = True

    def serves(self, queue: str) -> bool:
        """Whether a partition of `queue` may be proposed to it."""
        return self.kafka_ok and (self.queues is None or queue in self.queues)


@dataclass(frozen=True)
class Plan:
    """What to do now.

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


@functools.lru_cache(maxsize=1 << 16)
def _weight(queue: str, partition: int, member: str) -> int:
    text = f"{queue}/{partition}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def propose(partitions: Iterable[Partition], members: Iterable[Member]) -> dict[Partition, tuple[str, ...]]:
    """The ranking of each partition that some member can serve, whatever the order of the input.

    The heaviest pairs of partition and member choose first. Where members serve different queues,
    a partition whose members are all at their bound goes to the least loaded of them.
    """
    ranked: dict[Partition, list[tuple[int, str]]] = {}
    candidates = {member.id: member for member in members}.values()
    for partition in sorted(set(partitions)):
        able = [m.id for m in candidates if m.serves(partition[0])]
        if able:
            ranked[partition] = sorted(((_weight(*partition, m), m) for m in able), reverse=True)
    owners = {member for pairs in ranked.values() for _, member in pairs}
    bound = capacity(len(ranked), len(owners))
    load: Counter[str] = Counter()
    chosen: dict[Partition, str] = {}
    pairs = ((weight, p, member) for p, rank in ranked.items() for weight, member in rank)
    for _, partition, member in sorted(pairs, reverse=True):
        if partition not in chosen and load[member] < bound:
            chosen[partition] = member
            load[member] += 1
    for partition, rank in ranked.items():
        if partition not in chosen:
            chosen[partition] = min((member for _, member in rank), key=lambda m: (load[m], m))
            load[chosen[partition]] += 1
    return {
        partition: (chosen[partition], *(m for _, m in rank if m != chosen[partition]))
        for partition, rank in ranked.items()
    }


def capacity(partitions: int, members: int) -> int:
    """The most partitions that are proposed to one member when all serve all queues."""
    return math.ceil(LOAD * partitions / members) if members else 0


def plan(
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
    """What member `me` does next.

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
    for partition, rank in ranking.items():
        if partition in held:
            if rank[0] != me and partition not in stand_in:
                releasing.add(partition)
        elif partition in unowned_since and me in rank and partition[0] not in deleting:
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
